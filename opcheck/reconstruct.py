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
from typing import Any

import numpy as np

from opcheck.arrays import Array
from opcheck.calls import Call
from opcheck.golden_rules import argument
from opcheck.references import host_array

__all__ = ["RECONSTRUCTED", "Identity", "Reconstruction"]

ROUNDING = 8.0
"""Allowed residual in units of eps * sqrt(n) * norm. Largest measured on OpInfo's samples and on
matrices of 5 to 300 rows (normal, of low rank, ill-conditioned) in float32 and complex64: 3.3 for
`U.mH @ U`, 1.5 for `U @ diag(S) @ Vh`, 1.3 for `A @ V`, 1.2 for `Q @ R`, 0.25 for `A @ inverse`."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Two arrays that are equal, up to `bound`, if the results are right."""

    text: str
    actual: Array
    expected: Array
    bound: Array | float


@dataclass(frozen=True, slots=True)
class Reconstruction:
    """Which outputs of an op are judged by identities when they differ from the reference."""

    outputs: frozenset[int]
    identities: Callable[[Call, Sequence[Array], float], list[Identity]]
    """(call, results, eps) -> what has to hold; nothing: the plain comparison stands."""


def _wide(values: Any) -> Array:
    array = host_array(values)
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def _adjoint(matrix: Array) -> Array:
    return np.conj(np.swapaxes(matrix, -1, -2))


def _norm(matrix: Array) -> Array:
    """Frobenius norm of each matrix, ready to be broadcast over its elements."""
    found: Array = np.sqrt(np.sum(np.square(np.absolute(matrix)), axis=(-2, -1), keepdims=True))
    return found


def _slack(matrix: Array, eps: float) -> float:
    return ROUNDING * eps * float(np.sqrt(max(1, *matrix.shape[-2:])))


def _product(text: str, actual: Array, expected: Array, scale: Array, slack: float) -> Identity:
    return Identity(text, actual, expected, np.broadcast_to(slack * scale, expected.shape))


def _orthonormal(name: str, columns: Array, eps: float) -> Identity:
    gram = _adjoint(columns) @ columns
    unit = np.broadcast_to(np.eye(gram.shape[-1], dtype=gram.dtype), gram.shape)
    return Identity(f"{name}.mH @ {name}", gram, unit, _slack(columns, eps))


# ---- eigenvalues and singular values ------------------------------------------------------------


def _svd(call: Call, results: Sequence[Array], eps: float) -> list[Identity]:
    left, values, right = results[:3]
    if not left.size or not right.size:  # values alone were asked for
        return []
    matrix = _wide(call.args[0])
    rank = values.shape[-1]
    product = (left[..., :rank] * values[..., None, :]) @ right[..., :rank, :]
    return [
        _product("U @ diag(S) @ Vh", product, matrix, _norm(matrix), _slack(matrix, eps)),
        _orthonormal("U", left, eps),
        _orthonormal("V", _adjoint(right), eps),
    ]


def _eigh(call: Call, results: Sequence[Array], eps: float) -> list[Identity]:
    values, vectors = results[:2]
    if not vectors.size:
        return []
    given = _wide(call.args[0])
    upper = argument(call, "UPLO", "L") in ("U", "u")
    part = _adjoint(np.triu(given)) if upper else np.tril(given)
    matrix = np.tril(part, -1) + _adjoint(part)
    index = np.arange(matrix.shape[-1])
    matrix[..., index, index] = matrix[..., index, index].real
    product, scaled = matrix @ vectors, vectors * values[..., None, :]
    return [
        _product("A @ V", product, scaled, _norm(matrix), _slack(matrix, eps)),
        _orthonormal("V", vectors, eps),
    ]


def _eig(call: Call, results: Sequence[Array], eps: float) -> list[Identity]:
    values, vectors = results[:2]
    matrix = _wide(call.args[0]).astype(np.complex128)
    slack = _slack(matrix, eps)
    lengths = np.sqrt(np.sum(np.square(np.absolute(vectors)), axis=-2))
    scaled = vectors * values[..., None, :]
    return [
        _product("A @ V", matrix @ vectors, scaled, _norm(matrix), slack),
        Identity("lengths of the eigenvectors", lengths, np.ones_like(lengths), slack),
        # residuals alone would pass if one pair were given twice
        *_eigvals(call, results, eps),
    ]


def _eigvals(call: Call, results: Sequence[Array], eps: float) -> list[Identity]:
    """In any order: their sum and that of their squares are traces."""
    values = results[0]
    matrix = _wide(call.args[0]).astype(np.complex128)
    size, flat, slack = matrix.shape[-1], _norm(matrix)[..., 0, 0], _slack(matrix, eps)
    trace = np.trace(matrix, axis1=-2, axis2=-1)
    of_square = np.trace(matrix @ matrix, axis1=-2, axis2=-1)
    return [
        Identity("sum of L", values.sum(-1), trace, np.asarray(slack * size * flat)),
        Identity(
            "sum of L**2", np.square(values).sum(-1), of_square,
            np.asarray(2 * slack * size * np.square(flat)),
        ),
    ]  # fmt: skip


# ---- factorisations -----------------------------------------------------------------------------


def _qr(call: Call, results: Sequence[Array], eps: float) -> list[Identity]:
    basis, triangle = results[:2]
    matrix = _wide(call.args[0])
    norm, slack = _norm(matrix), _slack(matrix, eps)
    below = Identity("R below its diagonal", np.tril(triangle, -1), np.zeros_like(triangle), 0.0)
    if argument(call, "mode", "reduced") == "r":
        gram, own = _adjoint(triangle) @ triangle, _adjoint(matrix) @ matrix
        return [_product("R.mH @ R", gram, own, np.square(norm), slack), below]
    return [
        _product("Q @ R", basis @ triangle, matrix, norm, slack),
        _orthonormal("Q", basis, eps),
        below,
    ]


