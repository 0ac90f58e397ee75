"""Each limit of the rule at module level, from both sides: just within it passes, beyond it fails.

The values lie in [1, 2), so that the spacing of a dtype is its eps, and what is allowed an element
can be written down.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from modulecheck.compared import Compared, Kinks, References, Rule, documented
from modulecheck.judging import compare
from opcheck import Verdict
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

HALF = ("bfloat16", "float16")
CALIBRATED = Rule(criterion="calibrated", atol=1e-4, rtol=1e-3)
each_dtype = pytest.mark.parametrize("dtype", EPS)


def judge(
    actual: np.ndarray,
    eager: np.ndarray,
    golden: np.ndarray | None,
    *,
    dtype: str = "float32",
    moved: np.ndarray | None = None,
    **more: Any,
) -> Compared:
    references = References(golden=lambda: golden, moved=lambda draw: moved, **more)
    return compare(actual, eager, dtype=dtype, rule=CALIBRATED, references=references)


def verdict(*args: Any, **options: Any) -> Verdict:
    return judge(*args, **options).verdict


def distinct(size: int) -> np.ndarray:
    return 1.0 + np.arange(size) / (2 * size)


def allowance(golden: np.ndarray, dtype: str) -> float:
    """A spacing, and the rounding of what is added up in float32 (float64)."""
    return EPS[dtype] + max(EPS["float64"], EPS["float32"] * (dtype != "float64")) * rms(golden)


# ---- at a glance --------------------------------------------------------------------------------


def asked(actual: np.ndarray, eager: np.ndarray, dtype: str, **more: Any) -> bool:
    """Whether float64 was asked for."""
    calls: list[int] = []
    references = References(
        golden=lambda: calls.append(1),  # type: ignore[func-returns-value]
        moved=lambda draw: None, **more,
    )  # fmt: skip
    compare(actual, eager, dtype=dtype, rule=CALIBRATED, references=references)
    return bool(calls)


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 8.0), ("float16", 1.01)])
@pytest.mark.parametrize("size", [8, 4096])
def test_near_results_need_no_float64_run(dtype: str, limit: float, size: int) -> None:
    eager = constant(size)
    step = limit * allowance(eager, dtype)
    assert not asked(with_one(eager, WITHIN * step), eager, dtype)
    assert not asked(with_one(eager, -WITHIN * step), eager, dtype)
    assert asked(with_one(eager, BEYOND * step), eager, dtype)
    assert asked(with_one(eager, -BEYOND * step), eager, dtype)


def test_half_results_that_all_lean_to_one_side_need_one() -> None:
    eager = distinct(64)
    step = 0.1 * allowance(eager, "float16")
    assert not asked(eager + WITHIN * step, eager, "float16")
    assert asked(eager + BEYOND * step, eager, "float16")
    assert asked(-eager - BEYOND * step, -eager, "float16")
    assert not asked((eager + BEYOND * step)[:63], eager[:63], "float16")


def test_nonfinite_elements_in_the_same_places_need_none() -> None:
    eager = np.array([1.5, np.nan, np.inf, -np.inf])
    assert not asked(eager * (1 + 2.0**-22), eager, "float32")
    assert asked(eager * [1, 1, -1, -1], eager, "float32")
    assert not asked(np.full(2, np.nan), np.full(2, np.nan), "float32")


def test_parts_of_complex_numbers_are_looked_at_one_by_one() -> None:
    eager = 1.5 + 1.5j * np.ones(8)
    step = 8.0 * allowance(constant(8), "float32")
    assert not asked(with_one(eager, 1j * WITHIN * step), eager, "float32")
    assert asked(with_one(eager, 1j * BEYOND * step), eager, "float32")


def test_golden_always_asks_even_where_both_sides_agree() -> None:
    eager = constant(8)
    assert asked(eager.copy(), eager, "float32", always=True)
    assert not asked(eager.copy(), eager, "float32")
    assert not asked(eager[:0].copy(), eager[:0], "float32", always=True)
    whole = np.arange(8)
    assert not asked(whole.copy(), whole, "int64", always=True)


# ---- the documented numbers ---------------------------------------------------------------------


def test_one_element_that_is_not_close_is_enough() -> None:
    assert not documented(np.ones(2), np.array([1.0, 2.0]), atol=1e-4, rtol=1e-3).allclose


def test_rtol_is_a_share_of_the_compiled_value_and_atol_itself_is_close() -> None:
    assert documented(np.array([100.05]), np.array([100.0]), atol=0.0, rtol=1e-3).allclose
    assert not documented(np.array([0.0105]), np.array([0.01]), atol=0.0, rtol=1e-3).allclose
    assert documented(np.zeros(1), np.ones(1), atol=1.0, rtol=0.0).allclose


def test_max_rel_of_a_zero_divides_by_the_documented_floor() -> None:
    assert documented(np.zeros(1), np.full(1, 1e-8), atol=0.0, rtol=0.0).max_rel == 1.0


@pytest.mark.parametrize(
    ("right", "wrong"),
    [(2**53, 2**53 + 1), (10_000, 10_001), (True, False)],
    ids=["above 2^53", "index", "bool"],
)
def test_integers_and_bools_have_no_tolerance(right: Any, wrong: Any) -> None:
    eager = np.array([right, right])
    found = judge(np.array([right, wrong]), eager, None, dtype=str(eager.dtype))
    assert found.verdict == Verdict.FAIL
    assert found.reason
    assert found.documented.max_abs == 1.0
    found = judge(eager.copy(), eager, None, dtype=str(eager.dtype))
    assert (found.verdict, found.documented.max_abs) == (Verdict.PASS, 0.0)


# ---- the interval -------------------------------------------------------------------------------


@each_side
@pytest.mark.parametrize(
    ("dtype", "limit"),
    [("bfloat16", 7.0), ("float16", 12.0), ("float32", 32.0), ("float64", 32.0)],
)
@pytest.mark.parametrize("sign", [1, -1], ids=["above", "below"])
def test_one_element_out(dtype: str, limit: float, sign: int, share: float, passes: bool) -> None:
    golden = constant(8)
    actual = with_one(golden, sign * share * limit * allowance(golden, dtype))
    found = judge(actual, golden, golden, dtype=dtype)
    assert (found.verdict == Verdict.PASS) == passes
    assert found.metrics.num_out == (0 if passes else 1)
    assert found.metrics.q == pytest.approx(share, rel=1e-2)
    assert found.metrics.worst_index == (3,)
    if not passes:
        assert found.reason.startswith("element (3,) is ")


@each_side
@pytest.mark.parametrize(
    ("dtype", "limit"), [("bfloat16", 3.0), ("float16", 3.0), ("float32", 64.0), ("float64", 64.0)]
)
def test_all_elements_a_little_out(dtype: str, limit: float, share: float, passes: bool) -> None:
    golden = constant(64)
    error = share * limit * 0.25 * EPS[dtype] * rms(golden)
    actual = golden + error * in_turn(64)
    found = judge(actual, golden, golden, dtype=dtype)
    assert (found.verdict == Verdict.PASS) == passes
    assert found.metrics.rmse_ratio == pytest.approx(share * limit, rel=1e-2)
    assert passes or "rms error is" in found.reason
    assert verdict(actual[:63], golden[:63], golden[:63], dtype=dtype) == Verdict.PASS


@each_side
@pytest.mark.parametrize(
    ("dtype", "limit"), [("bfloat16", 0.1), ("float16", 0.1), ("float32", 2.0), ("float64", 2.0)]
)
@pytest.mark.parametrize("sign", [1, -1])
def test_all_elements_lean_to_one_side(
    dtype: str, limit: float, sign: int, share: float, passes: bool
) -> None:
    size = 4096
    golden = distinct(size)
    allowed = allowance(golden, dtype)
    by_chance = 3.0 / math.sqrt(size)
    actual = sign * (golden + share * (limit + by_chance) * allowed)
    if dtype not in HALF:  # else a glance settles it
        actual[0] += sign * 7.0 * allowed
    found = judge(actual, sign * golden, sign * golden, dtype=dtype)
    assert (found.verdict == Verdict.PASS) == passes
    assert passes or "lean to one side" in found.reason


def test_a_lean_of_few_or_equal_values_says_nothing() -> None:
    allowed = 0.3 * EPS["float16"]
    for golden in (distinct(63), constant(4096), np.resize(distinct(15), 4096)):
        assert verdict(golden + allowed, golden, golden, dtype="float16") == Verdict.PASS
    for golden in (distinct(640), np.resize(distinct(16), 4096)):
        assert verdict(golden + allowed, golden, golden, dtype="float16") == Verdict.FAIL


@each_side
def test_where_eager_leans_compiled_may_lean_twice_as_far(share: float, passes: bool) -> None:
    golden = distinct(4096)
    own = allowance(golden, "float16")
    allowed = 2 * own  # the distance of eager from float64 is granted to each element
    limit = 0.1 + 2.0 * 0.5 + 3.0 / 64
    actual = golden + share * limit * allowed
    assert (verdict(actual, golden + own, golden, dtype="float16") == Verdict.PASS) == passes


@each_dtype
def test_between_eager_and_float64_everything_passes(dtype: str) -> None:
    golden = constant(8)
    far = 300 * EPS[dtype] if dtype not in HALF else 5 * EPS[dtype]
    for eager in (golden + far, golden - far):
        middle = (golden + eager) / 2
        assert verdict(middle, eager, golden, dtype=dtype) == Verdict.PASS


@each_side
@pytest.mark.parametrize(("dtype", "granted"), [("float16", 0.25), ("float32", 1.0)])
def test_what_inputs_moved_by_one_rounding_do_is_granted(
    dtype: str, granted: float, share: float, passes: bool
) -> None:
    golden = constant(8)
    limit = {"float16": 12.0, "float32": 32.0}[dtype]
    change = 50 * EPS[dtype]
    allowed = allowance(golden, dtype) + granted * change
    actual = with_one(golden, share * limit * allowed)
    options: dict[str, Any] = {"dtype": dtype, "moved": with_one(golden, -change)}
    assert (verdict(actual, golden, golden, **options) == Verdict.PASS) == passes
    # its neighbours are granted a quarter of the typical sensitivity
    typical = granted * 0.25 * change / math.sqrt(8)
    beside = golden.copy()
    beside[4] += share * limit * (allowance(golden, dtype) + typical)
    assert (verdict(beside, golden, golden, **options) == Verdict.PASS) == passes


def test_sensitivity_that_is_not_finite_grants_nothing() -> None:
    golden = constant(8)
    moved = with_one(golden, np.nan)
    actual = with_one(golden, BEYOND * 32.0 * allowance(golden, "float32"))
    assert verdict(actual, golden, golden, moved=moved) == Verdict.FAIL


def test_a_huge_element_hides_no_others() -> None:
    golden = constant(8)
    golden[0] = 1e12
    actual = with_one(golden, 1.0)
    assert verdict(actual, golden, golden) == Verdict.FAIL


@pytest.mark.parametrize("fill", [-1e4, -1e9, float(np.finfo(np.float32).min)])
@pytest.mark.parametrize("num_masked", [0, 100, 400, 512, 900])
@pytest.mark.parametrize("eager_error", [0.0, 2.0**-24])
def test_masked_elements_hide_no_others(fill: float, num_masked: int, eager_error: float) -> None:
    golden = in_turn(1024) * distinct(1024)
    golden[:num_masked] += fill
    eager = golden * (1 + eager_error)
    moved = golden * (1 + EPS["float32"] * in_turn(1024))
    assert verdict(eager, golden, golden, moved=moved) == Verdict.PASS
    wrong = golden.copy()
    wrong[num_masked:] *= 1.01
    assert verdict(wrong, eager, golden, moved=moved) == Verdict.FAIL


# ---- noise, and float64 that is no judge --------------------------------------------------------


@each_side
def test_gradients_that_rounding_buries_are_noise(share: float, passes: bool) -> None:
    golden = 1e-12 * distinct(64)
    eager, actual = in_turn(64), -in_turn(64)
    found = judge(actual, eager, golden, noise_floor=1.0 / share)
    assert (found.verdict == Verdict.PASS) == passes
    assert any("zero in exact arithmetic" in note for note in found.notes) == passes


@each_side
def test_one_element_far_beyond_the_noise_is_a_fault(share: float, passes: bool) -> None:
    golden = 1e-12 * distinct(1024)
    eager = 0.1 * in_turn(1024)
    actual = eager.copy()
    actual[3] = share * 8.0
    assert (verdict(actual, eager, golden, noise_floor=1.0) == Verdict.PASS) == passes


def test_a_gradient_larger_than_eagers_error_is_no_noise() -> None:
    golden = constant(64)
    eager = golden * 1.01
    assert verdict(golden * 3, eager, golden, noise_floor=10.0) == Verdict.FAIL


@each_side
def test_eager_far_from_float64_is_no_end_of_an_interval(share: float, passes: bool) -> None:
    golden = constant(8)
    eager, middle = (golden * (1 + part * share * 0.05) for part in (1.0, 0.5))
    assert (verdict(middle, eager, golden) == Verdict.PASS) == passes
    assert verdict(middle, eager, golden, noise_floor=1.0) == Verdict.PASS


def test_beside_either_end_alone_a_result_passes() -> None:
    golden = constant(8)
    eager = golden * 1.2
    near = 10 * allowance(golden, "float32")
    assert "eager is the wrong side" in judge(golden + near, eager, golden).notes[-1]
    assert "float64 is no judge here" in judge(eager + near, eager, golden).notes[-1]
    assert verdict(eager + 10 * near, eager, golden) == Verdict.FAIL


# ---- eager died ---------------------------------------------------------------------------------


@each_side
@pytest.mark.parametrize(
    ("dtype", "limit"), [("bfloat16", 16.0), ("float16", 16.0), ("float32", 64.0)]
)
def test_where_eager_is_nan_float64_alone_judges(
    dtype: str, limit: float, share: float, passes: bool
) -> None:
    golden = constant(8)
    allowed = allowance(golden, dtype) + EPS[dtype] * rms(golden)
    actual = with_one(golden, share * limit * allowed)
    eager = with_one(golden, np.nan)
    found = judge(actual, eager, golden, dtype=dtype)
    assert (found.verdict == Verdict.PASS) == passes
    assert passes or "both sides are wrong, in 1 of 1 such elements" in found.reason


# ---- both sides agree ---------------------------------------------------------------------------


@each_side
@pytest.mark.parametrize(
    ("dtype", "limit"), [("bfloat16", 16.0), ("float16", 16.0), ("float32", 64.0)]
)
def test_one_element_that_both_sides_have_far_from_float64(
    dtype: str, limit: float, share: float, passes: bool
) -> None:
    golden = constant(8)
    allowed = allowance(golden, dtype) + EPS[dtype] * rms(golden)
    both = with_one(golden, share * limit * allowed)
    found = judge(both, both.copy(), golden, dtype=dtype, always=True)
    assert found.verdict == (Verdict.PASS if passes else Verdict.INCONCLUSIVE)
    assert passes or "element (3,) is " in found.reason


@each_side
@pytest.mark.parametrize(("dtype", "limit"), [("bfloat16", 2.0), ("float32", 4.0)])
def test_all_elements_that_both_sides_have_a_little_off(
    dtype: str, limit: float, share: float, passes: bool
) -> None:
    golden = constant(64)
    allowed = allowance(golden, dtype) + EPS[dtype] * rms(golden)
    both = golden + share * limit * allowed * in_turn(64)
    found = judge(both, both.copy(), golden, dtype=dtype, always=True)
    assert found.verdict == (Verdict.PASS if passes else Verdict.INCONCLUSIVE)
    assert passes or "the rms distance is" in found.reason
    fewer = judge(both[:63], both[:63].copy(), golden[:63], dtype=dtype, always=True)
    assert fewer.verdict == Verdict.PASS


def test_both_sides_nan_where_float64_is_not() -> None:
    golden = constant(8)
    both = with_one(golden, np.nan)
    found = judge(both, both.copy(), golden, always=True)
    assert found.verdict == Verdict.INCONCLUSIVE
    assert "NaN or Inf in 1 elements alone" in found.reason
    assert verdict(both, both.copy(), both, always=True) == Verdict.PASS


def test_both_sides_far_from_other_random_numbers_pass_and_say_so() -> None:
    both, golden = constant(8), 2 * constant(8)
    assert verdict(both, both.copy(), golden, always=True) == Verdict.INCONCLUSIVE
    found = judge(both, both.copy(), golden, always=True, draws_apart=lambda: True)
    assert found.verdict == Verdict.PASS
    assert "it drew other random numbers" in found.notes[-1]
    # nearer than that it drew the same numbers
    near = both * 1.01
    options: dict[str, Any] = {"always": True, "draws_apart": lambda: True}
    assert verdict(near, near.copy(), both, **options) == Verdict.INCONCLUSIVE


def test_noise_and_a_missing_float64_run_say_nothing_where_both_agree() -> None:
    both, golden = constant(8), 1e-12 * constant(8)
    assert verdict(both, both.copy(), golden, always=True) == Verdict.INCONCLUSIVE
    assert verdict(both, both.copy(), golden, always=True, noise_floor=1.0) == Verdict.PASS
    found = judge(both, both.copy(), None, always=True)
    assert (found.verdict, found.notes[-1]) == (Verdict.PASS, "no float64 run")
    assert verdict(both, both.copy(), constant(9), always=True) == Verdict.PASS


# ---- autocast -----------------------------------------------------------------------------------


def under_autocast(
    actual: np.ndarray, eager: np.ndarray, golden: np.ndarray | None, dtype: str = "float32"
) -> Verdict:
    return verdict(actual, eager, golden, dtype=dtype, autocast="bfloat16")


@each_side
def test_float32_results_of_bfloat16_ops_are_judged_as_bfloat16(share: float, passes: bool) -> None:
    golden = constant(8)
    own = 1.5 * 2.0**-11 * EPS["bfloat16"] * rms(golden)
    eager = golden + own
    out = share * 14.0 * (allowance(golden, "bfloat16") + own)
    assert (under_autocast(eager + with_one(0 * golden, out), eager, golden) == "PASS") == passes
    assert verdict(eager + with_one(0 * golden, out), eager, golden) == Verdict.FAIL


def test_float32_results_of_float32_ops_under_autocast_are_float32() -> None:
    golden = constant(8)
    eager = golden + 0.75 * 2.0**-11 * EPS["bfloat16"] * rms(golden)
    actual = with_one(eager, 5 * EPS["bfloat16"])
    assert under_autocast(actual, eager, golden) == Verdict.FAIL
    assert under_autocast(actual, golden, None) == Verdict.PASS  # nobody can tell


def test_autocast_changes_no_other_dtype() -> None:
    golden = constant(8)
    eager = golden + 1.5 * 2.0**-11 * EPS["bfloat16"] * rms(golden)
    actual = with_one(eager, 5 * EPS["bfloat16"])
    assert under_autocast(actual, eager, golden, "float64") == Verdict.FAIL
    assert under_autocast(actual, eager, golden) == Verdict.PASS


def test_under_autocast_the_nan_of_both_sides_is_left_out_of_the_distance() -> None:
    golden = constant(8)
    eager = golden + 1.5 * 2.0**-11 * EPS["bfloat16"] * rms(golden)
    eager[0] = golden[0] = np.nan
    assert under_autocast(with_one(eager, 5 * EPS["bfloat16"]), eager, golden) == Verdict.PASS


# ---- corners of the forward ---------------------------------------------------------------------


@each_side
def test_an_element_is_granted_twice_its_jump_over_the_draws(share: float, passes: bool) -> None:
    golden = constant(8)
    drawn: list[int] = []

    def moved(draw: int) -> np.ndarray:
        drawn.append(draw)
        return with_one(golden, 0.5 if draw == 7 else 0.0)

    kinks = Kinks(
        elements=(), complete=False, flipped=lambda numbers: None, pinned=lambda draw: None,
        moved=moved,
    )  # fmt: skip
    actual = with_one(golden, share * 2.0 * 0.5)
    found = judge(actual, golden, golden, kinks=lambda: kinks)
    assert (found.verdict == Verdict.PASS) == passes
    assert drawn == list(range(8))


def test_where_all_corners_are_known_draws_grant_nothing() -> None:
    golden = constant(8)
    kinks = Kinks(
        elements=(), complete=True, flipped=lambda numbers: None, pinned=lambda draw: None,
        moved=lambda draw: with_one(golden, 0.5),
    )  # fmt: skip
    actual = with_one(golden, 0.5)
    assert verdict(actual, golden, golden, kinks=lambda: kinks) == Verdict.FAIL
