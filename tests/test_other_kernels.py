"""What kernels of other devices and libraries may do that the CPU's own do not."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from opcheck import Verdict, _torch, check
from opcheck.runstate import RunState
from tests.device_results import judged
from tests.faults import planted

aten = torch.ops.aten

# ---- TF32 ---------------------------------------------------------------------------------------


def to_tf32(tensor: Tensor) -> Tensor:
    """Rounded to 10 bits of mantissa."""
    return ((tensor.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


@contextmanager
def precision_of(owner: Any, value: str) -> Iterator[None]:
    before = owner.fp32_precision
    owner.fp32_precision = value
    try:
        yield
    finally:
        owner.fp32_precision = before


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


PRODUCTS = {
    "mm": (aten.mm.default, (random(9, 33), random(33, 7))),
    "bmm": (aten.bmm.default, (random(2, 9, 33), random(2, 33, 7))),
    "linear": (aten.linear.default, (random(9, 33), random(7, 33))),
    "matmul": (aten.matmul.default, (random(9, 33), random(33, 7))),
    # one factor: the product with 1 moves by as much as the other factor
    "identity": (aten.mm.default, (torch.diag(torch.tensor([0.66135216, 1.0, 1.0])), torch.eye(3))),
}


@pytest.mark.parametrize("value", ["tf32", "ieee"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_tf32_passes_where_it_is_allowed_and_only_there(name: str, value: str) -> None:
    func, args = PRODUCTS[name]
    out = func(*[to_tf32(arg) for arg in args])
    with precision_of(torch.backends.cuda.matmul, value):
        assert judged(func, args, out, device="cuda").passed == (value == "tf32")
        assert not judged(func, args, out, device="mps").passed


@pytest.mark.parametrize("value", ["tf32", "ieee"])
def test_convolutions_have_a_setting_of_their_own(value: str) -> None:
    func = aten.convolution.default
    x, w = random(2, 5, 9, 9), random(4, 5, 3, 3)
    rest = (None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    out = func(to_tf32(x), to_tf32(w), *rest)
    with precision_of(torch.backends.cudnn.conv, value):
        assert judged(func, (x, w, *rest), out, device="cuda").passed == (value == "tf32")


@pytest.mark.parametrize(
    ("func", "args"), [(aten.mv.default, (random(9, 33), random(33))),
                       (aten.cummax.default, (random(9, 33), 0))]
)  # fmt: skip
def test_what_is_no_product_of_matrices_stays_float32(func: Any, args: Any) -> None:
    out = func(*[to_tf32(arg) if isinstance(arg, Tensor) else arg for arg in args])
    with precision_of(torch.backends.cuda.matmul, "tf32"):
        assert not judged(func, args, out, device="cuda").passed


def test_a_wrong_product_fails_where_tf32_is_allowed() -> None:
    func, args = PRODUCTS["mm"]
    with precision_of(torch.backends.cuda.matmul, "tf32"):
        assert not judged(func, args, func(*args) * 1.1, device="cuda").passed


@pytest.mark.parametrize("in_tiles", [True, False])
def test_a_bfloat16_product_of_the_cpu_passes_where_it_is_allowed_and_possible(
    in_tiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_torch, "cpu_multiplies_in_tiles", lambda: in_tiles)
    func, args = PRODUCTS["mm"]
    out = func(*[arg.bfloat16().float() for arg in args])
    assert not judged(func, args, out, on_device=False).passed
    with precision_of(torch.backends.mkldnn.matmul, "bf16"):
        assert judged(func, args, out, on_device=False).passed == in_tiles


@pytest.mark.parametrize("in_tiles", [True, False])
def test_so_does_a_large_one(
    in_tiles: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The bounds of TF32 were applied, and bfloat16 is four times as coarse."""
    monkeypatch.setattr(_torch, "cpu_multiplies_in_tiles", lambda: in_tiles)
    a, b = random(1100, 1100), random(1100, 1100)
    product = a.bfloat16().float() @ b.bfloat16().float()
    with (
        planted("aten.mm.default", lambda original: lambda *args: product.clone()),
        precision_of(torch.backends.mkldnn.matmul, "bf16"),
        check(log_dir=tmp_path, quiet=True) as session,
    ):
        torch.mm(a, b)
    (record,) = session.records
    assert record.sample is not None
    assert record.sample.strategy == "projection"
    assert (record.verdict is Verdict.PASS) == in_tiles, record.reason


