"""The pass/fail rule: NumPy arrays in, an `Outcome` out.

Three references may be at hand. `baseline`, the same op in the same dtype on the CPU; `golden`, the
op on inputs widened to float64; and perturbed goldens, on inputs moved by one ulp, which show how
much of an error the op's conditioning explains::

    judge_baseline   baseline, then golden and perturbed goldens if the quick test did not pass
    judge_golden     golden alone: the op under test is itself the CPU kernel
    judge_allclose   the documented criterion
    judge_exact      integers, bools: no tolerance and no cast

Vocabulary: `spacing` is the distance of neighbouring numbers of the dtype at the expected value,
`allowance` the error an element may make before the class limit multiplies it, `class` one of
finite, NaN, +Inf, -Inf. Arrays inside are flat; complex ones are flat arrays of their components.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from opcheck import tolerances as tol
from opcheck.records import Metrics

__all__ = [
    "Outcome",
    "Rule",
    "judge_allclose",
    "judge_baseline",
    "judge_exact",
    "judge_golden",
    "rms",
    "round_to",
    "spacing_of",
]

Array: TypeAlias = npt.NDArray[Any]
Draw: TypeAlias = Callable[[int], Array]

_CHUNK = 16384
"""Elements a pass works on: two float64 buffers of 128 KiB stay in the cache of one core."""
_EXPONENT_BITS = np.int64(0x7FF0_0000_0000_0000)
_TINY_SQUARE, _HUGE_SQUARE = 1e-280, 1e300


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What applies to one result."""

    dtype: str
    """Of the result itself, real component: "float32", "float64", "bfloat16", "float16"."""
    op_class: str = "std"
    reduction_length: float = 1.0
    """Terms summed for one element of the result."""
    exact: bool = False
    """Must equal the expected value rounded to dtype, up to NaN payload and the sign of zero."""
    limit_factor: float = 1.0
    """A named allowance: the element limit, and in 16 bit the rms limit, times this."""
    shift_factor: float = 1.0
    """A named allowance: the limit of the mean shift times this."""
    test_rms: bool = True
    """False, a named allowance: the rms of a 16-bit result is not tested."""
    extra: Array | None = None
    """A named allowance added to the allowance of each element, same shape."""
    bound: Array | float | None = None
    """A named allowance that replaces the rule: |actual - golden| <= bound, no mean or rms test."""
    rtol: float = tol.OP_RTOL
    atol: float = tol.OP_ATOL
    """The documented tolerances that apply."""

    def __post_init__(self) -> None:
        """Refuse what the tables do not hold.

        Raises:
            ValueError: unknown dtype or class.
        """
        if self.dtype not in tol.EPS:
            raise ValueError(f"dtype: expected one of {sorted(tol.EPS)}, got {self.dtype!r}")
        if self.op_class not in tol.CLASS_LIMITS:
            known = sorted(tol.CLASS_LIMITS)
            raise ValueError(f"op_class: expected one of {known}, got {self.op_class!r}")

    @property
    def is_half(self) -> bool:
        """The result has 16 bits."""
        return self.dtype in tol.HALF_DTYPES

    def with_allowance(
        self, allowance: tol.Allowance, *, inputs: tol.Inputs, golden: Array
    ) -> Rule:
        """This rule with a named allowance; its formulas see the float64 inputs and the golden."""
        with np.errstate(all="ignore"):
            extra, bound = (
                None if formula is None else formula(inputs, golden, self.dtype)
                for formula in (allowance.extra, allowance.bound)
            )
        return replace(
            self,
            limit_factor=allowance.limit_factor,
            shift_factor=allowance.shift_factor,
            test_rms=allowance.test_rms,
            extra=None if extra is None else np.broadcast_to(extra, golden.shape),
            bound=bound,
        )

    @property
    def element_limit(self) -> float:
        """Largest distance of an element, in allowances."""
        if self.is_half:
            return tol.CLASS_LIMITS[self.op_class].max_q * self.limit_factor
        return tol.ELEMENT_LIMIT * tol.length_factor(self.reduction_length) * self.limit_factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Verdict of one result, with its numbers."""

    passed: bool
    stage: str
    """The test that settled it: "empty", "bits", "quick", "golden", "bound", "nonfinite", "exact",
    "allclose"."""
    why: str = ""
    """"" if passed, else "elem", "bias", "rmse", "nonfinite", "exact", "allclose"."""
    reason: str = ""
    """One sentence for a person, with numbers; "" if passed."""
    metrics: Metrics
    compared: int
    """Elements compared; 0 is no evidence for a PASS."""
    finite: bool = True
    """Actual and expected are finite everywhere; False on a PASS: they share NaN or Inf."""


# ---- arrays -------------------------------------------------------------------------------------


def rms(values: Array) -> float:
    """Root mean square in float64, scaled: neither 1e200 nor 1e-200 is lost. 0.0 if empty."""
    if not values.size:
        return 0.0
    values = values.astype(np.float64, copy=False)
    square = float(np.dot(values, values))
    if _TINY_SQUARE < square < _HUGE_SQUARE:
        return math.sqrt(square / values.size)
    top = float(np.maximum.reduce(np.absolute(values)))
    if not 0.0 < top < math.inf:
        return top
    scaled = values / top
    return top * math.sqrt(float(np.dot(scaled, scaled)) / values.size)


def spacing_of(values: Array, dtype: str) -> Array:
    """Distance of neighbouring numbers of `dtype` at each float64 value, subnormals included."""
    eps = tol.EPS[dtype]
    # the bare exponent of a float64 is the power of two at or below it
    power: Array = (values.view(np.int64) & _EXPONENT_BITS).view(np.float64)
    power *= eps
    np.maximum(power, tol.SMALLEST_NORMAL[dtype] * eps, out=power)
    return power


def round_to(values: Array, dtype: str) -> Array:
    """float64 values rounded to `dtype`, as float64 (float64) or float32 (all others) values.

    16-bit results are rounded by way of float32, as the kernels do that compute in float32.
    """
    if dtype == "float64":
        return values.astype(np.float64, copy=False)
    single = values.astype(np.float32)
    if dtype == "float16":
        return single.astype(np.float16).astype(np.float32)
    if dtype == "bfloat16":
        bits = single.view(np.uint32)
        odd = (bits >> np.uint32(16)) & np.uint32(1)
        rounded = (bits + np.uint32(0x7FFF) + odd) & np.uint32(0xFFFF0000)
        return np.where(np.isnan(single), single, rounded.view(np.float32))
    return single


def _classes(values: Array, overflow: float = math.inf) -> Array:
    """0 finite, 1 NaN, 2 +Inf, 3 -Inf, per element."""
    codes = np.isnan(values).astype(np.int8)
    codes += np.int8(2) * (values >= overflow)
    codes += np.int8(3) * (values <= -overflow)
    return codes


def _flat(values: Array) -> Array:
    """All components in C order, one dimension; a copy only where strides ask for one."""
    if values.dtype.kind == "c":
        return np.ascontiguousarray(values).reshape(-1).view(values.real.dtype)
    if values.dtype == np.float16:
        return values.astype(np.float32).reshape(-1)
    return values.reshape(-1)


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two results side by side, flat."""

    actual: Array
    expected: Array
    shape: tuple[int, ...]
    is_complex: bool

    def place(self, flat_index: int) -> tuple[tuple[int, ...], Any, Any]:
        """Coordinates in the result, and both values there."""
        if self.is_complex:
            flat_index //= 2
            span = slice(2 * flat_index, 2 * flat_index + 2)
            actual, expected = complex(*self.actual[span]), complex(*self.expected[span])
        else:
            actual, expected = self.actual[flat_index].item(), self.expected[flat_index].item()
        index = tuple(int(i) for i in np.unravel_index(flat_index, self.shape))
        return index, actual, expected


