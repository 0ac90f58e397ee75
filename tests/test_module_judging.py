"""The rule at module level: what it lets pass, what it does not, and what it says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from modulecheck.judging import Kinks, References, Rule, compare, documented
from opcheck import Verdict

CALIBRATED = Rule(criterion="calibrated", atol=1e-4, rtol=1e-3)
ALLCLOSE = Rule(criterion="allclose", atol=1e-4, rtol=1e-3)
SIZE = 4096


def golden_of(size: int = SIZE) -> np.ndarray:
    return np.random.default_rng(0).normal(size=size)


def rounded(values: np.ndarray, seed: int, *, eps: float = 2.0**-23) -> np.ndarray:
    """As a kernel would give it: a few roundings away."""
    noise = np.random.default_rng(seed).normal(size=values.shape)
    return (values * (1 + 3 * eps * noise)).astype(np.float32)


def judge(actual: np.ndarray, eager: np.ndarray, golden: np.ndarray | None, **options: Any) -> Any:
    kinks = options.pop("kinks", None)
    references = References(
        golden=lambda: golden,
        moved=lambda draw: None if golden is None else golden * (1 + 2.0**-23 * (-1) ** draw),
        kinks=None if kinks is None else lambda: kinks,
        always=options.pop("always", False),
    )
    rule = options.pop("rule", CALIBRATED)
    dtype = options.pop("dtype", "float32")
    return compare(actual, eager, dtype=dtype, rule=rule, references=references)


def test_two_roundings_of_one_result_pass() -> None:
    golden = golden_of()
    found = judge(rounded(golden, 1), rounded(golden, 2), golden)
    assert found.verdict == Verdict.PASS


@pytest.mark.parametrize(
    "spoil",
    [
        lambda y: y * 1.001,
        lambda y: np.where(np.arange(y.size) == 7, y + 0.01, y),
        lambda y: np.where(np.arange(y.size) == 7, np.nan, y),
        lambda y: np.where(np.arange(y.size) == 7, np.inf, y),
        lambda y: np.zeros_like(y),
        lambda y: -y,
        np.roll,
        lambda y: y + 1e-4,
    ],
)
def test_wrong_results_fail_and_say_where(spoil: Any) -> None:
    golden = golden_of()
    eager = rounded(golden, 2)
    right = rounded(golden, 1)
    actual = (spoil(right, 1) if spoil is np.roll else spoil(right)).astype(np.float32)
    found = judge(actual, eager, golden)
    assert found.verdict == Verdict.FAIL
    assert found.reason


def test_scaled_half_result_fails_though_each_element_is_near() -> None:
    golden = golden_of()
    eager = golden.astype(np.float16).astype(np.float32)
    actual = (golden * 1.004).astype(np.float16).astype(np.float32)
    assert judge(actual, eager, golden, dtype="float16").verdict == Verdict.FAIL
    assert judge(eager + 0, eager, golden, dtype="float16").verdict == Verdict.PASS


@pytest.mark.parametrize("num_dead", [1, 100, SIZE])
def test_where_eager_died_float64_judges(num_dead: int) -> None:
    golden = golden_of()
    eager = rounded(golden, 2)
    eager[:num_dead] = np.nan
    right = rounded(golden, 1)
    found = judge(right, eager, golden)
    assert found.verdict == Verdict.PASS
    assert any("eager is the wrong side" in note for note in found.notes)
    wrong = right.copy()
    wrong[0] = 0.0
    found = judge(wrong, eager, golden)
    assert found.verdict == Verdict.FAIL
    assert "both sides are wrong, in 1 of" in found.reason
    assert judge(eager, eager.copy(), golden).verdict == Verdict.PASS  # equal bits


def test_compiled_that_agrees_with_float64_passes_where_eager_is_far_off() -> None:
    golden = golden_of()
    found = judge(rounded(golden, 1), rounded(golden * 2, 2), golden)
    assert found.verdict == Verdict.PASS
    assert "eager is the wrong side" in found.notes[-1]


def test_compiled_that_is_far_off_fails_where_eager_agrees_with_float64() -> None:
    golden = golden_of()
    found = judge(rounded(golden * 2, 1), rounded(golden, 2), golden)
    assert found.verdict == Verdict.FAIL
    assert "eager is nearer to float64" in found.reason


def test_golden_that_drew_other_numbers_hides_nothing() -> None:
    eager, other = golden_of(), golden_of()[::-1].copy()
    wrong = eager.copy()
    wrong[7] += 0.01
    near = rounded(eager, 1, eps=2.0**-21)
    assert judge(near, eager.astype(np.float32), other).verdict == Verdict.PASS
    found = judge(wrong.astype(np.float32), eager.astype(np.float32), other)
    assert found.verdict == Verdict.FAIL
    assert "float64 is no judge" in found.notes[-1]


def test_without_a_golden_the_row_says_so() -> None:
    eager = golden_of().astype(np.float32)
    found = judge(eager * np.float32(1 + 1e-5), eager, None)
    assert found.verdict == Verdict.FAIL
    assert any("no float64 run" in note for note in found.notes)


def one_flip(golden: np.ndarray, jump: np.ndarray) -> Kinks:
    return Kinks(
        elements=(0,),
        complete=True,
        flipped=lambda numbers: golden + jump,
        pinned=lambda draw: golden * (1 + 2.0**-23 * (-1) ** draw),
        moved=lambda draw: None,
    )


def drawn(golden: np.ndarray, jump: np.ndarray) -> Kinks:
    return Kinks(
        elements=(),
        complete=False,
        flipped=lambda numbers: None,
        pinned=lambda draw: None,
        moved=lambda draw: golden + jump,
    )


@pytest.mark.parametrize("how", [one_flip, drawn])
def test_element_at_a_kink_passes_and_is_noted(how: Any) -> None:
    golden = golden_of()
    jump = np.zeros_like(golden)
    jump[7] = 0.5
    actual = rounded(golden, 1)
    actual[7] += 0.5
    found = judge(actual, rounded(golden, 2), golden, kinks=how(golden, jump))
    assert found.verdict == Verdict.PASS
    assert "at a kink" in found.notes
    assert judge(actual, rounded(golden, 2), golden).verdict == Verdict.FAIL


@pytest.mark.parametrize("how", [one_flip, drawn])
def test_fault_beside_a_kink_is_still_a_fault(how: Any) -> None:
    golden = golden_of()
    jump = np.zeros_like(golden)
    jump[7] = 0.5
    right = rounded(golden, 1)
    right[7] += 0.5
    one_more = right.copy()
    one_more[8] += 0.5
    for wrong in (right * np.float32(1.01), one_more):
        found = judge(wrong, rounded(golden, 2), golden, kinks=how(golden, jump))
        assert found.verdict == Verdict.FAIL


def test_part_of_a_jump_is_no_kink_where_flips_are_tried() -> None:
    golden = golden_of()
    jump = np.zeros_like(golden)
    jump[7] = 0.5
    actual = rounded(golden, 1)
    actual[7] += 0.25
    found = judge(actual, rounded(golden, 2), golden, kinks=one_flip(golden, jump))
    assert found.verdict == Verdict.FAIL


def test_either_side_may_have_flipped() -> None:
    golden = golden_of()
    jump = np.where(np.arange(SIZE) < 64, 0.5, 0.0)
    eager = rounded(golden + jump, 2)
    found = judge(rounded(golden, 1), eager, golden, kinks=one_flip(golden, jump))
    assert found.verdict == Verdict.PASS


@pytest.mark.parametrize(
    ("eager", "compiled", "close"),
    [
        ([1.0], [1.0 + 1e-3], True),
        ([1.0], [1.01], False),
        ([np.nan, 1.0], [np.nan, 1.0], True),
        ([np.nan], [1.0], False),
        ([np.inf], [np.inf], True),
        ([np.inf], [-np.inf], False),
        ([1.0], [np.inf], False),
        ([], [], True),
    ],
)
def test_documented_allclose(eager: list[float], compiled: list[float], close: bool) -> None:
    a, b = np.asarray(eager), np.asarray(compiled)
    found = documented(a, b, atol=1e-4, rtol=1e-3)
    assert found.allclose == close


def test_documented_numbers_divide_by_eager() -> None:
    found = documented(np.array([2.0, 4.0]), np.array([3.0, 4.0]), atol=1e-4, rtol=1e-3)
    assert (found.max_abs, found.mean_abs) == (1.0, 0.5)
    assert found.max_rel == pytest.approx(0.5)
    complex_ones = documented(np.array([1j]), np.array([2j]), atol=1e-4, rtol=1e-3)
    assert complex_ones.max_abs == 1.0


def test_allclose_judges_where_it_was_asked_for() -> None:
    golden = golden_of()
    eager = golden.astype(np.float32)
    assert judge(eager + np.float32(5e-5), eager, golden, rule=ALLCLOSE).verdict == Verdict.PASS
    assert judge(eager + np.float32(5e-5), eager, golden).verdict == Verdict.FAIL
    assert judge(eager + np.float32(5e-3), eager, golden, rule=ALLCLOSE).verdict == Verdict.FAIL