def _packed_lu(call: Call, results: Sequence[Array], eps: float) -> list[Identity]:
    packed, pivots = results[:2]
    matrix = _wide(call.args[0])
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
    return _lower_upper(lower, upper, permuted.reshape(matrix.shape), eps)


def _swapped(matrix: Array, rows: Array) -> Array:
    order = np.arange(matrix.shape[0])
    for position, row in enumerate(rows):
        order[[position, row]] = order[[row, position]]
    found: Array = matrix[order]
    return found


def _lower_upper(lower: Array, upper: Array, matrix: Array, eps: float) -> list[Identity]:
    # LAPACK pivots complex matrices by |re| + |im|, which is up to sqrt(2) times the size
    largest = math.sqrt(2.0) if np.iscomplexobj(matrix) else 1.0
    sizes = np.maximum(np.absolute(lower), largest)
    scale = _norm(lower) * _norm(upper)
    return [
        _product("L @ U", lower @ upper, matrix, scale, _slack(matrix, eps)),
        Identity("|L|, which pivoting bounds", sizes, np.full_like(sizes, largest), 4 * eps),
    ]


def _lu(call: Call, results: Sequence[Array], eps: float) -> list[Identity]:
    order, lower, upper = results[0].real, *results[1:3]
    matrix = _wide(call.args[0])
    if not order.size or not matrix.size:
        return []
    rows = np.identity(order.shape[-1])
    gram = np.swapaxes(order, -1, -2) @ order
    return [
        *_lower_upper(lower, upper, np.swapaxes(order, -1, -2) @ matrix, eps),
        Identity("P.mH @ P", gram, np.broadcast_to(rows, gram.shape), 0.0),
        Identity("L above its diagonal", np.triu(lower, 1), np.zeros_like(lower), 0.0),
        Identity("U below its diagonal", np.tril(upper, -1), np.zeros_like(upper), 0.0),
    ]


# ---- equations ----------------------------------------------------------------------------------


def _inverse(call: Call, results: Sequence[Array], eps: float) -> list[Identity]:
    matrix, inverse = _wide(call.args[0]), results[0]
    unit = np.broadcast_to(np.eye(matrix.shape[-1]), matrix.shape).astype(matrix.dtype)
    scale, slack = _norm(matrix) * _norm(inverse), _slack(matrix, eps)
    return [_product("A @ inverse", matrix @ inverse, unit, scale, slack)]


def _solution(call: Call, results: Sequence[Array], eps: float) -> list[Identity]:
    matrix, right = _wide(call.args[0]), _wide(call.args[1])
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
    return [_product("A @ X", product, expected, scale, _slack(matrix, eps))]


def _least_squares(call: Call, results: Sequence[Array], eps: float) -> list[Identity]:
    matrix, right = _wide(call.args[0]), _wide(call.args[1])
    solution = results[0]
    if right.ndim == matrix.ndim - 1:
        right, solution = right[..., None], solution[..., None]
    residual = _adjoint(matrix) @ (matrix @ solution - right)
    norm = _norm(matrix)
    scale = norm * (norm * _norm(solution) + _norm(right))
    zero = np.zeros_like(residual)
    return [_product("A.mH @ (A @ X - B)", residual, zero, scale, _slack(matrix, eps))]


# ---- counts -------------------------------------------------------------------------------------


def _histogram(call: Call, results: Sequence[Array], eps: float) -> list[Identity]:
    """A value near an edge may be counted on either side: cumulated, counts differ by those."""
    values, counts = _wide(call.args[0]).reshape(-1), results[0].astype(np.float64)
    low, high = float(argument(call, "min", 0)), float(argument(call, "max", 0))
    if low == high:
        low, high = float(values.min(initial=np.inf)), float(values.max(initial=-np.inf))
    if not low < high or not np.isfinite([low, high]).all():
        return []
    edges = np.linspace(low, high, counts.size + 1)[1:]
    # position * bins is rounded, then floored
    width = 4 * eps * max(abs(low), abs(high), high - low)
    inside = np.sort(values[(values >= low) & (values <= high)])
    edges[-1] = np.inf
    below = np.searchsorted(inside, edges, side="left")
    near = np.searchsorted(inside, edges + width, side="right")
    near -= np.searchsorted(inside, edges - width, side="left")
    cumulated = np.cumsum(counts)
    # a count that no longer fits the dtype is rounded
    bound = near + eps * below
    return [Identity("cumulated counts", cumulated, below.astype(np.float64), bound)]


RECONSTRUCTED: Mapping[str, Reconstruction] = MappingProxyType(
    {
        "_linalg_svd": Reconstruction(frozenset({0, 2}), _svd),
        "_linalg_eigh": Reconstruction(frozenset({1}), _eigh),
        "linalg_eig": Reconstruction(frozenset({0, 1}), _eig),
        "_linalg_eigvals": Reconstruction(frozenset({0}), _eigvals),
        "linalg_qr": Reconstruction(frozenset({0, 1}), _qr),
        "linalg_lu_factor_ex": Reconstruction(frozenset({0, 1}), _packed_lu),
        "linalg_lu": Reconstruction(frozenset({0, 1, 2}), _lu),
        "linalg_inv_ex": Reconstruction(frozenset({0}), _inverse),
        "_linalg_solve_ex": Reconstruction(frozenset({0}), _solution),
        "linalg_lstsq": Reconstruction(frozenset({0}), _least_squares),
        "histc": Reconstruction(frozenset({0}), _histogram),
    }
)
"""Op base name -> how its results are judged where they differ from the reference."""
