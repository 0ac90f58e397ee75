"""PrecisionChecker in single-pass: what it finds, what it cannot know, what it leaves behind."""

from __future__ import annotations

import copy
import csv
import inspect
import math
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import modulecheck
from modulecheck import CompareResult, ModuleDiff, PrecisionChecker, TensorDiff, single_pass
from modulecheck.sidechannel import SideChannel
from opcheck import ArgumentError, ArgumentTypeError, Verdict
from tests import compiled
from tests.compiled import (
    DYNAMO_WARNS,
    MARK,
    WIDTH,
    Block,
    CountingBackend,
    Kind,
    add_to_one,
    assert_pass,
    checked_step,
    explain,
    mark,
    stack,
    wrong_backend,
)
from tests.models import Workload

pytestmark = [DYNAMO_WARNS, pytest.mark.usefixtures("fresh_dynamo")]


def check(model: nn.Module, step: Any, *wrapped: nn.Module, **options: Any) -> CompareResult:
    checker = PrecisionChecker(**options)
    for module in wrapped:
        checker.wrap(module)
    with checker.installed(model):
        loss = step()
    return checker.collect(loss)


def kinds_failed(result: CompareResult) -> set[tuple[str, str]]:
    return {
        (diff.name, kind)
        for diff in result.diffs
        for call in diff.calls
        for kind, _, item in call.tensors()
        if item.judged == Verdict.FAIL
    }


# ---- the public face ----------------------------------------------------------------------------


def test_public_names() -> None:
    assert {
        "PrecisionChecker",
        "TensorDiff",
        "ModuleDiff",
        "CompareResult",
        "merge_reports",
        "MergedReport",
        "RankReport",
    } <= set(modulecheck.__all__)
    for name in modulecheck.__all__:
        assert getattr(modulecheck, name)


def test_constructor_has_the_documented_parameters_first() -> None:
    documented = {
        "backend": "aot_eager",
        "threshold": 1e-4,
        "dump_graphs": False,
        "graph_dir": "./graph_dump",
        "cast_dtype": None,
        "capture_input": True,
        "single_pass": True,
    }
    parameters = inspect.signature(PrecisionChecker).parameters
    assert list(parameters)[: len(documented)] == list(documented)
    checker = PrecisionChecker()
    for name, default in documented.items():
        assert parameters[name].default == default
        assert getattr(checker, name) == default
        assert parameters[name].kind == inspect.Parameter.POSITIONAL_OR_KEYWORD


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (TensorDiff, ["max_abs", "mean_abs", "max_rel", "allclose", "shape"]),
        (ModuleDiff, ["name", "fwd_input", "fwd_output", "grad_input", "grad_output", "note"]),
        (CompareResult, ["loss_eager", "loss_compiled", "diffs", "cast_dtype"]),
    ],
)
def test_fields_are_in_the_documented_order(kind: Any, names: list[str]) -> None:
    assert [field.name for field in fields(kind)][: len(names)] == names


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"threshold": -1.0}, ArgumentError),
        ({"rtol": math.nan}, ArgumentError),
        ({"criterion": "strict"}, ArgumentError),
        ({"backend": 3}, ArgumentTypeError),
        ({"cast_dtype": "bfloat16"}, ArgumentTypeError),
        ({"cast_dtype": torch.int64}, ArgumentError),
        ({"single_pass": "no"}, ArgumentTypeError),
        ({"capture_input": None}, ArgumentTypeError),
        ({"dump_graphs": 1}, ArgumentTypeError),
        ({"graph_dir": 3}, ArgumentTypeError),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(options))):
        PrecisionChecker(**options)


def test_wrap_and_ignore_return_the_module() -> None:
    model = stack().model
    checker = PrecisionChecker()
    assert checker.wrap(model.head) is model.head
    assert checker.ignore(model.head) is model.head


# ---- what is found ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "dict", "dataclass", "keyword_only", "twice", "dropout"])
def test_wrong_forward_is_found_in_its_block(kind: str) -> None:
    workload = stack(kind)
    where = mark(workload.model)
    backend = wrong_backend(forward=add_to_one(1e-2))
    result, _ = checked_step(workload, compiled.block_class(kind), backend)
    assert result.verdict == Verdict.FAIL
    assert {name for name, _ in result.suspects} == {where}
    assert result.suspects[0] == (where, "forward")
    assert not result.all_pass


