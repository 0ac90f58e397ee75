"""What today's tool of the same use gets wrong, with the right answer, in both modes.

Each was reproduced with msProbe 26.2.0. Where a case has a test of its own elsewhere, it is in
`test_precision_checker.py` (single-pass) or `test_two_pass.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modulecheck import CompareResult, ModuleDiff, PrecisionChecker, TensorDiff
from opcheck import Verdict
from tests.compiled import (
    DYNAMO_WARNS,
    MODES,
    WIDTH,
    Block,
    Kind,
    add_to_one,
    assert_pass,
    block_class,
    explain,
    mark,
    stack,
    wrong_backend,
)
from tests.models import Workload
from tests.two_pass import step_of

pytestmark = [DYNAMO_WARNS, pytest.mark.usefixtures("fresh_dynamo")]


def compare(
    workload: Workload,
    classes: Any,
    backend: Any = "aot_eager",
    *,
    single_pass: bool,
    step: Callable[[nn.Module], Any] | None = None,
    **options: Any,
) -> CompareResult:
    checker = PrecisionChecker(backend=backend, single_pass=single_pass, **options)
    checker.wrap_by_policy(workload.model, classes)
    return checker.compare(step or step_of(workload), workload.model)


# ---- says PASS without having looked ------------------------------------------------------------


@MODES
@pytest.mark.parametrize("kind", ["dict", "dataclass"])
def test_wrong_output_in_a_dict_or_dataclass_fails(kind: str, single_pass: bool) -> None:
    workload = stack(kind)
    where = mark(workload.model)
    backend = wrong_backend(forward=add_to_one(1e-2))
    result = compare(workload, block_class(kind), backend, single_pass=single_pass)
    assert {name for name, _ in result.suspects} == {where}


@MODES
def test_doubled_backward_with_a_tuple_output_fails(single_pass: bool) -> None:
    workload = stack("tuple")
    where = mark(workload.model)
    backend = wrong_backend(backward=lambda grad: grad * 2)
    result = compare(workload, block_class("tuple"), backend, single_pass=single_pass)
    assert result.suspects == [(where, "backward")]


def passing() -> TensorDiff:
    return TensorDiff(0.0, 0.0, 0.0, True, (2, 3))


@pytest.mark.parametrize(
    ("result", "verdict"),
    [
        (CompareResult(1.0, 1.0, []), Verdict.INCONCLUSIVE),
        (CompareResult(1.0, 1.0, [ModuleDiff("a", note="IGNORED")]), Verdict.INCONCLUSIVE),
        (
            CompareResult(
                1.0, 1.0,
                [ModuleDiff("a", fwd_output=[passing()]),
                 ModuleDiff("b", note="MISSING_fwd_in_compiled")],
            ),
            Verdict.INCONCLUSIVE,
        ),
        (
            CompareResult(
                1.0, 1.0, [ModuleDiff("a", fwd_output=[passing()], note="MISSING_bwd_in_compiled")]
            ),
            Verdict.INCONCLUSIVE,
        ),
        (CompareResult(1.0, float("nan"), [ModuleDiff("a", fwd_output=[passing()])]), Verdict.FAIL),
        (CompareResult(1.0, 100.0, [ModuleDiff("a", fwd_output=[passing()])]), Verdict.FAIL),
        (CompareResult(1.0, 1.0, [ModuleDiff("a", fwd_output=[passing()])]), Verdict.PASS),
    ],
    ids=["nothing", "all ignored", "missing fwd", "missing bwd", "nan loss", "1 against 100", "ok"],
)  # fmt: skip
def test_result_is_a_pass_only_if_all_was_compared(result: CompareResult, verdict: Verdict) -> None:
    assert result.verdict == verdict
    assert result.all_pass == (verdict == Verdict.PASS)


class Pair(nn.Module):
    """Gives three tensors in eager, and two where it is compiled."""

    def forward(self, hidden: Tensor) -> tuple[Tensor, ...]:
        three = hidden + 1, hidden + 2, hidden + 3
        return three[:2] if torch.compiler.is_compiling() else three


@MODES
def test_tuples_of_different_length_fail(single_pass: bool) -> None:
    workload = stack(Kind(Pair, lambda block, x: block(x)[0]))
    result = compare(workload, Pair, single_pass=single_pass)
    assert result.verdict == Verdict.FAIL
    assert "has 2 parts (0, 1), eager gives 3 parts" in explain(result)


@MODES
def test_one_wrong_parameter_gradient_fails(single_pass: bool) -> None:
    workload = stack()
    where = mark(workload.model)
    backend = wrong_backend(backward={0: add_to_one(1e-2)})
    result = compare(workload, Block, backend, single_pass=single_pass)
    assert result.suspects == [(where, "backward")]


class Writes(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        hidden.mul_(2)
        return hidden + 1


@MODES
def test_dropped_mutation_of_an_argument_fails(single_pass: bool) -> None:
    def backend(graph: Any, inputs: Any) -> Any:
        return lambda *args: graph(*[arg.clone() for arg in args])

    model = nn.Sequential(Writes())
    checker = PrecisionChecker(backend=backend, single_pass=single_pass)
    checker.wrap(model[0])
    result = checker.compare(lambda model: model(torch.ones(2, 4)).sum(), model)
    assert result.suspects == [("0", "forward")]


def test_differing_inputs_are_shown_with_their_size() -> None:
    workload = stack()
    mark(workload.model)
    backend = wrong_backend(forward=add_to_one(1e-2))
    result = compare(workload, Block, backend, single_pass=False)
    inputs = {diff.name: diff.fwd_input[0] for diff in result.diffs}
    assert inputs["blocks.0"].max_abs == inputs["blocks.1"].max_abs == 0.0
    assert inputs["blocks.2"].max_abs == pytest.approx(1e-2, rel=1e-3)
    assert inputs["blocks.2"].judged == Verdict.FAIL


def test_a_replay_on_other_inputs_shows_by_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiled(tensors: list[Tensor]) -> list[Tensor]:
        return [tensor.detach() + 1e-2 for tensor in tensors]

    monkeypatch.setattr("modulecheck.replay.copied_together", spoiled)
    result = compare(stack(), Block, single_pass=True)
    given = result.diffs[0].fwd_input[0]
    assert given.max_abs == pytest.approx(1e-2, rel=1e-3)
    assert given.judged == Verdict.INCONCLUSIVE
    assert "did not get what the compiled one got" in given.reason
    assert not result.all_pass


class Flag(nn.Module):
    def forward(self, hidden: Tensor, flag: int) -> Tensor:
        return hidden * flag


@MODES
def test_silent_fall_back_to_eager_at_the_recompile_limit_is_no_pass(single_pass: bool) -> None:
    model = nn.ModuleDict({"flag": Flag()})
    checker = PrecisionChecker(single_pass=single_pass)
    checker.wrap(model["flag"])

    def step(model: nn.Module) -> Tensor:
        return sum(model["flag"](torch.ones(2), flag).sum() for flag in range(3))

    with torch._dynamo.config.patch(recompile_limit=1, specialize_int=True):
        result = checker.compare(step, model)
    assert result.verdict == Verdict.INCONCLUSIVE
    assert "recompile_limit" in explain(result)


# ---- cries wolf ---------------------------------------------------------------------------------


@MODES
@pytest.mark.parametrize("kind", ["dropout", "in_place_input", "in_place_output", "nan"])
def test_correct_steps_pass(kind: str, single_pass: bool) -> None:
    """Dropout in train mode, in-place changes, NaN at the same place."""
    assert_pass(compare(stack(kind), block_class(kind), single_pass=single_pass))


class VarianceNorm(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * torch.rsqrt(inputs.var(dim=-1, keepdim=True) + 1e-9)


@MODES
def test_eager_can_be_the_wrong_side(single_pass: bool) -> None:
    """And so half precision is not judged by the tolerances of float32."""

    def in_float32(graph: Any, inputs: Any) -> Any:
        return lambda *args: [VarianceNorm()(args[0].float()).half()]

    inputs = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).half()
    inputs[1] = 1e-9
    model = nn.Sequential(VarianceNorm())
    checker = PrecisionChecker(backend=in_float32, single_pass=single_pass)
    checker.wrap(model[0])
    result = checker.compare(lambda model: model(inputs).nansum(), model)
    (item,) = result.diffs[0].fwd_output
    assert item.judged == Verdict.PASS, explain(result)
    assert any("eager is the wrong side" in note for note in item.notes)


# ---- harms the step -----------------------------------------------------------------------------


@MODES
def test_batch_norm_counts_a_step_once_or_not_at_all(single_pass: bool) -> None:
    workload = stack("batch_norm")
    assert_pass(compare(workload, block_class("batch_norm"), single_pass=single_pass))
    counts = [block.norm.num_batches_tracked.item() for block in workload.model.blocks]
    assert counts == [int(single_pass)] * 3


@MODES
@pytest.mark.parametrize("fails", [True, False])
def test_model_is_left_as_it_was(single_pass: bool, fails: bool) -> None:
    """Gradients, eval mode, hooks and compiled calls, also after an exception."""
    workload = stack("dropout")
    workload.step()
    model = workload.model.eval()
    before = {name: item.grad.clone() for name, item in model.named_parameters()}
    attributes = [sorted(vars(item)) for item in model.modules()]

    def step(model: nn.Module) -> Tensor:
        loss = workload.loss_fn(model, workload.batch)
        if fails:
            raise KeyError("mine")
        return loss

    if fails:
        with pytest.raises(KeyError, match="mine"):
            compare(workload, block_class("dropout"), single_pass=single_pass, step=step)
    else:
        assert_pass(compare(workload, block_class("dropout"), single_pass=single_pass, step=step))
    for name, item in model.named_parameters():
        assert torch.equal(item.grad, before[name])
    assert not any(item.training for item in model.modules())
    assert [sorted(vars(item)) for item in model.modules()] == attributes
    assert all(item._compiled_call_impl is None for item in model.modules())
    assert not any(item._forward_hooks or item._backward_hooks for item in model.modules())


@MODES
def test_users_tensor_is_changed_once_or_not_at_all(single_pass: bool) -> None:
    hidden = torch.ones(2, 4)
    model = nn.Sequential(Writes())
    checker = PrecisionChecker(single_pass=single_pass)
    checker.wrap(model[0])
    assert_pass(checker.compare(lambda model: model(hidden).sum(), model))
    assert torch.equal(hidden, torch.full((2, 4), 2.0 if single_pass else 1.0))


@MODES
@pytest.mark.parametrize("kind", ["keyword_only", "by_keyword"])
def test_keyword_arguments_are_no_crash(kind: str, single_pass: bool) -> None:
    assert_pass(compare(stack(kind), block_class(kind), single_pass=single_pass))


@MODES
def test_empty_tensors_are_no_crash(single_pass: bool, capsys: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    checker = PrecisionChecker(single_pass=single_pass)
    checker.wrap(model[0])
    result = checker.compare(lambda model: model(torch.ones(0, 4)).sum(), model)
    assert result.verdict != Verdict.FAIL
    assert "crashed" not in explain(result)
    checker.report(result)
    assert "shape=(0, 4)" in capsys.readouterr().out


# ---- loses information --------------------------------------------------------------------------


@MODES
def test_threshold_works(single_pass: bool) -> None:
    for threshold, passes in ((1e-1, True), (1e-6, False)):
        workload = stack()
        mark(workload.model)
        backend = wrong_backend(forward=add_to_one(3e-3))
        options = {"threshold": threshold, "single_pass": single_pass}
        assert compare(workload, Block, backend, **options).all_pass == passes


@MODES
def test_first_call_of_a_shared_module_is_kept(single_pass: bool) -> None:
    workload = stack("twice")
    where = mark(workload.model)
    backend = wrong_backend(forward=add_to_one(1e-2), at=1)
    result = compare(workload, Block, backend, single_pass=single_pass)
    assert result.suspects[0] == (where, "forward")
    diff = next(diff for diff in result.diffs if diff.name == where)
    assert diff.calls[0].begins("forward")
    assert not diff.calls[1].begins("forward")


class Spectrum(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return torch.complex(hidden, hidden * 2)


def edited(edit: Callable[[Tensor], Tensor]) -> Any:
    def backend(graph: Any, inputs: Any) -> Any:
        return lambda *args: [edit(out) for out in graph(*args)]

    return backend


@MODES
def test_wrong_imaginary_part_fails(single_pass: bool) -> None:
    model = nn.Sequential(Spectrum())
    backend = edited(lambda out: torch.complex(out.real, out.imag * 1.001))
    checker = PrecisionChecker(backend=backend, single_pass=single_pass)
    checker.wrap(model[0])
    result = checker.compare(lambda model: model(torch.ones(2, WIDTH)).abs().sum(), model)
    assert result.suspects == [("0", "forward")]
    assert result.diffs[0].fwd_output[0].max_abs == pytest.approx(2e-3, rel=1e-3)


@MODES
def test_difference_that_only_float64_can_hold_fails(single_pass: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4)).double()
    backend = edited(lambda out: out + 1e-11)
    checker = PrecisionChecker(backend=backend, single_pass=single_pass)
    checker.wrap(model[0])
    inputs = torch.ones(2, 4, dtype=torch.float64)
    result = checker.compare(lambda model: model(inputs).sum(), model)
    assert result.suspects == [("0", "forward")]
    assert result.diffs[0].fwd_output[0].max_abs == pytest.approx(1e-11, rel=1e-3)
