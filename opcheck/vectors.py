"""Eigenvectors, singular vectors and orthonormal factors: what has to hold of them.

They are unique up to their signs (complex ones: phases), or up to a rotation inside the space of
equal values, so that no reference tells right ones from wrong ones. What they have to do is
determined, and takes no kernel of torch to look at: `A @ v` is `lambda * v`, they are of length 1
and orthogonal, values are in order, R is a triangle. As all of it is independent of the kernel,
float64 results are judged as well, which nothing wider could recompute.

Columns may be summed in groups with random factors first, which takes the time of a few columns and
still lets no column out (Freivalds 1979).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from opcheck import tolerances as tol
from opcheck.arrays import Array
from opcheck.calls import Call
from opcheck.golden_rules import argument

__all__ = [
    "VECTORS", "Identity", "Mix", "adjoint", "has_vectors", "matrices_of", "traces",
    "unit_scale",
]  # fmt: skip

ROUNDING = 64.0
"""Allowed error of what vectors reconstruct, in units of eps * sqrt(n) * norm. Largest measured on
matrices of 1 to 1000 rows (normal, of low rank, ill-conditioned, graded by rows and by columns,
with equal values, constant, near overflow and underflow) in float32, complex64 and float64, by two
builds of LAPACK and by a one-sided Jacobi method in float32: 20.8 for singular vectors of a 5 by 5
matrix with a large mean, 10.8 for `V.mH @ V`, 7.7 for eigenvectors, 5.3 for `Q @ R`."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Two arrays that are equal, up to `bound`, if the results are right."""

    text: str
    actual: Array
    expected: Array
    bound: Array | float


@dataclass(frozen=True, slots=True)
class Mix:
    """Sums of `width` neighbouring columns with random factors; a width of 1 leaves them alone."""

    width: int = 1
    rng: np.random.Generator | None = None

    def __call__(self, *matrices: Array) -> tuple[list[Array], Array]:
        """The matrices with the same columns summed, and by how much each sum's error may grow."""
        count = matrices[0].shape[-1]
        if self.rng is None or count < 2:
            return list(matrices), np.ones(count)
        # signs alone would miss columns that are exchanged within a group half of the time
        factors = self.rng.integers(4, 13, count) / 8.0 * self.rng.choice((-1.0, 1.0), count)
        starts = np.arange(0, count, self.width)
        mixed = [np.add.reduceat(item * factors, starts, axis=-1) for item in matrices]
        return mixed, np.sqrt(np.add.reduceat(np.square(factors), starts))

    def most(self, sizes: Array) -> Array:
        """The largest of each group of columns."""
        if self.rng is None or sizes.shape[-1] < 2:
            return sizes
        starts = np.arange(0, sizes.shape[-1], self.width)
        return np.maximum.reduceat(sizes, starts, axis=-1)


def adjoint(matrix: Array) -> Array:
    """Conjugate transpose of each matrix."""
    found: Array = np.conj(np.swapaxes(matrix, -1, -2))
    return found


def slack_of(matrix: Array, eps: float) -> float:
    """Allowed relative error of what the vectors of a matrix reconstruct."""
    return ROUNDING * eps * float(np.sqrt(max(1, *matrix.shape[-2:])))


def _lengths(columns: Array) -> Array:
    found: Array = np.sqrt(np.sum(np.square(np.absolute(columns)), axis=-2))
    return found


def _or_one(sizes: Array) -> Array:
    """What to divide by: of a matrix of zeros the results are judged as they are."""
    return np.where(sizes > 0.0, sizes, 1.0)


def unit_scale(matrix: Array) -> Array:
    """A power of two for each matrix that brings its largest element to about 1.

    Squares neither overflow nor vanish then, and dividing by it rounds nothing.
    """
    largest = np.max(np.absolute(matrix), axis=(-2, -1), initial=0.0)
    _, exponents = np.frexp(_or_one(largest))
    # 1e-310 is as small as float64 gets: its reciprocal is still a number
    found: Array = np.ldexp(1.0, np.maximum(exponents, -1000))[..., None, None]
    return found