@pytest.mark.parametrize("kind", ["plain", "tuple", "dict", "dropout"])
def test_doubled_backward_is_found_in_its_block(kind: str) -> None:
    workload = stack(kind)
    where = mark(workload.model)
    backend = wrong_backend(backward=lambda grad: grad * 2)
    result, _ = checked_step(workload, compiled.block_class(kind), backend)
    assert result.suspects == [(where, "backward")]


def test_one_wrong_parameter_gradient_is_found_alone() -> None:
    workload = stack()
    where = mark(workload.model)
    backend = wrong_backend(backward={0: add_to_one(1e-2)})
    result, _ = checked_step(workload, Block, backend)
    assert result.suspects == [(where, "backward")]
    assert len(kinds_failed(result)) == 1


def test_tiny_values_with_flipped_signs_are_found() -> None:
    workload = stack()
    where = mark(workload.model)
    with torch.no_grad():
        for parameter in [*workload.model.inp.parameters(), *workload.model.blocks.parameters()]:
            parameter.mul_(1e-5)
    backend = wrong_backend(forward=lambda out: -out)
    result, _ = checked_step(workload, Block, backend)
    assert result.suspects[0] == (where, "forward")


def test_fault_in_the_first_call_alone_is_found_there() -> None:
    workload = stack("twice")
    where = mark(workload.model)
    backend = wrong_backend(forward=add_to_one(1e-2), at=1)
    result, _ = checked_step(workload, Block, backend)
    assert result.suspects == [(where, "forward")]
    diff = next(diff for diff in result.diffs if diff.name == where)
    assert [call.verdict for call in diff.calls] == [Verdict.FAIL, Verdict.PASS]
    assert diff.fwd_output[0].judged == Verdict.FAIL  # the module shows its worst call
    assert diff.fwd_output[0].max_abs == pytest.approx(1e-2, rel=1e-3)


def test_each_call_of_a_shared_module_has_its_own_entry() -> None:
    result, _ = checked_step(stack("twice"), Block)
    assert_pass(result)
    assert [len(diff.calls) for diff in result.diffs] == [2, 2, 2]


class Cut(nn.Module):
    """Gives the gradient of `detach`, which compiled code must give too."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.out(hidden.detach()) + 0 * hidden


def test_gradient_that_is_zero_passes() -> None:
    result, _ = checked_step(stack(Kind(Cut)), Cut)
    assert_pass(result)


class Counter(nn.Module):
    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return hidden * 2, hidden.argmax(-1)


class Shifted(nn.Module):
    """Softmax does not see a number that is added to all: the gradient of `shift` is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.shift = nn.Linear(8, 8), nn.Parameter(torch.full((70,), 0.3))

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.softmax(self.linear(hidden) + self.shift.mean(), -1)


def test_noise_of_a_gradient_that_is_zero_passes_where_all_others_agree_bit_for_bit() -> None:
    def other_rounding(grad: Tensor) -> Tensor:
        return grad * -0.7 if grad.shape == (70,) else grad

    torch.manual_seed(0)
    model = nn.Sequential(Shifted())
    backend = wrong_backend(backward=other_rounding)
    checker = PrecisionChecker(backend=backend)
    checker.wrap(model[0])
    with checker.installed(model):
        loss = model(torch.randn(MARK, 8)).square().sum()
        loss.backward()
    noise = model[0].shift.grad.abs().max().item()
    assert 0.0 < noise < 1e-6
    result = checker.collect(loss)
    assert_pass(result)
    (item,) = [item for item in result.diffs[0].param_grads if item.name == "shift"]
    assert "zero in exact arithmetic" in item.notes[0]


