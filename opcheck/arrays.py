"""What the pass/fail rule knows about arrays: spacings, rounding, classes, pairs.

Arrays are flat float64 or float32; complex ones are flat arrays of their components. No torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from opcheck import tolerances as tol

__all__ = [
    "CHUNK",
    "HUGE_SQUARE",
    "TINY_SQUARE",
    "Array",
    "Pair",
    "absolute_difference",
    "classes",
    "components",
    "fill_of",
    "flat_of",
    "pair_of",
    "rms",
    "rms_apart",
    "round_to",
    "size_beside_fill",
    "spacing_of",
    "typical_size",
    "usual_size",
]

Array: TypeAlias = npt.NDArray[Any]

CHUNK = 16384
"""Elements a pass works on: two float64 buffers of 128 KiB stay in the cache of one core."""
_EXPONENT_BITS = np.int64(0x7FF0_0000_0000_0000)
TINY_SQUARE, HUGE_SQUARE = 1e-280, 1e300
"""A sum of squares between these is exact enough; beyond them values are scaled first."""


def rms(values: Array) -> float:
    """Root mean square in float64, scaled: neither 1e200 nor 1e-200 is lost. 0.0 if empty."""
    if not values.size:
        return 0.0
    values = values.astype(np.float64, copy=False)
    square = float(np.dot(values, values))
    if TINY_SQUARE < square < HUGE_SQUARE:
        return math.sqrt(square / values.size)
    top = float(np.maximum.reduce(np.absolute(values)))
    if not 0.0 < top < math.inf:
        return top
    scaled = values / top
    return top * math.sqrt(float(np.dot(scaled, scaled)) / values.size)


def typical_size(values: Array, size: float) -> float:
    """The rms, capped at a multiple of the (lower) median of what is not zero; 0.0 if all is.

    Args:
        values: flat.
        size: their rms, or that of more values of which these are some.
    """
    magnitude = np.absolute(values)
    nonzero = magnitude[magnitude > 0.0]
    if not nonzero.size:
        return 0.0
    middle = (nonzero.size - 1) // 2
    if np.count_nonzero(nonzero < size / tol.MAX_RMS_OVER_MEDIAN) <= middle:
        return size
    return min(size, tol.MAX_RMS_OVER_MEDIAN * float(np.partition(nonzero, middle)[middle]))


def fill_of(values: Array) -> Array | None:
    """Which elements are a huge value that many have, as in masked scores; None if none is.

    Args:
        values: flat.
    """
    magnitude = np.absolute(values)
    top = float(np.maximum.reduce(magnitude, initial=0.0))
    if not tol.SMALLEST_FILL <= top < math.inf:
        return None
    fill: Array = magnitude >= top * (1 - tol.FILL_SPREAD)
    num_filled = int(np.count_nonzero(fill))
    num_rest = int(np.count_nonzero(magnitude)) - num_filled
    if min(num_filled, num_rest) < tol.MIN_ELEMENTS or num_filled < tol.LEAST_FILL * num_rest:
        return None
    between = magnitude >= top / tol.FILL_OVER_REST
    return fill if np.count_nonzero(between) == num_filled else None


def size_beside_fill(values: Array, typical: float) -> float:
    """The typical size; where there is a fill value, that of what is left.

    Args:
        values: flat.
        typical: their `typical_size`.
    """
    fill = fill_of(values)
    if fill is None:
        return typical
    rest = values[~fill]
    return typical_size(rest, rms(rest))


def usual_size(values: Array) -> float:
    """The typical size beside a fill value, of values whose rms nobody has taken yet."""
    return size_beside_fill(values, typical_size(values, rms(values)))


def rms_apart(values: Array, fill: Array | None) -> Array | float:
    """rms; where there is a fill value, that of its elements at those, of the others at others."""
    return rms(values) if fill is None else np.where(fill, rms(values[fill]), rms(values[~fill]))


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


def classes(values: Array, overflow: float = math.inf) -> Array:
    """0 finite, 1 NaN, 2 +Inf, 3 -Inf, per element."""
    codes = np.isnan(values).astype(np.int8)
    codes += np.int8(2) * (values >= overflow)
    codes += np.int8(3) * (values <= -overflow)
    return codes


def flat_of(values: Array) -> Array:
    """All components in C order, one dimension; a copy only where strides ask for one."""
    if values.dtype.kind == "c":
        return np.ascontiguousarray(values).reshape(-1).view(values.real.dtype)
    if values.dtype == np.float16:
        return values.astype(np.float32).reshape(-1)
    return values.reshape(-1)


@dataclass(frozen=True, slots=True)
class Pair:
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


def pair_of(actual: Array, expected: Array) -> Pair:
    """Two results of one shape side by side.

    Raises:
        ValueError: the shapes differ, or one side alone is complex.
    """
    if actual.shape != expected.shape:
        raise ValueError(f"actual has shape {actual.shape}, expected {expected.shape}")
    is_complex = actual.dtype.kind == "c"
    if is_complex != (expected.dtype.kind == "c"):
        raise ValueError(f"actual is {actual.dtype}, expected {expected.dtype}")
    return Pair(flat_of(actual), flat_of(expected), actual.shape, is_complex)


def components(values: Array | float | None, pair: Pair, keep: Array | None) -> Any:
    """A named allowance or a perturbed golden as a flat array of the elements that are judged."""
    if values is None or isinstance(values, (float, int)):
        return values
    if values.shape != pair.shape:
        raise ValueError(f"expected shape {pair.shape}, got {values.shape}")
    flat = flat_of(values)
    if pair.is_complex and values.dtype.kind != "c":
        flat = np.repeat(flat, 2)
    return flat if keep is None else flat[keep]


def absolute_difference(pair: Pair) -> Array:
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
