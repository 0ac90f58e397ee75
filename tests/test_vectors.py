"""Eigenvectors, singular vectors, orthonormal factors: what is not unique passes, faults do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import opcheck
from opcheck.records import SkipReason, Verdict
from tests.faults import planted, spoiled

DTYPES = [torch.float32, torch.float64, torch.complex64]
EIGH, EIG = "aten._linalg_eigh.default", "aten.linalg_eig.default"
SVD, QR = "aten._linalg_svd.default", "aten.linalg_qr.default"
BATCHES = pytest.mark.parametrize("batch", [(), (2, 2)], ids=str)
PRECISIONS = pytest.mark.parametrize("dtype", DTYPES, ids=lambda item: str(item)[6:])


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=dtype, generator=generator)


def symmetric(x: Tensor) -> Tensor:
    return x + x.mH


def basis(size: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    return torch.linalg.qr(normal(size, size, dtype=dtype, seed=seed))[0]


def with_values(values: Any, dtype: torch.dtype) -> Tensor:
    """A Hermitian matrix with these eigenvalues."""
    vectors = basis(len(values), dtype)
    return (vectors * torch.tensor(values).to(dtype)) @ vectors.mH


STEPS: dict[str, Callable[[Tensor], Any]] = {
    EIGH: lambda x: torch.linalg.eigh(symmetric(x)),
    EIG: torch.linalg.eig,
    SVD: torch.linalg.svd,
    QR: torch.linalg.qr,
}


def record(tmp_path: Any, op: str, step: Callable[[], Any], **options: Any) -> Any:
    with opcheck.check(log_dir=tmp_path, quiet=True, **options) as session:
        step()
    assert session.coverage.adds_up
    found = [item for item in session.records if item.op == op]
    assert [item.error for item in found] == [None] * len(found)
    return found[-1]


def changed_by(change: Callable[[list[Tensor]], Any], results: list[Tensor]) -> list[Tensor]:
    """Results changed in place, or replaced where `change` gives a list of others."""
    given = change(results)
    return given if isinstance(given, list) else results


def spoilt(change: Callable[[list[Tensor]], Any]) -> Any:
    """A kernel whose results are `changed_by` it."""

    def make(original: Any) -> Any:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            return tuple(changed_by(change, list(original(*args, **kwargs))))

        return kernel

    return make


# ---- faults -------------------------------------------------------------------------------------


def scaled(number: int) -> Any:
    return lambda out: out[number].mul_(1.01)


def one_scaled(number: int) -> Any:
    return lambda out: out[number][..., 2].mul_(1.01)


def replaced(number: int) -> Any:
    return lambda out: out[number][..., 2].copy_(out[number][..., 4])


def swapped(number: int) -> Any:
    def change(out: list[Tensor]) -> None:
        order = [0, 1, 3, 2, *range(4, out[number].shape[-1])]
        out[number].copy_(out[number].clone()[..., order])

    return change


def stale_row(number: int) -> Any:
    return lambda out: out[number][..., -1, :].zero_()


def one_sign(number: int) -> Any:
    """Of one vector of a pair that belongs together."""
    return lambda out: out[number][..., 2].neg_()


def one_sign_of_row(number: int) -> Any:
    return lambda out: out[number][..., 2, :].neg_()


def upside_down(out: list[Tensor]) -> list[Tensor]:
    """Values and vectors belong together, but in the other order."""
    values, vectors = out
    return [values.flip(-1), vectors.flip(-1)]


def not_a_triangle(out: list[Tensor]) -> None:
    out[1][..., 3, 1] += 0.01


def value_off(number: int) -> Any:
    return lambda out: out[number][..., 1].mul_(1.002)


FAULTS = {
    "eigh scaled": (EIGH, scaled(1)),
    "eigh one scaled": (EIGH, one_scaled(1)),
    "eigh replaced": (EIGH, replaced(1)),
    "eigh swapped": (EIGH, swapped(1)),
    "eigh stale row": (EIGH, stale_row(1)),
    "eigh order": (EIGH, upside_down),
    "eigh value": (EIGH, value_off(0)),
    "eig scaled": (EIG, scaled(1)),
    "eig one scaled": (EIG, one_scaled(1)),
    "eig replaced": (EIG, replaced(1)),
    "eig swapped": (EIG, swapped(1)),
    "eig stale row": (EIG, stale_row(1)),
    "eig value": (EIG, value_off(0)),
    "svd U scaled": (SVD, scaled(0)),
    "svd V scaled": (SVD, scaled(2)),
    "svd one scaled": (SVD, one_scaled(0)),
    "svd replaced": (SVD, replaced(0)),
    "svd swapped": (SVD, swapped(0)),
    "svd stale row": (SVD, stale_row(0)),
    "svd sign of U alone": (SVD, one_sign(0)),
    "svd sign of V alone": (SVD, one_sign_of_row(2)),
    "svd value": (SVD, value_off(1)),
    "qr scaled": (QR, scaled(0)),
    "qr R scaled": (QR, scaled(1)),
    "qr replaced": (QR, replaced(0)),
    "qr stale row": (QR, stale_row(0)),
    "qr sign of Q alone": (QR, one_sign(0)),
    "qr R is no triangle": (QR, not_a_triangle),
}


@PRECISIONS
@BATCHES
@pytest.mark.parametrize(("op", "fault"), FAULTS.values(), ids=FAULTS)
def test_fault_is_found(tmp_path: Any, op: str, fault: Any, batch: Any, dtype: Any) -> None:
    x = normal(*batch, 12, 12, dtype=dtype)
    with planted(op, spoilt(fault)):
        found = record(tmp_path, op, lambda: STEPS[op](x))
    assert found.verdict == Verdict.FAIL
    assert found.reason


@PRECISIONS
@pytest.mark.parametrize(("op", "fault"), FAULTS.values(), ids=FAULTS)
def test_fault_in_one_matrix_of_a_large_batch_is_found(
    tmp_path: Any, op: str, fault: Any, dtype: Any
) -> None:
    x = normal(40, 12, 12, dtype=dtype)

    def in_one(out: list[Tensor]) -> Any:
        changed = changed_by(fault, [item[17].clone() for item in out])
        for item, new in zip(out, changed, strict=True):
            item[17] = new

    with planted(op, spoilt(in_one)):
        found = record(tmp_path, op, lambda: STEPS[op](x), max_numel=1000)
    assert found.verdict == Verdict.FAIL
    assert found.sample.strategy == "projection"


@pytest.mark.parametrize(("op", "fault"), FAULTS.values(), ids=FAULTS)
def test_fault_in_a_large_matrix_is_found(tmp_path: Any, op: str, fault: Any) -> None:
    x = normal(200, 200)
    with planted(op, spoilt(fault)):
        found = record(tmp_path, op, lambda: STEPS[op](x), max_numel=10_000)
    assert found.verdict == Verdict.FAIL
    assert found.sample.covers_all


def test_wrong_eigenvalues_alone_are_found(tmp_path: Any) -> None:
    op = "aten._linalg_eigvals.default"
    with planted(op, spoiled(lambda values: values.mul_(1.001))):
        found = record(tmp_path, op, lambda: torch.ops.aten._linalg_eigvals(normal(12, 12)))
    assert found.verdict == Verdict.FAIL


# ---- correct variants ---------------------------------------------------------------------------


def phases(size: int, like: Tensor, sign: float = 1.0) -> Tensor:
    angles = (
        sign * 2 * np.pi * torch.rand(size, generator=torch.Generator().manual_seed(3)).double()
    )
    if like.is_complex():
        return torch.polar(torch.ones_like(angles), angles).to(like.dtype)
    return torch.where(angles.abs() < np.pi, 1.0, -1.0).to(like.dtype)


def other_phases(op: str) -> Callable[[list[Tensor]], list[Tensor]]:
    def change(out: list[Tensor]) -> list[Tensor]:
        if op in (EIGH, EIG):
            return [out[0], out[1] * phases(out[1].shape[-1], out[1])]
        turned, back = (phases(out[0].shape[-1], out[0], sign) for sign in (1.0, -1.0))
        if op == QR:
            return [out[0] * turned, out[1] * back[:, None]]
        return [out[0] * turned, out[1], out[2] * back[:, None]]

    return change


def by_numpy(op: str) -> Callable[..., Any]:
    """Other code for the same problem, in float64 and rounded."""

    def make(original: Any) -> Any:
        def kernel(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            wide = x.numpy().astype(np.complex128 if x.is_complex() else np.float64)
            if op == EIGH:
                out = np.linalg.eigh(wide)
            elif op == EIG:
                out = tuple(np.asarray(item, np.complex128) for item in np.linalg.eig(wide))
            elif op == SVD:
                out = np.linalg.svd(wide)
            else:
                out = np.linalg.qr(wide)
            dtypes = [item.dtype for item in original(x, *args, **kwargs)]
            return tuple(
                torch.from_numpy(np.ascontiguousarray(item)).to(dtype)
                for item, dtype in zip(out, dtypes, strict=True)
            )

        return kernel

    return make


def rotated(out: list[Tensor]) -> list[Tensor]:
    """The vectors of the three equal values, by another basis of their space."""
    turn = basis(3, out[1].dtype, seed=8)
    vectors = out[1].clone()
    vectors[:, :3] = vectors[:, :3] @ turn
    return [out[0], vectors]


@PRECISIONS
@BATCHES
@pytest.mark.parametrize("op", STEPS)
def test_other_signs_and_phases_pass(tmp_path: Any, op: str, batch: Any, dtype: Any) -> None:
    x = normal(*batch, 12, 12, dtype=dtype)
    with planted(op, spoilt(other_phases(op))):
        assert record(tmp_path, op, lambda: STEPS[op](x)).verdict == Verdict.PASS


@PRECISIONS
@pytest.mark.parametrize("op", STEPS)
def test_other_code_passes(tmp_path: Any, op: str, dtype: Any) -> None:
    x = normal(2, 40, 40, dtype=dtype)
    with planted(op, by_numpy(op)):
        assert record(tmp_path, op, lambda: STEPS[op](x)).verdict == Verdict.PASS


@PRECISIONS
def test_other_basis_of_equal_values_passes(tmp_path: Any, dtype: Any) -> None:
    x = with_values([1.0, 1.0, 1.0, 2.0, 3.0, 4.0], dtype)
    with planted(EIGH, spoilt(rotated)):
        assert record(tmp_path, EIGH, lambda: torch.linalg.eigh(x)).verdict == Verdict.PASS


def low_rank(dtype: torch.dtype) -> Tensor:
    return normal(20, 2, dtype=dtype) @ normal(2, 20, dtype=dtype, seed=1)


def jordan(dtype: torch.dtype) -> Tensor:
    return (torch.eye(6) + torch.diag(torch.ones(5), 1)).to(dtype)


MATRICES: dict[str, Callable[[torch.dtype], Tensor]] = {
    "tiny": lambda dtype: normal(20, 20, dtype=dtype) * 1e-30,
    "subnormal": lambda dtype: normal(20, 20, dtype=dtype) * 1e-42,
    "huge": lambda dtype: normal(20, 20, dtype=dtype) * 1e30,
    "low rank": low_rank,
    "zero": lambda dtype: torch.zeros(7, 7, dtype=dtype),
    "constant": lambda dtype: torch.ones(30, 30, dtype=dtype),
    "identity": lambda dtype: torch.eye(9, dtype=dtype),
    "jordan block": jordan,
    "large mean": lambda dtype: normal(5, 5, dtype=dtype) + 100,
    "graded columns": lambda dtype: normal(20, 20, dtype=dtype) * torch.logspace(0, -12, 20),
    "graded rows": lambda dtype: normal(20, 20, dtype=dtype) * torch.logspace(0, -12, 20)[:, None],
    "one element": lambda dtype: normal(1, 1, dtype=dtype),
    "many rows": lambda dtype: normal(30, 4, dtype=dtype),
    "many columns": lambda dtype: normal(4, 30, dtype=dtype),
    "batch": lambda dtype: normal(2, 3, 8, 8, dtype=dtype),
    "nothing": lambda dtype: torch.zeros(0, 3, 3, dtype=dtype),
}
NOT_SQUARE = {"many rows", "many columns"}
OF_STEPS = [
    (op, name) for op in STEPS for name in MATRICES if op in (SVD, QR) or name not in NOT_SQUARE
]


@PRECISIONS
@pytest.mark.parametrize("large", [False, True], ids=["all", "large"])
@pytest.mark.parametrize(("op", "name"), OF_STEPS)
def test_torch_itself_passes(tmp_path: Any, op: str, name: str, large: bool, dtype: Any) -> None:
    x = MATRICES[name](dtype)
    # of complex subnormal numbers a LAPACK may give NaN, which is wrong
    is_wrong = op == QR and not all(item.isfinite().all() for item in STEPS[op](x))
    options = {"max_numel": 8} if large else {}
    with opcheck.check(log_dir=tmp_path, quiet=True, **options) as session:
        STEPS[op](x)
    assert [item.error for item in session.records] == [None] * len(session.records)
    assert [record.op for record in session.failures] == ([QR] if is_wrong else [])
    checked = [item for item in session.records if item.op == op]
    assert bool(checked) == bool(x.numel())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "step",
    [
        lambda x: torch.linalg.svd(x[:, :5]),
        lambda x: torch.linalg.svd(x[:, :5], full_matrices=False),
        lambda x: torch.linalg.qr(x[:, :5], mode="complete"),
        lambda x: torch.linalg.qr(x[:, :5], mode="r"),
        lambda x: torch.linalg.eigh(x, UPLO="U"),
        lambda x: torch.linalg.eigh(x, UPLO="L"),
    ],
)
def test_options_are_understood(tmp_path: Any, step: Any, dtype: Any) -> None:
    x = normal(12, 12, dtype=dtype)
    with opcheck.check(log_dir=tmp_path, quiet=True) as session:
        step(x)
    (found,) = [item for item in session.records if "linalg" in item.op]
    assert found.verdict == Verdict.PASS


def test_values_alone_in_float64_have_no_judge(tmp_path: Any) -> None:
    x = normal(12, 12, dtype=torch.float64)
    with opcheck.check(log_dir=tmp_path, quiet=True) as session:
        torch.ops.aten._linalg_svd(x, False, False)
    assert session.coverage.skipped[SkipReason.NO_INDEPENDENT_REFERENCE] == 1


def test_record_says_by_what_it_was_judged(tmp_path: Any) -> None:
    x = normal(60, 60, dtype=torch.float64)
    found = record(tmp_path, QR, lambda: torch.linalg.qr(x))
    assert found.reference == "what it reconstructs"
    assert found.sample is None
    found = record(tmp_path, QR, lambda: torch.linalg.qr(x), max_numel=1000)
    assert found.reference == "what it reconstructs"
    assert found.sample.detail == "all columns, in sums of 16"
    assert found.sample.covers_all


@pytest.mark.parametrize("max_numel", [1_000_000, 100])
def test_wrong_shape_or_dtype_in_float64_fails(tmp_path: Any, max_numel: int) -> None:
    x = normal(12, 12, dtype=torch.float64)
    for change, word in (
        (lambda out: [out[0][:, :11].contiguous(), out[1]], "shape"),
        (lambda out: [out[0].float(), out[1]], "dtype"),
    ):
        with planted(QR, spoilt(change)):
            found = record(tmp_path, QR, lambda: torch.linalg.qr(x), max_numel=max_numel)
        assert found.verdict == Verdict.FAIL
        assert word in found.reason