def test_the_run_state_is_read_where_the_new_settings_are_in_use() -> None:
    with precision_of(torch.backends.cuda.matmul, "tf32"):
        assert RunState.now().cuda_tf32
    assert not RunState.now().cuda_tf32


# ---- statistics of norms ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_statistics_of_16_bit_inputs_may_be_float32(dtype: torch.dtype) -> None:
    func, args = aten.native_layer_norm.default, (random(5, 8).to(dtype), [8], None, None, 1e-5)
    out, mean, rstd = func(args[0].float(), *args[1:])
    assert judged(func, args, (out.to(dtype), mean, rstd)).passed
    assert judged(func, args, (out.to(dtype), mean.to(dtype), rstd.to(dtype))).passed
    assert not judged(func, args, (out.to(dtype), mean * 1.1, rstd)).passed


def test_the_result_itself_may_not() -> None:
    func, args = aten.native_layer_norm.default, (random(5, 8).half(), [8], None, None, 1e-5)
    found = judged(func, args, func(args[0].float(), *args[1:]))
    assert found.reason == "output 0 has dtype torch.float32, expected torch.float16"


# ---- powers -------------------------------------------------------------------------------------

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
SPECIAL = [-math.inf, math.inf, 4.0, 0.0, -0.0, -1.0, math.nan]
POWERS = {
    0.5: {math.nan, math.inf},  # of -inf: a square root, and a power
    -0.5: {math.nan, 0.0},
}


@pytest.mark.parametrize("exponent", POWERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_power_may_be_a_root_or_a_power(dtype: torch.dtype, exponent: float) -> None:
    func, args = aten.pow.Tensor_Scalar, (torch.tensor(SPECIAL, dtype=dtype), exponent)
    right = func(*args)
    for value in POWERS[exponent]:
        out = right.clone()
        out[0] = value
        assert judged(func, args, out).passed
        assert judged(func, args, out, on_device=False).passed


@pytest.mark.parametrize(("place", "wrong"), [(0, 1.0), (1, math.nan), (2, math.nan), (5, 0.0)])
@pytest.mark.parametrize("on_device", [True, False])
def test_a_nan_that_no_kernel_gives_fails(place: int, wrong: float, on_device: bool) -> None:
    func, args = aten.pow.Tensor_Scalar, (torch.tensor(SPECIAL, dtype=torch.float16), 0.5)
    out = func(*args)
    out[place] = wrong
    assert not judged(func, args, out, on_device=on_device).passed


def test_another_exponent_has_one_spelling() -> None:
    func, args = aten.pow.Tensor_Scalar, (torch.tensor(SPECIAL), 1.5)
    out = func(*args)
    assert judged(func, args, out).passed
    out[0] = math.nan
    assert not judged(func, args, out).passed


def test_every_spelling_of_a_power_passes_in_a_step(tmp_path: Path) -> None:
    values = torch.tensor(SPECIAL, dtype=torch.float16)
    with check(log_dir=tmp_path, quiet=True) as session:
        torch.pow(values, 0.5)
        values.clone().pow_(-0.5)
        torch._foreach_pow([values, values], 0.5)
        torch._foreach_pow_([values.clone()], -0.5)
    assert session.verdict == Verdict.PASS, session.failures
    assert session.coverage.checked == 4


# ---- Python numbers -----------------------------------------------------------------------------

NUMBERS = {
    "sub": (aten.sub.Tensor, torch.sub),
    "remainder": (aten.remainder.Scalar, torch.remainder),
    "hardshrink": (aten.hardshrink.default, torch.nn.functional.hardshrink),
    "eq": (aten.eq.Scalar, torch.eq),
}


def beside_numbers(dtype: torch.dtype) -> Tensor:
    """With elements that are equal to the number once it is rounded to 16 bit."""
    return torch.cat([random(200), torch.tensor([0.3, -0.3, 0.51])]).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", NUMBERS)
def test_a_kernel_may_keep_python_numbers_in_float32(name: str, dtype: torch.dtype) -> None:
    func, compute = NUMBERS[name]
    x = beside_numbers(dtype)
    rounded = func(x, 0.3)
    out = compute(x.float(), 0.3).to(rounded.dtype)
    assert not torch.equal(out, rounded)
    assert judged(func, (x, 0.3), out).passed
    assert judged(func, (x, 0.3), rounded).passed
    wrong = ~out if out.dtype == torch.bool else compute(x.float(), 0.35).to(out.dtype)
    assert not judged(func, (x, 0.3), wrong).passed


# ---- sums that cancel ---------------------------------------------------------------------------


@pytest.mark.parametrize("on_device", [True, False])
def test_a_gradient_that_cancels_may_be_rounding_alone(*, on_device: bool) -> None:
    x, weight = random(16, 2048).bfloat16(), random(2048).bfloat16()
    _, mean, rstd = torch.native_batch_norm(x, weight, weight, None, None, True, 0.1, 1e-5)
    func = aten.native_batch_norm_backward.default
    rest = (weight, None, None, mean, rstd, True, 1e-5, [True, True, True])
    grad = torch.full_like(x, 0.7)
    # channels last: each product is rounded, and their sum is zero in exact arithmetic
    out = func(grad.t().contiguous().t(), x.t().contiguous().t(), *rest)
    assert judged(func, (grad, x, *rest), out, on_device=on_device).passed
    for wrong in (out[1] + 0.1, out[1] * 10):
        found = judged(func, (grad, x, *rest), (out[0], wrong, out[2]), on_device=on_device)
        assert not found.passed


# ---- a kernel of the CPU that is no reference ---------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [0.01, 0.1, 1.0])
def test_powers_of_matrices_in_16_bit_are_judged_by_float64_alone(
    dtype: torch.dtype, scale: float
) -> None:
    func, x = aten.linalg_matrix_exp.default, (scale * random(5, 5)).to(dtype)
    right = torch.linalg.matrix_exp(x.double()).to(dtype)
    wrong = {
        "the CPU": func(x),
        "NaN": torch.full_like(right, math.nan),
        "one NaN": right.index_fill(0, torch.tensor([2]), math.nan),
        "beside": right + 1000,
    }
    for on_device in (True, False):
        assert judged(func, (x,), right, on_device=on_device).passed
        found = {name: judged(func, (x,), out, on_device=on_device) for name, out in wrong.items()}
        assert not [name for name, item in found.items() if item.passed], on_device


# ---- counts of values on the edge of a bin ------------------------------------------------------

EQUAL = torch.full((5000,), 3.0)
WHOLE = torch.arange(11.0).repeat(100)
COUNTS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "equal values": (aten.histc.default, (EQUAL, 10)),
    "equal values in the middle": (aten.histc.default, (EQUAL, 10, 0, 6)),
    "equal values at the lower end": (aten.histc.default, (EQUAL, 10, 3, 6)),
    "equal values at the upper end": (aten.histc.default, (EQUAL, 10, 0, 3)),
    "whole numbers": (aten.histc.default, (WHOLE, 10, 0, 10)),
    "histogram of equal values": (aten.histogram.bin_ct, (EQUAL, 10)),
    "histogram of whole numbers": (aten.histogram.bins_tensor, (WHOLE, torch.arange(11.0))),
}


