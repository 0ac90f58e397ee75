"""Products of units that flush subnormal numbers pass; faults among and beside those do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import opcheck
from opcheck.flushing import NOTE
from opcheck.records import Verdict
from tests.faults import planted, spoiled

SMALLEST = 2.0**-126
BFLOAT = torch.bfloat16
MM, CONV = "aten.mm.default", "aten.convolution.default"


def normal(*shape: int, scale: float = 1.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(BFLOAT)


def partly_tiny(*shape: int) -> Tensor:
    """Half of the elements are around the smallest normal number."""
    x = normal(*shape)
    return torch.where(torch.arange(shape[-1]) % 2 == 0, x, (x.float() * SMALLEST).to(BFLOAT))


def record(tmp_path: Any, op: str, step: Callable[[], Any], **options: Any) -> Any:
    with opcheck.check(log_dir=tmp_path, quiet=True, **options) as session:
        step()
    (found,) = [item for item in session.records if item.op == op]
    assert found.error is None
    return found


def flush(x: Any, *, smallest: float = SMALLEST) -> Any:
    if not isinstance(x, Tensor):
        return x
    return torch.where(x.abs() < smallest, torch.zeros((), dtype=x.dtype), x)


def flushing(original: Any) -> Any:
    """As units of bfloat16 do."""
    return lambda *args: flush(original(*map(flush, args)))


def flushing_left(*, smallest: float) -> Any:
    return lambda original: lambda x, y: original(flush(x, smallest=smallest), y)


def in_float32(original: Any) -> Any:
    """A unit that keeps subnormal numbers."""
    return lambda *args: original(*[x.float() if isinstance(x, Tensor) else x for x in args]).to(
        BFLOAT
    )


FACTORS = {
    "tiny left": lambda: (normal(64, 128, scale=SMALLEST), normal(128, 64, seed=1)),
    "subnormal left": lambda: (normal(64, 128, scale=SMALLEST / 16), normal(128, 64, seed=1)),
    "tiny right": lambda: (normal(64, 128), normal(128, 64, scale=SMALLEST, seed=1)),
    "large beside subnormal": lambda: (
        normal(64, 128, scale=SMALLEST / 4),
        normal(128, 64, scale=64, seed=1),
    ),
    "subnormal products": lambda: (
        normal(64, 128, scale=2.0**-66),
        normal(128, 64, scale=2.0**-66, seed=1),
    ),
    "partly tiny": lambda: (partly_tiny(64, 128), normal(128, 64, seed=1)),
}
KERNELS = {"flushes": flushing, "keeps": in_float32}


@pytest.mark.parametrize("max_numel", [1_000_000, 5_000], ids=["all", "large"])
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("factors", FACTORS.values(), ids=FACTORS)
def test_correct_products_pass(tmp_path: Any, factors: Any, kernel: Any, max_numel: int) -> None:
    a, b = factors()
    assert record(tmp_path, MM, lambda: a @ b, max_numel=max_numel).verdict == Verdict.PASS
    with planted(MM, kernel):
        found = record(tmp_path, MM, lambda: a @ b, max_numel=max_numel)
    assert found.verdict == Verdict.PASS, found.reason


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_correct_large_product_passes(tmp_path: Any, kernel: Any) -> None:
    a, b = normal(1024, 1024, scale=SMALLEST), normal(1024, 1024, seed=1)
    with planted(MM, kernel):
        found = record(tmp_path, MM, lambda: a @ b, max_numel=1_000_000)
    assert found.sample.strategy == "projection"
    assert found.verdict == Verdict.PASS, found.reason


def test_fault_in_a_large_product_beside_subnormals_is_found(tmp_path: Any) -> None:
    a, b = partly_tiny(1024, 1024), normal(1024, 1024, seed=1)
    with planted(MM, lambda original: spoiled(lambda y: y[700].mul_(1.1))(flushing(original))):
        found = record(tmp_path, MM, lambda: a @ b, max_numel=1_000_000)
    assert found.verdict == Verdict.FAIL


@pytest.mark.parametrize("scale", [SMALLEST, SMALLEST**0.5 / 8])
def test_correct_convolutions_pass(tmp_path: Any, scale: float) -> None:
    x = normal(2, 8, 10, 10, scale=scale)
    weight = normal(6, 8, 3, 3, scale=1.0 if scale == SMALLEST else scale, seed=1)
    step = lambda: torch.nn.functional.conv2d(x, weight)  # noqa: E731
    assert record(tmp_path, CONV, step).verdict == Verdict.PASS


def test_correct_gradients_pass(tmp_path: Any) -> None:
    """A gradient that vanishes, as of a saturated loss."""
    x, weight = normal(64, 32).requires_grad_(), normal(48, 32, seed=1).requires_grad_()
    kernels = normal(6, 8, 3, 3, seed=2).requires_grad_()
    images = normal(2, 8, 10, 10).requires_grad_()
    with opcheck.check(log_dir=tmp_path, quiet=True) as session:
        for y in (x @ weight.t(), torch.nn.functional.conv2d(images, kernels)):
            y.backward(normal(*y.shape, scale=SMALLEST))
    assert session.verdict == Verdict.PASS, session.report()


def test_record_says_that_subnormals_were_flushed(tmp_path: Any) -> None:
    """So small a product is no work for such a unit: the CPU's own kernel keeps subnormals."""
    a, b = normal(8, 16, scale=SMALLEST / 4), normal(16, 8, scale=64, seed=1)
    with planted(MM, flushing):
        found = record(tmp_path, MM, lambda: a @ b)
    assert found.verdict == Verdict.PASS
    assert NOTE in found.notes
    assert NOTE not in record(tmp_path, MM, lambda: a @ b).notes


# ---- faults -------------------------------------------------------------------------------------

CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "scaled": lambda y: y.mul_(1.03),
    "one element": lambda y: y[3, 5].add_(y.double().square().mean().sqrt().to(BFLOAT)),
    "last column": lambda y: y[:, -1].zero_(),
    "sign of a row": lambda y: y[7].neg_(),
    "zeros": lambda y: y.zero_(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_fault_beside_subnormals_is_found(tmp_path: Any, kernel: Any, change: Any) -> None:
    a, b = FACTORS["partly tiny"]()
    with planted(MM, lambda original: spoiled(change)(kernel(original))):
        found = record(tmp_path, MM, lambda: a @ b)
    assert found.verdict == Verdict.FAIL


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_fault_in_small_normal_numbers_is_found(tmp_path: Any, change: Any) -> None:
    """Factors and results are normal numbers, some 2^20 above the smallest one."""
    a, b = normal(64, 128, scale=2.0**-100), normal(128, 64, scale=16, seed=1)
    with planted(MM, lambda original: spoiled(change)(flushing(original))):
        found = record(tmp_path, MM, lambda: a @ b)
    assert found.verdict == Verdict.FAIL


def test_flushing_of_larger_numbers_is_found(tmp_path: Any) -> None:
    a, b = normal(64, 128, scale=2.0**-100), normal(128, 64, seed=1)
    with planted(MM, flushing_left(smallest=2.0**-101)):
        assert record(tmp_path, MM, lambda: a @ b).verdict == Verdict.FAIL


def test_float16_keeps_its_subnormals(tmp_path: Any) -> None:
    """They are ordinary numbers of the float32 in which a product is summed."""
    a, b = (normal(64, 128) * 2.0**-18).half(), normal(128, 64, seed=1).half()
    with planted(MM, flushing_left(smallest=2.0**-14)):
        assert record(tmp_path, MM, lambda: a @ b).verdict == Verdict.FAIL
