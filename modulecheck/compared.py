"""What is known of one tensor of a module, and what eager and compiled alone can settle.

All values are NumPy arrays; nothing here runs a module.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from opcheck import tolerances as tol
from opcheck.arrays import classes
from opcheck.measures import typical_at_a_glance
from opcheck.records import Metrics, Verdict
from opcheck.verdicts import Rule as OpRule
from opcheck.verdicts import judge_allclose, judge_exact, rms, spacing_of

__all__ = [
    "Array", "Compared", "Documented", "Kinks", "References", "Rule", "documented",
    "flat", "quick",
]  # fmt: skip

Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Rule:
    """Which criterion judges."""

    criterion: str
    """"calibrated" or "allclose"."""
    atol: float
    rtol: float


@dataclass(frozen=True, slots=True)
class Documented:
    """The documented numbers: of eager `a` and compiled `b`."""

    max_abs: float = 0.0
    mean_abs: float = 0.0
    max_rel: float = 0.0
    allclose: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Kinks:
    """Float64 runs in which elements near a corner of the forward take the other branch."""

    elements: tuple[int, ...]
    """Which element each flip carries over; the nearest first."""
    complete: bool
    """False: there may be others, of ops that cannot be reached, or too many."""
    flipped: Callable[[frozenset[int]], Array | None]
    """The gradient with these carried over, and all others on their side."""
    pinned: Callable[[int], Array | None]
    """The k-th gradient with inputs and parameters moved by one ulp and all of them on their side:
    without that, moving crosses corners, and what it shows would excuse any fault."""
    moved: Callable[[int], Array | None]
    """The k-th gradient with inputs and parameters moved by the size of the forward's own error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class References:
    """What may be asked for, each computed when it is."""

    golden: Callable[[], Array | None]
    """The tensor in float64; None: there is none."""
    moved: Callable[[int], Array | None]
    """The k-th golden with inputs and parameters moved by one ulp; the same-dtype module moved
    likewise where there is no golden."""
    kinks: Callable[[], Kinks] | None = None
    """Runs across corners of the forward; for gradients whose forward passed."""
    noise_floor: float = 0.0
    """Gradients whose rms is below are zero in exact arithmetic, as far as anybody can tell."""
    autocast: str = ""
    """The dtype in which some ops of the module compute, whatever that of its tensors."""
    moved_as_autocast: Callable[[int], Array | None] = lambda draw: None
    """As `moved`, by one ulp of that dtype."""
    is_of_autocast: bool = False
    """The tensor's values went through such ops."""
    always: bool = False
    """Hold the two sides against float64 also where they agree."""
    draws_apart: Callable[[], bool] = lambda: False
    """True when the module drew random numbers: float64 may have drawn other ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One tensor, judged."""

    verdict: Verdict
    reason: str = ""
    notes: tuple[str, ...] = ()
    documented: Documented = field(default_factory=Documented)
    metrics: Metrics = field(default_factory=Metrics)
    settled: bool = True
    """False: a quick look does not settle it, and the references were not asked."""
    strained: bool = False
    """Eager, or what moved by one ulp, is further from float64 than rounding explains: the
    allowance, which grows with that distance, may hide a fault."""


def documented(eager: Array, compiled: Array, *, atol: float, rtol: float) -> Documented:
    """max_abs, mean_abs, max_rel and `torch.allclose(eager, compiled)`, in float64 or complex128.

    NaN beside NaN and equal infinities count as equal; a NaN or Inf on one side makes the numbers
    NaN or Inf, as they should be.
    """
    if not eager.size or np.array_equal(eager, compiled):
        return Documented()
    wide = np.complex128 if "c" in (eager.dtype.kind, compiled.dtype.kind) else np.float64
    with np.errstate(all="ignore"):
        a, b = eager.astype(wide, copy=False), compiled.astype(wide, copy=False)
        alike = (a == b) | (np.isnan(a) & np.isnan(b))
        error = np.where(alike, 0.0, np.abs(a - b))
        within = alike | (error <= atol + rtol * np.abs(b))
        # |Inf| on the compiled side makes its own tolerance infinite
        within &= alike | np.isfinite(b)
        relative = np.where(alike, 0.0, error / (np.abs(a) + tol.MAX_REL_FLOOR))
        return Documented(
            float(error.max()), float(error.mean()), float(relative.max()), bool(within.all())
        )


def quick(actual: Array, eager: Array, dtype: str, rule: Rule) -> Compared:
    """What two sides alone can settle: equal bits, exact dtypes, errors of a few spacings."""
    numbers = documented(eager, actual, atol=rule.atol, rtol=rule.rtol)
    if not actual.size:
        return Compared(verdict=Verdict.PASS, documented=numbers, notes=("empty",))
    if actual.dtype.kind in "iub":
        outcome = judge_exact(actual, eager)
        if not outcome.passed:  # float64 does not hold every int64
            exact = outcome.metrics
            numbers = Documented(exact.max_abs, exact.mean_abs, exact.max_rel, numbers.allclose)
        return Compared(
            verdict=Verdict.PASS if outcome.passed else Verdict.FAIL,
            reason=outcome.reason,
            documented=numbers,
            metrics=outcome.metrics,
        )
    size = Metrics(num_elements=actual.size, max_abs=numbers.max_abs, allclose=numbers.allclose)
    if rule.criterion == "allclose":
        outcome = judge_allclose(
            eager, actual, rule=OpRule(dtype=dtype, atol=rule.atol, rtol=rule.rtol)
        )
        return Compared(
            verdict=Verdict.PASS if numbers.allclose else Verdict.FAIL,
            reason="" if numbers.allclose else f"eager's {outcome.reason}",
            documented=numbers,
            metrics=outcome.metrics,
        )
    settled = numbers.max_abs == 0.0 or _is_close(flat(actual), flat(eager), dtype)
    return Compared(verdict=Verdict.PASS, documented=numbers, metrics=size, settled=settled)


def _is_close(actual: Array, eager: Array, dtype: str) -> bool:
    with np.errstate(all="ignore"):
        if not np.array_equal(classes(actual), classes(eager)):
            return False
        keep = np.isfinite(eager)
        y, c = actual[keep].astype(np.float64), eager[keep].astype(np.float64)
        if not y.size:
            return True
        typical = typical_at_a_glance(c, rms(c))
        ratio = (y - c) / (spacing_of(c, dtype) + tol.compute_eps(dtype) * typical)
        if dtype not in tol.HALF_DTYPES:
            return float(np.abs(ratio).max()) <= tol.QUICK_LIMIT
        shift = abs(float(np.mean(ratio * np.sign(c))))
        small = float(np.abs(ratio).max()) <= tol.QUICK_LIMIT_HALF
        return small and (y.size < tol.MIN_ELEMENTS or shift <= tol.QUICK_SHIFT_HALF)


def flat(values: Array) -> Array:
    """One axis; complex values as real and imaginary part in turn."""
    if values.dtype.kind == "c":
        return np.ascontiguousarray(values).reshape(-1).view(values.real.dtype)
    return values.reshape(-1)