def _pair(actual: Array, expected: Array) -> _Pair:
    if actual.shape != expected.shape:
        raise ValueError(f"actual has shape {actual.shape}, expected {expected.shape}")
    is_complex = actual.dtype.kind == "c"
    if is_complex != (expected.dtype.kind == "c"):
        raise ValueError(f"actual is {actual.dtype}, expected {expected.dtype}")
    return _Pair(_flat(actual), _flat(expected), actual.shape, is_complex)


def _components(values: Array | float | None, pair: _Pair, keep: Array | None) -> Any:
    """A named allowance or a perturbed golden as a flat array of the elements that are judged."""
    if values is None or isinstance(values, (float, int)):
        return values
    if values.shape != pair.shape:
        raise ValueError(f"expected shape {pair.shape}, got {values.shape}")
    flat = _flat(values)
    if pair.is_complex and values.dtype.kind != "c":
        flat = np.repeat(flat, 2)
    return flat if keep is None else flat[keep]


# ---- the quick test -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Scan:
    """Documented metrics of one pass over two flat arrays; NaN or Inf where elements are."""

    max_abs: float
    mean_abs: float
    max_rel: float
    expected_rms: float

    @property
    def finite(self) -> bool:
        return self.max_abs < math.inf  # False for NaN


def _scan(actual: Array, expected: Array) -> _Scan:
    """Two values that are not both finite never give a finite difference, so none slips through."""
    count = actual.size
    error = np.empty(min(count, _CHUNK))
    scale = np.empty(error.size)
    max_abs = max_rel = total = square = 0.0
    for start in range(0, count, _CHUNK):
        want = expected[start : start + _CHUNK]
        if want.size != error.size:
            error, scale = error[: want.size], scale[: want.size]
        np.subtract(actual[start : start + _CHUNK], want, out=error, dtype=np.float64)
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
            return _Scan(math.nan, math.nan, math.nan, math.nan)
    expected_rms = (
        math.sqrt(square / count) if _TINY_SQUARE < square < _HUGE_SQUARE else rms(expected)
    )
    return _Scan(max_abs, total / max(count, 1), max_rel, expected_rms)