def one_less(counts: Tensor) -> Tensor:
    return counts.index_add(0, counts.argmax(keepdim=True), torch.tensor([-1.0]))


@pytest.mark.parametrize("wrong", [torch.zeros_like, lambda counts: counts / 2, one_less])
@pytest.mark.parametrize("name", COUNTS)
def test_each_value_is_counted_once(name: str, wrong: Any) -> None:
    func, args = COUNTS[name]
    right = func(*args)

    def result(change: Any) -> Any:
        return (change(right[0]), right[1]) if isinstance(right, tuple) else change(right)

    for on_device in (True, False):
        assert judged(func, args, result(torch.clone), on_device=on_device).passed
        assert not judged(func, args, result(wrong), on_device=on_device).passed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("ends", [(0, 0), (-0.3, 0.7), (0.1, 0.3), (-2, 3)])
def test_counts_of_torch_are_right(dtype: torch.dtype, ends: tuple[float, float]) -> None:
    for size, bins in ((1, 1), (50, 4), (1000, 77)):
        for x in (random(size), random(size).round(), torch.full((size,), 0.3)):
            args = (x.to(dtype), bins, *ends)
            for on_device in (True, False):
                out = aten.histc.default(*args)
                found = judged(aten.histc.default, args, out, on_device=on_device)
                assert found.passed, found.reason


def test_an_end_that_is_rounded_may_be_inside_or_not() -> None:
    x = torch.tensor([0.1, 0.2, 0.3])  # float32(0.3) is larger than 0.3
    args = (x, 2, 0.1, 0.3)
    for counts in ([2.0, 1.0], [1.0, 2.0], [1.0, 1.0]):
        assert judged(aten.histc.default, args, torch.tensor(counts)).passed
    assert not judged(aten.histc.default, args, torch.zeros(2)).passed
