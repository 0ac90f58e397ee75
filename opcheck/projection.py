"""A large product checked without computing it again: Freivalds' test, cut into column blocks.

For `y = a @ b` and a random vector r, `y r` and `a (b r)` are equal up to rounding, and cost a pass
over the three matrices. r is cut into column blocks, so that the residual

    residual[i, j] = sum over the columns n of block j: (y[i, n] - (a @ b)[i, n]) r[n]

is a matrix of one row for each row of y, and says where an error is. Every element of y has a part
in it. All arithmetic is on the CPU, chunk by chunk, whatever the sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from opcheck.arrays import Array
from opcheck.flushing import nearer
from opcheck.passes import Blocks, Scratch, float32_is_exact, sums_and_norms, sums_and_rows, times
from opcheck.tensor_kinds import HALF

__all__ = ["Product", "Projection", "Residual", "project", "random_signs", "residual_of"]

NUM_BLOCKS = 16
SMALLEST_BLOCK = 16
_ROWS_AT_A_TIME = 1 << 20
"""Elements of rows that are widened to float64 at a time."""

_EPS = {
    torch.float16: 2.0**-10,
    torch.bfloat16: 2.0**-7,
    torch.float32: 2.0**-23,
    torch.float64: 2.0**-52,
}

SUSPECT = 6.0
"""A residual of so many times its rounding scale is looked at: no correct one of 2,530 was."""
_LEAST_SUSPECT, _OF_NOISE = 3.0, 5.5
"""16-bit results round by a known amount, so that one of so many times the noise of all residuals
is looked at too. Of 65,536 correct ones one in 400 products has such a residual, and what is looked
at is judged by the rule of any product."""
FACTOR_RMS = 0.8
"""Rounding of one product whose factors were rounded, in units of a factor's largest error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """`alpha * a @ b + beta * added = y`, two dimensions each, of any strides, on any device."""

    a: Tensor
    """[M, K]"""
    b: Tensor
    """[K, N]"""
    y: Tensor
    """[M, N]"""
    added: Tensor | None = None
    """Broadcast to [M, N]."""
    alpha: float = 1.0
    beta: float = 1.0
    factor_step: float = 0.0
    """Largest relative error to which float32 inputs may have been rounded first (TF32: 2^-11)."""
    other_hardware: bool = False
    """Not a CPU: accumulators may truncate, and partial sums may be kept in 16 bit."""
    lost: float = 0.0
    """What an element may lose in sums that are flushed to zero."""

    @property
    def depth(self) -> int:
        """K, the terms summed for one element."""
        return int(self.a.shape[1])

    @property
    def is_half(self) -> bool:
        """The result has 16 bits."""
        return self.y.dtype in HALF

    @property
    def working_dtype(self) -> torch.dtype:
        """float32 suffices for all but float64, where the CPU's own products are of float32."""
        if self.y.dtype is torch.float64 or not float32_is_exact():
            return torch.float64
        return torch.float32

    @property
    def golden_dtype(self) -> torch.dtype:
        """That rows are computed in: float32 is golden enough for 16 bits."""
        return self.working_dtype if self.is_half else torch.float64

    def rows_of_a(self, rows: Array) -> Tensor:
        """Some rows of the first factor, copied to the CPU."""
        index = torch.from_numpy(rows).to(self.a.device)
        return self.a.index_select(0, index).to("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """What a projection found; one row for each row of y, one column for each block."""

    z: Array
    """[rows, blocks] |residual| in units of its rounding scale; Inf where it is not finite."""
    strict: Array
    """The same, partial sums in 16 bit aside: what is above `suspect_above` here is looked at."""
    suspect_above: float
    block: int
    """Columns in a block; the last one may have fewer."""
    scale_error: float
    """Relative error that all elements share: 0.01 for a result that is 1% too large."""
    scale_sigma: float
    """Standard deviation of that estimate for a correct result."""
    agreement: float
    """Share of the sums that are too large in size less that of those too small; a correct result
    is near 0, and so is one with a fault somewhere, not one that is off by a factor."""
    num_nonfinite: int

    @property
    def suspects(self) -> Array:
        """[rows, blocks] which residuals are looked at."""
        found: Array = ~(self.strict <= self.suspect_above)
        return found

    @property
    def worst(self) -> tuple[int, int]:
        """Row and block of the largest residual; a finite one where there is one."""
        finite = np.where(np.isfinite(self.strict), self.strict, -1.0)
        row, block = np.unravel_index(int(np.argmax(finite)), self.z.shape)
        return int(row), int(block)

    @property
    def largest(self) -> float:
        """Of the finite ones."""
        return max(0.0, float(np.max(self.z, initial=0.0, where=np.isfinite(self.z))))

    @property
    def rms(self) -> float:
        """Of the finite ones; below 1 for a correct result."""
        finite = self.z[np.isfinite(self.z)]
        return float(np.sqrt(np.mean(np.square(finite)))) if finite.size else 0.0

    def worst_rows(self, count: int) -> Array:
        """Rows with the largest residuals, not finite ones first."""
        return np.argsort(-self.strict.max(axis=1), kind="stable")[:count]


@dataclass(frozen=True, slots=True)
class Projection:
    """A residual, and what was computed along with it."""

    residual: Residual
    rows: Tensor
    """[R, N] the rows that b was multiplied by, times b."""


def random_signs(count: int, rng: np.random.Generator, dtype: torch.dtype) -> Tensor:
    """+-k/8 with k from 4 to 12.

    Plain signs miss half of all swapped columns, numbers near zero miss single elements; of these
    a swap hides in 6%. They have 4 bits, so that products with 16-bit values are exact.
    """
    values = (rng.integers(0, 2, count) * 2 - 1) * rng.integers(4, 13, count) / 8.0
    return torch.from_numpy(values).to(dtype)


_LARGEST_SIGN = 1.5


# ---- the residual -------------------------------------------------------------------------------


def project(
    product: Product,
    rng: np.random.Generator,
    *,
    left: Tensor | None = None,
    scratch: Scratch | None = None,
) -> Projection:
    """Project a product on one random vector, block by block.

    Args:
        product: of any size.
        rng: draws the vector.
        left: [R, K] on the CPU, further rows that b is multiplied by while it is read.
        scratch: memory of earlier passes.
    """
    scratch = scratch or Scratch()
    columns, dtype = product.b.shape[1], product.working_dtype
    width = max(SMALLEST_BLOCK, -(-columns // NUM_BLOCKS))
    blocks = Blocks(random_signs(columns, rng, dtype), width)
    if left is None:
        left = torch.empty(0, product.depth, dtype=dtype)
    of_b, rows = sums_and_rows(product.b, blocks, left, scratch)
    of_y, norms = sums_and_norms(product.y, blocks, scratch)
    expected = _array(times(product.a, of_b, scratch)) * product.alpha
    square = np.square(_array(norms))
    if product.added is not None:
        added = product.added.expand(product.y.shape)
        one = added[:1] if added.stride(0) == 0 else added
        of_added, added_norms = sums_and_norms(one, blocks, scratch)
        expected = expected + product.beta * _array(of_added)
        square = square + product.beta**2 * np.square(_array(added_norms))
    actual = _array(of_y)
    if product.lost:  # of so many elements, times their factors
        actual = nearer(actual, expected, expected, _LARGEST_SIGN * width * product.lost)
    residual = residual_of(
        actual, expected, square,
        inputs=lambda rows: product.alpha**2 * _input_squares(product, rows, blocks, scratch),
        dtype=product.y.dtype, input_dtype=product.a.dtype, depth=product.depth,
        factor_step=product.factor_step, other_hardware=product.other_hardware, block=width,
    )  # fmt: skip
    return Projection(residual, rows)


def _array(tensor: Tensor) -> Array:
    array: Array = np.from_dlpack(tensor.to(torch.float64))  # .numpy() would forbid a resize
    return array


def _input_squares(product: Product, rows: Array, blocks: Blocks, scratch: Scratch) -> Array:
    """What can cancel in a row, squares of a times those of the block of b. [rows, blocks]."""
    plain = replace(blocks, signs=torch.ones_like(blocks.signs))
    _, norms = sums_and_norms(product.b, plain, scratch)
    squares = np.square(_array(norms))
    found = np.empty((rows.size, blocks.count))
    step = max(1, _ROWS_AT_A_TIME // max(product.depth, 1))
    for start in range(0, rows.size, step):
        a = _array(product.rows_of_a(rows[start : start + step]))
        found[start : start + step] = np.square(a) @ squares
    return found


def residual_of(
    actual: Array,
    expected: Array,
    square: Array,
    *,
    inputs: Callable[[Array], Array] | None,
    dtype: torch.dtype,
    input_dtype: torch.dtype,
    depth: float,
    factor_step: float,
    other_hardware: bool,
    block: int,
) -> Residual:
    """Residuals in units of what rounding explains.

    Args:
        actual: sums of the result, float64.
        expected: the same sums of the right result.
        square: sums of squares of the terms of `actual`.
        inputs: rows -> sums of squares of the products that may have cancelled; asked only for
            rows that are suspect without.
        dtype: of the result.
        input_dtype: of the factors.
        depth: terms summed for one element.
        factor_step: see `Product`.
        other_hardware: see `Product`.
        block: columns in a block.
    """
    half = dtype in HALF
    unit = 2.0**-53 if dtype is torch.float64 else 2.0**-24
    summing = 9.0 * unit**2 * (depth / 6.0 + 8.0)
    if other_hardware:  # accumulators of tensor cores truncate: 2^-24 for every 16 terms
        summing += (depth / 16.0 * unit) ** 2
    of_factors = 0.0 if half else (FACTOR_RMS * factor_step) ** 2
    rounding = (_EPS[dtype] / 4.0) ** 2 if half else of_factors
    tiny = (torch.finfo(dtype).smallest_normal * _EPS[dtype] * 16.0) ** 2
    with np.errstate(all="ignore"):
        allowed = square * (summing + rounding)
        allowed += tiny
        error = actual - expected
        squared = error * error
        strict = np.sqrt(squared / allowed)
        bad = ~np.isfinite(squared)
        num_bad = int(np.count_nonzero(bad))
        above = _suspect_above(strict, bad if num_bad else None, half=half)
        hot = np.flatnonzero(((strict > above) & ~bad).any(axis=1))
        z = strict
        if hot.size and inputs is not None:
            z = strict.copy()
            of_inputs = inputs(hot)
            allowed[hot] += (summing + of_factors) * of_inputs
            strict[hot] = np.sqrt(squared[hot] / allowed[hot])
            if half:
                # partial sums kept in 16 bit round at the size of what is summed
                share = 0.5 if other_hardware else 0.25
                allowed[hot] += (share * _EPS[input_dtype]) ** 2 * of_inputs
            z[hot] = np.sqrt(squared[hot] / allowed[hot])
        if num_bad:
            z, strict = (np.where(bad, math.inf, item) for item in (z, strict))
            allowed = np.where(bad, math.inf, allowed)
            error, expected = (np.where(bad, 0.0, item) for item in (error, expected))
        weighted = expected / allowed
        power = float(np.vdot(expected, weighted))
        shared = float(np.vdot(error, weighted))
        same = error * expected
        agreement = (np.count_nonzero(same > 0.0) - np.count_nonzero(same < 0.0)) / same.size
    return Residual(
        z=z,
        strict=strict,
        suspect_above=above,
        block=block,
        scale_error=shared / power if power > 0.0 else 0.0,
        scale_sigma=1.0 / math.sqrt(power) if power > 0.0 else 0.0,
        agreement=agreement,
        num_nonfinite=num_bad,
    )


def _suspect_above(z: Array, bad: Array | None, *, half: bool) -> float:
    if not half:
        return SUSPECT
    finite = z if bad is None else z[~bad]
    noise = math.sqrt(float(np.vdot(finite, finite)) / finite.size) if finite.size else 0.0
    return min(SUSPECT, max(_LEAST_SUSPECT, _OF_NOISE * noise))
