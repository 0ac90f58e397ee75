"""PrecisionChecker in two-pass: what it finds and where, what it cannot know, what it leaves."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modulecheck import CompareResult, ModuleDiff, PrecisionChecker
from opcheck import ArgumentError, Verdict
from tests.compiled import (
    DYNAMO_WARNS,
    WIDTH,
    Block,
    CountingBackend,
    Kind,
    add_to_one,
    assert_pass,
    block_class,
    explain,
    mark,
    stack,
    wrong_backend,
)
from tests.two_pass import step_of, two_pass

pytestmark = [DYNAMO_WARNS, pytest.mark.usefixtures("fresh_dynamo")]


def notes_of(result: CompareResult) -> dict[str, str]:
    return {diff.name: diff.note for diff in result.diffs}


def named(result: CompareResult, name: str) -> ModuleDiff:
    return next(diff for diff in result.diffs if diff.name == name)


def shown(result: CompareResult, capsys: Any) -> str:
    capsys.readouterr()
    PrecisionChecker().report(result)
    return str(capsys.readouterr().out)


# ---- losses, and what is compared ---------------------------------------------------------------


def test_losses_are_those_of_the_step_alone_on_either_side() -> None:
    workload = stack("dropout")
    torch.manual_seed(1234)
    expected = step_of(workload)(copy.deepcopy(workload.model))
    backend = CountingBackend()
    result = two_pass(workload, Block, backend)
    assert_pass(result)
    assert result.loss_eager == expected.item()
    assert result.loss_compiled == expected.item()  # the masks of dropout are the same ones
    assert result.loss_diff == 0.0
    assert not result.is_single_pass
    assert (backend.graphs, backend.runs) == (1, 3)


def test_every_kind_of_tensor_is_compared() -> None:
    result = two_pass(stack("batch_norm"), block_class("batch_norm"))
    assert_pass(result)
    for diff in result.diffs:
        kinds = [kind for kind, _, _ in diff.calls[0].tensors()]
        assert set(kinds) == {
            "fwd_input", "fwd_output", "mutated", "grad_input", "grad_output", "param_grad",
        }  # fmt: skip
        buffers = [item.name for item in diff.mutated]
        assert buffers == ["buffer norm.running_mean", "buffer norm.running_var",
                           "buffer norm.num_batches_tracked"]  # fmt: skip
        assert [item.name for item in diff.param_grads] == [
            "norm.weight", "norm.bias", "out.weight", "out.bias",
        ]  # fmt: skip


# ---- what is found ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "dict", "keyword_only", "twice", "dropout", "batch"])
@pytest.mark.parametrize("place", [1, 2])
def test_wrong_forward_begins_in_its_block_and_is_inherited_by_the_others(
    kind: str, place: int
) -> None:
    workload = stack("plain" if kind == "batch" else kind)
    where = mark(workload.model, place)
    backend = wrong_backend(forward=add_to_one(1e-2))
    result = two_pass(workload, block_class("plain" if kind == "batch" else kind), backend)
    assert result.verdict == Verdict.FAIL
    assert result.suspects[0] == (where, "forward")
    assert {name for name, _ in result.suspects} == {where}
    assert result.loss_diff > 0
    if place == 1:
        later = named(result, "blocks.2")
        assert later.fwd_output[0].judged == Verdict.FAIL
        assert "inherited" in later.fwd_output[0].notes


def test_origins_are_looked_for_in_the_modes_of_the_step() -> None:
    workload = stack("dropout")
    where = mark(workload.model, 1)

    def step(model: nn.Module) -> Tensor:
        model.eval()
        return step_of(workload)(model)

    backend = wrong_backend(forward=add_to_one(1e-2))
    result = two_pass(workload, block_class("dropout"), backend, step=step)
    assert {name for name, _ in result.suspects} == {where}
    failed = [item for item in named(result, where).fwd_output if item.judged == Verdict.FAIL]
    assert [item.max_abs for item in failed] == [pytest.approx(1e-2, rel=1e-3)]


class TellsItsModes(Block):
    """Adds what it sees of the modes around it, as a cache that is filled in inference alone."""

    def forward(self, hidden: Tensor) -> Tensor:
        out = super().forward(hidden).float()
        seen = int(torch.is_grad_enabled()) + 2 * int(torch.is_inference_mode_enabled())
        return out + seen + 4 * int(torch.is_autocast_enabled("cpu"))


MODES_OF_A_CALL: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "none": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


@pytest.mark.parametrize("mode", MODES_OF_A_CALL)
def test_a_block_is_run_again_in_the_modes_of_its_call(mode: str) -> None:
    workload = stack(Kind(TellsItsModes))
    where = mark(workload.model, 1)

    def step(model: nn.Module) -> Tensor:
        with MODES_OF_A_CALL[mode]():
            return model(workload.batch[0]).sum()

    backend = wrong_backend(forward=add_to_one(5.0))
    result = two_pass(workload, TellsItsModes, backend, step=step)
    assert {name for name, _ in result.suspects} == {where}
    failed = [item for item in named(result, where).fwd_output if item.judged == Verdict.FAIL]
    # in other modes it would differ by a whole number everywhere
    assert [item.max_abs for item in failed] == [pytest.approx(5.0, abs=0.1)]
    assert [item.mean_abs < 0.5 for item in failed] == [True]


def test_doubled_backward_begins_in_its_block() -> None:
    workload = stack("tuple")
    where = mark(workload.model)
    backend = wrong_backend(backward=lambda grad: grad * 2)
    result = two_pass(workload, block_class("tuple"), backend)
    assert result.suspects == [(where, "backward")]
    assert result.loss_diff == 0.0
    earlier = named(result, "blocks.0")
    assert earlier.grad_output[0].judged == Verdict.FAIL
    assert earlier.inherited == ("backward",)
    assert named(result, "blocks.2").verdict == Verdict.PASS


def test_one_wrong_parameter_gradient_is_found_alone() -> None:
    workload = stack()
    where = mark(workload.model)
    backend = wrong_backend(backward={0: add_to_one(1e-2)})
    result = two_pass(workload, Block, backend)
    assert result.suspects == [(where, "backward")]
    failed = [
        (diff.name, kind)
        for diff in result.diffs
        for kind, _, item in diff.tensors()
        if item.judged == Verdict.FAIL
    ]
    assert failed == [(where, "param_grad")]


def test_fault_in_the_second_call_of_a_shared_block_is_found_there(capsys: Any) -> None:
    workload = stack("twice")
    where = mark(workload.model)
    backend = wrong_backend(forward=add_to_one(1e-2), at=2)
    result = two_pass(workload, Block, backend)
    assert result.suspects == [(where, "forward")]
    calls = named(result, where).calls
    assert [call.fwd_output[0].judged for call in calls] == [Verdict.PASS, Verdict.FAIL]
    assert f"{where} (forward): call 1, fwd_output" in shown(result, capsys)


def test_wrong_buffer_is_found() -> None:
    def backend(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            out = graph(*args)
            for arg in args:
                if arg.shape == (4,) and not arg.requires_grad:
                    arg.add_(1e-2)
            return out

        return run

    class Accumulates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(4))

        def forward(self, hidden: Tensor) -> Tensor:
            self.total += hidden.sum(0)
            return hidden + 1

    model = nn.Sequential(Accumulates())
    checker = PrecisionChecker(backend=backend, single_pass=False)
    checker.wrap(model[0])
    hidden = torch.randn(3, 4)
    result = checker.compare(lambda model: model(hidden).sum(), model)
    assert result.suspects == [("0", "forward")]
    assert not model[0].total.any()


def test_wrong_loss_shows_in_the_report(capsys: Any) -> None:
    workload = stack()
    mark(workload.model)
    result = two_pass(workload, Block, wrong_backend(forward=add_to_one(0.5)))
    text = shown(result, capsys)
    assert (
        f"  Loss  eager={result.loss_eager:.6f}  compiled={result.loss_compiled:.6f}"
        f"  diff={result.loss_diff:.3e}\n"
    ) in text
    assert "single_pass" not in text
    assert "Mode" not in text
    assert f"\n  loss: eager {result.loss_eager:.9g}, compiled {result.loss_compiled:.9g}" in text
    assert "First divergence: blocks.1 (forward)" in text


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("side", ["eager", "compiled"])
def test_loss_that_is_not_finite_on_one_side_fails(side: str, bad: float) -> None:
    runs = []

    def step(model: nn.Module) -> float:
        runs.append(1)
        loss = model(torch.ones(2, WIDTH)).sum().item()
        return bad if len(runs) == ("eager", "compiled").index(side) + 1 else loss

    result = two_pass(stack(), Block, step=step)
    assert result.verdict == Verdict.FAIL
    assert result.judgement[1].startswith("loss: eager")
    assert result.suspects == []


def test_loss_of_another_sign_of_infinity_fails_and_the_same_nan_passes() -> None:
    losses = iter([math.inf, -math.inf])
    workload = stack()

    def step(model: nn.Module) -> float:
        model(workload.batch[0])
        return next(losses)

    assert two_pass(workload, Block, step=step).verdict == Verdict.FAIL
    losses = iter([math.nan, math.nan])
    assert two_pass(workload, Block, step=step).verdict == Verdict.PASS


@pytest.mark.parametrize(
    ("options", "passes"), [({}, False), ({"threshold": 1e-1}, True), ({"rtol": 1e-6}, False)]
)
def test_loss_is_judged_by_the_criterion(options: dict[str, Any], passes: bool) -> None:
    losses = iter([1.0, 1.01, *[1.0] * 3])
    workload = stack()

    def step(model: nn.Module) -> float:
        model(workload.batch[0])
        return next(losses)

    result = two_pass(workload, Block, step=step, **options)
    assert result.verdict == (Verdict.PASS if passes else Verdict.FAIL)


def test_step_without_a_loss_compares_the_modules() -> None:
    workload = stack()
    result = two_pass(workload, Block, step=lambda model: [model(workload.batch[0])].clear())
    assert_pass(result)
    assert math.isnan(result.loss_eager)


# ---- what cannot be known -----------------------------------------------------------------------


class Gated(nn.Module):
    """Goes one way or the other, by what the first block gives."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.blocks[0](hidden)
        chosen = self.blocks[1] if hidden.sum() > 1e6 else self.blocks[2]
        return chosen(hidden)


