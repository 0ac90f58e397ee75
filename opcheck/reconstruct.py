"""Results that are right in more than one way are judged by what they reconstruct.

Eigenvectors may have any sign (complex ones any phase), vectors of equal singular values are any
basis of their space, a histogram may put a value at an edge into either bin, and the inverse of a
nearly singular matrix is any of many. Where such a result differs from its reference it is still
right if it does what it is for: `U @ diag(S) @ Vh` is the matrix, and `U` is orthonormal.

To add an op: a function from the call and its results to identities, and a line in `RECONSTRUCTED`.
All of it is NumPy in float64, far from the kernels under test.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from opcheck import tolerances as tol
from opcheck.arrays import Array, round_to
from opcheck.calls import Call
from opcheck.golden_rules import argument
from opcheck.references import wide_array
from opcheck.vectors import (
    VECTORS,
    Identity,
    Mix,
    adjoint,
    has_vectors,
    matrices_of,
    traces,
    unit_scale,
)

__all__ = ["RECONSTRUCTED", "Identity", "Reconstruction"]

ROUNDING = 8.0
"""Allowed residual in units of eps * sqrt(n) * norm. Largest measured on OpInfo's samples and on
matrices of 5 to 300 rows (normal, of low rank, ill-conditioned) in float32 and complex64: 1.2 for
factors, 0.25 for `A @ inverse`. Vectors have a constant of their own."""


@dataclass(frozen=True, slots=True)
class Reconstruction:
    """Which outputs of an op are judged by identities when they differ from the reference."""

    outputs: frozenset[int]
    identities: Callable[[Call, Sequence[Array], str], list[Identity]]
    """(call, results, dtype) -> what has to hold; nothing: the plain comparison stands."""
    always: bool = False
    """Also where results agree with the reference: moved inputs give vectors of another sign, or
    values in another order or another bin, which excuses anything."""
    bits_settle: bool = False
    """But not where they have the bits of torch's own kernel, which counts in 16 bit as well."""


def _norm(matrix: Array) -> Array:
    """Frobenius norm of each matrix, ready to be broadcast over its elements."""
    found: Array = np.sqrt(np.sum(np.square(np.absolute(matrix)), axis=(-2, -1), keepdims=True))
    return found


def _slack(matrix: Array, dtype: str) -> float:
    return ROUNDING * tol.EPS[dtype] * float(np.sqrt(max(1, *matrix.shape[-2:])))


def _product(text: str, actual: Array, expected: Array, scale: Array, slack: float) -> Identity:
    return Identity(text, actual, expected, np.broadcast_to(slack * scale, expected.shape))


# ---- vectors ------------------------------------------------------------------------------------


def _vectors(call: Call, results: Sequence[Array], dtype: str) -> list[Identity]:
    if not has_vectors(call) or not all(np.isfinite(item).all() for item in results):
        return []  # values alone were asked for, or overflow
    return VECTORS[call.traits.base](call, wide_array(matrices_of(call)), results, dtype, Mix())


def _eigvals(call: Call, results: Sequence[Array], dtype: str) -> list[Identity]:
    matrix = wide_array(call.args[0]).astype(np.complex128)
    if not np.isfinite(results[0]).all():
        return []
    scale = unit_scale(matrix)
    return traces(matrix / scale, results[0] / scale[..., 0], _slack(matrix, dtype))


# ---- factorisations -----------------------------------------------------------------------------


def _packed_lu(call: Call, results: Sequence[Array], dtype: str) -> list[Identity]:
    packed, pivots = results[:2]
    matrix = wide_array(call.args[0])
    rank = min(matrix.shape[-2:])
    if not argument(call, "pivot", True) or not matrix.size:  # noqa: FBT003 - torch's default
        return []
    lower = np.tril(packed, -1)[..., :, :rank] + np.eye(matrix.shape[-2], rank)
    upper = np.triu(packed)[..., :rank, :]
    flat = matrix.reshape(-1, *matrix.shape[-2:])
    swaps = pivots.reshape(-1, pivots.shape[-1]).astype(np.int64) - 1
    if swaps.min() < 0 or swaps.max() >= matrix.shape[-2]:
        return []
    permuted = np.stack([_swapped(one, rows) for one, rows in zip(flat, swaps, strict=True)])
    return _lower_upper(lower, upper, permuted.reshape(matrix.shape), dtype)