def _worst_ratio(
    actual: Array, expected: Array, *, dtype: str, floor: float
) -> tuple[float, float]:
    """Largest |error| / (spacing + floor), and the mean of error / (spacing + floor) * sign."""
    worst = shift = 0.0
    for start in range(0, actual.size, _CHUNK):
        want = expected[start : start + _CHUNK].astype(np.float64, copy=False)
        ratio = np.subtract(actual[start : start + _CHUNK], want, dtype=np.float64)
        scale = spacing_of(want, dtype)
        scale += floor
        ratio /= scale
        shift += float(np.dot(ratio, np.sign(want)))
        worst = max(worst, float(np.maximum.reduce(np.absolute(ratio, out=ratio))))
    return worst, shift / actual.size


def _quick_ratio(pair: _Pair, scan: _Scan, rule: Rule, *, test_shift: bool) -> float | None:
    """Largest error in units of `spacing + ec * rms` (or above it) if that is a PASS, else None.

    A spacing is at least eps/2 times its number, which lets the documented metrics prove most
    results correct without looking at them again.
    """
    eps = tol.EPS[rule.dtype]
    floor = tol.compute_eps(rule.dtype) * scan.expected_rms
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


def _is_allclose(pair: _Pair, scan: _Scan, rule: Rule) -> bool:
    """The documented criterion on finite elements, from the metrics where they prove it."""
    if scan.max_abs <= rule.atol:
        return True
    if scan.max_rel <= rule.rtol and tol.MAX_REL_FLOOR * rule.rtol <= rule.atol:
        return True
    for start in range(0, pair.actual.size, _CHUNK):
        want = pair.expected[start : start + _CHUNK].astype(np.float64, copy=False)
        error = np.absolute(
            np.subtract(pair.actual[start : start + _CHUNK], want, dtype=np.float64)
        )
        if not np.all(error <= rule.atol + rule.rtol * np.absolute(want)):
            return False
    return True


# ---- entries ------------------------------------------------------------------------------------


def judge_golden(actual: Array, golden: Array, *, perturbed: Draw | None, rule: Rule) -> Outcome:
    """Judge a result for which no independent same-dtype result exists.

    Args:
        actual: the result; a 16-bit one as float32 values (float16 also as it is).
        golden: of the same shape, the op in float64 or complex128.
        perturbed: gives the k-th golden (k = 0 to 3) of inputs moved by one ulp; called only as
            far as needed. None: there are none.
        rule: what applies.

    Raises:
        ValueError: the shapes differ, or one side alone is complex.
    """
    with np.errstate(all="ignore"):
        pair = _pair(actual, golden)
        if not pair.actual.size:
            return _empty()
        if rule.exact:
            return _judge_equal(replace(pair, expected=round_to(pair.expected, rule.dtype)), rule)
        part = _finite_part(pair, rule)
        if part.num_wrong:
            return _fail_nonfinite(part, rule)
        if part.scan.finite:
            ratio = _quick_ratio(part.kept, part.scan, rule, test_shift=False)
            if ratio is not None:
                return _pass("quick", part, rule, ratio / rule.element_limit)
        return _judge_elements(part, None, perturbed, rule)