def test_modules_that_ran_on_one_side_only_are_missing_and_no_pass(
    tmp_path: Path, capsys: Any
) -> None:
    model = Gated()
    backend = wrong_backend(forward=lambda out: out + 1e6)
    mark(model, 0)
    checker = PrecisionChecker(backend=backend, single_pass=False)
    checker.wrap_by_policy(model, (Block,))
    hidden = torch.randn(2, WIDTH)
    result = checker.compare(lambda model: model(hidden).sum(), model)
    assert result.suspects == [("blocks.0", "forward")]
    assert notes_of(result) == {
        "blocks.0": "", "blocks.1": "MISSING_fwd_in_eager", "blocks.2": "MISSING_fwd_in_compiled",
    }  # fmt: skip
    for name in ("blocks.1", "blocks.2"):
        assert named(result, name).verdict == Verdict.INCONCLUSIVE
    path = tmp_path / "report.csv"
    checker.report(result, csv_path=path)
    text = capsys.readouterr().out
    assert "  WARN MISSING_fwd_in_eager  blocks.1\n" in text
    assert "  WARN MISSING_fwd_in_compiled  blocks.2\n" in text
    rows = path.read_text().splitlines()
    assert "blocks.1,note,0,WARN,,,,,MISSING_fwd_in_eager" in rows
    assert "blocks.2,note,0,WARN,,,,,MISSING_fwd_in_compiled" in rows