@dataclass(frozen=True, slots=True)
class _Problem:
    """The matrices of a call, each scaled to about 1, and the errors that they allow."""

    matrix: Array
    scale: Array
    slack: float
    floor: Array
    """Rounding among subnormals, or flushing them, of results as large as the matrix."""
    mix: Mix

    @classmethod
    def of(cls, given: Array, dtype: str, mix: Mix) -> _Problem:
        scale = unit_scale(given)
        rows = max(1, *given.shape[-2:])
        floor = tol.ALLOWED_UNDERFLOW[dtype] * rows / scale[..., 0]
        return cls(given / scale, scale, slack_of(given, tol.EPS[dtype]), floor, mix)

    def values(self, given: Array) -> Array:
        """Values of the scaled matrix."""
        scaled: Array = given / self.scale[..., 0]
        return scaled

    def residual(
        self, text: str, product: Array, expected: Array, norm: Array, grown: Array
    ) -> Any:
        """Lengths of the columns of a difference, beside a norm."""
        apart = _lengths(product - expected) / norm
        bound = (self.slack + self.floor / norm) * grown
        return Identity(text, apart, np.zeros_like(apart), np.broadcast_to(bound, apart.shape))

    def orthonormal(self, name: str, columns: Array) -> Identity:
        """The columns are of length 1 and orthogonal to each other."""
        unit = np.broadcast_to(
            np.eye(columns.shape[-1]), (*columns.shape[:-2], *[columns.shape[-1]] * 2)
        )
        (mixed, wanted), grown = self.mix(columns, unit)
        gram = adjoint(columns) @ mixed
        slack = slack_of(columns, self.slack / slack_of(self.matrix, 1.0))
        bound = np.broadcast_to(slack * grown, gram.shape)
        return Identity(f"{name}.mH @ {name}", gram, wanted.astype(gram.dtype), bound)


def _norm_2(problem: _Problem, values: Array) -> Array:
    """The largest value, but no more than the matrix allows, if the values are wrong."""
    frobenius = np.sqrt(np.sum(np.square(_lengths(problem.matrix)), axis=-1))
    largest = np.max(np.absolute(values), axis=-1, initial=0.0)
    return _or_one(np.minimum(largest, frobenius))[..., None]


def _estimated_norm_2(matrix: Array) -> Array:
    """Its largest singular value, by a few products with its square from a random vector."""
    vector = np.random.default_rng(0).standard_normal((matrix.shape[-1], 1))
    found = np.zeros((*matrix.shape[:-2], 1))
    for _ in range(_NUM_PRODUCTS):
        size = _or_one(_lengths(vector))
        product = (matrix @ vector) / np.expand_dims(size, -2)
        found = _lengths(product)
        vector = adjoint(matrix) @ product
    largest: Array = _MARGIN * found[..., 0]
    return largest


_NUM_PRODUCTS = 8
_MARGIN = 1.25
"""The estimate is below the norm, by at most 18% in 1,000 normal matrices of 2 to 200 rows."""


# ---- what holds ---------------------------------------------------------------------------------


def _svd(
    call: Call, given: Array, results: Sequence[Array], dtype: str, mix: Mix
) -> list[Identity]:
    left, values, right = results[:3]
    problem = _Problem.of(given, dtype, mix)
    matrix, scaled = problem.matrix, problem.values(values)
    rank = values.shape[-1]
    u, v = left[..., :rank], adjoint(right)[..., :rank]
    norm = _norm_2(problem, scaled)
    stretched = [side * scaled[..., None, :] for side in (u, v)]
    (v_mixed, u_wanted), grown = mix(v, stretched[0])
    (u_mixed, v_wanted), grown_left = mix(u, stretched[1])
    return [
        problem.residual("A @ V - U @ diag(S), beside A", matrix @ v_mixed, u_wanted, norm, grown),
        problem.residual(
            "A.mH @ U - V @ diag(S), beside A",
            adjoint(matrix) @ u_mixed,
            v_wanted,
            norm,
            grown_left,
        ),
        problem.orthonormal("U", left),
        problem.orthonormal("V", adjoint(right)),
        Identity("S descends", scaled, -np.sort(-np.absolute(scaled), axis=-1), 0.0),
    ]


def hermitian(call: Call, given: Array) -> Array:
    """The matrix that eigh takes a triangle of to be."""
    upper = argument(call, "UPLO", "L") in ("U", "u")
    part = adjoint(np.triu(given)) if upper else np.tril(given)
    matrix = np.tril(part, -1) + adjoint(part)
    index = np.arange(matrix.shape[-1])
    matrix[..., index, index] = matrix[..., index, index].real
    return matrix