def judge_baseline(
    actual: Array,
    baseline: Array,
    *,
    golden: Callable[[], Array | None],
    perturbed: Draw | None,
    rule: Rule,
) -> Outcome:
    """Judge a result beside an independent same-dtype result.

    Args:
        actual: the result; a 16-bit one as float32 values (float16 also as it is).
        baseline: of the same shape and in the same form.
        golden: gives the op in float64 or complex128; called only if the quick test does not pass.
            None from it: the baseline takes its place.
        perturbed: as in `judge_golden`.
        rule: what applies.

    Raises:
        ValueError: the shapes differ, or one side alone is complex.
    """
    with np.errstate(all="ignore"):
        pair = _pair(actual, baseline)
        if not pair.actual.size:
            return _empty()
        if np.array_equal(pair.actual, pair.expected):
            scan = _Scan(0.0, 0.0, 0.0, rms(pair.expected))
            if scan.expected_rms < math.inf:  # else equal infinities, which are not in metrics
                return _pass("bits", _Part(pair, pair, None, scan), rule, 0.0)
        if rule.exact:
            return _judge_equal(pair, rule)
        part = _finite_part(pair, rule)
        if not part.num_wrong and part.scan.finite:
            ratio = _quick_ratio(part.kept, part.scan, rule, test_shift=True)
            if ratio is not None:
                return _pass("quick", part, rule, ratio / rule.element_limit)
        widened = golden()
        judge = pair if widened is None else _pair(actual, widened)
        part = _finite_part(judge, rule, baseline=pair.expected)
        if part.num_wrong:
            return _fail_nonfinite(part, rule)
        beside = pair.expected if part.keep is None else pair.expected[part.keep]
        return _judge_elements(part, beside, perturbed, rule)


def judge_allclose(actual: Array, expected: Array, *, rule: Rule) -> Outcome:
    """The documented criterion: FAIL if an element is outside `atol + rtol * |expected|`.

    Args:
        actual: floating or complex; judged by component.
        expected: of the same shape.
        rule: gives dtype, rtol and atol.

    Raises:
        ValueError: the shapes differ, or one side alone is complex.
    """
    with np.errstate(all="ignore"):
        pair = _pair(actual, expected)
        if not pair.actual.size:
            return _empty()
        part = _finite_part(pair, rule)
        if part.num_wrong:
            return _fail_nonfinite(part, rule)
        if not part.kept.actual.size or _is_allclose(part.kept, part.scan, rule):
            return _pass("allclose", part, rule, _allclose_share(part.scan, rule))
        want = part.kept.expected.astype(np.float64, copy=False)
        error = np.absolute(np.subtract(part.kept.actual, want, dtype=np.float64))
        return _judge_bound(
            part, error, rule.atol + rule.rtol * np.absolute(want), rule, stage="allclose"
        )


def judge_exact(actual: Array, expected: Array) -> Outcome:
    """Equal in every element, without a cast; NaN equals NaN, +0 equals -0.

    Args:
        actual: integers or bools of any width (or floating, complex).
        expected: of the same shape.

    Raises:
        ValueError: the shapes differ, or one side alone is complex.
    """
    with np.errstate(all="ignore"):
        pair = _pair(actual, expected)
        if not pair.actual.size:
            return _empty()
        return _judge_equal(pair, Rule(dtype="float64"))


# ---- classes and equality -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Part:
    """The elements of a pair that are finite on every side, and what the others say."""

    pair: _Pair
    kept: _Pair
    keep: Array | None
    """Which elements `kept` has; None: all."""
    scan: _Scan
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
            close = _is_allclose(self.kept, self.scan, rule)
            numbers["allclose"] = close and not self.num_wrong
        return Metrics(
            max_abs=self.scan.max_abs,
            mean_abs=self.scan.mean_abs,
            max_rel=self.scan.max_rel,
            num_elements=self.pair.actual.size,
            expected_rms=self.scan.expected_rms if judged else None,
            **numbers,
        )