def test_missing_forward_alone_is_inconclusive() -> None:
    model = nn.Sequential(Block(), Block())
    runs: list[int] = []

    def step(model: nn.Module) -> Tensor:
        runs.append(1)
        hidden = model[0](torch.ones(2, WIDTH))
        return (model[1](hidden) if len(runs) == 1 else hidden).sum() * 0

    checker = PrecisionChecker(single_pass=False)
    checker.wrap_by_policy(model, (Block,))
    result = checker.compare(step, model)
    assert notes_of(result) == {"0": "", "1": "MISSING_fwd_in_compiled"}
    assert result.verdict == Verdict.INCONCLUSIVE
    assert not result.all_pass


def test_missing_backward_is_marked_and_no_pass(capsys: Any) -> None:
    workload = stack()
    runs: list[int] = []

    def step(model: nn.Module) -> Tensor:
        runs.append(1)
        loss = workload.loss_fn(model, workload.batch)
        if len(runs) == 1:
            loss.backward()
        return loss

    result = two_pass(workload, Block, step=step)
    assert set(notes_of(result).values()) == {"MISSING_bwd_in_compiled"}
    assert result.verdict == Verdict.INCONCLUSIVE
    assert "  WARN MISSING_bwd_in_compiled  blocks.0\n" in shown(result, capsys)


