"""Numbers for the tests of limits. In [1, 2), where they lie, the spacing of a dtype is its eps."""

from __future__ import annotations

import math

import numpy as np
import pytest

EPS = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-23, "float64": 2.0**-52}
WITHIN, BEYOND = 0.95, 1.05
"""Of a limit."""
each_side = pytest.mark.parametrize(
    ("share", "passes"), [(WITHIN, True), (BEYOND, False)], ids=["within", "beyond"]
)


def rms(values: np.ndarray) -> float:
    return math.sqrt(float(np.mean(np.square(values))))


def constant(size: int) -> np.ndarray:
    """One value: no mean shift is asked for."""
    return np.full(size, 1.5)


def with_one(values: np.ndarray, change: float) -> np.ndarray:
    changed = values.copy()
    changed[3] += change
    return changed


def in_turn(size: int) -> np.ndarray:
    """1, -1, 1, -1: without a mean."""
    return np.where(np.arange(size) % 2, -1.0, 1.0)