def _finite_part(pair: _Pair, rule: Rule, *, baseline: Array | None = None) -> _Part:
    """Compare classes: that of the rounded reference or, where there is one, of the baseline."""
    scan = _scan(pair.actual, pair.expected)
    overflow = tol.ROUNDS_TO_INF[rule.dtype]
    if scan.finite and (baseline is None or np.isfinite(baseline).all()):
        ceiling = scan.expected_rms * math.sqrt(pair.actual.size)
        # an rms alone often proves that no element overflows
        if ceiling < overflow or np.max(np.absolute(pair.expected)) < overflow:
            return _Part(pair, pair, None, scan)
    actual, expected = _classes(pair.actual), _classes(pair.expected, overflow)
    wrong, keep = actual != expected, (actual == 0) & (expected == 0)
    if baseline is not None:
        beside = _classes(baseline)
        wrong &= actual != beside
        keep &= beside == 0
    kept = replace(pair, actual=pair.actual[keep], expected=pair.expected[keep])
    scan = _scan(kept.actual, kept.expected)
    num_wrong = int(np.count_nonzero(wrong))
    return _Part(pair, kept, keep, scan, num_wrong, int(np.argmax(wrong)))


def _empty() -> Outcome:
    return Outcome(passed=True, stage="empty", metrics=Metrics(), compared=0)


def _pass(stage: str, part: _Part, rule: Rule, q: float, **numbers: Any) -> Outcome:
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
    part: _Part, rule: Rule, *, stage: str, why: str, worst: int, detail: str, **numbers: Any
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


def _fail_nonfinite(part: _Part, rule: Rule) -> Outcome:
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


def _judge_equal(pair: _Pair, rule: Rule) -> Outcome:
    """Bit for bit, up to NaN payload and the sign of zero."""
    different = pair.actual != pair.expected
    if pair.actual.dtype.kind == "f":
        part = _finite_part(pair, rule)
        if part.num_wrong:
            return _fail_nonfinite(part, rule)
        different &= ~np.isnan(pair.actual)
    elif different.any():
        part = _Part(pair, pair, None, _scan_integers(pair))
    else:
        part = _Part(pair, pair, None, _Scan(0.0, 0.0, 0.0, rms(pair.expected)))
    num_out = int(np.count_nonzero(different))
    if not num_out:
        return _pass("exact", part, rule, 0.0, allclose=True)
    error = np.where(different, _absolute_difference(pair), 0.0)
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


def _absolute_difference(pair: _Pair) -> Array:
    """As float64; exact for integers up to the last rounding, also where int64 would overflow."""
    actual, expected = pair.actual, pair.expected
    if actual.dtype.kind in "iub":
        if actual.dtype != expected.dtype or actual.dtype.kind == "b":
            whole = actual.astype(object) * 1 - expected.astype(object) * 1
            big: Array = np.absolute(whole.astype(np.float64))
            return big
        wide = np.uint64 if actual.dtype.kind == "u" else np.int64
        high = np.maximum(actual, expected).astype(wide).view(np.uint64)
        low = np.minimum(actual, expected).astype(wide).view(np.uint64)
        gap: Array = high - low
        return gap.astype(np.float64)
    difference = np.absolute(np.subtract(actual, expected, dtype=np.float64))
    return np.where(np.isnan(difference), 0.0, difference)


def _scan_integers(pair: _Pair) -> _Scan:
    error = _absolute_difference(pair)
    expected = np.absolute(pair.expected.astype(np.float64))
    return _Scan(
        float(error.max()),
        float(error.mean()),
        float((error / (expected + tol.MAX_REL_FLOOR)).max()),
        rms(expected),
    )


# ---- the full rule ------------------------------------------------------------------------------


def _allclose_share(scan: _Scan, rule: Rule) -> float:
    """Upper estimate of the largest share of `atol + rtol * |expected|` that an error takes."""
    by_atol = scan.max_abs / rule.atol if rule.atol else math.inf
    by_rtol = scan.max_rel / rule.rtol if rule.rtol else math.inf
    return 0.0 if scan.max_abs == 0.0 else min(by_atol, by_rtol, 1.0)


