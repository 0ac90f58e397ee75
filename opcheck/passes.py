"""Passes over large matrices, chunk by chunk on the CPU.

A chunk is converted once and serves everything that is wanted of it while it is in the cache. The
buffers of a pass take some MiB, whatever the sizes of the matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "Blocks",
    "Scratch",
    "borrowed_scratch",
    "float32_is_exact",
    "release_scratch",
    "rows_times",
    "sums_and_norms",
    "sums_and_rows",
    "times",
]

CHUNK = 1 << 23
"""Bytes of a converted chunk. A pass over a 4096 x 4096 matrix in bf16 takes 3% longer with half
of that, and a third longer with an eighth, in calls."""


def float32_is_exact() -> bool:
    """The CPU multiplies float32 as it is: nobody allowed it to round factors first."""
    backend: Any = torch.backends.mkldnn
    return backend.matmul.fp32_precision in ("ieee", "none")


@dataclass(frozen=True, slots=True)
class Blocks:
    """Columns under signs, in blocks of one width; the last one may have fewer."""

    signs: Tensor
    """[columns] on the CPU."""
    width: int

    @property
    def columns(self) -> int:
        """In all blocks."""
        return int(self.signs.shape[0])

    @property
    def count(self) -> int:
        """Blocks."""
        return -(-self.columns // self.width)

    def cut(self, values: Tensor) -> Iterator[tuple[Tensor, slice]]:
        """Views [rows, blocks, width] of [rows, columns], and which blocks they are."""
        whole = self.columns // self.width
        if whole:
            full = values[:, : whole * self.width]
            yield full.unflatten(1, (whole, self.width)), slice(0, whole)
        if whole < self.count:
            yield values[:, None, whole * self.width :], slice(whole, self.count)

    def pieces(self, most: int) -> Iterator[tuple[int, int, int]]:
        """(block, first, last + 1) of at most `most` columns each, none across a border."""
        for number in range(self.count):
            end = min(self.columns, (number + 1) * self.width)
            for start in range(number * self.width, end, most):
                yield number, start, min(end, start + most)


class Scratch:
    """Memory that chunks are converted into, whatever device they are on.

    One is for all passes over a product: to map it takes ten times as long as to fill it.
    """

    def __init__(self) -> None:
        self._flat: dict[torch.dtype, Tensor] = {}

    def buffer(self, columns: int, most: int, dtype: torch.dtype) -> Buffer:
        """Room for at most `most` rows of `columns`; the last buffer of this dtype is gone."""
        rows = max(1, min(most, CHUNK // (dtype.itemsize * max(columns, 1))))
        flat = self._flat.get(dtype)
        if flat is None or flat.numel() < rows * columns:
            flat = self._flat[dtype] = torch.empty(rows * columns, dtype=dtype)
        return Buffer(flat[: rows * columns].view(rows, columns))

    @property
    def num_bytes(self) -> int:
        """Held."""
        return sum(flat.nbytes for flat in self._flat.values())


_SPARE: list[Scratch] = []
"""Given back by checks that are over, until a session ends."""


@contextmanager
def borrowed_scratch() -> Iterator[Scratch]:
    """Memory of an earlier check, for this thread alone until the context ends."""
    try:
        scratch = _SPARE.pop()
    except IndexError:
        scratch = Scratch()
    yield scratch
    _SPARE.append(scratch)


def release_scratch() -> None:
    """Keep nothing of earlier checks; those that run have theirs."""
    _SPARE.clear()


@dataclass(frozen=True, slots=True)
class Buffer:
    """Room for the rows of a chunk."""

    values: Tensor

    @property
    def rows(self) -> int:
        """Of a chunk."""
        return int(self.values.shape[0])

    def of(self, chunk: Tensor) -> Tensor:
        """The chunk in the dtype of the buffer."""
        return self.values[: chunk.shape[0]].copy_(chunk)

    def signed(self, chunk: Tensor, signs: Tensor) -> Tensor:
        """The chunk times signs, in the dtype of the buffer."""
        values = self.values[: chunk.shape[0]]
        if chunk.dtype is values.dtype and chunk.device.type == "cpu":
            return torch.mul(chunk, signs, out=values)
        return values.copy_(chunk).mul_(signs)


def _chunks(tensor: Tensor, rows: int) -> Iterator[tuple[int, int, Tensor]]:
    """(first row, last row + 1, rows) one after the other."""
    start = 0
    for chunk in tensor.split(rows):
        yield start, start + chunk.shape[0], chunk
        start += chunk.shape[0]


def _is_row_major(tensor: Tensor) -> bool:
    return tensor.shape[-1] == 1 or tensor.stride(-1) == 1


def _is_ready(tensor: Tensor, dtype: torch.dtype) -> bool:
    """BLAS reads it where it lies."""
    if tensor.dtype is not dtype or tensor.device.type != "cpu":
        return False
    return 1 in tensor.stride() and min(tensor.stride()) > 0


def sums_and_norms(x: Tensor, blocks: Blocks, scratch: Scratch) -> tuple[Tensor, Tensor]:
    """Sums of `x * signs` over each block of columns, and the norms of those blocks.

    Args:
        x: [R, columns], of any strides, on any device.
        blocks: their signs have the dtype that is computed in.
        scratch: for the chunks.

    Returns:
        [R, blocks] each.
    """
    dtype, rows = blocks.signs.dtype, x.shape[0]
    if not _is_row_major(x):
        return _of_columns(x, blocks, scratch)
    sums = torch.empty(rows, blocks.count, dtype=dtype)
    norms = torch.empty(rows, blocks.count, dtype=dtype)
    buffer = scratch.buffer(x.shape[1], rows, dtype)
    for start, stop, chunk in _chunks(x, buffer.rows):
        for part, place in blocks.cut(buffer.signed(chunk, blocks.signs)):
            torch.sum(part, -1, out=sums[start:stop, place])
            torch.linalg.vector_norm(part, dim=-1, out=norms[start:stop, place])
    return sums, norms


def _of_columns(x: Tensor, blocks: Blocks, scratch: Scratch) -> tuple[Tensor, Tensor]:
    dtype, rows = blocks.signs.dtype, x.shape[0]
    sums = torch.zeros(blocks.count, rows, dtype=dtype)
    squares = torch.zeros(blocks.count, rows, dtype=dtype)
    buffer, columns = scratch.buffer(rows, blocks.width, dtype), x.t()
    for number, start, stop in blocks.pieces(buffer.rows):
        values = buffer.of(columns[start:stop])
        signs = blocks.signs[start:stop]
        sums[number] += torch.mv(values.t(), signs)
        squares[number] += torch.mv(values.square_().t(), signs.square())
    return sums.t(), squares.sqrt_().t()


def sums_and_rows(
    b: Tensor, blocks: Blocks, left: Tensor, scratch: Scratch
) -> tuple[Tensor, Tensor]:
    """Sums of `b * signs` over each block of columns, and `left @ b`, in one pass over b.

    Args:
        b: [K, columns], of any strides, on any device.
        blocks: their signs have the dtype of the sums.
        left: [R, K] on the CPU, in the dtype of the product.
        scratch: for the chunks.

    Returns:
        [K, blocks] and [R, columns].
    """
    dtype, depth = blocks.signs.dtype, b.shape[0]
    if not _is_row_major(b):
        return _sums_and_rows_by_columns(b, blocks, left, scratch)
    sums = torch.empty(depth, blocks.count, dtype=dtype)
    found = torch.zeros(left.shape[0], blocks.columns, dtype=left.dtype)
    buffer = scratch.buffer(b.shape[1], depth, dtype)
    factors = buffer if left.dtype is dtype else scratch.buffer(b.shape[1], depth, left.dtype)
    for start, stop, chunk in _chunks(b, min(buffer.rows, factors.rows)):
        factor = factors.of(chunk)
        found += _product(left[:, start:stop], factor)
        signed = buffer.signed(chunk if factors is not buffer else factor, blocks.signs)
        for part, place in blocks.cut(signed):
            torch.sum(part, -1, out=sums[start:stop, place])
    return sums, found


def _sums_and_rows_by_columns(
    b: Tensor, blocks: Blocks, left: Tensor, scratch: Scratch
) -> tuple[Tensor, Tensor]:
    dtype, depth = blocks.signs.dtype, b.shape[0]
    sums = torch.zeros(blocks.count, depth, dtype=dtype)
    found = torch.empty(left.shape[0], blocks.columns, dtype=left.dtype)
    buffer, columns = scratch.buffer(depth, blocks.width, dtype), b.t()
    factors = buffer if left.dtype is dtype else scratch.buffer(depth, blocks.width, left.dtype)
    for number, start, stop in blocks.pieces(min(buffer.rows, factors.rows)):
        chunk = columns[start:stop]
        factor = factors.of(chunk)
        found[:, start:stop] = _product(left, factor.t())
        values = factor if factors is buffer else buffer.of(chunk)
        sums[number] += torch.mv(values.t(), blocks.signs[start:stop])
    return sums.t(), found


def times(a: Tensor, z: Tensor, scratch: Scratch) -> Tensor:
    """`a @ z` for a narrow z, in the dtype of z; [M, K], [K, q] -> [M, q]."""
    if _is_ready(a, z.dtype):
        return a @ z
    return rows_times(z.t().contiguous(), a.t(), scratch).t()


def rows_times(left: Tensor, b: Tensor, scratch: Scratch, *, squared: bool = False) -> Tensor:
    """`left @ b`, in the dtype of `left`; with `squared` that of the squares of b.

    Args:
        left: [R, K] on the CPU.
        b: [K, N], of any strides, on any device.
        scratch: for the chunks.
        squared: b is squared element by element.

    Returns:
        [R, N]
    """
    depth, columns = b.shape
    if _is_row_major(b):
        found = torch.zeros(left.shape[0], columns, dtype=left.dtype)
        buffer = scratch.buffer(columns, depth, left.dtype)
        for start, stop, chunk in _chunks(b, buffer.rows):
            values = buffer.of(chunk)
            found += _product(left[:, start:stop], values.square_() if squared else values)
        return found
    found = torch.empty(left.shape[0], columns, dtype=left.dtype)
    buffer = scratch.buffer(depth, columns, left.dtype)
    for start, stop, chunk in _chunks(b.t(), buffer.rows):
        values = buffer.of(chunk)
        found[:, start:stop] = _product(left, (values.square_() if squared else values).t())
    return found


_ONEDNN_LINEAR = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
"""`x @ weight.t()` in float32, a kernel of its own; None in builds without oneDNN."""


def narrow_product(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right` in float32 on the CPU, for a left with few rows or a right with few columns.

    oneDNN takes half the time of MKL where MKL does not use AVX-512, which is on all CPUs but
    Intel's. The wide matrix must lie dense: others are copied element by element.
    """
    if _ONEDNN_LINEAR is None or not torch.backends.mkldnn.is_available():
        return torch.mm(left, right)
    found: Tensor = _ONEDNN_LINEAR(left, right.t(), None, "none", [], "")
    return found


def _product(left: Tensor, right: Tensor) -> Tensor:
    if left.dtype is torch.float32:
        return narrow_product(left, right)
    return torch.mm(left, right)
