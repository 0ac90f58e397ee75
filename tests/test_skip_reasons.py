"""Each reason for not checking a call, as the coverage of a session counts it.

Reasons that settings give (steps, modules, budgets, sizes) are tested with those settings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import opcheck
from opcheck import SkipReason, Verdict
from opcheck.calls import Call, Site, traits_of
from opcheck.kernel_table import kernels
from opcheck.references import choose

X = torch.linspace(-2, 2, 24).reshape(4, 6)
WHOLE = torch.arange(6)
BYTES = torch.ones(32, 32, dtype=torch.int8)
SPARSE = X.to_sparse()
TRUE, EMPTY, OUT = torch.ones(1), torch.ones(0, 3), torch.empty_like(X)


def session_of(step: Callable[[], object], folder: Path) -> opcheck.Session:
    with opcheck.check(log_dir=folder, quiet=True) as session:
        step()
    assert session.coverage.adds_up
    return session


@pytest.fixture
def library() -> Iterator[None]:
    """Ops of another namespace, registered after the table of kernels was taken."""
    kernels()
    made = torch.library.Library("skipped", "FRAGMENT")
    made.define("twice(Tensor x) -> Tensor")
    made.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
    made.define("elsewhere(Tensor x) -> Tensor")
    made.impl("elsewhere", lambda x: x * 2, "PrivateUse1")
    try:
        yield
    finally:
        made._destroy()


COMPUTING = {
    "an op that draws": (lambda: torch.native_dropout(X, 0.5, True), SkipReason.RANDOM),
    "integers": (lambda: WHOLE + WHOLE, SkipReason.NO_INDEPENDENT_REFERENCE),
    "another namespace": (lambda: torch.ops.skipped.twice(X), SkipReason.NO_INDEPENDENT_REFERENCE),
    "narrow alone": (lambda: torch._int_mm(BYTES, BYTES), SkipReason.REFERENCE_NOT_AVAILABLE),
    "a sparse result": (lambda: X.to_sparse(), SkipReason.UNSUPPORTED_TYPE),
    "a sparse argument": (lambda: torch.neg(SPARSE), SkipReason.UNSUPPORTED_TYPE),
}


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("what", COMPUTING)
def test_what_computes_and_has_no_judge_is_named(what: str, tmp_path: Path) -> None:
    step, reason = COMPUTING[what]
    session = session_of(step, tmp_path)
    coverage = session.coverage
    assert coverage.skipped == {reason: coverage.seen}
    assert {item.reason for item in coverage.unchecked_signatures} == {reason}
    assert coverage.signatures_seen == len(coverage.unchecked_signatures) >= 1
    assert coverage.signatures_checked == 0
    assert session.verdict is Verdict.INCONCLUSIVE


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("name", "reason"),
    [("twice", SkipReason.NO_INDEPENDENT_REFERENCE), ("elsewhere", SkipReason.NO_CPU_KERNEL)],
)
def test_an_op_of_a_library_is_said_to_have_no_kernel_where_it_has_none(
    name: str, reason: SkipReason
) -> None:
    func = getattr(torch.ops.skipped, name).default
    call = Call(
        func=func, traits=traits_of(func), args=(X,), kwargs={}, site=Site("", "other"), index=0,
        step=0, occurrence=0, signature=(), source="",
    )  # fmt: skip
    assert choose(call, on_device=True, seed=0) is reason


NOTHING = {
    "memory": (lambda: torch.empty(3), SkipReason.UNINITIALIZED),
    "a view": (lambda: X.t(), SkipReason.LAYOUT),
    "a copy": (lambda: X.clone(), SkipReason.LAYOUT),
    "an assertion": (lambda: torch._assert_async(TRUE), SkipReason.NOTHING_TO_COMPARE),
    "no elements": (lambda: torch.exp(EMPTY), SkipReason.NOTHING_TO_COMPARE),
    "a generator": (lambda: torch.rand(3), SkipReason.RANDOM),
    "out=": (lambda: torch.exp(X, out=OUT), SkipReason.OUT_VARIANT),
    "the profiler": (
        lambda: torch.profiler.record_function("x").__enter__(),
        SkipReason.SIDE_EFFECT,
    ),
}


@pytest.mark.parametrize("what", NOTHING)
def test_what_is_never_compared_is_counted(what: str, tmp_path: Path) -> None:
    step, reason = NOTHING[what]
    session = session_of(step, tmp_path)
    assert session.coverage.skipped == {reason: 1}
    assert session.coverage.unchecked_signatures == ()
    assert session.verdict is Verdict.INCONCLUSIVE


def test_calls_on_a_wrapper_give_way_to_those_on_what_it_holds(tmp_path: Path) -> None:
    jagged = torch.nested.nested_tensor([X, X[:2]], layout=torch.jagged)
    coverage = session_of(lambda: torch.exp(jagged), tmp_path).coverage
    assert coverage.skipped[SkipReason.UNWRAPPED] == 1
    assert coverage.checked == 1
    assert coverage.unchecked_signatures == ()


@pytest.mark.parametrize(
    "error", [NotImplementedError("here"), RuntimeError("\"exp\" not implemented for 'Double'")]
)
def test_a_kernel_that_is_missing_is_no_crash(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr("opcheck.comparison.judge", refuses)
    session = session_of(lambda: torch.exp(X), tmp_path)
    assert session.coverage.skipped == {SkipReason.REFERENCE_NOT_AVAILABLE: 1}
    assert session.coverage.errors == 0
    assert session.verdict is Verdict.INCONCLUSIVE