def _judge_bound(part: _Part, error: Array, bound: Array, rule: Rule, *, stage: str) -> Outcome:
    """`|error| <= bound` in every element."""
    q = np.where(error > 0.0, error / bound, 0.0)
    if np.maximum.reduce(q) <= 1.0:
        return _pass(stage, part, rule, float(np.maximum.reduce(q)))
    why = "allclose" if stage == "allclose" else "elem"
    return _fail_element(part, q, bound, rule, stage=stage, why=why)


def _fail_element(
    part: _Part, q: Array, allowed: Array, rule: Rule, *, detail: str = "", **numbers: Any
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


def _typical(golden: Array, golden_rms: float) -> float:
    """rms, capped at a multiple of the (lower) median of what is not zero."""
    magnitude = np.absolute(golden)
    nonzero = magnitude[magnitude > 0.0]
    if not nonzero.size:
        return 0.0
    middle = (nonzero.size - 1) // 2
    if np.count_nonzero(nonzero < golden_rms / tol.MAX_RMS_OVER_MEDIAN) <= middle:
        return golden_rms
    return min(golden_rms, tol.MAX_RMS_OVER_MEDIAN * float(np.partition(nonzero, middle)[middle]))


def _local(values: Array, spacing: Array) -> Array:
    """Typical size of `values` at each element: by rms, or by rms in spacings if that is less."""
    return np.minimum(rms(values), spacing * rms(values / spacing))


def _judge_elements(
    part: _Part, baseline: Array | None, perturbed: Draw | None, rule: Rule
) -> Outcome:
    """The interval rule on the elements that are finite on every side."""
    if not part.kept.actual.size:
        return _pass("nonfinite", part, rule, 0.0)
    actual = part.kept.actual.astype(np.float64, copy=False)
    golden = part.kept.expected.astype(np.float64, copy=False)
    if rule.bound is not None:
        bound = _components(rule.bound, part.pair, part.keep)
        error = np.absolute(actual - golden)
        return _judge_bound(part, error, np.broadcast_to(bound, error.shape), rule, stage="bound")
    rank = _Ranking.of(part, actual, golden, baseline, rule)
    q = allowance = rank.base
    worst = shift = shift_limit = 0.0
    for allowance in rank.allowances(part, perturbed):
        q = rank.distance / (allowance * rule.element_limit)
        worst = float(np.maximum.reduce(q))
        shift, shift_limit = rank.shift(allowance)
        if worst <= 1.0 and (rule.is_half or abs(shift) <= shift_limit):
            break  # a 16-bit shift is counted in spacings, which do not grow
    numbers = {"rmse_ratio": rank.rms_ratio, "mean_shift": shift}
    why, detail = "elem", ""
    if worst <= 1.0:
        why, detail = rank.verdict(shift, shift_limit)
        if not why:
            return _pass("golden", part, rule, worst, **numbers)
    allowed = allowance * rule.element_limit + rank.beside()
    return _fail_element(part, q, allowed, rule, stage="golden", why=why, detail=detail, **numbers)


@dataclass(frozen=True, slots=True)
class _Ranking:
    """What the interval rule measures of one result; arrays are float64."""

    rule: Rule
    golden: Array
    error: Array
    """actual - golden."""
    own: Array | None
    """baseline - golden."""
    distance: Array
    """Of actual to the interval between golden and baseline."""
    spacing: Array
    base: Array
    """Allowance before the sensitivity is added."""
    rms_ratio: float

    @classmethod
    def of(
        cls, part: _Part, actual: Array, golden: Array, baseline: Array | None, rule: Rule
    ) -> _Ranking:
        """Measure."""
        spacing = spacing_of(golden, rule.dtype) + tol.ALLOWED_UNDERFLOW[rule.dtype]
        typical = _typical(golden, part.scan.expected_rms)
        base = spacing + tol.compute_eps(rule.dtype) * typical
        error = actual - golden
        yardstick = tol.ROUNDING_RMS * tol.EPS[rule.dtype] * typical
        if rule.extra is not None:
            extra = _components(rule.extra, part.pair, part.keep)
            base += extra
            yardstick = max(yardstick, tol.ROUNDING_RMS * rms(extra))
        if baseline is None:
            own, distance = None, np.absolute(error)
        else:
            own = baseline - golden
            base += _local(own, spacing)
            below = np.minimum(baseline, golden) - actual
            above = actual - np.maximum(baseline, golden)
            distance = np.maximum(np.maximum(below, above), 0.0)
            yardstick = max(yardstick, rms(own))
        ratio = rms(error) / max(yardstick, 1e-300)
        return cls(rule, golden, error, own, distance, spacing, base, ratio)

    def allowances(self, part: _Part, draw: Draw | None) -> Iterator[Array]:
        """With the sensitivity that 0, 1, 2 and 4 perturbed goldens show; it only grows."""
        yield self.base
        if draw is None:
            return
        share = tol.PERTURBED_SHARE_HALF if self.rule.is_half else tol.PERTURBED_SHARE
        moved = np.zeros_like(self.golden)
        for last in (1, 2, tol.NUM_DRAWS):
            for k in range(last // 2, last):
                change = np.absolute(_components(draw(k), part.pair, part.keep) - self.golden)
                np.maximum(moved, np.where(np.isfinite(change), change, 0.0), out=moved)
            floor = tol.LOCAL_FLOOR * _local(moved, self.spacing)
            yield self.base + share * np.maximum(moved, floor)

    def shift(self, allowance: Array) -> tuple[float, float]:
        """Mean signed shift away from zero, and its limit (Inf where it is no evidence)."""
        sign, own = np.sign(self.golden), self.own
        if self.rule.is_half:
            rounding = self.golden - round_to(self.golden, self.rule.dtype)
            of_own = 0.0 if own is None else self._mean_spacings(own + rounding, sign)
            shift = self._mean_spacings(self.error + rounding, sign)
            limit = tol.CLASS_LIMITS[self.rule.op_class].max_shift * self.rule.shift_factor
            limit += tol.SHIFT_OF_BASELINE_HALF * abs(of_own)
        else:
            shift = float(np.mean(self.error / allowance * sign))
            if own is None:
                return shift, math.inf
            limit = tol.SHIFT_LIMIT * self.rule.shift_factor
            limit *= tol.length_factor(self.rule.reduction_length)
            limit += tol.SHIFT_OF_BASELINE * abs(float(np.mean(own / allowance * sign)))
        if abs(shift) > limit and not self._has_distinct_values():
            return shift, math.inf
        return shift, limit

    def _mean_spacings(self, error: Array, sign: Array) -> float:
        clamped = np.clip(error / self.spacing, -tol.SHIFT_CLAMP, tol.SHIFT_CLAMP)
        return float(np.mean(clamped * sign))

    def _has_distinct_values(self) -> bool:
        if self.golden.size < tol.MIN_ELEMENTS:
            return False
        sample = round_to(self.golden[: tol.DISTINCT_SAMPLE], self.rule.dtype)
        return len(np.unique(sample)) >= tol.MIN_DISTINCT

    def verdict(self, shift: float, shift_limit: float) -> tuple[str, str]:
        """What the mean and rms tests find, and a sentence about it; "" and "" if nothing."""
        if abs(shift) > shift_limit:
            unit = f"spacings of {self.rule.dtype}" if self.rule.is_half else "allowances"
            return "bias", (
                f"results are shifted by {shift:.3g} {unit} on average, allowed {shift_limit:.3g}"
            )
        limit = self._rms_limit()
        if self.rms_ratio > limit:
            whose = "correct rounding" if self.own is None else "the reference"
            return "rmse", (
                f"the rms error is {self.rms_ratio:.3g} times that of {whose}, allowed {limit:.3g}"
            )
        return "", ""

    def _rms_limit(self) -> float:
        tested = self.rule.is_half and self.rule.test_rms
        if not tested or self.golden.size < tol.MIN_ELEMENTS:
            return math.inf
        limit = tol.CLASS_LIMITS[self.rule.op_class].max_rms_ratio * self.rule.limit_factor
        return limit if self.own is not None else tol.GOLDEN_RMS_FACTOR * limit

    def beside(self) -> Array | float:
        """How much further from golden a result may lie on the baseline's side."""
        if self.own is None:
            return 0.0
        return np.where(self.error * self.own > 0.0, np.absolute(self.own), 0.0)