@pytest.mark.parametrize("wrong", [True, False])
def test_integers_are_compared_exactly(wrong: bool) -> None:
    def backend(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            doubled, index = graph(*args)
            return doubled, index + int(wrong)

        return run

    model = nn.Sequential(Counter())
    hidden = torch.randn(3, 4)
    result = check(model, lambda: model(hidden)[0].sum(), model[0], backend=backend)
    assert result.verdict == (Verdict.FAIL if wrong else Verdict.PASS)


class ToIndex(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return (hidden / 0).to(torch.int64)


def test_cast_that_no_integer_can_hold_is_undefined_and_not_wrong() -> None:
    def backend(graph: Any, inputs: Any) -> Any:
        return lambda *args: [out + 1 for out in graph(*args)]

    model = ToIndex()
    hidden = torch.randn(3)
    result = check(model, lambda: model(hidden).sum(), model, backend=backend)
    assert result.verdict == Verdict.INCONCLUSIVE
    assert "undefined" in explain(result)


class Dtype(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * 2


@pytest.mark.parametrize("what", ["dtype", "shape", "parts"])
def test_another_structure_is_a_fault(what: str) -> None:
    def backend(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            (out,) = graph(*args)
            return [{"dtype": out.double(), "shape": out[None], "parts": None}[what]]

        return run

    model = Dtype()
    hidden = torch.randn(3)
    checker = PrecisionChecker(backend=backend)
    checker.wrap(model)
    with checker.installed(model):
        model(hidden)
    result = checker.collect()
    assert result.verdict == Verdict.FAIL
    word = "output" if what == "parts" else what
    assert word in explain(result)


class Accumulates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4))

    def forward(self, hidden: Tensor) -> Tensor:
        self.total += hidden.sum(0)
        hidden.mul_(2)
        return hidden + 1


def test_changed_buffers_and_arguments_are_compared() -> None:
    model = Accumulates()
    hidden = torch.randn(3, 4)
    before = hidden.clone()
    result = check(model, lambda: model(hidden).sum(), model)
    assert_pass(result)
    names = {item.name for item in result.diffs[0].mutated}
    assert names == {"argument 0", "buffer total"}
    assert torch.equal(hidden, before * 2)
    assert torch.equal(model.total, before.sum(0))


def test_dropped_mutation_is_found() -> None:
    def backend(graph: Any, inputs: Any) -> Any:
        return lambda *args: graph(*[arg.clone() for arg in args])

    model = Accumulates()
    hidden = torch.randn(3, 4)
    result = check(model, lambda: model(hidden).sum(), model, backend=backend)
    assert result.suspects == [("", "forward")]
    assert {kind for _, kind in kinds_failed(result)} >= {"mutated"}


def test_eager_can_be_the_wrong_side() -> None:
    class VarianceNorm(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            return inputs * torch.rsqrt(inputs.var(dim=-1, keepdim=True) + 1e-9)

    def in_float32(graph: Any, inputs: Any) -> Any:
        return lambda *args: [VarianceNorm()(args[0].float()).half()]

    model = VarianceNorm()
    inputs = torch.randn(3, 8).half()
    inputs[1] = 1e-9
    result = check(model, lambda: model(inputs).nansum(), model, backend=in_float32)
    (item,) = result.diffs[0].fwd_output
    assert item.judged == Verdict.PASS, explain(result)
    assert any("eager is the wrong side" in note for note in item.notes)
    assert not item.allclose


# ---- criteria -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "passes"),
    [
        ({"threshold": 1e-2}, True),
        ({"threshold": 1e-6, "rtol": 0.0}, False),
        ({"criterion": "allclose"}, False),
        ({"criterion": "allclose", "rtol": 1.0}, True),
    ],
)
def test_threshold_and_rtol_work(options: dict[str, Any], passes: bool) -> None:
    workload = stack()
    mark(workload.model)
    backend = wrong_backend(forward=add_to_one(3e-3))
    result, _ = checked_step(workload, Block, backend, **options)
    assert result.criterion == "allclose"
    assert result.all_pass == passes
    given = {"threshold": 1e-4, "rtol": 1e-3, **options}
    assert (result.atol, result.rtol) == (given["threshold"], given["rtol"])


def test_calibrated_judges_by_default_and_shows_the_documented_metric_too() -> None:
    workload = stack()
    where = mark(workload.model)
    backend = wrong_backend(forward=add_to_one(5e-5))
    result, _ = checked_step(workload, Block, backend)
    assert result.criterion == "calibrated"
    diff = next(diff for diff in result.diffs if diff.name == where)
    assert diff.fwd_output[0].judged == Verdict.FAIL
    assert diff.fwd_output[0].allclose


# ---- what cannot be known -----------------------------------------------------------------------


def test_nothing_wrapped_is_inconclusive() -> None:
    workload = stack()
    result = check(workload.model, workload.step)
    assert result.verdict == Verdict.INCONCLUSIVE
    assert "nothing was wrapped" in result.judgement[1]


def test_nothing_called_is_inconclusive() -> None:
    workload = stack()
    result = check(workload.model, lambda: torch.tensor(1.0), workload.model.head)
    assert result.verdict == Verdict.INCONCLUSIVE
    assert "no wrapped module was called" in result.judgement[1]


def test_everything_ignored_is_inconclusive() -> None:
    workload = stack()
    checker = PrecisionChecker()
    checker.wrap(workload.model.head)
    checker.ignore(workload.model.head)
    result = checker.compare(lambda model: workload.step(), workload.model)
    assert result.verdict == Verdict.INCONCLUSIVE
    assert not result.all_pass


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_loss_that_is_not_finite_is_inconclusive_and_names_a_module(bad: float) -> None:
    workload = stack("nan")
    result = check(workload.model, lambda: workload.model(workload.batch[0]).sum() + bad,
                   *workload.model.blocks)  # fmt: skip
    assert result.verdict == Verdict.INCONCLUSIVE
    assert "blocks.0" in result.judgement[1]


def test_module_that_dynamo_skips_is_inconclusive() -> None:
    class Skipped(nn.Linear):
        @torch.compiler.disable
        def forward(self, hidden: Tensor) -> Tensor:
            return super().forward(hidden)

    model = nn.Sequential(Skipped(4, 4))
    result = check(model, lambda: model(torch.randn(2, 4)).sum(), model[0])
    assert result.verdict == Verdict.INCONCLUSIVE
    assert "not_compiled" in result.judgement[1]


def test_recompile_limit_is_inconclusive() -> None:
    model = nn.Sequential(Block())
    hidden = torch.randn(2, WIDTH)

    class Flag(nn.Module):
        def forward(self, hidden: Tensor, flag: int) -> Tensor:
            return hidden * flag

    flag = Flag()
    with torch._dynamo.config.patch(recompile_limit=1, specialize_int=True):
        result = check(flag, lambda: sum(flag(hidden, i).sum() for i in range(3)), flag)
    assert result.verdict == Verdict.INCONCLUSIVE
    assert "recompile_limit" in explain(result)
    assert model is not None


def test_many_shapes_of_one_torch_class_are_all_compiled() -> None:
    model = nn.Sequential(*[nn.Linear(n, n + 1) for n in range(3, 15)])
    result = check(model, lambda: model(torch.randn(2, 3)).sum(), *model)
    assert_pass(result)


def test_module_without_ops_is_a_note() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity())
    result = check(model, lambda: model(torch.randn(2, 4)).sum(), *model)
    assert result.verdict == Verdict.PASS, explain(result)
    assert "nothing to compile" in result.diffs[1].note
    assert result.diffs[1].compared == 0


def test_crash_of_the_checker_is_inconclusive_and_not_the_users(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from modulecheck import pairing

    monkeypatch.setattr(pairing, "quick", lambda *args: 1 / 0)
    workload = stack()
    result = check(workload.model, workload.step, workload.model.head)
    assert result.verdict == Verdict.INCONCLUSIVE
    assert "ZeroDivisionError" in explain(result)


def test_hooks_of_the_user_that_change_the_result_make_it_inconclusive() -> None:
    model = nn.Sequential(Block())
    calls = []

    def double(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        calls.append(1)
        return output * 2

    model[0].register_forward_hook(double)
    result = check(model, lambda: model(torch.randn(2, WIDTH)).sum(), model[0])
    assert result.verdict == Verdict.INCONCLUSIVE
    assert "hooks_not_replayed" in explain(result)
    assert len(calls) == 1


# ---- what runs ----------------------------------------------------------------------------------


def test_compiled_code_runs_once_a_call_and_equal_blocks_share_a_graph() -> None:
    backend = CountingBackend()
    result, _ = checked_step(stack("twice"), Block, backend)
    assert_pass(result)
    assert backend.graphs == 1
    assert backend.runs == 6


def test_root_can_be_wrapped() -> None:
    workload = stack()
    backend = CountingBackend()
    result = check(workload.model, workload.step, workload.model, backend=backend)
    assert_pass(result)
    assert (backend.graphs, backend.runs) == (1, 1)
    assert result.diffs[0].name == ""


def test_module_compiled_by_the_user_and_wrapped_inside_has_one_row() -> None:
    model = stack().model
    model.blocks[1] = torch.compile(model.blocks[1], backend="aot_eager")
    checker = PrecisionChecker()
    checker.wrap(model.blocks[0])
    checker.wrap(model.blocks[1])
    checker.wrap_by_policy(model, (Block,))  # finds what the wrapper holds as well
    plan = checker._selection.plan(model)
    assert plan.skipped.count(("blocks.1", "SKIP_compiled_wrapper")) == 1


def test_modules_inside_wrapped_ones_are_compiled_with_them() -> None:
    workload = stack()
    checker = PrecisionChecker()
    checker.wrap_by_policy(workload.model, (Block, nn.Linear))
    result = checker.compare(lambda model: workload.step(), workload.model)
    notes = {diff.name: diff.note for diff in result.diffs}
    assert notes["blocks.0.up"] == "SKIP_inside_compiled"
    assert notes["blocks.0"] == notes["head"] == ""
    assert result.all_pass


@pytest.mark.parametrize("how", ["in place", "wrapper"])
def test_module_that_the_user_compiled_is_skipped(how: str) -> None:
    workload = stack()
    blocks = workload.model.blocks
    if how == "wrapper":
        blocks[0] = torch.compile(blocks[0], backend="aot_eager")
    else:
        blocks[0].compile(backend="aot_eager")
    checker = PrecisionChecker()
    checker.wrap_by_policy(workload.model, (Block,))
    result = checker.compare(lambda model: workload.step(), workload.model)
    notes = {diff.name: diff.note for diff in result.diffs}
    assert notes == {"blocks.0": "SKIP_compiled_wrapper", "blocks.1": "", "blocks.2": ""}
    assert result.all_pass
    assert blocks[0]._compiled_call_impl is not None or how == "wrapper"


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_modules_pass(use_reentrant: bool) -> None:
    from tests import models

    def build() -> Workload:
        return models.checkpointed(use_reentrant=use_reentrant)

    expected = compiled.plain_step(build(), models.TransformerBlock, "aot_eager")
    result, actual = checked_step(build(), models.TransformerBlock, "aot_eager")
    assert compiled.differences(expected, actual) == []
    assert_pass(result)
    # the reentrant one calls the block a second time, in backward, and that call has the gradients
    for diff in result.diffs:
        gradients = [len(call.param_grads or ()) for call in diff.calls]
        assert gradients == ([0, 12] if use_reentrant else [12])


def test_tied_parameters_pass() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.second.weight = self.first.weight

        def forward(self, hidden: Tensor) -> Tensor:
            return self.second(torch.tanh(self.first(hidden)))

    result, _ = checked_step(stack(Kind(Tied)), Tied)
    assert_pass(result)
    assert [item.name for item in result.diffs[0].param_grads] == [
        "first.weight", "first.bias", "second.bias",
    ]  # fmt: skip


def test_calls_under_no_grad_compare_the_forward() -> None:
    workload = stack()
    with torch.no_grad():
        result = check(workload.model, lambda: workload.loss(), *workload.model.blocks)
    assert_pass(result)
    assert all(diff.grad_input is None for diff in result.diffs)


def test_inference_mode_compares_the_forward() -> None:
    workload = stack()
    with torch.inference_mode():
        result = check(workload.model, lambda: workload.loss(), *workload.model.blocks)
    assert_pass(result)


def test_empty_tensors_are_no_crash() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    result = check(model, lambda: model(torch.randn(0, 4)).sum(), model[0])
    assert result.verdict != Verdict.FAIL
    assert "crashed" not in explain(result)


def test_growing_cache_is_compared_and_grows_once() -> None:
    class Cache:
        def __init__(self) -> None:
            self.keys: list[Tensor] = []

    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(WIDTH, WIDTH)

        def forward(self, hidden: Tensor, cache: Cache) -> Tensor:
            cache.keys.append(hidden * 2)
            return self.out(torch.cat(cache.keys).sum(0, keepdim=True) + hidden)

    model, cache = Cached(), Cache()
    cache.keys.append(torch.randn(2, WIDTH))
    result = check(model, lambda: model(torch.randn(2, WIDTH), cache).sum(), model)
    assert_pass(result)
    assert len(cache.keys) == 2


def test_aliases_among_the_inputs_stay_aliases() -> None:
    class Aliased(nn.Module):
        def forward(self, whole: Tensor, part: Tensor) -> Tensor:
            part.add_(1)
            return whole * 2

    model, whole = Aliased(), torch.randn(4, 4)
    result = check(model, lambda: model(whole, whole[:2]).sum(), model)
    assert_pass(result)


class Strided(nn.Module):
    """Reads the strides of its input: a copy laid out anew would give other numbers."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * hidden.stride(0) + hidden.stride(1)


def test_replay_gets_the_strides_and_leaves_version_counters() -> None:
    hidden = torch.randn(8, 8)[::2, ::2]
    model = nn.Sequential(Strided(), nn.Linear(4, 4))
    versions = [item._version for item in model.parameters()]
    result = check(model, lambda: model(hidden).sum(), *model)
    assert_pass(result)
    assert hidden._version == 0
    assert hidden.stride() == (16, 2)
    assert [item._version for item in model.parameters()] == versions


class Mask(nn.Module):
    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return hidden * 2, hidden > 0


@pytest.mark.parametrize("wrong", [True, False])
def test_bools_are_compared_exactly(wrong: bool) -> None:
    def backend(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            doubled, mask = graph(*args)
            return doubled, mask ^ wrong

        return run

    model = Mask()
    hidden = torch.randn(3, 4)
    result = check(model, lambda: model(hidden)[0].sum(), model, backend=backend)
    assert result.verdict == (Verdict.FAIL if wrong else Verdict.PASS)


def test_own_gradient_of_a_module_is_apart_from_other_users() -> None:
    result, _ = checked_step(stack(), Block)
    workload = stack()
    seen = {}

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(lambda grad: seen.setdefault("all users", grad))

    workload.model.blocks[0].register_forward_hook(keep)
    workload.step()
    assert_pass(result)
    assert result.diffs[1].grad_input[0].metrics.num_elements == seen["all users"].numel()


# ---- what is left -------------------------------------------------------------------------------


def marks_of(model: nn.Module) -> Any:
    return [
        (name, type(module), sorted(vars(module)), module.training, len(module._forward_hooks))
        for name, module in model.named_modules()
    ]


@pytest.mark.parametrize("how", ["collect", "exception", "compare"])
def test_model_is_given_back_as_it_was(how: str) -> None:
    workload = stack()
    model = workload.model
    model.blocks[0].eval()
    before, keys = marks_of(model), list(model.state_dict())
    checker = PrecisionChecker()
    checker.wrap_by_policy(model, (Block, nn.Linear))
    if how == "exception":
        with pytest.raises(KeyError), checker.installed(model):
            workload.step()
            raise KeyError("in the step")
    elif how == "compare":
        checker.compare(lambda model: workload.step(), model)
    else:
        checker.install(model)
        assert list(model.state_dict()) == keys
        checker.collect(workload.step())
    assert marks_of(model) == before
    assert list(model.state_dict()) == keys
    copy.deepcopy(model)


def test_exception_of_the_users_module_goes_on_to_the_user() -> None:
    class Raises(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            raise KeyError("mine")

    model = Raises()
    checker = PrecisionChecker()
    checker.wrap(model)
    checker.install(model)
    with pytest.raises(KeyError, match="mine"):
        model(torch.randn(2))
    result = checker.collect()
    assert result.verdict == Verdict.INCONCLUSIVE
    assert "_compiled_call_impl" not in vars(model)


def test_keep_installed_goes_on_with_the_next_step() -> None:
    workload = stack()
    optimizer = torch.optim.SGD(workload.model.parameters(), lr=0.1)
    checker = PrecisionChecker()
    checker.wrap_by_policy(workload.model, (Block,))
    checker.install(workload.model)
    first = checker.collect(workload.step(optimizer), keep_installed=True)
    second = checker.collect(workload.step(optimizer))
    assert_pass(first)
    assert_pass(second)
    assert first.loss_compiled != second.loss_compiled
    assert all(len(diff.calls) == 1 for diff in second.diffs)
    with pytest.raises(RuntimeError, match="install"):
        checker.collect()


def test_install_twice_is_an_error_that_says_what_to_do() -> None:
    workload = stack()
    checker = PrecisionChecker()
    checker.wrap(workload.model.head)
    checker.install(workload.model)
    with pytest.raises(RuntimeError, match="collect"):
        checker.install(workload.model)
    checker.collect()


def test_install_in_two_pass_names_single_pass() -> None:
    with pytest.raises(RuntimeError, match="single_pass"):
        PrecisionChecker(single_pass=False).install(nn.Linear(2, 2))


def test_wrapping_a_module_of_another_model_is_an_error() -> None:
    checker = PrecisionChecker()
    checker.wrap(nn.Linear(2, 2))
    with pytest.raises(ArgumentError, match="Linear"):
        checker.install(nn.Linear(2, 2))


@pytest.mark.parametrize("single_pass", [True, False])
def test_unknown_backend_is_said_before_the_step(single_pass: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    checker = PrecisionChecker("aot_eagre", single_pass=single_pass)
    checker.wrap(model[0])
    with pytest.raises(ArgumentError, match="aot_eagre"):
        checker.compare(lambda model: model(torch.ones(1, 2)).sum(), model)


@pytest.mark.parametrize("single_pass", [True, False])
def test_two_modules_of_one_name_are_refused(single_pass: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    checker = PrecisionChecker(single_pass=single_pass)
    checker.wrap(model[0], name="block")
    checker.wrap(model[1], name="block")
    with pytest.raises(ArgumentError, match="2 modules have the name 'block'"):
        checker.compare(lambda model: model(torch.ones(1, 2)).sum(), model)


def test_name_that_is_no_string_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match="name: "):
        PrecisionChecker().wrap(nn.Linear(2, 2), name=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "use",
    [
        lambda checker, result: checker.report(result),
        lambda checker, result: checker.save(result, "result.mc"),
        lambda checker, result: checker.drilldown(result),
    ],
    ids=["report", "save", "drilldown"],
)
def test_what_is_no_result_is_refused(use: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="result: "):
        use(PrecisionChecker(), None)


def test_loss_of_a_tensor_or_a_float_can_be_recorded() -> None:
    workload = stack()
    checker = PrecisionChecker()
    checker.wrap(workload.model.head)
    for loss in (2.5, torch.tensor(2.5)):
        checker.install(workload.model)
        workload.step()
        checker.record_loss(loss)
        result = checker.collect()
        assert result.loss_compiled == 2.5
        assert math.isnan(result.loss_eager)
        assert math.isnan(result.loss_diff)
        assert_pass(result)


def test_gradients_that_were_there_before_are_kept() -> None:
    workload = stack()
    workload.step()
    before = {name: item.grad.clone() for name, item in workload.model.named_parameters()}
    checker = PrecisionChecker()
    checker.wrap_by_policy(workload.model, (Block,))
    with checker.installed(workload.model):
        loss = workload.loss()
        loss.backward()
    assert_pass(checker.collect(loss))
    for name, item in workload.model.named_parameters():
        assert torch.allclose(item.grad, 2 * before[name], rtol=1e-5)


def test_attributes_that_a_forward_counts_in_are_counted_once() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[int] = []
            self.out = nn.Linear(4, 4)

        def forward(self, hidden: Tensor) -> Tensor:
            self.seen.append(1)
            return self.out(hidden)

    model = Counts()
    result = check(model, lambda: model(torch.randn(2, 4)).sum(), model)
    assert_pass(result)
    assert len(model.seen) == 1


def test_spectral_norm_hooks_are_part_of_the_forward() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(torch.nn.utils.spectral_norm(nn.Linear(4, 4)))
    result = check(model, lambda: model(torch.randn(2, 4)).sum(), model[0])
    assert result.verdict != Verdict.FAIL, explain(result)


# ---- report -------------------------------------------------------------------------------------


def by_hand(name: str = "layers.0", allclose: bool = True, count: int = 1) -> CompareResult:
    item = TensorDiff(2.3e-07, 1.2e-08, 5.1e-06, allclose, (2, 128, 4096))
    diffs = [ModuleDiff(f"{name}{i or ''}", fwd_output=[item]) for i in range(count)]
    return CompareResult(6.912340, 6.9123412, diffs)


def test_result_made_by_hand_is_judged_by_allclose(capsys: pytest.CaptureFixture[str]) -> None:
    PrecisionChecker().report(by_hand())
    shown = capsys.readouterr().out
    assert "  Loss  eager=6.912340  compiled=6.912341  diff=1.200e-06\n" in shown
    expected = (
        "  pass  layers.0                                             [OK] max_abs=2.300e-07"
        "  mean_abs=1.200e-08  max_rel=5.100e-06  shape=(2, 128, 4096)\n"
    )
    assert expected in shown
    assert "RESULT: ALL PASS" in shown
    PrecisionChecker().report(by_hand(allclose=False))
    shown = capsys.readouterr().out
    assert "  FAIL  layers.0 " in shown
    assert "[!!]" in shown
    assert "RESULT: FAILED" in shown


def test_long_names_do_not_break_the_columns(capsys: pytest.CaptureFixture[str]) -> None:
    PrecisionChecker().report(by_hand("a_very_long_name." * 12))
    line = next(row for row in capsys.readouterr().out.splitlines() if row.startswith("  pass"))
    assert line.index("[OK]") == 61
    assert "..." in line


@pytest.mark.parametrize(("terminal", "verbose", "rows"), [(1, 0, 1), (1, 1, 25), (0, 0, 25)])
def test_many_passes_collapse_in_a_terminal(
    terminal: int, verbose: int, rows: int, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: bool(terminal))
    PrecisionChecker().report(by_hand(count=25), verbose=bool(verbose))
    shown = [row for row in capsys.readouterr().out.splitlines() if row.startswith("  pass")]
    assert len(shown) == rows


def test_csv_rows_have_nine_fields_whatever_is_in_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workload = stack("twice")
    mark(workload.model)
    backend = wrong_backend(forward=add_to_one(1e-2))
    result, _ = checked_step(workload, Block, backend)
    result.diffs[0].calls[0].note = 'a, "quoted"\nnote'
    path = tmp_path / "deep" / "report.csv"
    PrecisionChecker().report(result, csv_path=path)
    assert capsys.readouterr().out.endswith(f"CSV report saved to: {path}\n")
    with path.open(newline="") as file:
        rows = list(csv.reader(file))
    assert {len(row) for row in rows} == {9}
    assert rows[1][:4] == ["LOSS", "loss", "0", "PASS"]
    assert any(row[8].startswith("call=1") for row in rows)
    assert list(path.parent.iterdir()) == [path]


def test_failing_report_ends_with_the_first_divergence(capsys: Any) -> None:
    workload = stack()
    where = mark(workload.model)
    backend = wrong_backend(forward=add_to_one(1e-2))
    result, _ = checked_step(workload, Block, backend)
    PrecisionChecker().report(result)
    shown = capsys.readouterr().out
    assert "RESULT: FAILED" in shown
    assert shown.rstrip().splitlines()[-1].strip().startswith(f"{where} (forward): fwd_output")
    assert "nearer to float64" in shown


@pytest.mark.parametrize("capture_input", [True, False])
def test_capture_input_shows_or_hides_the_section(capture_input: bool, capsys: Any) -> None:
    workload = stack()
    checker = PrecisionChecker(capture_input=capture_input)
    checker.wrap(workload.model.head)
    checker.report(checker.compare(lambda model: workload.step(), workload.model))
    assert ("FORWARD INPUT" in capsys.readouterr().out) == capture_input


def test_inductor_without_a_compiler_is_said_before_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("modulecheck.backends.lacks_cpp_compiler", lambda: True)
    model = nn.Sequential(Block(), Block())
    checker = PrecisionChecker(backend="inductor")
    checker.wrap_by_policy(model, (Block,))
    with pytest.raises(RuntimeError, match=r"C\+\+ compiler"):
        checker.install(model)
    assert all(module._compiled_call_impl is None for module in model.modules())


def test_parameters_and_outputs_can_be_resized_as_before():
    workload = stack()
    kept = []
    workload.model.blocks[0].register_forward_hook(
        lambda module, args, out: kept.extend([*args, out])
    )
    result, _ = checked_step(workload, Block, golden="always")
    assert_pass(result)
    tensors = [*kept, *workload.model.parameters()]
    assert len(kept) == 2
    assert all(tensor.untyped_storage().resizable() for tensor in tensors)


def test_seconds_for_other_ranks_reach_every_wait(monkeypatch: Any) -> None:
    asked = []

    def of_default_group(name: str, *, timeout_s: float) -> None:
        asked.append((name.split("/")[0], timeout_s))

    monkeypatch.setattr(SideChannel, "of_default_group", of_default_group)
    monkeypatch.setattr(single_pass, "ranks_of", lambda tensors: [0, 1])
    workload = stack()
    checker = PrecisionChecker(rank_timeout_s=7.5)
    checker.wrap_by_policy(workload.model, Block)
    checker.install(workload.model)
    result = checker.collect(workload.step())
    checker.report(result, gather=True)
    assert set(asked) == {("calls", 7.5), ("report", 7.5)}
