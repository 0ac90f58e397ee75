"""A large product checked without computing it again: Freivalds' test, cut into column blocks.

For `y = a @ b` and a random vector r, `y r` and `a (b r)` are equal up to rounding, and cost a pass
over the three matrices. r is cut into column blocks, so that the residual

    residual[i, j] = sum over the columns n of block j: (y[i, n] - (a @ b)[i, n]) r[n]

is a matrix of one row for each row of y, and says where an error is. Every element of y has a part
in it. All arithmetic is on the CPU, chunk by chunk: 4 MiB to 8 MiB of buffers, whatever the sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from opcheck.arrays import Array

__all__ = ["Product", "Residual", "product_rows", "project", "random_signs", "residual_of"]

NUM_BLOCKS = 16
SMALLEST_BLOCK = 16
CHUNK = 1 << 20
"""Elements of a buffer: 8 MiB in float64, 4 MiB in float32. With a quarter of that the passes over
a 4096 x 4096 matrix took twice as long, in calls."""

_EPS = {
    torch.float16: 2.0**-10,
    torch.bfloat16: 2.0**-7,
    torch.float32: 2.0**-23,
    torch.float64: 2.0**-52,
}
_HALF = (torch.float16, torch.bfloat16)

SUSPECT = 6.0
"""A residual of so many times its rounding scale is looked at: no correct one of 2,530 was."""
TF32_RMS = 0.4 * 2.0**-10
"""Relative rounding of TF32 inputs, as a share of one product's typical size."""


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
    tf32: bool = False
    """The inputs may have been rounded to TF32."""
    other_hardware: bool = False
    """Not a CPU: accumulators may truncate, and partial sums may be kept in 16 bit."""

    @property
    def depth(self) -> int:
        """K, the terms summed for one element."""
        return int(self.a.shape[1])

    @property
    def is_half(self) -> bool:
        """The result has 16 bits."""
        return self.y.dtype in _HALF

    @property
    def working_dtype(self) -> torch.dtype:
        """float32 suffices for all but float64."""
        return torch.float64 if self.y.dtype is torch.float64 else torch.float32

    @property
    def has_tf32(self) -> bool:
        """TF32 is allowed and these inputs can be rounded to it."""
        return self.tf32 and self.a.dtype is torch.float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """What a projection found; one row for each row of y, one column for each block."""

    z: Array
    """[rows, blocks] |residual| in units of its rounding scale; Inf where it is not finite."""
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
    def worst(self) -> tuple[int, int]:
        """Row and block of the largest residual; a finite one where there is one."""
        finite = np.where(np.isfinite(self.z), self.z, -1.0)
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
        return np.argsort(-self.z.max(axis=1), kind="stable")[:count]


def random_signs(count: int, rng: np.random.Generator, dtype: torch.dtype) -> Tensor:
    """+-k/8 with k from 4 to 12.

    Plain signs miss half of all swapped columns, numbers near zero miss single elements; of these
    a swap hides in 6%. They have 4 bits, so that products with 16-bit values are exact.
    """
    values = (rng.integers(0, 2, count) * 2 - 1) * rng.integers(4, 13, count) / 8.0
    return torch.from_numpy(values).to(dtype)


# ---- passes over matrices, chunk by chunk -------------------------------------------------------