def _swapped(matrix: Array, rows: Array) -> Array:
    order = np.arange(matrix.shape[0])
    for position, row in enumerate(rows):
        order[[position, row]] = order[[row, position]]
    found: Array = matrix[order]
    return found


def _lower_upper(lower: Array, upper: Array, matrix: Array, dtype: str) -> list[Identity]:
    # LAPACK pivots complex matrices by |re| + |im|, which is up to sqrt(2) times the size
    largest = math.sqrt(2.0) if np.iscomplexobj(matrix) else 1.0
    sizes = np.maximum(np.absolute(lower), largest)
    scale = _norm(lower) * _norm(upper)
    return [
        _product("L @ U", lower @ upper, matrix, scale, _slack(matrix, dtype)),
        Identity(
            "|L|, which pivoting bounds", sizes, np.full_like(sizes, largest), 4 * tol.EPS[dtype]
        ),
    ]


def _lu(call: Call, results: Sequence[Array], dtype: str) -> list[Identity]:
    order, lower, upper = results[0].real, *results[1:3]
    matrix = wide_array(call.args[0])
    if not order.size or not matrix.size:
        return []
    rows = np.identity(order.shape[-1])
    gram = np.swapaxes(order, -1, -2) @ order
    return [
        *_lower_upper(lower, upper, np.swapaxes(order, -1, -2) @ matrix, dtype),
        Identity("P.mH @ P", gram, np.broadcast_to(rows, gram.shape), 0.0),
        Identity("L above its diagonal", np.triu(lower, 1), np.zeros_like(lower), 0.0),
        Identity("U below its diagonal", np.tril(upper, -1), np.zeros_like(upper), 0.0),
    ]


# ---- equations ----------------------------------------------------------------------------------


def _inverse(call: Call, results: Sequence[Array], dtype: str) -> list[Identity]:
    matrix, inverse = wide_array(call.args[0]), results[0]
    unit = np.broadcast_to(np.eye(matrix.shape[-1]), matrix.shape).astype(matrix.dtype)
    scale, slack = _norm(matrix) * _norm(inverse), _slack(matrix, dtype)
    return [_product("A @ inverse", matrix @ inverse, unit, scale, slack)]


def _solution(call: Call, results: Sequence[Array], dtype: str) -> list[Identity]:
    matrix, right = wide_array(call.args[0]), wide_array(call.args[1])
    solution = results[0]
    is_vector = right.ndim == 1 or (
        right.ndim == matrix.ndim - 1 and right.shape == matrix.shape[:-1]
    )
    if is_vector:
        right, solution = right[..., None], solution[..., None]
    from_left = argument(call, "left", True)  # noqa: FBT003 - torch's default
    product = matrix @ solution if from_left else solution @ matrix
    scale = _norm(matrix) * _norm(solution) + _norm(right)
    expected = np.broadcast_to(right, product.shape)
    return [_product("A @ X", product, expected, scale, _slack(matrix, dtype))]


def _least_squares(call: Call, results: Sequence[Array], dtype: str) -> list[Identity]:
    matrix, right = wide_array(call.args[0]), wide_array(call.args[1])
    solution = results[0]
    if right.ndim == matrix.ndim - 1:
        right, solution = right[..., None], solution[..., None]
    residual = adjoint(matrix) @ (matrix @ solution - right)
    norm = _norm(matrix)
    scale = norm * (norm * _norm(solution) + _norm(right))
    zero = np.zeros_like(residual)
    return [_product("A.mH @ (A @ X - B)", residual, zero, scale, _slack(matrix, dtype))]


