"""Passes over matrices in chunks: what they sum and multiply, for every layout and dtype."""

from __future__ import annotations

import weakref

import pytest
import torch

import opcheck
from opcheck import passes
from opcheck.passes import Blocks, Scratch, rows_times, sums_and_norms, sums_and_rows, times
from opcheck.projection import Product
from tests.registering import enabled, registered

K, N, WIDTH = 130, 150, 40
LAYOUTS = {
    "row-major": lambda x: x,
    "column-major": lambda x: x.t().contiguous().t(),
    "strided": lambda x: torch.stack([x, x], -1).view(K, 2 * N)[:, ::2],
    "rows of a wider matrix": lambda x: torch.cat([x, x], 1)[:, :N],
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Several chunks, the last one smaller."""
    monkeypatch.setattr(passes, "CHUNK", 4096)


def values(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def wide_of(dtype):
    return torch.float64 if dtype is torch.float64 else torch.float32


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("golden", [torch.float32, torch.float64], ids=str)
def test_one_pass_gives_block_sums_and_rows(layout, dtype, golden):
    b = LAYOUTS[layout](values(K, N, dtype=dtype))
    left, signs = values(3, K, dtype=golden, seed=1), values(N, dtype=wide_of(dtype), seed=2)
    kept = b.clone()
    sums, rows = sums_and_rows(b, Blocks(signs, WIDTH), left, Scratch())
    wanted = torch.stack(
        [part.sum(1) for part in (b.double() * signs.double()).split(WIDTH, dim=1)], dim=1
    )
    assert torch.allclose(sums.double(), wanted, atol=1e-4)
    assert torch.allclose(rows.double(), left.double() @ b.double(), atol=1e-3)
    assert torch.equal(b, kept)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_block_sums_and_norms(layout, dtype):
    y, signs = LAYOUTS[layout](values(K, N, dtype=dtype)), values(N, dtype=wide_of(dtype), seed=2)
    sums, norms = sums_and_norms(y, Blocks(signs, WIDTH), Scratch())
    parts = (y.double() * signs.double()).split(WIDTH, dim=1)
    assert torch.allclose(sums.double(), torch.stack([p.sum(1) for p in parts], 1), atol=1e-4)
    assert torch.allclose(norms.double(), torch.stack([p.norm(dim=1) for p in parts], 1), atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("squared", [False, True], ids=["plain", "squared"])
def test_products_with_a_narrow_side(layout, dtype, squared):
    b, wide = LAYOUTS[layout](values(K, N, dtype=dtype)), wide_of(dtype)
    left, z, scratch = values(3, K, dtype=wide, seed=1), values(N, 4, dtype=wide, seed=3), Scratch()
    wanted = left.double() @ (b.double().square() if squared else b.double())
    assert torch.allclose(rows_times(left, b, scratch, squared=squared).double(), wanted, atol=1e-3)
    assert torch.allclose(times(b, z, scratch).double(), b.double() @ z.double(), atol=1e-3)
    assert 0 < scratch.num_bytes <= 4096 + 8 * max(K, N)


def test_a_build_without_onednn_multiplies_too(monkeypatch):
    left, right = values(3, K), values(K, N, seed=1)
    with_it = passes.narrow_product(left, right)
    monkeypatch.setattr(passes, "_ONEDNN_LINEAR", None)
    assert torch.allclose(passes.narrow_product(left, right), with_it, atol=1e-4)


def test_where_the_cpu_may_round_factors_first_references_are_float64():
    a = values(2, 2)
    product = Product(a=a, b=a, y=a.bfloat16())
    assert product.working_dtype is product.golden_dtype is torch.float32
    torch.set_float32_matmul_precision("medium")
    try:
        assert product.working_dtype is product.golden_dtype is torch.float64
    finally:
        torch.set_float32_matmul_precision("highest")


def test_memory_of_a_check_serves_the_next_and_is_let_go(tmp_path):
    a = torch.ones(1024, 1024)
    with opcheck.check(log_dir=tmp_path, quiet=True, max_numel=1000) as session:
        a @ a
        (kept,) = passes._SPARE
        held = weakref.ref(kept)
        a @ a
        assert [kept] == passes._SPARE
        del kept
    assert session.verdict == "PASS"
    assert held() is None


def test_each_of_two_checks_at_once_has_memory_of_its_own():
    with passes.borrowed_scratch() as one, passes.borrowed_scratch() as other:
        assert one is not other
    passes.release_scratch()


def test_registered_kernels_let_go_of_it_too(tmp_path):
    def product(x, y):
        return torch.from_numpy(x.numpy() @ y.numpy())

    a = torch.ones(1024, 1024)
    options = {"path": tmp_path / "kernels.log", "large": "sample"}
    with registered(("mm", product)):
        with enabled(**options):
            torch.mm(a, a)
            assert len(passes._SPARE) == 1
        assert opcheck.coverage().checked == 1
    assert passes._SPARE == []
