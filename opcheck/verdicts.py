"""The pass/fail rule: NumPy arrays in, an `Outcome` out.

Three references may be at hand. `baseline`, the same op in the same dtype on the CPU; `golden`, the
op on inputs widened to float64; and perturbed goldens, on inputs moved by one ulp, which show how
much of an error the op's conditioning explains::

    judge_baseline   baseline, then golden and perturbed goldens if the quick test did not pass
    judge_golden     golden alone: the op under test is itself the CPU kernel
    judge_allclose   the documented criterion
    judge_exact      integers, bools: no tolerance and no cast

`measures.py` has the tests that need no sensitivity, `interval.py` the one that does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from opcheck.arrays import Array, pair_of, rms, round_to, spacing_of
from opcheck.interval import Draw, judge_elements
from opcheck.measures import (
    Part,
    Scan,
    allclose_share,
    beside_or_golden,
    empty,
    failed_nonfinite,
    finite_part,
    is_allclose,
    judge_bound,
    judge_equal,
    passed,
    quick_ratio,
)
from opcheck.rules import Outcome, Rule

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
        pair = pair_of(actual, golden)
        if not pair.actual.size:
            return empty()
        if rule.exact:
            return judge_equal(replace(pair, expected=round_to(pair.expected, rule.dtype)), rule)
        part = finite_part(pair, rule)
        if part.num_wrong:
            return failed_nonfinite(part, rule)
        if part.scan.finite:
            ratio = quick_ratio(part.kept, part.scan, rule, test_shift=False)
            if ratio is not None:
                return passed("quick", part, rule, ratio / rule.element_limit)
        return judge_elements(part, None, perturbed, rule)


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
        pair = pair_of(actual, baseline)
        if not pair.actual.size:
            return empty()
        if np.array_equal(pair.actual, pair.expected):
            scan = Scan(0.0, 0.0, 0.0, rms(pair.expected))
            if scan.expected_rms < math.inf:  # else equal infinities, which are not in metrics
                return passed("bits", Part(pair, pair, None, scan), rule, 0.0)
        if rule.exact:
            return judge_equal(pair, rule)
        part = finite_part(pair, rule)
        if not part.num_wrong and part.scan.finite:
            ratio = quick_ratio(part.kept, part.scan, rule, test_shift=True)
            if ratio is not None:
                return passed("quick", part, rule, ratio / rule.element_limit)
        widened = golden()
        judge = pair if widened is None else pair_of(actual, widened)
        part = finite_part(judge, rule, baseline=pair.expected)
        if part.num_wrong:
            return failed_nonfinite(part, rule)
        living = beside_or_golden(pair.expected, judge.expected)
        if living is not pair.expected:
            part = finite_part(judge, rule, baseline=living)
        beside = living if part.keep is None else living[part.keep]
        return judge_elements(part, beside, perturbed, rule)


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
        pair = pair_of(actual, expected)
        if not pair.actual.size:
            return empty()
        part = finite_part(pair, rule)
        if part.num_wrong:
            return failed_nonfinite(part, rule)
        if not part.kept.actual.size or is_allclose(part.kept, part.scan, rule):
            return passed("allclose", part, rule, allclose_share(part.scan, rule))
        want = part.kept.expected.astype(np.float64, copy=False)
        error = np.absolute(np.subtract(part.kept.actual, want, dtype=np.float64))
        return judge_bound(
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
        pair = pair_of(actual, expected)
        if not pair.actual.size:
            return empty()
        return judge_equal(pair, Rule(dtype="float64"))
