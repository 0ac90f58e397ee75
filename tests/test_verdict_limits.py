"""Each limit of the rule at op level, from both sides: just within it passes, beyond it fails.

The values lie in [1, 2), so that the spacing of a dtype is its eps, and are numbers of the dtype.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from opcheck.verdicts import (
    Outcome,
    Rule,
    judge_allclose,
    judge_baseline,
    judge_exact,
    judge_golden,
)
from tests.limit_values import (
    BEYOND,
    EPS,
    WITHIN,
    constant,
    each_side,
    in_turn,
    rms,
    with_one,
)

each_half = pytest.mark.parametrize("half", ["bfloat16", "float16"])


def distinct() -> np.ndarray:
    """Every bfloat16 number in [1, 2)."""
    return 1.0 + np.arange(128) / 128


def allowance(golden: np.ndarray, dtype: str) -> float:
    """A spacing, and the rounding of what is added up in float32."""
    return EPS[dtype] + EPS["float32"] * rms(golden)


def alone(
    actual: np.ndarray, golden: np.ndarray, dtype: str, moved: Any = None, **rule: Any
) -> Outcome:
    draw = None if moved is None else lambda k: moved
    return judge_golden(actual, golden, perturbed=draw, rule=Rule(dtype=dtype, **rule))


def beside(
    actual: np.ndarray, baseline: np.ndarray, golden: np.ndarray, dtype: str, **rule: Any
) -> Outcome:
    return judge_baseline(
        actual, baseline, golden=lambda: golden, perturbed=None, rule=Rule(dtype=dtype, **rule)
    )


# ---- at a glance --------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 8.0), ("bfloat16", 1.01)])
@pytest.mark.parametrize("sign", [1, -1])
def test_near_results_need_no_sensitivity(dtype: str, limit: float, sign: int) -> None:
    golden = constant(8)
    step = sign * limit * allowance(golden, dtype)
    near, far = with_one(golden, WITHIN * step), with_one(golden, BEYOND * step)
    element_limit = {"float32": 32.0, "bfloat16": 6.0}[dtype]
    for judged in (alone(near, golden, dtype), beside(near, golden, golden, dtype)):
        assert judged.stage == "quick"
        assert judged.metrics.q == pytest.approx(WITHIN * limit / element_limit, rel=1e-3)
    assert alone(far, golden, dtype).stage == "golden"
    assert beside(far, golden, golden, dtype).stage == "golden"


def test_the_share_of_what_is_allowed_is_told_at_a_glance_too() -> None:
    golden = constant(8)
    unit = EPS["float32"] * rms(golden)
    assert alone(with_one(golden, 4 * unit), golden, "float32").metrics.q == pytest.approx(4 / 32)
    # where the error is at the largest element, by its own size: a spacing is half of it at least
    golden[3] = 1e4
    error = 3 * EPS["float32"] * 1e4
    found = alone(with_one(golden, error), golden, "float32")
    assert (found.stage, found.metrics.q) == ("quick", pytest.approx(6 / 32, rel=1e-3))


@each_half
def test_half_results_that_lean_to_one_side_need_the_golden(half: str) -> None:
    golden = distinct()
    step = 0.1 * allowance(golden, half)
    assert beside(golden + WITHIN * step, golden, golden, half).stage == "quick"
    assert beside(golden + BEYOND * step, golden, golden, half).stage == "golden"
    assert beside(-golden - BEYOND * step, -golden, -golden, half).stage == "golden"
    fewer = golden[:63]
    assert beside(fewer + BEYOND * step, fewer, fewer, half).stage == "quick"
    # where the op under test is the only one of its dtype, the golden has been looked at
    assert alone(golden + BEYOND * step, golden, half).stage == "quick"


# ---- the interval -------------------------------------------------------------------------------


@each_side
@pytest.mark.parametrize("sign", [1, -1], ids=["above", "below"])
@pytest.mark.parametrize(
    ("dtype", "op_class", "length", "limit"),
    [
        ("bfloat16", "std", 1.0, 6.0),
        ("float16", "std", 1e6, 6.0),
        ("bfloat16", "mm", 1.0, 24.0),
        ("bfloat16", "atom", 1.0, 24.0),
        ("bfloat16", "scan", 1.0, 48.0),
        ("float32", "std", 1.0, 32.0),
        ("float32", "scan", 4096.0, 32.0),
        ("float32", "mm", 16 * 4096.0, 128.0),
    ],
)
def test_one_element_out(
    dtype: str, op_class: str, length: float, limit: float, sign: int, share: float, passes: bool
) -> None:
    golden = constant(8)
    actual = with_one(golden, sign * share * limit * allowance(golden, dtype))
    rule: dict[str, Any] = {"op_class": op_class, "reduction_length": length}
    for found in (
        alone(actual, golden, dtype, **rule),
        beside(actual, golden, golden, dtype, **rule),
    ):
        assert found.passed == passes
        assert found.metrics.num_out == (0 if passes else 1)
        assert found.metrics.q == pytest.approx(share, rel=1e-3)
        if not passes:
            assert found.why == "elem"
            allowed = limit * allowance(golden, dtype)
            assert found.metrics.allowed_at == pytest.approx(allowed, rel=1e-3)


def test_what_is_allowed_at_an_element_reaches_to_the_other_result_and_beyond() -> None:
    golden = constant(8)
    baseline = with_one(golden, 10 * EPS["bfloat16"])
    beyond = beside(with_one(golden, 90 * EPS["bfloat16"]), baseline, golden, "bfloat16")
    behind = beside(with_one(golden, -90 * EPS["bfloat16"]), baseline, golden, "bfloat16")
    assert beyond.why == behind.why == "elem"
    more = beyond.metrics.allowed_at - behind.metrics.allowed_at
    assert more == pytest.approx(10 * EPS["bfloat16"])


@each_side
@pytest.mark.parametrize(("op_class", "limit"), [("std", 4.0), ("mm", 8.0), ("atom", 8.0)])
@each_half
def test_all_elements_a_little_out(
    half: str, op_class: str, limit: float, share: float, passes: bool
) -> None:
    golden = constant(64)
    unit = 0.25 * EPS[half] * rms(golden)
    near = golden + share * limit * unit * in_turn(64)
    found = beside(near, golden, golden, half, op_class=op_class)
    assert (found.passed, found.why) == (passes, "" if passes else "rmse")
    # alone, twice as much: the error of another result of this dtype is not known
    far = golden + 2 * share * limit * unit * in_turn(64)
    found = alone(far, golden, half, op_class=op_class)
    assert (found.passed, found.why) == (passes, "" if passes else "rmse")
    assert alone(far[:63], golden[:63], half, op_class=op_class).passed


def test_the_rms_of_a_scan_and_of_float32_is_not_tested() -> None:
    golden = constant(64)
    far = golden + 40 * EPS["bfloat16"] * in_turn(64)
    assert alone(far, golden, "bfloat16", op_class="scan").passed
    assert alone(golden + 60 * EPS["float32"] * in_turn(64), golden, "float32").passed


@each_side
@each_half
def test_rms_of_what_moved_inputs_explain(half: str, share: float, passes: bool) -> None:
    golden = constant(64)
    moved = 20 * EPS[half]
    # a quarter of the sensitivity is allowed, a quarter of that is the unit, 8 of them the limit
    actual = golden + share * 8 * 0.25 * 0.25 * moved * in_turn(64)
    found = alone(actual, golden, half, moved=golden + moved)
    assert (found.passed, found.why) == (passes, "" if passes else "rmse")


@each_side
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("op_class", "limit"), [("std", 0.5), ("mm", 0.5), ("atom", 2.0)])
@each_half
def test_half_results_that_lean_to_one_side(
    half: str, op_class: str, limit: float, sign: int, share: float, passes: bool
) -> None:
    golden = sign * distinct()
    out = 1.5 * sign * EPS[half]  # else a glance settles it
    lean = (share * limit * len(golden) * EPS[half] - abs(out)) / (len(golden) - 1)
    actual = golden + sign * lean
    actual[3] = golden[3] + out
    found = alone(actual, golden, half, op_class=op_class)
    assert (found.passed, found.why) == (passes, "" if passes else "bias")
    assert found.metrics.mean_shift == pytest.approx(share * limit, rel=1e-3)
    # beside a result that leans by half a spacing, one spacing more
    baseline = golden + sign * 0.5 * EPS[half]
    more = golden + sign * share * (limit + 1.0) * EPS[half]
    found = beside(more, baseline, golden, half, op_class=op_class)
    assert (found.passed, found.why) == (passes, "" if passes else "bias")


@each_half
def test_a_scan_may_drift(half: str) -> None:
    golden = distinct()
    assert alone(golden + 7.5 * EPS[half], golden, half, op_class="scan").passed


@each_half
def test_one_element_counts_little_in_a_mean(half: str) -> None:
    golden = distinct()
    actual = golden + 0.42 * EPS[half]
    actual[3] = golden[3] + 20 * EPS[half]  # as 8: 0.48 on average
    assert alone(actual, golden, half, op_class="mm").passed
    actual += 0.05 * EPS[half]
    assert alone(actual, golden, half, op_class="mm").why == "bias"


@each_side
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("length", "growth"), [(1.0, 1.0), (4 * 4096.0, 2.0)])
def test_float32_results_that_lean_beside_another_result(
    length: float, growth: float, sign: int, share: float, passes: bool
) -> None:
    golden = sign * distinct()
    base = allowance(golden, "float32")
    actual = golden + sign * share * 2.0 * growth * base
    actual[3] = golden[3] + sign * 9 * base  # else a glance settles it
    actual[4] = golden[4] + sign * (2 * share * 2.0 * growth - 9) * base
    found = beside(actual, golden, golden, "float32", reduction_length=length)
    assert (found.passed, found.why) == (passes, "" if passes else "bias")
    # alone there is nothing to say how far correct results lean
    assert alone(actual, golden, "float32", reduction_length=length).passed


@each_side
def test_float32_may_lean_four_times_as_far_as_the_other_result(share: float, passes: bool) -> None:
    golden = distinct()
    base = allowance(golden, "float32")
    own = 2 * base
    allowed = base + own
    limit = 2.0 + 4.0 * own / allowed
    found = beside(golden + share * limit * allowed, golden + own, golden, "float32")
    assert (found.passed, found.why) == (passes, "" if passes else "bias")


def test_a_lean_that_moved_inputs_explain_passes() -> None:
    golden = distinct()
    base = allowance(golden, "float32")
    actual = golden + 3 * base
    actual[3] = golden[3] + 9 * base  # else a glance settles it
    assert beside(actual, golden, golden, "float32").why == "bias"
    found = judge_baseline(
        actual, golden, golden=lambda: golden, perturbed=lambda k: golden + 10 * base,
        rule=Rule(dtype="float32"),
    )  # fmt: skip
    assert found.passed


@pytest.mark.parametrize(("num_values", "passes"), [(15, True), (31, True), (33, False)])
def test_a_lean_of_few_different_values_says_nothing(num_values: int, passes: bool) -> None:
    golden = np.resize(distinct()[:num_values], 64)
    actual = golden + 2 * EPS["bfloat16"]
    assert alone(actual, golden, "bfloat16").passed == passes


@each_side
@pytest.mark.parametrize(("dtype", "granted", "limit"), [("float16", 0.25, 6), ("float32", 1, 32)])
def test_what_inputs_moved_by_one_rounding_do_is_granted(
    dtype: str, granted: float, limit: float, share: float, passes: bool
) -> None:
    golden = constant(8)
    change = 50 * EPS[dtype]
    moved = with_one(golden, -change)
    allowed = allowance(golden, dtype) + granted * change
    assert alone(with_one(golden, share * limit * allowed), golden, dtype, moved).passed == passes
    # the others are granted a quarter of what is typical
    typical = granted * 0.25 * change / math.sqrt(8)
    other = golden.copy()
    other[4] += share * limit * (allowance(golden, dtype) + typical)
    assert alone(other, golden, dtype, moved).passed == passes


@each_side
def test_a_huge_element_counts_as_a_thousand_typical_ones(share: float, passes: bool) -> None:
    golden = constant(8)
    golden[0] = 2.0**40
    allowed = EPS["float32"] * (1 + 1000 * 1.5)
    actual = with_one(golden, share * 32 * allowed)
    assert alone(actual, golden, "float32").passed == passes
    assert beside(actual, golden, golden, "float32").passed == passes


@pytest.mark.parametrize(
    ("dtype", "smallest_normal"), [("float32", 2.0**-126), ("bfloat16", 2.0**-126)]
)
def test_numbers_below_the_normal_ones_may_be_flushed(dtype: str, smallest_normal: float) -> None:
    golden = np.full(8, 0.99 * smallest_normal)
    assert alone(np.zeros(8), golden, dtype).passed


def test_float32_results_may_lean_a_little_without_a_golden() -> None:
    golden = distinct()
    actual = golden + 0.5 * allowance(golden, "float32")
    assert beside(actual, golden, golden, "float32").stage == "quick"


@each_half
def test_rounding_that_leans_is_no_lean(half: str) -> None:
    right = distinct()
    golden = right + 0.4 * EPS[half]  # all are rounded down
    actual = right.copy()
    actual[3] += 2 * EPS[half]  # else a glance settles it
    assert alone(actual, golden, half).passed
    baseline = right.copy()
    baseline[5] += EPS[half]
    assert beside(actual, baseline, golden, half).passed


@pytest.mark.parametrize(("share", "passes"), [(0.99, True), (1.01, False)])
@pytest.mark.parametrize("sign", [1, -1], ids=["above", "below"])
def test_distance_is_counted_from_the_other_result(sign: int, share: float, passes: bool) -> None:
    golden = constant(8)
    own = 10 * EPS["float32"]
    baseline = golden + sign * own
    reach = 32 * (allowance(golden, "float32") + own)
    actual = with_one(baseline, sign * share * reach)
    assert beside(actual, baseline, golden, "float32").passed == passes


# ---- named allowances ---------------------------------------------------------------------------


@each_side
def test_a_limit_factor_scales_the_rms_limit_too(share: float, passes: bool) -> None:
    golden = constant(64)
    actual = golden + share * 2 * 8 * 0.25 * EPS["bfloat16"] * rms(golden) * in_turn(64)
    found = alone(actual, golden, "bfloat16", limit_factor=2.0)
    assert (found.passed, found.why) == (passes, "" if passes else "rmse")
    assert alone(actual, golden, "bfloat16", limit_factor=2.0, test_rms=False).passed
    assert not alone(actual, golden, "bfloat16").passed


@each_side
@pytest.mark.parametrize(("dtype", "limit"), [("bfloat16", 0.5), ("float32", 2.0)])
def test_a_shift_factor_scales_the_shift_limit(
    dtype: str, limit: float, share: float, passes: bool
) -> None:
    golden = distinct()
    unit = EPS[dtype] if dtype == "bfloat16" else allowance(golden, dtype)
    actual = golden + share * 5 * limit * unit
    found = beside(actual, golden, golden, dtype, shift_factor=5.0, test_rms=False)
    assert (found.passed, found.why) == (passes, "" if passes else "bias")


@each_side
def test_an_extra_is_a_unit_of_the_rms_too(share: float, passes: bool) -> None:
    golden = constant(64)
    extra = np.full(64, 10 * EPS["bfloat16"])
    actual = golden + share * 8 * 0.25 * extra * in_turn(64)
    found = alone(actual, golden, "bfloat16", extra=extra)
    assert (found.passed, found.why) == (passes, "" if passes else "rmse")


def test_reasons_say_in_what_they_count() -> None:
    golden, half = distinct(), "bfloat16"
    lean = golden + 3 * EPS[half]
    assert "3 spacings of bfloat16 on average, allowed 0.5" in alone(lean, golden, half).reason
    base = allowance(golden, "float32")
    lean = golden + 9 * base
    found = beside(lean, golden, golden, "float32")
    assert "9 allowances on average, allowed 2" in found.reason
    spread = golden + 5 * EPS[half] * in_turn(128)
    assert "times that of correct rounding, allowed 8" in alone(spread, golden, half).reason
    assert "times that of the reference, allowed 4" in beside(spread, golden, golden, half).reason


# ---- the documented criterion -------------------------------------------------------------------


@each_side
@pytest.mark.parametrize("sign", [1, -1], ids=["above", "below"])
@pytest.mark.parametrize("expected", [0.0, 3.0, -300.0])
def test_documented_tolerances(expected: float, sign: int, share: float, passes: bool) -> None:
    wanted = np.array([1.0, expected, 2.0])
    allowed = 1e-5 + 1e-4 * abs(expected)
    actual = wanted + np.array([0.0, sign * share * allowed, 0.0])
    found = judge_allclose(actual, wanted, rule=Rule(dtype="float32", rtol=1e-4, atol=1e-5))
    assert found.passed == passes
    assert found.metrics.allclose == passes
    assert found.metrics.num_out == (0 if passes else 1)
    assert found.metrics.q == pytest.approx(share, rel=1e-3) or passes


def test_the_share_of_the_documented_tolerances_is_told() -> None:
    zeros, ones = np.zeros(4), np.ones(4)
    by_atol = judge_allclose(zeros + 5e-6, zeros, rule=Rule(dtype="float32", rtol=0.0, atol=1e-5))
    by_rtol = judge_allclose(ones + 2e-5, ones, rule=Rule(dtype="float32", rtol=1e-4, atol=0.0))
    assert by_atol.metrics.q == pytest.approx(0.5)
    assert by_rtol.metrics.q == pytest.approx(0.2, rel=1e-6)
    # elements within what is allowed are not counted as out, however near the limit
    some_out = judge_allclose(
        zeros + np.array([2e-5, 7e-6, 0.0, -3e-5]), zeros,
        rule=Rule(dtype="float32", rtol=0.0, atol=1e-5),
    )  # fmt: skip
    assert (some_out.metrics.num_out, some_out.metrics.q) == (2, pytest.approx(3.0))
    assert some_out.metrics.worst_index == (3,)


def test_numbers_of_unequal_integers() -> None:
    found = judge_exact(np.array([5, -7, 0, 3]), np.array([5, -5, 0, 4])).metrics
    assert (found.max_abs, found.mean_abs, found.allowed_at) == (2.0, 0.75, 0.0)
    assert found.max_rel == pytest.approx(2 / 5)
    assert (found.num_out, found.allclose) == (2, False)
    equal = judge_exact(np.array([5, -7]), np.array([5, -7])).metrics
    assert (equal.max_abs, equal.mean_abs, equal.max_rel, equal.q) == (0.0, 0.0, 0.0, 0.0)


def test_without_atol_a_zero_has_no_tolerance() -> None:
    wanted = np.array([0.0, 1.0])
    rule = Rule(dtype="float32", rtol=1.0, atol=0.0)
    assert not judge_allclose(np.array([1e-9, 1.0]), wanted, rule=rule).passed
    assert judge_allclose(np.array([0.0, 2.0]), wanted, rule=rule).passed


def test_equal_results_have_metrics_of_zero() -> None:
    values = constant(8)
    metrics = beside(values.copy(), values, values, "float32").metrics
    assert (metrics.max_abs, metrics.mean_abs, metrics.max_rel, metrics.q) == (0.0, 0.0, 0.0, 0.0)
    assert metrics.allclose


def test_equal_infinities_are_in_no_metric() -> None:
    values = with_one(constant(8), np.inf)
    found = beside(values.copy(), values, values, "float32")
    assert found.passed
    assert not found.finite
    assert found.metrics.expected_rms == pytest.approx(1.5)