def test_markers_of_what_is_not_compared(capsys: Any) -> None:
    workload = stack()
    workload.model.blocks[0].compile(backend="aot_eager")
    checker = PrecisionChecker(single_pass=False)
    checker.wrap_by_policy(workload.model, (Block, nn.Linear))
    checker.ignore(workload.model.head)
    result = checker.compare(step_of(workload), workload.model)
    notes = notes_of(result)
    assert notes["blocks.0"] == "SKIP_compiled_wrapper"
    assert notes["blocks.1.up"] == "SKIP_inside_compiled"
    assert notes["head"] == "IGNORED"
    assert notes["blocks.1"] == notes["inp"] == ""
    assert result.verdict == Verdict.PASS, explain(result)
    text = shown(result, capsys)
    for line in ("SKIP_compiled_wrapper  blocks.0", "SKIP_inside_compiled  blocks.1.up",
                 "IGNORED  head"):  # fmt: skip
        assert f"  skip {line}\n" in text


def test_step_that_never_calls_its_model_is_no_pass_and_is_undone() -> None:
    workload = stack("batch_norm")
    optimizer = torch.optim.SGD(workload.model.parameters(), lr=0.1, momentum=0.9)

    def step(model: nn.Module) -> Tensor:
        workload.model.eval().train()
        return workload.step(optimizer)

    workload.step(optimizer)
    result = two_pass(
        workload, block_class("batch_norm"), step=step, optimizer=optimizer, writes=True
    )
    assert result.verdict == Verdict.INCONCLUSIVE
    assert "never called the model it was given, it called the original one" in result.judgement[1]


def test_step_that_calls_nothing_is_no_pass() -> None:
    result = two_pass(stack(), Block, step=lambda model: torch.tensor(1.0))
    assert result.verdict == Verdict.INCONCLUSIVE
    assert "never called the model" in result.judgement[1]


def test_step_that_takes_the_next_batch_is_no_comparison() -> None:
    workload = stack()
    batches = iter(torch.randn(5, 6, WIDTH))
    result = two_pass(workload, Block, step=lambda model: model(next(batches)).sum())
    assert result.verdict == Verdict.INCONCLUSIVE
    assert "other inputs in the second run" in result.judgement[1]
    assert result.compared == 0


def test_module_that_is_not_compiled_is_inconclusive() -> None:
    class Skipped(nn.Linear):
        @torch.compiler.disable
        def forward(self, hidden: Tensor) -> Tensor:
            return super().forward(hidden)

    model = nn.Sequential(Skipped(4, 4), nn.Identity())
    checker = PrecisionChecker(single_pass=False)
    checker.wrap_by_policy(model, (Skipped, nn.Identity))
    result = checker.compare(lambda model: model(torch.ones(2, 4)).sum(), model)
    assert result.verdict == Verdict.INCONCLUSIVE
    assert "not_compiled" in result.judgement[1]
    assert "nothing to compile" in notes_of(result)["1"]


def test_nothing_wrapped_is_inconclusive() -> None:
    result = two_pass(stack(), nn.Conv2d)
    assert result.verdict == Verdict.INCONCLUSIVE
    assert "nothing was wrapped" in result.judgement[1]


