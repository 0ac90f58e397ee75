"""Is what a rank got of a collective what the ranks gave? By digests, without torch.

Copies are compared by a hash of all their bits. Sums are compared in float64, in blocks of elements
with random signs, so that every element has a part in the verdict however large the tensor: by
Hoeffding's inequality the signed sum of n errors of at most e each exceeds 8 e sqrt(n) once in 1e13
times. What an element may be off by is what any order of additions in its dtype may cost.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["SUMS", "Digest", "Mismatch", "compare_sums", "digest"]

SUMS = 4096
"""Blocks of one tensor, unless told otherwise."""
_DEVIATIONS = 8.0
_SEED = 20_260_101

_ROUNDOFF = {
    "float64": 2.0**-53, "complex128": 2.0**-53, "float32": 2.0**-24, "complex64": 2.0**-24,
    "bfloat16": 2.0**-8, "float16": 2.0**-11,
}  # fmt: skip
"""Half the distance of 1 to the next number (IEEE 754; bfloat16 has 8 bits of precision)."""
_LARGEST = {
    "float64": np.finfo(np.float64).max, "complex128": np.finfo(np.float64).max,
    "float32": 3.4028234663852886e38, "complex64": 3.4028234663852886e38,
    "bfloat16": 3.3895313892515355e38, "float16": 65504.0,
}  # fmt: skip
_SMALLEST = {
    "float64": 2.0**-1074, "complex128": 2.0**-1074, "float32": 2.0**-149,
    "complex64": 2.0**-149, "bfloat16": 2.0**-133, "float16": 2.0**-24,
}  # fmt: skip

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Digest:
    """What is told of one tensor.

    Attributes:
        dtype: without `torch.`.
        numel: elements.
        bits: hash of all bytes.
        block: elements of one sum, 1 where the sums are the elements.
        sums: of blocks, with signs; float64, or int64 of integers (modulo 2^64).
        squares: sums of the squares of blocks; empty for integers and blocks of one element.
    """

    dtype: str
    numel: int
    bits: str
    block: int
    sums: Array
    squares: Array

    def to_json(self) -> dict[str, Any]:
        """As JSON can hold it; numbers bit for bit."""
        return {
            "dtype": self.dtype, "numel": self.numel, "bits": self.bits, "block": self.block,
            "sums": _packed(self.sums), "squares": _packed(self.squares),
        }  # fmt: skip

    @classmethod
    def of_json(cls, data: dict[str, Any]) -> Digest:
        """What `to_json` gave."""
        return cls(
            data["dtype"], data["numel"], data["bits"], data["block"],
            _unpacked(data["sums"]), _unpacked(data["squares"]),
        )  # fmt: skip


@dataclass(frozen=True)
class Mismatch:
    """The worst sum of a tensor: over elements `start` to `stop`, exclusive."""

    start: int
    stop: int
    actual: float
    expected: float
    allowed: float
    reduction: str

    def __str__(self) -> str:
        if self.stop - self.start == 1:
            what = f"element {self.start} is"
        else:
            what = f"the signed sum of elements {self.start} to {self.stop - 1} is"
        return (
            f"{what} {self.actual:.9g}, the {self.reduction} over the ranks in float64 is"
            f" {self.expected:.9g}, allowed error {self.allowed:.3g}"
        )


def digest(
    raw: bytes, values: Array, dtype: str, *, numel: int, max_sums: int, with_sums: bool
) -> Digest:
    """Digest of one tensor.

    Args:
        raw: all its bytes, in order.
        values: flat; float64 (the components of complex numbers), or int64.
        dtype: without `torch.`.
        numel: elements, also where there are no `values`.
        max_sums: blocks at most.
        with_sums: False where the bits alone will be compared.
    """
    bits = hashlib.blake2b(raw, digest_size=16).hexdigest()
    empty = np.empty(0, values.dtype)
    if not with_sums or not values.size:
        return Digest(dtype, numel, bits, 1, empty, np.empty(0))
    block = math.ceil(values.size / max_sums)
    if block == 1:
        return Digest(dtype, values.size, bits, 1, values.copy(), np.empty(0))
    starts = np.arange(0, values.size, block)
    squares = np.empty(0)
    with np.errstate(all="ignore"):
        sums = np.add.reduceat(values * _signs(values.size, values.dtype), starts)
        if values.dtype == np.float64:
            squares = np.add.reduceat(values * values, starts)
    return Digest(dtype, values.size, bits, block, sums, squares)


def _signs(size: int, dtype: Any) -> Array:
    """Plus and minus one, the same on every rank."""
    chosen = np.random.default_rng([_SEED, size]).integers(0, 2, size, dtype=np.int8)
    signs: Array = (chosen * 2 - 1).astype(dtype)
    return signs


def compare_sums(
    given: Sequence[Digest], got: Digest, reduction: str
) -> tuple[Mismatch | None, int]:
    """The worst block of `got` that is not the reduction of `given`, and blocks that say nothing.

    Args:
        given: of each rank, as large as `got`.
        got: of one rank.
        reduction: "sum" or "avg"; "min" and "max" are exact and need blocks of one element.
    """
    if not got.numel:
        return None, 0
    if reduction in ("min", "max"):
        return _compare_extremes(given, got, reduction)
    if got.sums.dtype == np.int64:
        return _compare_integers(given, got), 0
    return _compare_floats(given, got, reduction)


def _compare_floats(
    given: Sequence[Digest], got: Digest, reduction: str
) -> tuple[Mismatch | None, int]:
    num_ranks = len(given)
    with np.errstate(all="ignore"):
        expected = np.sum([item.sums for item in given], axis=0)
        spread = _spread(given)
        # every rank's addition, and a division or two for an average, each round once
        steps = (num_ranks + 1) * 1.01
        allowed = steps * _ROUNDOFF[got.dtype] * spread
        if got.block > 1:
            allowed *= _DEVIATIONS
        allowed += steps * got.block * _SMALLEST[got.dtype]
        # what our own float64 sums round
        allowed += 2.0**-53 * (got.block + num_ranks) * math.sqrt(got.block) * spread
        if reduction == "avg":
            expected, allowed = expected / num_ranks, allowed / num_ranks
        error = np.absolute(got.sums - expected)
    finite = np.isfinite(expected) & np.isfinite(got.sums)
    wrong = finite & (error > allowed)  # never where a square of 1e155 made `allowed` infinite
    unsaid = finite & ~np.isfinite(allowed)
    if got.block == 1:
        wrong |= ~finite & ~_same_class(got, expected, spread)
    else:
        unsaid |= ~np.isfinite(expected)
        wrong |= ~finite & np.isfinite(expected) & (spread < 0.99 * _LARGEST[got.dtype])
    num_unsaid = int(np.count_nonzero(unsaid))
    if not wrong.any():
        return None, num_unsaid
    with np.errstate(all="ignore"):
        ratio = np.where(wrong, np.where(finite, error / allowed, np.inf), -1.0)
    return _mismatch(got, int(np.argmax(ratio)), expected, allowed, reduction), num_unsaid


def _spread(given: Sequence[Digest]) -> Array:
    """At least the root of the sum, over the elements of a block, of (sum over ranks of |x|)^2."""
    block = given[0].block
    if block == 1:
        magnitudes: Array = np.stack([np.absolute(item.sums) for item in given]).sum(axis=0)
        return magnitudes
    squares = len(given) * np.stack([item.squares for item in given]).sum(axis=0)
    # squares of numbers below 1e-150 are lost
    spread: Array = np.sqrt(squares) + 1e-150 * math.sqrt(block * len(given))
    return spread


def _same_class(got: Digest, expected: Array, spread: Array) -> Array:
    """NaN for NaN, Inf for Inf of its sign, or Inf where the sum leaves the dtype."""
    same: Array = np.isnan(got.sums) & np.isnan(expected)
    same |= got.sums == expected
    overflows = np.isfinite(expected) & (spread >= 0.99 * _LARGEST[got.dtype])
    same |= overflows & ~np.isfinite(got.sums)
    return same


def _compare_integers(given: Sequence[Digest], got: Digest) -> Mismatch | None:
    """Modulo the size of the dtype, as the additions themselves."""
    with np.errstate(all="ignore"):
        expected: Array = np.stack([item.sums for item in given]).sum(axis=0)
        bits = int("".join(filter(str.isdigit, got.dtype)))
        off = (got.sums - expected) & np.int64((1 << bits) - 1 if bits < 64 else -1)
    if not off.any():
        return None
    return _mismatch(got, int(np.argmax(off != 0)), expected, np.zeros(len(off)), "sum")


def _compare_extremes(
    given: Sequence[Digest], got: Digest, reduction: str
) -> tuple[Mismatch | None, int]:
    if got.block > 1:
        return None, len(got.sums)
    values = np.stack([item.sums for item in given])
    expected = values.min(axis=0) if reduction == "min" else values.max(axis=0)
    wrong = ~((got.sums == expected) | np.isnan(values).any(axis=0))
    if not wrong.any():
        return None, 0
    return _mismatch(got, int(np.argmax(wrong)), expected, np.zeros(len(wrong)), reduction), 0


def _mismatch(got: Digest, place: int, expected: Array, allowed: Array, reduction: str) -> Mismatch:
    start = place * got.block
    return Mismatch(
        start, min(start + got.block, got.numel),
        float(got.sums[place]), float(expected[place]), float(allowed[place]),
        reduction,
    )  # fmt: skip


def _packed(values: Array) -> list[str]:
    return [values.dtype.str, base64.b64encode(values.tobytes()).decode("ascii")]


def _unpacked(packed: list[str]) -> Array:
    dtype, text = packed
    return np.frombuffer(base64.b64decode(text), dtype=np.dtype(dtype))