class _Buffer:
    """Reused memory on the CPU that chunks are converted into, whatever device they are on."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._flat = torch.empty(CHUNK, dtype=dtype)

    def of(self, chunk: Tensor) -> Tensor:
        """The chunk in the dtype of the buffer."""
        if chunk.numel() > self._flat.numel():
            self._flat = torch.empty(chunk.numel(), dtype=self._flat.dtype)
        view = self._flat[: chunk.numel()].view(chunk.shape)
        return view.copy_(chunk)


def _chunks(tensor: Tensor, rows: int) -> Iterator[tuple[int, Tensor]]:
    for start in range(0, tensor.shape[0], rows):
        yield start, tensor[start : start + rows]


def _is_row_major(tensor: Tensor) -> bool:
    return tensor.shape[-1] == 1 or tensor.stride(-1) == 1


def _block_sums(
    x: Tensor, signs: Tensor, block: int, buffer: _Buffer, *, squares: bool
) -> tuple[Tensor, Tensor]:
    """`x * signs` summed over each block of columns, and the norms of those blocks."""
    rows, columns = x.shape
    count = -(-columns // block)
    sums = torch.zeros(rows, count, dtype=signs.dtype)
    norms = torch.zeros(rows, count, dtype=signs.dtype)
    if _is_row_major(x):
        whole = columns // block
        for start, chunk in _chunks(x, max(1, CHUNK // columns)):
            values = buffer.of(chunk).mul_(signs)
            stop = start + values.shape[0]
            parts = [(values[:, : whole * block].unflatten(1, (whole, block)), slice(0, whole))]
            if whole < count:
                parts.append((values[:, whole * block :].unsqueeze(1), slice(whole, count)))
            for part, place in parts:
                sums[start:stop, place] = part.sum(-1)
                if squares:
                    norms[start:stop, place] = torch.linalg.vector_norm(part, dim=-1)
        return sums, norms
    step = math.gcd(max(1, min(block, CHUNK // rows)), block)  # never across a border
    for start, chunk in _chunks(x.t(), step):
        values, number = buffer.of(chunk), start // block
        sums[:, number] += signs[start : start + values.shape[0]] @ values
        if squares:
            values.mul_(signs[start : start + values.shape[0], None])
            norms[:, number] += values.square_().sum(0)
    return sums, norms.sqrt_()


def _times(a: Tensor, z: Tensor, buffer: _Buffer) -> Tensor:
    """`a @ z` for a narrow z."""
    if a.dtype is z.dtype and a.device.type == "cpu" and min(a.stride()) > 0:
        return a @ z
    rows, depth = a.shape
    found = torch.zeros(rows, z.shape[1], dtype=z.dtype)
    if _is_row_major(a):
        for start, chunk in _chunks(a, max(1, CHUNK // depth)):
            found[start : start + chunk.shape[0]] = buffer.of(chunk) @ z
    else:
        for start, chunk in _chunks(a.t(), max(1, CHUNK // rows)):
            found.addmm_(buffer.of(chunk).t(), z[start : start + chunk.shape[0]])
    return found


def product_rows(
    product: Product, rows: Array, dtype: torch.dtype, *, squared: bool = False
) -> Tensor:
    """Rows of `a @ b` in `dtype`; with `squared`, of the elementwise squares."""
    index = torch.from_numpy(rows).to(product.a.device)
    a = product.a.index_select(0, index).to("cpu").to(dtype)
    b, buffer = product.b, _Buffer(dtype)
    if squared:
        a = a.square()
    depth, columns = b.shape
    if _is_row_major(b):
        found = torch.zeros(len(rows), columns, dtype=dtype)
        for start, chunk in _chunks(b, max(1, CHUNK // columns)):
            values = buffer.of(chunk)
            values = values.square_() if squared else values
            found.addmm_(a[:, start : start + values.shape[0]], values)
        return found
    found = torch.empty(len(rows), columns, dtype=dtype)
    for start, chunk in _chunks(b.t(), max(1, CHUNK // depth)):
        values = buffer.of(chunk)
        values = values.square_() if squared else values
        found[:, start : start + values.shape[0]] = a @ values.t()
    return found


# ---- the residual -------------------------------------------------------------------------------


def project(product: Product, rng: np.random.Generator) -> Residual:
    """Project a product on one random vector, block by block."""
    columns = product.b.shape[1]
    block = max(SMALLEST_BLOCK, -(-columns // NUM_BLOCKS))
    dtype = product.working_dtype
    signs, buffer = random_signs(columns, rng, dtype), _Buffer(dtype)
    of_b, _ = _block_sums(product.b, signs, block, buffer, squares=False)
    of_y, norms = _block_sums(product.y, signs, block, buffer, squares=True)
    expected = _array(_times(product.a, of_b, buffer)) * product.alpha
    square = np.square(_array(norms))
    if product.added is not None:
        added = product.added.expand(product.y.shape)
        one = added[:1] if added.stride(0) == 0 else added
        of_added, added_norms = _block_sums(one, signs, block, buffer, squares=True)
        expected = expected + product.beta * _array(of_added)
        square = square + product.beta**2 * np.square(_array(added_norms))
    return residual_of(
        _array(of_y), expected, square,
        inputs=lambda rows: product.alpha**2 * _input_squares(product, rows, block, buffer),
        dtype=product.y.dtype, input_dtype=product.a.dtype, depth=product.depth,
        tf32=product.has_tf32, other_hardware=product.other_hardware, block=block,
    )  # fmt: skip


def _array(tensor: Tensor) -> Array:
    array: Array = np.from_dlpack(tensor.to(torch.float64))  # .numpy() would forbid a resize
    return array


def _input_squares(product: Product, rows: Array, block: int, buffer: _Buffer) -> Array:
    """What can cancel in a row, squares of a times those of the block of b. [rows, blocks]."""
    columns = product.b.shape[1]
    signs = torch.ones(columns, dtype=product.working_dtype)
    _, norms = _block_sums(product.b, signs, block, buffer, squares=True)
    index = torch.from_numpy(rows).to(product.a.device)
    a = _array(product.a.index_select(0, index).to("cpu"))
    found: Array = np.square(a) @ np.square(_array(norms))
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
    tf32: bool,
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
        tf32: the factors may have been rounded to TF32.
        other_hardware: see `Product`.
        block: columns in a block.
    """
    half = dtype in _HALF
    unit = 2.0**-53 if dtype is torch.float64 else 2.0**-24
    summing = 9.0 * unit**2 * (depth / 6.0 + 8.0)
    if other_hardware:  # accumulators of tensor cores truncate: 2^-24 for every 16 terms
        summing += (depth / 16.0 * unit) ** 2
    rounding = (_EPS[dtype] / 4.0) ** 2 if half else (TF32_RMS**2 if tf32 else 0.0)
    tiny = (torch.finfo(dtype).smallest_normal * _EPS[dtype] * 16.0) ** 2
    with np.errstate(all="ignore"):
        allowed = (summing + rounding) * square + tiny
        error = np.square(actual - expected)
        bad = ~np.isfinite(error)
        hot = np.flatnonzero(((error > SUSPECT**2 * allowed) & ~bad).any(axis=1))
        if hot.size and inputs is not None:
            of_inputs = summing + (TF32_RMS**2 if tf32 else 0.0)
            if half:
                # partial sums kept in 16 bit round at the size of what is summed
                share = 0.5 if other_hardware else 0.25
                of_inputs += (share * _EPS[input_dtype]) ** 2
            allowed[hot] += of_inputs * inputs(hot)
        z = np.where(bad, math.inf, np.sqrt(error / allowed))
        weight = np.where(bad, 0.0, 1.0 / allowed)
        size = np.where(bad, 0.0, expected)
        power = float(np.sum(size * size * weight))
        sides = np.sign(np.where(bad, 0.0, (actual - expected) * expected))
        shared = float(np.sum(np.where(bad, 0.0, actual - expected) * size * weight))
    return Residual(
        z=z,
        block=block,
        scale_error=shared / power if power > 0.0 else 0.0,
        scale_sigma=1.0 / math.sqrt(power) if power > 0.0 else 0.0,
        agreement=float(np.mean(sides)),
        num_nonfinite=int(np.count_nonzero(bad)),
    )