def _eigh(
    call: Call, given: Array, results: Sequence[Array], dtype: str, mix: Mix
) -> list[Identity]:
    values, vectors = results[:2]
    problem = _Problem.of(hermitian(call, given), dtype, mix)
    scaled = problem.values(values)
    (mixed, wanted), grown = mix(vectors, vectors * scaled[..., None, :])
    norm = _norm_2(problem, scaled)
    return [
        problem.residual(
            "A @ V - V @ diag(L), beside A", problem.matrix @ mixed, wanted, norm, grown
        ),
        problem.orthonormal("V", vectors),
        Identity("L ascends", scaled, np.sort(scaled, axis=-1), 0.0),
    ]


def _eig(
    call: Call, given: Array, results: Sequence[Array], dtype: str, mix: Mix
) -> list[Identity]:
    values, vectors = results[:2]
    problem = _Problem.of(given.astype(np.complex128), dtype, mix)
    matrix, scaled = problem.matrix, problem.values(values)
    norm = _or_one(_estimated_norm_2(matrix))[..., None]
    (mixed, wanted), grown = mix(vectors, vectors * scaled[..., None, :])
    lengths = _lengths(vectors)
    return [
        problem.residual("A @ V - V @ diag(L), beside A", matrix @ mixed, wanted, norm, grown),
        Identity("lengths of the eigenvectors", lengths, np.ones_like(lengths), problem.slack),
        # residuals alone would pass if one pair were given twice
        *traces(matrix, scaled, problem.slack / 8, problem.floor[..., 0]),
    ]


def traces(
    matrix: Array, values: Array, slack: float, floor: Array | float = 0.0
) -> list[Identity]:
    """Eigenvalues in any order: their sum and that of their squares are traces."""
    size = matrix.shape[-1]
    norm = np.sqrt(np.sum(np.square(np.absolute(matrix)), axis=(-2, -1)))
    trace = np.trace(matrix, axis1=-2, axis2=-1)
    of_square = np.einsum("...ij,...ji->...", matrix, matrix)
    return [
        Identity("sum of L", values.sum(-1), trace, size * (slack * norm + floor)),
        Identity(
            "sum of L**2", np.square(values).sum(-1), of_square,
            2 * size * norm * (slack * norm + floor),
        ),
    ]  # fmt: skip


def _qr(call: Call, given: Array, results: Sequence[Array], dtype: str, mix: Mix) -> list[Identity]:
    basis, triangle = results[:2]
    problem = _Problem.of(given, dtype, mix)
    matrix, scaled = problem.matrix, triangle / problem.scale
    below = Identity("R below its diagonal", np.tril(triangle, -1), np.zeros_like(triangle), 0.0)
    norms = _or_one(_lengths(matrix))
    if argument(call, "mode", "reduced") == "r":
        gram, own = adjoint(scaled) @ scaled, adjoint(matrix) @ matrix
        sizes = norms[..., :, None] * norms[..., None, :]
        return [Identity("R.mH @ R", gram, own, problem.slack * sizes), below]
    # Householder reflections err by a share of each column, and not of the whole matrix
    (mixed, wanted), grown = mix(scaled / norms[..., None, :], matrix / norms[..., None, :])
    apart = _lengths(basis @ mixed - wanted)
    bound = (problem.slack + mix.most(problem.floor / norms)) * grown
    return [
        Identity("Q @ R - A, by column", apart, np.zeros_like(apart), bound),
        problem.orthonormal("Q", basis),
        below,
    ]


Identities = Callable[[Call, Array, Sequence[Array], str, Mix], list[Identity]]
"""(call, matrices, results, dtype, how columns are summed) -> what has to hold; arrays are float64
or complex128."""

VECTORS: Mapping[str, Identities] = MappingProxyType(
    {"_linalg_svd": _svd, "_linalg_eigh": _eigh, "linalg_eig": _eig, "linalg_qr": _qr}
)
"""Op base name -> what has to hold of its results, vectors among them."""


def has_vectors(call: Call) -> bool:
    """The op gives vectors that are judged here, and this call has asked for them."""
    if call.traits.base not in VECTORS or not matrices_of(call).numel():
        return False
    return bool(
        argument(call, "compute_uv", default=True) and argument(call, "compute_v", default=True)
    )


def matrices_of(call: Call) -> Any:
    """The tensor whose last two dimensions are matrices."""
    return argument(call, call.traits.params[0].name)