def test_other_random_numbers_are_no_fault() -> None:
    calls: list[int] = []

    class Draws(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            return hidden * torch.rand(hidden.shape)

    def step(model: nn.Module) -> Tensor:
        calls.append(1)
        torch.manual_seed(len(calls))
        return model(torch.ones(2, 4)).sum() * 0

    model = nn.Sequential(Draws())
    checker = PrecisionChecker(single_pass=False)
    checker.wrap(model[0])
    result = checker.compare(step, model)
    assert result.verdict == Verdict.INCONCLUSIVE
    assert "other random numbers" in explain(result)


class RefusesFloat64(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        if hidden.dtype == torch.float64:
            raise TypeError("no doubles here")
        return self.out(hidden)


@pytest.mark.parametrize("size", [1e-6, 1e-2])
def test_model_that_refuses_float64_is_judged_in_its_own_dtype(size: float) -> None:
    workload = stack(Kind(RefusesFloat64))
    backend = wrong_backend_for_all(lambda out: out * (1 + size))
    result = two_pass(workload, RefusesFloat64, backend)
    item = result.diffs[0].fwd_output[0]
    assert item.judged == (Verdict.PASS if size < 1e-4 else Verdict.FAIL), explain(result)
    assert any("no float64 run" in note for note in item.notes)


def wrong_backend_for_all(edit: Any) -> Any:
    from torch._dynamo.backends.debugging import aot_eager

    def backend(graph: Any, inputs: Any) -> Any:
        compiled = aot_eager(graph, inputs)
        return lambda *args: [edit(out) for out in compiled(*args)]

    return backend


# ---- what is left -------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["eager", "compiled"])
def test_exception_of_the_step_goes_on_and_nothing_is_left(when: str) -> None:
    workload = stack("batch_norm")
    workload.step()
    runs: list[int] = []

    def step(model: nn.Module) -> None:
        runs.append(1)
        model(workload.batch[0]).sum().backward()
        workload.model.zero_grad()
        if len(runs) == ("eager", "compiled").index(when) + 1:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        two_pass(workload, block_class("batch_norm"), step=step)


def test_optimizer_of_the_original_is_put_back_and_said() -> None:
    workload = stack("batch_norm")
    optimizer = torch.optim.AdamW(workload.model.parameters(), lr=0.1)
    workload.step(optimizer)

    def step(model: nn.Module) -> Tensor:
        loss = workload.loss_fn(model, workload.batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    result = two_pass(
        workload, block_class("batch_norm"), step=step, optimizer=optimizer, writes=True
    )
    assert_pass(result)
    assert any("an optimizer (AdamW)" in note and "put back" in note for note in result.notes)


def test_optimizer_of_the_copy_may_step() -> None:
    workload = stack()

    def step(model: nn.Module) -> Tensor:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = workload.loss_fn(model, workload.batch)
        loss.backward()
        optimizer.step()
        return loss

    result = two_pass(workload, Block, step=step)
    assert_pass(result)
    assert not any("optimizer" in note for note in result.notes)


def test_fault_after_the_step_moved_parameters_is_found_by_what_came_in() -> None:
    workload = stack()
    where = mark(workload.model)
    backend = wrong_backend(forward=add_to_one(1e-2), at=2)

    def step(model: nn.Module) -> Tensor:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            loss = workload.loss_fn(model, workload.batch)
            loss.backward()
            optimizer.step()
        return loss

    result = two_pass(workload, Block, backend, step=step)
    assert result.suspects[0] == (where, "forward")
    assert {name for name, phase in result.suspects if phase == "forward"} == {where}


@pytest.mark.parametrize("how", ["in place", "replaced"])
def test_blocks_whose_parameters_the_step_changed_inherit_a_fault(how: str) -> None:
    workload = stack()
    where = mark(workload.model)

    def step(model: nn.Module) -> Tensor:
        loss = workload.loss_fn(model, workload.batch)
        for block in model.blocks:
            with torch.no_grad():
                if how == "in place":
                    block.up.weight.mul_(2)
                else:
                    block.up.weight = nn.Parameter(block.up.weight * 2)
        return loss + workload.loss_fn(model, workload.batch)

    backend = wrong_backend(forward=add_to_one(1e-2), at=2)
    result = two_pass(workload, Block, backend, step=step)
    assert result.suspects == [(where, "forward")]


CHANGES_OF_THE_ORIGINAL: dict[str, Callable[[nn.Parameter], Any]] = {
    "frozen": lambda weight: weight.requires_grad_(False),
    "other memory": lambda weight: setattr(weight, "data", weight.data * 2),
    "another shape": lambda weight: setattr(weight, "data", weight.data[:1].clone()),
    "through data": lambda weight: weight.data.mul_(2),
    "a gradient": lambda weight: setattr(weight, "grad", torch.ones_like(weight)),
}


@pytest.mark.parametrize("change", CHANGES_OF_THE_ORIGINAL)
@pytest.mark.parametrize("place", ["parameter", "input"])
def test_what_a_step_does_to_the_original_is_put_back(change: str, place: str) -> None:
    workload = stack()
    weight = workload.model.blocks[0].up.weight
    hidden = torch.randn(2, WIDTH, requires_grad=True)
    chosen: Any = weight if place == "parameter" else hidden
    memory, values = chosen.data_ptr(), chosen.detach().clone()

    def step(model: nn.Module) -> Tensor:
        loss = model(hidden).sum() if place == "input" else step_of(workload)(model)
        CHANGES_OF_THE_ORIGINAL[change](chosen)
        return loss

    model = nn.Sequential(Block()) if place == "input" else workload.model
    checker = PrecisionChecker(single_pass=False)
    checker.wrap_by_policy(model, (Block,))
    checker.compare(step, model)
    assert chosen.requires_grad
    assert chosen.grad is None
    assert chosen.data_ptr() == memory
    assert torch.equal(chosen, values)


def test_inputs_and_what_they_hold_are_put_back() -> None:
    class Cache:
        def __init__(self) -> None:
            self.keys: list[Tensor] = []

    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(WIDTH, WIDTH)

        def forward(self, hidden: Tensor, cache: Cache) -> Tensor:
            hidden.mul_(2)
            cache.keys.append(hidden * 2)
            return self.out(torch.cat(cache.keys).sum(0, keepdim=True) + hidden)

    model, cache, hidden = nn.ModuleList([Cached()]), Cache(), torch.randn(2, WIDTH)
    cache.keys.append(torch.randn(2, WIDTH))

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, hidden: Tensor, cache: Cache) -> Tensor:
            return self.parts[0](hidden, cache)

    before = hidden.clone()
    checker = PrecisionChecker(single_pass=False)
    checker.wrap(model[0])
    root = Root()
    result = checker.compare(lambda model: model(hidden, cache).sum(), root)
    assert_pass(result)
    assert torch.equal(hidden, before)
    assert len(cache.keys) == 1


def test_gradients_of_inputs_and_attributes_are_put_back() -> None:
    class Counts(Block):
        seen = 0

        def forward(self, hidden: Tensor) -> Tensor:
            self.seen += 1
            return super().forward(hidden)

    workload = stack(Kind(Counts))
    inputs = workload.batch[0].requires_grad_()
    inputs.grad = torch.ones_like(inputs)
    result = two_pass(workload, Counts, writes=True)
    assert_pass(result)
    assert torch.equal(inputs.grad, torch.ones_like(inputs))
    assert all(block.seen == 0 for block in workload.model.blocks)


class Uncopyable(Block):
    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("sharded, no copies")


def test_model_that_cannot_be_copied_is_an_error_that_names_single_pass() -> None:
    workload = stack(Kind(Uncopyable))
    with pytest.raises(ArgumentError, match=r"Stack cannot be copied .*single_pass=True") as info:
        two_pass(workload, Uncopyable)
    assert isinstance(info.value, RuntimeError)
    assert "sharded, no copies" in str(info.value)


def test_hooks_of_the_user_run_on_both_sides_and_stay() -> None:
    workload = stack()

    def double(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * 2

    workload.model.blocks[1].register_forward_hook(double)
    assert_pass(two_pass(workload, Block))


def test_saved_result_of_a_comparison_is_the_same(tmp_path: Path) -> None:
    workload = stack()
    mark(workload.model)
    result = two_pass(workload, Block, wrong_backend(forward=add_to_one(1e-2)))
    result.save(tmp_path / "result")
    again = CompareResult.load(tmp_path / "result")
    assert again == result
    assert again.suspects == result.suspects
    assert again.judgement == result.judgement


def test_failing_origin_is_recorded_for_the_drill_down() -> None:
    workload = stack()
    where = mark(workload.model)
    result = two_pass(workload, Block, wrong_backend(forward=add_to_one(1e-2)))
    assert [(call.name, call.index) for call in result.recordings] == [(where, 0)]
    assert result.recordings[0].module is workload.model.blocks[1]
