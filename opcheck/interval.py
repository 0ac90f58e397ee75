"""The interval rule: how far from golden and baseline, as a share of what conditioning explains."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from opcheck import tolerances as tol
from opcheck.arrays import (
    Array,
    components,
    rms,
    round_to,
    size_beside_fill,
    spacing_of,
    typical_size,
)
from opcheck.measures import Part, failed_element, judge_bound, passed
from opcheck.rules import Outcome, Rule

__all__ = ["Draw", "Limits", "interval_limits", "judge_elements"]

Draw: TypeAlias = Callable[[int], Array]
"""k -> the k-th perturbed golden."""


def _local(values: Array, spacing: Array) -> Array:
    """Typical size of `values` at each element: by rms, or by rms in spacings if that is less."""
    return np.minimum(rms(values), spacing * rms(values / spacing))


def _local_typical(moved: Array, spacing: Array) -> Array:
    """As `_local`, but one element beside a pole does not speak for the others.

    On bf16 inputs next to the poles of polygamma it granted all others 1e28 of their spacings.
    """
    relative = moved / spacing
    everywhere = typical_size(moved, rms(moved))
    return np.minimum(everywhere, spacing * typical_size(relative, rms(relative)))


def _mean(values: Array) -> float:
    return float(np.mean(values))


def _num_effective(values: Array) -> float:
    """How many different values a mean is taken of; less than there are, if some come often."""
    counts = np.unique(values, return_counts=True)[1].astype(np.float64)
    return float(counts.sum() ** 2 / max(1.0, np.dot(counts, counts)))


def judge_elements(
    part: Part, baseline: Array | None, perturbed: Draw | None, rule: Rule
) -> Outcome:
    """The interval rule on the elements that are finite on every side."""
    if not part.kept.actual.size:
        return passed("nonfinite", part, rule, 0.0)
    actual = part.kept.actual.astype(np.float64, copy=False)
    golden = part.kept.expected.astype(np.float64, copy=False)
    if rule.bound is not None:
        bound = components(rule.bound, part.pair, part.keep)
        error = np.absolute(actual - golden)
        return judge_bound(part, error, np.broadcast_to(bound, error.shape), rule, stage="bound")
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
        if why == "rmse":
            rank = rank.beside_sensitivity(part, perturbed)
            numbers["rmse_ratio"] = rank.rms_ratio
            why, detail = rank.verdict(shift, shift_limit)
        if not why:
            return passed("golden", part, rule, worst, **numbers)
    allowed = allowance * rule.element_limit + rank.beside()
    return failed_element(part, q, allowed, rule, stage="golden", why=why, detail=detail, **numbers)


@dataclass(frozen=True, slots=True)
class Limits:
    """What the interval rule grants a result, whatever the result is."""

    allowed: Array
    """Largest distance to the interval between golden and baseline; 0 where one is not finite."""
    max_shift: float
    """Of the mean signed shift; Inf where it is no evidence."""
    unit: Array
    """What the shift is counted in."""
    max_rms: float
    """Of the error beside golden; Inf where it is not tested."""


def interval_limits(
    part: Part, baseline: Array | None, perturbed: Draw | None, rule: Rule
) -> Limits:
    """The limits of `judge_elements` with every draw of the sensitivity in them.

    Args:
        part: of a result that differs from golden and is finite where golden is.
        baseline: as in `judge_elements`.
        perturbed: likewise.
        rule: what applies; one with a bound of its own is not for the interval rule.

    Returns:
        Arrays as long as the flat pair.
    """
    actual = part.kept.actual.astype(np.float64, copy=False)
    golden = part.kept.expected.astype(np.float64, copy=False)
    rank = _Ranking.of(part, actual, golden, baseline, rule)
    allowance = rank.base
    for allowance in rank.allowances(part, perturbed):  # noqa: B007 - the last one is the widest
        pass
    _, max_shift = rank.shift(allowance)
    if not rank._has_distinct_values():
        max_shift = math.inf
    size, keep = part.pair.actual.size, part.keep
    allowed, unit = np.zeros(size), np.ones(size)
    where = slice(None) if keep is None else keep
    allowed[where] = allowance * rule.element_limit
    unit[where] = rank.spacing if rule.is_half else allowance
    rank = rank.beside_sensitivity(part, perturbed)
    error = rms(rank.error)
    max_rms = rank._rms_limit() * error / rank.rms_ratio if rank.rms_ratio else math.inf
    return Limits(allowed, max_shift, unit, max_rms)


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
        cls, part: Part, actual: Array, golden: Array, baseline: Array | None, rule: Rule
    ) -> _Ranking:
        """Measure."""
        spacing = spacing_of(golden, rule.dtype) + tol.ALLOWED_UNDERFLOW[rule.dtype]
        typical = typical_size(golden, part.scan.expected_rms)
        beside = size_beside_fill(golden, typical)
        base = spacing + tol.compute_eps(rule.dtype) * beside
        error = actual - golden
        # among subnormals rounding errs by their spacing, whatever the size: fp16 gradients
        smallest = tol.SMALLEST_NORMAL[rule.dtype]
        yardstick = tol.ROUNDING_RMS * tol.EPS[rule.dtype] * max(typical, smallest)
        if rule.extra is not None:
            extra = components(rule.extra, part.pair, part.keep)
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

    def allowances(self, part: Part, draw: Draw | None) -> Iterator[Array]:
        """With the sensitivity that 0, 1, 2 and 4 perturbed goldens show; it only grows."""
        yield self.base
        if draw is None:
            return
        share = tol.PERTURBED_SHARE_HALF if self.rule.is_half else tol.PERTURBED_SHARE
        moved = np.zeros_like(self.golden)
        for last in (1, 2, tol.NUM_DRAWS):
            for k in range(last // 2, last):
                change = np.absolute(components(draw(k), part.pair, part.keep) - self.golden)
                np.maximum(moved, np.where(np.isfinite(change), change, 0.0), out=moved)
            floor = tol.LOCAL_FLOOR * _local_typical(moved, self.spacing)
            yield self.base + share * np.maximum(moved, floor)

    def beside_sensitivity(self, part: Part, draw: Draw | None) -> _Ranking:
        """With the rms error counted in what conditioning explains, where that is more.

        A gradient that cancels, as that of a batch norm's weight under a constant gradient, is
        rounding alone: 770 times that of its own size on the channels-last path in bf16.
        """
        allowance = self.base
        for allowance in self.allowances(part, draw):  # noqa: B007 - the last one is the widest
            pass
        explained = rms(allowance - self.base)
        error = rms(self.error)
        if not error or not explained:
            return self
        explained *= tol.SENSITIVITY_RMS
        return replace(self, rms_ratio=min(self.rms_ratio, error / explained))

    def shift(self, allowance: Array) -> tuple[float, float]:
        """Mean signed shift away from zero, and its limit (Inf where it is no evidence)."""
        sign, own = np.sign(self.golden), self.own
        if self.rule.is_half:
            rounding = self.golden - round_to(self.golden, self.rule.dtype)
            of_own = 0.0 if own is None else _mean(self._in_spacings(own + rounding, sign))
            shifts = self._in_spacings(self.error + rounding, sign)
            shift = _mean(shifts)
            limit = tol.CLASS_LIMITS[self.rule.op_class].max_shift * self.rule.shift_factor
            limit += tol.SHIFT_OF_BASELINE_HALF * abs(of_own)
            if abs(shift) > limit:
                by_luck = float(np.std(shifts)) / math.sqrt(shifts.size)
                limit = max(limit, tol.SHIFT_SIGMAS * by_luck)
        else:
            shift = _mean(self.error / allowance * sign)
            if own is None:
                return shift, math.inf
            limit = tol.SHIFT_LIMIT * self.rule.shift_factor
            limit *= tol.length_factor(self.rule.reduction_length)
            limit += tol.SHIFT_OF_BASELINE * abs(_mean(own / allowance * sign))
        if abs(shift) > limit and not self._has_distinct_values():
            return shift, math.inf
        return shift, limit

    def _in_spacings(self, error: Array, sign: Array) -> Array:
        clamped: Array = np.clip(error / self.spacing, -tol.SHIFT_CLAMP, tol.SHIFT_CLAMP)
        clamped *= sign
        return clamped

    def _has_distinct_values(self) -> bool:
        if self.golden.size < tol.MIN_ELEMENTS:
            return False
        sample = self.golden[: tol.DISTINCT_SAMPLE]
        if len(np.unique(round_to(sample, self.rule.dtype))) < tol.MIN_DISTINCT:
            return False
        sample = sample[sample != 0.0].astype(np.float32)
        return bool(_num_effective(sample) >= min(tol.MIN_ELEMENTS, sample.size / 2))

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