# ---- counts -------------------------------------------------------------------------------------


def _counts(call: Call, results: Sequence[Array], dtype: str) -> list[Identity]:
    """Of `histc`."""
    values, counts = wide_array(call.args[0]).reshape(-1), results[0].astype(np.float64)
    low, high = float(argument(call, "min", 0)), float(argument(call, "max", 0))
    if low == high:
        low, high = float(values.min(initial=np.inf)), float(values.max(initial=-np.inf))
    if low == high:  # all values are one: torch counts from 1 below to 1 above, it in the middle
        low, high = low - 1.0, high + 1.0
    if not low < high or not np.isfinite([low, high]).all():
        return []
    return _cumulated(values, counts, np.linspace(low, high, counts.size + 1), dtype)


def _histogram(call: Call, results: Sequence[Array], dtype: str) -> list[Identity]:
    """Of `histogram`, by the edges that it gave: a weight has sums, and a density no counts."""
    counts, edges = (item.astype(np.float64) for item in results)
    is_plain = argument(call, "weight") is None and not argument(call, "density", False)  # noqa: FBT003
    if not is_plain or not np.isfinite(edges).all() or not edges[0] < edges[-1]:
        return []
    return _cumulated(wide_array(call.args[0]).reshape(-1), counts, edges, dtype)


def _cumulated(values: Array, counts: Array, edges: Array, dtype: str) -> list[Identity]:
    """A value near an edge may be counted on either side: cumulated, counts differ by those.

    The first and the last edge are compared with, as numbers of the dtype or as they are.
    """
    eps, (low, high) = tol.EPS[dtype], edges[[0, -1]]
    # position * bins is rounded, then floored
    width = 4 * eps * max(abs(low), abs(high), high - low)
    ends = np.array([[low, high], round_to(edges[[0, -1]], dtype)])
    first, last = ends[:, 0], ends[:, 1]
    inside = np.sort(values[(values >= first.min()) & (values <= last.max())])
    sure = np.count_nonzero((inside >= first.max()) & (inside <= last.min()))
    inner = np.append(edges[1:-1], np.inf)
    below = np.searchsorted(inside, inner, side="left")
    near = np.searchsorted(inside, inner + width, side="right")
    near -= np.searchsorted(inside, inner - width, side="left")
    near += inside.size - sure
    # a count that no longer fits the dtype is rounded
    bound = near + eps * below
    return [Identity("cumulated counts", np.cumsum(counts), below.astype(np.float64), bound)]


RECONSTRUCTED: Mapping[str, Reconstruction] = MappingProxyType(
    {
        "_linalg_svd": Reconstruction(frozenset({0, 2}), _vectors, always=True),
        "_linalg_eigh": Reconstruction(frozenset({1}), _vectors, always=True),
        "linalg_eig": Reconstruction(frozenset({0, 1}), _vectors, always=True),
        "_linalg_eigvals": Reconstruction(frozenset({0}), _eigvals, always=True),
        "linalg_qr": Reconstruction(frozenset({0, 1}), _vectors, always=True),
        "linalg_lu_factor_ex": Reconstruction(frozenset({0, 1}), _packed_lu),
        "linalg_lu": Reconstruction(frozenset({0, 1, 2}), _lu),
        "linalg_inv_ex": Reconstruction(frozenset({0}), _inverse),
        "_linalg_solve_ex": Reconstruction(frozenset({0}), _solution),
        "linalg_lstsq": Reconstruction(frozenset({0}), _least_squares),
        "histc": Reconstruction(frozenset({0}), _counts, always=True, bits_settle=True),
        "histogram": Reconstruction(frozenset({0}), _histogram, always=True, bits_settle=True),
    }
)
"""Op base name -> how its results are judged where no reference can tell."""
