"""Reported faults of compiled code, module by module: found where they are, and nothing else is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from modulecheck import CompareResult, PrecisionChecker
from opcheck import Verdict
from tests.cases import CASES, of_kind
from tests.compiled import DYNAMO_WARNS, explain, needs_compiler

pytestmark = [pytest.mark.slow, needs_compiler, DYNAMO_WARNS]

FAULTS = {
    "angle_negative_zero": ("phase", "forward", {""}),
    "autocast_backward_overflow": ("out", "backward", {"linear.weight"}),
    "cumsum_dtype_dropped": ("position", "forward", {"rows", "columns"}),
    "dropout_identity_alias": ("block", "forward", {"argument 0"}),
    "dtype_view_read_after_write": ("packed", "forward", {""}),
    "pool_then_where_backward": ("head", "backward", {"conv.weight", "conv.bias", "input 0"}),
    "remainder_vectorised": ("wrap", "forward", {""}),
}

SAID = {
    "angle_negative_zero": ("element (0,) is 0, eager gives 3.14159274", 1),
    "autocast_backward_overflow": ("is inf, expected", 6),
    "cumsum_dtype_dropped": ("dtype is torch.int64, eager gives torch.bfloat16", 0),
    "dropout_identity_alias": ("12 of 12 elements are out", 12),
    "dtype_view_read_after_write": ("", 15),
    "pool_then_where_backward": ("eager is nearer to float64", None),
    "remainder_vectorised": ("NaN or Inf differ in 12 of 32 elements", 12),
}
"""Of the first tensor that fails: words of the reason, and elements that are out."""


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """As many threads as the fault needs to show."""
    before = torch.get_num_threads()
    torch.set_num_threads(CASES[request.node.callspec.params["name"]].min_threads)
    yield
    torch.set_num_threads(before)


def run(name: str, *, root: bool) -> CompareResult:
    case = CASES[name]
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, args, kwargs = case.build()
    checker = PrecisionChecker(backend="inductor")
    if root:
        checker.wrap(model)
    else:
        checker.wrap_all_children(model, depth=0)
    with case.config(), checker.installed(model):
        case.step(model, args, kwargs)
    with case.config():
        return checker.collect()


def test_every_fault_of_compiled_code_has_an_expectation() -> None:
    modelled = {name for name, case in CASES.items() if case.modelled}
    assert set(FAULTS) == set(of_kind("compile", "backward")) - modelled


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("root", [False, True], ids=["children", "root"])
@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_found_and_nothing_else_is(name: str, root: bool) -> None:
    module, phase, tensors = FAULTS[name]
    result = run(name, root=root)
    assert result.verdict == Verdict.FAIL
    assert result.suspects == [("" if root else module, phase)]
    failed = {
        item.name
        for diff in result.diffs
        for _, _, item in diff.tensors()
        if item.judged == Verdict.FAIL
    }
    if root:
        tensors = {f"{module}.{part}" if part.count(".") else part for part in tensors}
        assert failed
        assert len(failed) == len(tensors)
    else:
        assert failed == tensors, explain(result)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("name", FAULTS)
def test_reason_tells_what_is_wrong_and_in_how_many_elements(name: str) -> None:
    said, num_out = SAID[name]
    result = run(name, root=False)
    failed = [
        item
        for diff in result.diffs
        for _, _, item in diff.tensors()
        if item.judged == Verdict.FAIL
    ]
    assert said in failed[0].reason
    assert num_out is None or failed[0].metrics.num_out == num_out


def test_compiled_code_that_is_wrong_beside_a_dead_eager_is_no_pass() -> None:
    """Eager's layer norm gives NaN for a row of 1e20, inductor's gives zeros."""
    result = run("layer_norm_large_inputs", root=False)
    assert result.verdict == Verdict.FAIL
    assert result.suspects == [("norm", "forward")]
    (item,) = result.diffs[0].fwd_output
    assert "both sides are wrong, in 48 of 48" in item.reason


@pytest.mark.parametrize("name", of_kind("benign"))
def test_what_is_no_fault_passes(name: str) -> None:
    result = run(name, root=True)
    assert result.verdict == Verdict.PASS, explain(result)
    assert result.compared > 0


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.modelled])
def test_wrong_kernel_of_eager_is_not_blamed_on_the_compiler(name: str) -> None:
    # inductor has its own formula for it, which agrees with float64
    result = run(name, root=False)
    assert result.suspects == []
    notes = [note for diff in result.diffs for _, _, item in diff.tensors() for note in item.notes]
    assert any("eager is the wrong side" in note for note in notes)


def test_eager_that_dies_where_compiled_lives_is_named() -> None:
    result = run("fp16_eps_underflow", root=False)
    (item,) = result.diffs[0].fwd_output
    assert item.judged == Verdict.PASS
    assert any("eager is the wrong side" in note for note in item.notes)
