"""Products of 1024: correct ones in any order never fail, planted faults do and are located."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch

from opcheck.calls import Call, Site, traits_of
from opcheck.large import judge_large
from opcheck.outside import outside_everything
from opcheck.projection import Product, project
from opcheck.sampled import Criterion

N = 1024
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CRITERION = Criterion(name="calibrated", rtol=1e-4, atol=1e-5, seed=0)


def normal(seed):
    return torch.randn(N, N, generator=torch.Generator().manual_seed(seed))


DATA = {
    "normal": lambda: (normal(0), normal(1)),
    "positive": lambda: (normal(0).relu(), normal(1).abs()),
    # every sum of 1024 terms of size 100 cancels to the size of a few
    "cancelling": lambda: (normal(0) + 10.0, normal(1) - normal(1).mean(0)),
    "scaled": lambda: (
        normal(0) * torch.logspace(-4, 4, N)[:, None],
        normal(1) * torch.logspace(3, -3, N),
    ),
}


@functools.cache
def factors(data, dtype):
    a, b = DATA[data]()
    return a.to(dtype), b.to(dtype)


@functools.cache
def right(data, dtype):
    a, b = factors(data, dtype)
    return (a.float() @ b.float()).to(dtype) if dtype is torch.float16 else a @ b


def judged(a, b, y, seed=0, **options):
    func = torch.ops.aten.mm.default
    call = Call(
        func=func, traits=traits_of(func), args=(a, b), kwargs={}, site=Site("", "other"), index=0,
        step=0, occurrence=0, signature=(func, a.dtype, "contiguous", b.dtype, "contiguous"),
        source="", out_dtype=y.dtype, **options,
    )  # fmt: skip
    with outside_everything():
        return judge_large(call, y, replace(CRITERION, seed=seed)).found


# ---- correct results ----


def by_columns(a, b):
    return torch.cat([a @ part for part in b.split(200, dim=1)], dim=1)


def split_k(a, b):
    parts = zip(a.split(256, dim=1), b.split(256), strict=True)
    return sum(left.float() @ right.float() for left, right in parts).to(a.dtype)


VARIANTS = {
    "as it is": lambda a, b: a.float() @ b.float(),
    "transposed": lambda a, b: (b.float().t() @ a.float().t()).t(),
    "by columns": lambda a, b: by_columns(a.float(), b.float()),
    "split-K": split_k,
    "rounded float64": lambda a, b: a.double() @ b.double(),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("variant", VARIANTS)
def test_correct_products_pass(variant, data, dtype):
    a, b = factors(data, dtype)
    found = judged(a, b, VARIANTS[variant](a, b).to(dtype))
    assert found.passed, found.reason
    assert found.sample.strategy == "projection"
    assert found.sample.covers_all


@pytest.mark.parametrize("data", DATA)
def test_column_major_factors_and_results_pass(data):
    a, b = factors(data, torch.float32)
    y = (b.t() @ a.t()).t()
    assert judged(a.t().contiguous().t(), b.t().contiguous().t(), y).passed


def to_tf32(x):
    """Cut to 10 bits of mantissa, as tensor cores do."""
    return (x.view(torch.int32) & ~0x1FFF).view(torch.float32)


def to_bfloat16(x):
    return x.bfloat16().float()


@pytest.mark.parametrize("data", ["normal", "positive"])
@pytest.mark.parametrize(("rounded", "step"), [(to_tf32, 2.0**-11), (to_bfloat16, 2.0**-9)])
def test_rounded_factors_are_explained_where_they_are_allowed_and_not_elsewhere(
    data, rounded, step
):
    a, b = factors(data, torch.float32)
    y = rounded(a) @ rounded(b)
    product = Product(a=a, b=b, y=y, factor_step=step, other_hardware=True)
    strict = Product(a=a, b=b, y=y)
    assert project(product, np.random.default_rng(0)).residual.largest < 6.0
    assert project(strict, np.random.default_rng(0)).residual.largest > 16.0
    assert not judged(a, b, y).passed


def test_partial_sums_in_sixteen_bit_pass_on_other_hardware():
    for data in DATA:
        a, b = factors(data, torch.bfloat16)
        parts = zip(a.split(256, dim=1), b.split(256), strict=True)
        y = sum((left @ right for left, right in parts), torch.zeros(N, N, dtype=a.dtype))
        found = judged(a, b, y, on_device=True)
        product = Product(a=a, b=b, y=y, other_hardware=True)
        residual = project(product, np.random.default_rng(0)).residual
        assert residual.largest < 6.0, data
        assert found.passed, (data, found.reason)


def partial_sums_in_sixteen_bit(a, b, parts):
    step = N // parts
    y = torch.zeros(N, N, dtype=a.dtype)
    for left, right in zip(a.split(step, dim=1), b.split(step), strict=True):
        y += (left.float() @ right.float()).to(a.dtype)
    return y


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_many_partial_sums_that_cancel_pass(dtype):
    a, b = factors("cancelling", dtype)
    y = partial_sums_in_sixteen_bit(a, b, 32)
    found = judged(a, b, y, on_device=True)
    assert found.passed, found.reason


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_faults_beside_partial_sums_in_sixteen_bit_are_found(dtype):
    for data in ("normal", "cancelling"):
        a, b = factors(data, dtype)
        y = partial_sums_in_sixteen_bit(a, b, 4)
        noise = torch.randn(N, N, generator=torch.Generator().manual_seed(3))
        wrong = (y.float() + 0.5 * y.float().std() * noise).to(dtype)
        assert not judged(a, b, wrong, on_device=True).passed, data
        wrong = y.clone()
        wrong[:, 640:704] = 0
        assert not judged(a, b, wrong, on_device=True).passed, data


# ---- faults ----


def element(share):
    def change(y):
        y[517, 301] += share * y.float().square().mean().sqrt()

    change.__name__ = f"element_off_by_{share}_rms"
    return change


def zero_tile(y):
    y[640:656, 256:272] = 0


def zero_row(y):
    y[77] = 0


def zero_column(y):
    y[:, 901] = 0


def swapped_columns(y):
    y[:, [400, 401]] = y[:, [401, 400]]


def one_percent(y):
    y.mul_(1.01)


def one_in_a_thousand(y):
    y.copy_((y.double() * 1.001).to(y.dtype))


def one_nan(y):
    y[3, 1000] = float("nan")


FAULTS = [element(0.5), zero_tile, zero_row, zero_column, swapped_columns, one_percent, one_nan]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("change", FAULTS, ids=lambda item: item.__name__)
def test_faults_are_found(change, dtype):
    a, b = factors("normal", dtype)
    y = right("normal", dtype).clone()
    change(y)
    found = judged(a, b, y)
    assert not found.passed
    assert found.metrics.worst_index is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("change", [element(0.1), one_in_a_thousand], ids=lambda i: i.__name__)
def test_small_faults_are_found_where_rounding_is_smaller(change, dtype):
    a, b = factors("normal", dtype)
    y = right("normal", dtype).clone()
    change(y)
    assert not judged(a, b, y).passed


def test_most_elements_near_the_limit_of_bfloat16_are_found():
    """In blocks of 64 columns 0.15 rms stands out as 0.3 rms does in those of 256."""
    a, b = factors("normal", torch.bfloat16)
    y = right("normal", torch.bfloat16)
    size, rng = float(y.float().square().mean().sqrt()), np.random.default_rng(0)
    found = 0
    for seed in range(40):
        while True:  # of twice the size the rule of rows lets an element be further off
            row, column = rng.integers(0, N, 2)
            if abs(float(y[row, column])) < 0.9 * size:
                break
        wrong = y.clone()
        wrong[row, column] += 0.15 * size
        found += not judged(a, b, wrong, seed=seed).passed
    assert found >= 32


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_missing_last_block_of_k_is_found(dtype):
    a, b = factors("normal", dtype)
    y = (a[:, :-16].float() @ b[:-16].float()).to(dtype)
    assert not judged(a, b, y).passed


def test_the_tile_is_named_with_exact_values():
    a, b = factors("normal", torch.float32)
    y = right("normal", torch.float32).clone()
    zero_tile(y)
    found = judged(a, b, y)
    assert found.sample.tile == (640, 655, 256, 271)
    assert "rows 640 to 655, columns 256 to 271" in found.reason
    row, column = found.metrics.worst_index
    assert 640 <= row < 656
    assert 256 <= column < 272
    assert found.metrics.actual_at == 0.0
    golden = float(a[row].double() @ b[:, column].double())
    assert found.metrics.expected_at == pytest.approx(golden, rel=1e-12)


def test_a_scale_error_is_named():
    a, b = factors("normal", torch.float32)
    y = right("normal", torch.float32) * 1.01
    assert "off by a factor of 1.01" in judged(a, b, y).reason


def test_added_matrix_and_factors_are_projected_too():
    a, b = factors("normal", torch.float32)
    for added in (normal(2)[0], normal(2)[:, :1], normal(2)):
        y = torch.addmm(added, a, b, beta=0.5, alpha=2.0)
        product = Product(a=a, b=b, y=y, added=added, alpha=2.0, beta=0.5)
        assert project(product, np.random.default_rng(0)).residual.largest < 6.0
        wrong = Product(a=a, b=b, y=y, added=added, alpha=2.0, beta=1.0)
        assert project(wrong, np.random.default_rng(0)).residual.largest > 16.0


def test_results_that_are_infinite_are_noted_as_blind_spots():
    a, b = factors("normal", torch.float32)
    a = a.clone()
    a[5, 5] = float("inf")
    found = judged(a, b, a @ b)
    assert found.passed, found.reason
    assert any("not finite" in note for note in found.notes)
