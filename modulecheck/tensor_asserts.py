"""The checker's comparison as assertions for tests."""

from __future__ import annotations

from typing import Any

from modulecheck.tensors import TensorChecker

__all__ = ["assert_tensor_allclose", "assert_tensor_equal"]


def assert_tensor_equal(
    actual: Any,
    expected: Any,
    *,
    equal_nan: bool = False,
    check_dtype: bool = True,
    tag: str = "tensor",
) -> None:
    """Assert that two tensors, or nested lists, dicts and dataclasses of them, are equal.

    Raises:
        AssertionError: with the message of `TensorChecker.check_equal`.
        ArgumentTypeError: a leaf holds no numbers.
    """
    checker = _both(actual, expected, tag)
    if not checker.check_equal(equal_nan=equal_nan, check_dtype=check_dtype):
        raise AssertionError(_message(checker))


def assert_tensor_allclose(
    actual: Any,
    expected: Any,
    rtol: float = 1e-5,
    atol: float = 1e-8,
    *,
    equal_nan: bool = False,
    check_dtype: bool = True,
    tag: str = "tensor",
) -> None:
    """Assert `|actual - expected| <= atol + rtol * |expected|` for every element.

    Raises:
        AssertionError: with the message of `TensorChecker.check_allclose`.
        ArgumentTypeError: a leaf holds no numbers.
    """
    checker = _both(actual, expected, tag)
    if not checker.check_allclose(rtol, atol, equal_nan, check_dtype=check_dtype):
        raise AssertionError(_message(checker))


def _both(actual: Any, expected: Any, tag: str) -> TensorChecker:
    checker = TensorChecker(quiet=True)
    checker.register_tensor(tag, expected, side="expected")
    checker.register_tensor(tag, actual, side="actual")
    return checker


def _message(checker: TensorChecker) -> str:
    lines = [record.line for record in checker.result.records]
    return "\n".join([*lines, checker.result.report()])
