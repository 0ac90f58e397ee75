"""Numbers of a comparison, and the tests that need no sensitivity: classes, bits, quick, bounds.

`spacing` is the distance of neighbouring numbers of the dtype at the expected value, `allowance`
the error an element may make before the class limit multiplies it, `class` one of finite, NaN,
+Inf, -Inf.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from opcheck import tolerances as tol
from opcheck.arrays import (
    CHUNK,
    HUGE_SQUARE,
    TINY_SQUARE,
    Array,
    Pair,
    absolute_difference,
    classes,
    rms,
    size_beside_fill,
    spacing_of,
    typical_size,
)
from opcheck.records import Metrics
from opcheck.rules import Outcome, Rule

__all__ = [
    "Part",
    "Scan",
    "allclose_share",
    "beside_or_golden",
    "empty",
    "failed_element",
    "failed_nonfinite",
    "finite_part",
    "is_allclose",
    "judge_bound",
    "judge_equal",
    "passed",
    "quick_ratio",
    "scan_of",
    "typical_at_a_glance",
]

# ---- the quick test -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scan:
    """Documented metrics of one pass over two flat arrays; NaN or Inf where elements are."""

    max_abs: float
    mean_abs: float
    max_rel: float
    expected_rms: float

    @property
    def finite(self) -> bool:
        """Every element is, on both sides."""
        return self.max_abs < math.inf  # False for NaN


def scan_of(actual: Array, expected: Array) -> Scan:
    """Two values that are not both finite never give a finite difference, so none slips through."""
    count = actual.size
    error = np.empty(min(count, CHUNK))
    scale = np.empty(error.size)
    max_abs = max_rel = total = square = 0.0
    for start in range(0, count, CHUNK):
        want = expected[start : start + CHUNK]
        if want.size != error.size:
            error, scale = error[: want.size], scale[: want.size]
        np.subtract(actual[start : start + CHUNK], want, out=error, dtype=np.float64)
        np.absolute(error, out=error)
        top = float(np.maximum.reduce(error))
        np.absolute(want, out=scale)
        square += float(np.dot(scale, scale))
        if top > 0.0:
            max_abs = max(max_abs, top)
            total += float(np.add.reduce(error))
            scale += tol.MAX_REL_FLOOR
            error /= scale
            max_rel = max(max_rel, float(np.maximum.reduce(error)))
        elif top != 0.0:
            return Scan(math.nan, math.nan, math.nan, math.nan)
    expected_rms = (
        math.sqrt(square / count) if TINY_SQUARE < square < HUGE_SQUARE else rms(expected)
    )
    return Scan(max_abs, total / max(count, 1), max_rel, expected_rms)


def _worst_ratio(
    actual: Array, expected: Array, *, dtype: str, floor: float
) -> tuple[float, float]:
    """Largest |error| / (spacing + floor), and the mean of error / (spacing + floor) * sign."""
    worst = shift = 0.0
    for start in range(0, actual.size, CHUNK):
        want = expected[start : start + CHUNK].astype(np.float64, copy=False)
        ratio = np.subtract(actual[start : start + CHUNK], want, dtype=np.float64)
        scale = spacing_of(want, dtype)
        scale += floor
        ratio /= scale
        shift += float(np.dot(ratio, np.sign(want)))
        worst = max(worst, float(np.maximum.reduce(np.absolute(ratio, out=ratio))))
    return worst, shift / actual.size


_GLANCE = np.arange(4096) * ((math.sqrt(5) - 1) / 2) % 1.0
"""Where the elements lie that the typical size is taken of, as shares of the whole: by the golden
ratio, since any fixed step meets masks and channels that repeat with it."""


def typical_at_a_glance(values: Array, size: float) -> float:
    """`size_beside_fill` of a sample; a wrong guess costs a run in float64 at most."""
    if values.size > _GLANCE.size:
        values = values[(_GLANCE * values.size).astype(np.intp)]
    return size_beside_fill(values, typical_size(values, size))


def quick_ratio(pair: Pair, scan: Scan, rule: Rule, *, test_shift: bool) -> float | None:
    """Largest error in units of `spacing + ec * typical` (or above it) if a PASS, else None.

    A spacing is at least eps/2 times its number, which lets the documented metrics prove most
    results correct without looking at them again.
    """
    eps = tol.EPS[rule.dtype]
    floor = tol.compute_eps(rule.dtype) * typical_at_a_glance(pair.expected, scan.expected_rms)
    limit = tol.QUICK_LIMIT_HALF if rule.is_half else tol.QUICK_LIMIT
    test_shift = test_shift and rule.is_half and pair.actual.size >= tol.MIN_ELEMENTS
    if not test_shift:
        if scan.max_abs <= limit * floor:
            return scan.max_abs / floor if floor else 0.0
        if scan.max_rel <= limit * eps / 2 and tol.MAX_REL_FLOOR * eps / 2 <= floor:
            return scan.max_rel / (eps / 2)
    worst, shift = _worst_ratio(pair.actual, pair.expected, dtype=rule.dtype, floor=floor)
    if worst <= limit and not (test_shift and abs(shift) > tol.QUICK_SHIFT_HALF):
        return worst
    return None


def is_allclose(pair: Pair, scan: Scan, rule: Rule) -> bool:
    """The documented criterion on finite elements, from the metrics where they prove it."""
    if scan.max_abs <= rule.atol:
        return True
    if scan.max_rel <= rule.rtol and tol.MAX_REL_FLOOR * rule.rtol <= rule.atol:
        return True
    for start in range(0, pair.actual.size, CHUNK):
        want = pair.expected[start : start + CHUNK].astype(np.float64, copy=False)
        error = np.absolute(np.subtract(pair.actual[start : start + CHUNK], want, dtype=np.float64))
        if not np.all(error <= rule.atol + rule.rtol * np.absolute(want)):
            return False
    return True


# ---- classes and equality -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Part:
    """The elements of a pair that are finite on every side, and what the others say."""

    pair: Pair
    kept: Pair
    keep: Array | None
    """Which elements `kept` has; None: all."""
    scan: Scan
    """Of `kept`."""
    num_wrong: int = 0
    """Elements whose class is not that of the reference."""
    first_wrong: int = 0

    def index_in_pair(self, kept_index: int) -> int:
        """Of an element of `kept`, counted in `pair`."""
        if self.keep is None:
            return kept_index
        return int(np.flatnonzero(self.keep)[kept_index])

    def metrics(self, rule: Rule, **numbers: Any) -> Metrics:
        """The documented numbers over the finite elements, and those given."""
        judged = self.kept.actual.size > 0
        if "allclose" not in numbers:
            close = is_allclose(self.kept, self.scan, rule)
            numbers["allclose"] = close and not self.num_wrong
        return Metrics(
            max_abs=self.scan.max_abs,
            mean_abs=self.scan.mean_abs,
            max_rel=self.scan.max_rel,
            num_elements=self.pair.actual.size,
            expected_rms=self.scan.expected_rms if judged else None,
            **numbers,
        )


def beside_or_golden(baseline: Array, golden: Array) -> Array:
    """The baseline, and the golden where it died: there the golden judges alone.

    Else nobody would look at what an actual result is in the place of its NaN.
    """
    alive = np.isfinite(baseline)
    return baseline if alive.all() else np.where(alive, baseline, golden)


def finite_part(pair: Pair, rule: Rule, *, baseline: Array | None = None) -> Part:
    """Compare classes: that of the rounded reference or, where there is one, of the baseline."""
    scan = scan_of(pair.actual, pair.expected)
    overflow = tol.ROUNDS_TO_INF[rule.dtype]
    if scan.finite and (baseline is None or np.isfinite(baseline).all()):
        ceiling = scan.expected_rms * math.sqrt(pair.actual.size)
        # an rms alone often proves that no element overflows
        if ceiling < overflow or np.max(np.absolute(pair.expected)) < overflow:
            return Part(pair, pair, None, scan)
    actual, expected = classes(pair.actual), classes(pair.expected, overflow)
    wrong, keep = actual != expected, (actual == 0) & (expected == 0)
    if baseline is not None:
        beside = classes(baseline)
        wrong &= actual != beside
        keep &= beside == 0
    if pair.is_complex:
        wrong &= ~_same_nonfinite(actual, expected)
    kept = replace(pair, actual=pair.actual[keep], expected=pair.expected[keep])
    scan = scan_of(kept.actual, kept.expected)
    num_wrong = int(np.count_nonzero(wrong))
    return Part(pair, kept, keep, scan, num_wrong, int(np.argmax(wrong)))


def _same_nonfinite(actual: Array, expected: Array) -> Array:
    """Components of other classes in complex numbers that may be the same non-finite number.

    (inf + 0j) * (1 + 1j) is inf + inf j or nan + inf j, by how a kernel multiplies. So where a
    number is not finite on both sides, a part may be NaN, and may be Inf for NaN. A finite part
    for one that is not was lost on the way, and so was Inf for a finite one. Measured on all pairs
    of 0, 1, -2.5, 3e38, Inf and NaN: kernels of the ops of OpInfo (vector and scalar loop,
    complex64 and complex128) differ in no other way, but where 1e38 overflows.
    """
    sides = [np.any(classes.reshape(-1, 2) != 0, axis=1) for classes in (actual, expected)]
    nan = 1
    undetermined = (actual == nan) | ((expected == nan) & (actual != 0))
    found: Array = np.repeat(sides[0] & sides[1], 2) & undetermined
    return found


def empty() -> Outcome:
    """Nothing was compared."""
    return Outcome(passed=True, stage="empty", metrics=Metrics(), compared=0)


def passed(stage: str, part: Part, rule: Rule, q: float, **numbers: Any) -> Outcome:
    """PASS, with the documented metrics."""
    if not part.kept.actual.size:
        stage = "nonfinite"
    metrics = part.metrics(rule, q=q, **numbers)
    return Outcome(
        passed=True,
        stage=stage,
        metrics=metrics,
        compared=part.pair.actual.size,
        finite=part.keep is None,
    )


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, (int, bool)) else f"{value:.9g}"


def _fail(
    part: Part, rule: Rule, *, stage: str, why: str, worst: int, detail: str, **numbers: Any
) -> Outcome:
    """FAIL, with coordinates and values of the element `worst` of the pair.

    A `detail` that begins with a comma or semicolon continues the sentence about that element.
    """
    index, actual, expected = part.pair.place(worst)
    if detail[0] in ",;":
        element = f"element {index}" if index else "the value"
        detail = f"{element} is {_shown(actual)}, expected {_shown(expected)}{detail}"
    metrics = part.metrics(
        rule, worst_index=index, actual_at=actual, expected_at=expected, **numbers
    )
    return Outcome(
        passed=False,
        stage=stage,
        why=why,
        reason=detail,
        metrics=metrics,
        compared=part.pair.actual.size,
    )


def failed_nonfinite(part: Part, rule: Rule) -> Outcome:
    """FAIL: elements that are NaN or Inf on one side alone."""
    detail = f"; NaN or Inf differ in {part.num_wrong} of {part.pair.actual.size} elements"
    return _fail(
        part,
        rule,
        stage="nonfinite",
        why="nonfinite",
        worst=part.first_wrong,
        detail=detail,
        q=math.inf,
        num_out=part.num_wrong,
        num_nonfinite=part.num_wrong,
    )


def judge_equal(pair: Pair, rule: Rule) -> Outcome:
    """Bit for bit, up to NaN payload and the sign of zero."""
    different = pair.actual != pair.expected
    if pair.actual.dtype.kind == "f":
        part = finite_part(pair, rule)
        if part.num_wrong:
            return failed_nonfinite(part, rule)
        different &= ~np.isnan(pair.actual)
    elif different.any():
        part = Part(pair, pair, None, _scan_integers(pair))
    else:
        part = Part(pair, pair, None, Scan(0.0, 0.0, 0.0, rms(pair.expected)))
    num_out = int(np.count_nonzero(different))
    if not num_out:
        return passed("exact", part, rule, 0.0, allclose=True)
    error = np.where(different, absolute_difference(pair), 0.0)
    return _fail(
        part,
        rule,
        stage="exact",
        why="exact",
        worst=int(np.argmax(error)),
        detail=f", exactly; {num_out} of {pair.actual.size} elements differ",
        q=math.inf,
        num_out=num_out,
        allowed_at=0.0,
        **({} if pair.actual.dtype.kind == "f" else {"allclose": False}),
    )


def _scan_integers(pair: Pair) -> Scan:
    error = absolute_difference(pair)
    expected = np.absolute(pair.expected.astype(np.float64))
    return Scan(
        float(error.max()),
        float(error.mean()),
        float((error / (expected + tol.MAX_REL_FLOOR)).max()),
        rms(expected),
    )


# ---- bounds ------------------------------------------------------------------------------------


def allclose_share(scan: Scan, rule: Rule) -> float:
    """Upper estimate of the largest share of `atol + rtol * |expected|` that an error takes."""
    by_atol = scan.max_abs / rule.atol if rule.atol else math.inf
    by_rtol = scan.max_rel / rule.rtol if rule.rtol else math.inf
    return 0.0 if scan.max_abs == 0.0 else min(by_atol, by_rtol, 1.0)


def judge_bound(part: Part, error: Array, bound: Array, rule: Rule, *, stage: str) -> Outcome:
    """`|error| <= bound` in every element."""
    q = np.where(error > 0.0, error / bound, 0.0)
    if np.maximum.reduce(q) <= 1.0:
        return passed(stage, part, rule, float(np.maximum.reduce(q)))
    why = "allclose" if stage == "allclose" else "elem"
    return failed_element(part, q, bound, rule, stage=stage, why=why)


def failed_element(
    part: Part, q: Array, allowed: Array, rule: Rule, *, detail: str = "", **numbers: Any
) -> Outcome:
    """FAIL, with the numbers of the element whose q is largest."""
    worst = int(np.argmax(q))
    num_out = int(np.count_nonzero(~(q <= 1.0)))
    return _fail(
        part,
        rule,
        worst=part.index_in_pair(worst),
        detail=detail
        or f", allowed error {allowed[worst]:.3g}; {num_out} of {q.size} elements are out",
        q=float(q[worst]),
        num_out=num_out,
        allowed_at=float(allowed[worst]),
        **numbers,
    )
