"""Evidence over many calls: a shift too small for one call to fail, in all of them.

A bf16 result that is 0.1% too large moves one element in six by one spacing, which a correct kernel
may do as well on one input. It does not do so to the same side call after call: results that are
rounded to nearest, from whatever order of float32 sums, are shifted by next to nothing on average.
So the mean signed shift of every call is added up per op and dtype, and per module; when a mean
over many calls is beyond its limit, the call that tips it over fails, and its reason says so.

Known to drift, and left out: results summed in 16 bit (scatter, scans), and kernels with a named
allowance. Rounding that all elements share is no shift: what counts is the distance to the
correctly rounded result.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from opcheck import tolerances as tol
from opcheck.arrays import Array, flat_of, round_to, spacing_of

__all__ = ["NO_SINGLE_CALL", "Drift", "Shift", "shift_of"]

MIN_CALLS = 100
"""Of one op and dtype, wherever it was called."""
MIN_MODULE_CALLS = 50
"""Of one op and dtype in one module and phase."""
LIMIT = 0.1
"""Mean shift in spacings; x1.001 in bf16 shifts by 0.13 to 0.26. Measured on training steps in
bf16, autocast and fp16 (GPT-2, Llama, ResNet, MiniLM, MLP): below 0.0005 for products,
convolutions and their gradients, 0.02 for attention and powers, 0.06 for a batch norm whose
statistics are kept in bf16."""
SIGMAS = 6.0
"""So many standard errors, from the spread of the calls, must it be away from half the limit."""
SAMPLE = 2048
"""Elements of a result that are looked at for this."""


@dataclass(frozen=True, slots=True)
class Shift:
    """Mean signed distance to the correctly rounded result, away from zero is positive."""

    mean: float
    """In spacings."""
    dtype: str


def shift_of(actual: Array, expected: Array, *, dtype: str) -> Shift | None:
    """The shift of one 16-bit result; None where it is no evidence.

    Args:
        actual: the result, as float32 values.
        expected: float64 golden, or a same-dtype result as float32 values.
        dtype: "float16" or "bfloat16".
    """
    if dtype not in tol.HALF_DTYPES or actual.size < tol.MIN_ELEMENTS or actual.dtype.kind == "c":
        return None
    step = max(1, actual.size // SAMPLE)
    got, want = flat_of(actual)[::step], flat_of(expected)[::step]
    with np.errstate(all="ignore"):
        rounded = round_to(want.astype(np.float64, copy=False), dtype)
        if np.array_equal(got, rounded):
            mean = 0.0
        else:
            wide = rounded.astype(np.float64)
            error = (got - wide) / spacing_of(wide.copy(), dtype)
            error = np.where(np.isfinite(error), error, 0.0)
            error = np.clip(error, -tol.SHIFT_CLAMP, tol.SHIFT_CLAMP)
            mean = float(np.mean(error * np.where(wide < 0.0, -1.0, 1.0)))
    if len(np.unique(rounded[: tol.DISTINCT_SAMPLE])) < tol.MIN_DISTINCT:
        return None
    return Shift(mean, dtype)


class _Sum:
    __slots__ = ("calls", "is_reported", "square", "total")

    def __init__(self) -> None:
        self.calls = 0
        self.total = 0.0
        self.square = 0.0
        self.is_reported = False

    def add(self, mean: float) -> None:
        self.calls += 1
        self.total += mean
        self.square += mean * mean

    @property
    def mean(self) -> float:
        return self.total / max(self.calls, 1)

    @property
    def error(self) -> float:
        """Standard error of the mean."""
        variance = max(0.0, self.square / self.calls - self.mean**2)
        return math.sqrt(variance / self.calls)


@dataclass(frozen=True, slots=True)
class Found:
    """A shift that many calls share."""

    mean: float
    reason: str


NO_SINGLE_CALL = "no single call shows it"
"""Ends the reason of such a failure."""


class Drift:
    """Adds up the shifts of a session."""

    def __init__(self) -> None:
        self._sums: dict[Hashable, _Sum] = {}

    def add(self, op: str, module: str, phase: str, shift: Shift) -> Found | None:
        """One call more; what it tips over, once for a module, and once for all others."""
        dtype = shift.dtype
        here = self._sums.setdefault((op, dtype, module, phase), _Sum())
        if here.is_reported:
            return None
        found = self._tipped(here, shift, MIN_MODULE_CALLS, f"{op} in {dtype} in this module")
        if found is not None:
            return found
        everywhere = self._sums.setdefault((op, dtype), _Sum())
        return self._tipped(everywhere, shift, MIN_CALLS, f"{op} in {dtype}")

    @staticmethod
    def _tipped(known: _Sum, shift: Shift, least: int, whose: str) -> Found | None:
        known.add(shift.mean)
        if known.is_reported or known.calls < least:
            return None
        if abs(known.mean) <= max(LIMIT, LIMIT / 2 + SIGMAS * known.error):
            return None
        known.is_reported = True
        return Found(
            known.mean,
            f"over {known.calls} calls of {whose} results are shifted by {known.mean:.3g} spacings"
            f" on average, allowed {LIMIT:g}; {NO_SINGLE_CALL}",
        )
