"""Named allowances: torch's own kernel needs each of these, and faults are found all the same.

Each case is a correct call that fails by the plain rule, so that a test fails when an allowance is
gone; the same call with a spoilt result fails with it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import opcheck
from opcheck import allowances, comparison
from opcheck.calls import Call, Site, traits_of
from opcheck.records import Verdict
from opcheck.references import choose
from opcheck.repro_limits import limits_of

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def uniform(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def gradient(function: Callable[..., Tensor], x: Tensor, *, grad: Any = None) -> None:
    out = function(x.clone().requires_grad_())
    out.backward(normal(*out.shape, seed=9).to(out.dtype) if grad is None else grad)


def resized(size: tuple[int, ...], mode: str, to: tuple[int, ...], **options: Any) -> None:
    gradient(lambda x: F.interpolate(x, size=to, mode=mode, **options), normal(1, 2, *size))


def sampled(dtype: torch.dtype, dims: int) -> None:
    sides = [12] * dims
    grid = (2 * uniform(2, *sides, dims) - 1).to(dtype)
    x = normal(2, 3, *sides).to(dtype)
    gradient(lambda a: F.grid_sample(a, grid, align_corners=False), x)


def grid_gradient(mode: str, side: int, seed: int, *, spread: float, corners: bool) -> None:
    x = normal(1, 2, side, side, seed=seed)
    grid = (2 * uniform(1, side, side, 2, seed=seed + 1) - 1) * spread
    sample = lambda g: F.grid_sample(x, g, mode=mode, align_corners=corners)  # noqa: E731
    gradient(sample, grid)


def float32_weights() -> None:
    x, grad = normal(1024, 24).to(BF16), normal(1024, 24, seed=1).abs().to(BF16)
    weight, bias = torch.ones(24), torch.zeros(24)
    _, mean, rstd = torch.native_layer_norm(x, (24,), weight, bias, 1e-5)
    torch.ops.aten.native_layer_norm_backward(
        grad, x, (24,), mean, rstd, weight, bias, [True, True, True]
    )


def certain_classes() -> None:
    x = normal(64, 10) * 8
    of_class = -F.one_hot(x.argmax(-1), 10).float()
    gradient(lambda y: F.log_softmax(y, -1), x, grad=of_class)


def soft_margin() -> None:
    sides = normal(50, 20, seed=1).sign().half()
    loss = lambda x: F.soft_margin_loss(x, sides, reduction="none")  # noqa: E731
    gradient(loss, (normal(50, 20) * 20).half())


def pooled(dtype: torch.dtype) -> None:
    gradient(lambda x: F.adaptive_avg_pool2d(x, (9, 11)), normal(2, 3, 20, 24).to(dtype))


def mse_of_odd_size() -> None:
    x, y = normal(1000).half(), normal(1000, seed=1).half()
    gradient(lambda a: F.mse_loss(a, y), x, grad=torch.ones((), dtype=FP16))


def divided(mode: str) -> None:
    torch.div((normal(10000) * 10).to(BF16), 0.3, rounding_mode=mode)


def pairs_divided() -> None:
    x, y = normal(10000) * 10, normal(10000, seed=1)
    torch.div(x.half(), y.half(), rounding_mode="trunc")


def with_logits() -> None:
    weight = (5 * uniform(5, seed=3)).to(BF16)
    F.binary_cross_entropy_with_logits(
        (normal(5, 5, seed=1) * 9).to(BF16), uniform(5, 5, seed=2).to(BF16), pos_weight=weight,
        reduction="none",
    )  # fmt: skip


def in_half(size: tuple[int, ...], mode: str, to: tuple[int, ...]) -> None:
    F.interpolate(normal(1, 2, *size).to(FP16), size=to, mode=mode)


BIG, SMALL = (200, 201), (37, 300)
CASES: dict[str, tuple[str, int, Callable[[], Any]]] = {
    "gelu": ("gelu", 0, lambda: F.gelu(torch.linspace(-6, -2, 4096))),
    "layer norm, float32 weights": ("native_layer_norm_backward", 3, float32_weights),
    "log softmax backward": ("_log_softmax_backward_data", 0, certain_classes),
    "log softmax": ("_log_softmax", 0, lambda: F.log_softmax((normal(64, 100) * 10).to(BF16), -1)),
    "grid 2d": ("grid_sampler_2d", 0, lambda: sampled(BF16, 2)),
    "grid 3d": ("grid_sampler_3d", 0, lambda: sampled(FP16, 3)),
    "grid 2d backward": ("grid_sampler_2d_backward", 0, lambda: sampled(BF16, 2)),
    "grid 3d backward": ("grid_sampler_3d_backward", 0, lambda: sampled(FP16, 3)),
    "bicubic grid": (
        "grid_sampler_2d_backward", 2,
        lambda: grid_gradient("bicubic", 256, 6, spread=0.3, corners=True),
    ),
    "bilinear grid": (
        "grid_sampler_2d_backward", 2,
        lambda: grid_gradient("bilinear", 400, 2, spread=0.3, corners=False),
    ),
    "linspace": ("linspace", 0, lambda: torch.linspace(-1, 1.3, 999, dtype=BF16)),
    "linspace of small steps": (
        "linspace", 0, lambda: torch.linspace(1e-4, 1e-2, 5000, dtype=FP16)
    ),
    "layer norm of one": (
        "native_layer_norm", 0, lambda: F.layer_norm((normal(4096, 1) * 100).to(BF16), (1,))
    ),
    "pool 3d": (
        "_adaptive_avg_pool3d", 0,
        lambda: F.adaptive_avg_pool3d(normal(2, 3, 16, 16, 16).to(BF16), (2, 2, 2)),
    ),
    "pool 2d backward": ("_adaptive_avg_pool2d_backward", 0, lambda: pooled(FP16)),
    "div by a number": ("div.Scalar_mode", 0, lambda: torch.ops.aten.div.Scalar_mode(
        (normal(10000) * 10).to(BF16), 0.3, rounding_mode="trunc")),
    "div": ("div.Tensor_mode", 0, pairs_divided),
    "mse backward": ("mse_loss_backward", 0, mse_of_odd_size),
    "svd of low rank": (
        "_linalg_svd", 0, lambda: torch.linalg.svd(normal(300, 3) @ normal(3, 300, seed=1))
    ),
    "cross": ("linalg_cross", 0, lambda: torch.linalg.cross(
        normal(1000, 3).half(), normal(1000, 3, seed=1).half())),
    "soft margin": ("soft_margin_loss", 0, soft_margin),
    "soft margin backward": ("soft_margin_loss_backward", 0, soft_margin),
    "logits": ("binary_cross_entropy_with_logits", 0, with_logits),
    "linear in half": ("upsample_linear1d", 0, lambda: in_half((255,), "linear", (100,))),
    "bilinear in half": (
        "upsample_bilinear2d", 0, lambda: in_half((10, 10), "bilinear", (100, 100))
    ),
    "linear": ("upsample_linear1d", 1, lambda: resized((777,), "linear", (300,))),
    "linear backward": ("upsample_linear1d_backward", 0, lambda: resized((777,), "linear", (300,))),
    "bilinear": ("upsample_bilinear2d", 1, lambda: resized(SMALL, "bilinear", BIG)),
    "bilinear backward": (
        "upsample_bilinear2d_backward", 0, lambda: resized(SMALL, "bilinear", BIG)
    ),
    "bicubic": ("upsample_bicubic2d", 1, lambda: resized(SMALL, "bicubic", (24, 37))),
    "bicubic backward": (
        "upsample_bicubic2d_backward", 1, lambda: resized(SMALL, "bicubic", (24, 37))
    ),
    "trilinear": (
        "upsample_trilinear3d", 1, lambda: resized((37, 38, 39), "trilinear", (24, 25, 26))
    ),
    "trilinear backward": (
        "upsample_trilinear3d_backward", 0, lambda: resized((37, 38, 39), "trilinear", (24, 25, 26))
    ),
    "antialiased": (
        "_upsample_bilinear2d_aa", 1,
        lambda: resized((65, 48), "bilinear", (300, 301), antialias=True),
    ),
    "antialiased backward": (
        "_upsample_bilinear2d_aa_backward", 0,
        lambda: resized(BIG, "bilinear", (37, 38), antialias=True),
    ),
    "antialiased bicubic": (
        "_upsample_bicubic2d_aa", 1,
        lambda: resized((65, 48), "bicubic", (300, 301), antialias=True),
    ),
    "antialiased bicubic backward": (
        "_upsample_bicubic2d_aa_backward", 0,
        lambda: resized(BIG, "bicubic", (37, 38), antialias=True),
    ),
}  # fmt: skip
"""Key of the table, which of its allowances, a correct call."""
EACH = pytest.mark.parametrize(("key", "place", "step"), CASES.values(), ids=CASES)


def verdicts(tmp_path: Any, key: str, step: Callable[[], Any]) -> list[Verdict]:
    pattern = f"aten.{key}" if "." in key else f"aten.{key}.*"
    with opcheck.check(log_dir=tmp_path, quiet=True, include=[pattern]) as session:
        step()
    assert [item.error for item in session.records] == [None] * len(session.records)
    return [item.verdict for item in session.records]


@EACH
def test_correct_call_passes(tmp_path: Any, key: str, place: int, step: Any) -> None:
    assert set(verdicts(tmp_path, key, step)) == {Verdict.PASS}


@EACH
def test_correct_call_needs_its_allowance(
    tmp_path: Any, monkeypatch: Any, key: str, place: int, step: Any
) -> None:
    items = allowances.ALLOWANCES[key]
    rest = [item for n, item in enumerate(items) if n != place] if type(items) is tuple else []
    without = {**allowances.ALLOWANCES, key: tuple(rest)}
    monkeypatch.setattr(allowances, "ALLOWANCES", MappingProxyType(without))
    assert Verdict.FAIL in verdicts(tmp_path, key, step)


def spoilt(out: Any, change: Callable[[Tensor], Any], number: int) -> Any:
    results = [item.clone() if isinstance(item, Tensor) else item
               for item in (out if isinstance(out, (tuple, list)) else [out])]  # fmt: skip
    change(results[number].reshape(-1) if results[number].dim() > 1 else results[number])
    return tuple(results) if isinstance(out, (tuple, list)) else results[0]


def last_quarter_zero(flat: Tensor) -> None:
    flat[-max(1, flat.numel() // 4) :] = 0


def smallest(flat: Tensor) -> int:
    """Of soft margins one that is far from overflow."""
    return int(flat.abs().nan_to_num(6e4, posinf=6e4).argmin())


def one_far_off(flat: Tensor) -> None:
    flat[smallest(flat)] += 8 * flat[flat.isfinite()].abs().max() + 1


def one_nan(flat: Tensor) -> None:
    flat[smallest(flat)] = float("nan")


_OUTPUT = {
    "bicubic grid": 1,
    "bilinear grid": 1,
    "layer norm, float32 weights": 1,
    "svd of low rank": 1,
}
_UNSEEN = {
    "grid 2d", "grid 3d", "grid 2d backward", "grid 3d backward", "layer norm of one",
    "svd of low rank",
}  # fmt: skip
"""The range alone is checked there, or all results are 0: zeros are within what is allowed."""


@pytest.mark.parametrize(
    ("name", "change"),
    [
        (name, change)
        for name in CASES
        for change in (last_quarter_zero, one_far_off, one_nan)
        if change is not last_quarter_zero or name not in _UNSEEN
    ],
)
def test_fault_is_found_within_an_allowance(
    tmp_path: Any, monkeypatch: Any, name: str, change: Any
) -> None:
    key, _, step = CASES[name]
    judge = comparison.judge

    def wrong(call: Any, out: Any, *args: Any, **options: Any) -> Any:
        return judge(call, spoilt(out, change, _OUTPUT.get(name, 0)), *args, **options)

    monkeypatch.setattr(comparison, "judge", wrong)
    assert Verdict.FAIL in verdicts(tmp_path, key, step)


def test_products_of_soft_margins_may_overflow(tmp_path: Any) -> None:
    x = torch.full((64,), -8.0).half()  # exp(8) is 2981
    step = lambda grad: gradient(  # noqa: E731
        lambda y: F.soft_margin_loss(y, torch.ones_like(y), reduction="none"),
        x, grad=torch.full_like(x, grad),
    )  # fmt: skip
    for grad in (1.0, 100.0):
        assert set(verdicts(tmp_path, "soft_margin_loss_backward", lambda g=grad: step(g))) == {
            Verdict.PASS
        }


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda y: y.sum(),
    "l1": lambda y: (y.float() - 1).abs().mean(),
    "exp": lambda y: y.float().exp().mean(),
}


def layer_norm_step(loss: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    x = normal(4096, 16).to(dtype)
    weight = torch.ones(16, dtype=dtype, requires_grad=True)
    bias = torch.zeros(16, dtype=dtype, requires_grad=True)
    loss(F.layer_norm(x, (16,), weight, bias)).backward()


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("loss", LOSSES)
def test_sums_of_rows_of_one_sign_may_stop_growing(tmp_path: Any, loss: str, dtype: Any) -> None:
    step = lambda: layer_norm_step(LOSSES[loss], dtype)  # noqa: E731
    assert set(verdicts(tmp_path, "native_layer_norm_backward", step)) == {Verdict.PASS}


@pytest.mark.parametrize("change", [last_quarter_zero, one_far_off, one_nan])
@pytest.mark.parametrize(("loss", "number"), [("sum", 2), ("l1", 2), ("exp", 1), ("exp", 2)])
def test_fault_is_found_in_sums_that_stopped_growing(
    tmp_path: Any, monkeypatch: Any, loss: str, number: int, change: Any
) -> None:
    judge = comparison.judge

    def wrong(call: Any, out: Any, *args: Any, **options: Any) -> Any:
        return judge(call, spoilt(out, change, number), *args, **options)

    monkeypatch.setattr(comparison, "judge", wrong)
    step = lambda: layer_norm_step(LOSSES[loss], FP16)  # noqa: E731
    assert verdicts(tmp_path, "native_layer_norm_backward", step) == [Verdict.FAIL]


@pytest.mark.parametrize("mode", ["trunc", "floor"])
def test_a_reproducer_grants_no_less_than_the_plain_rule(monkeypatch: Any, mode: str) -> None:
    func = torch.ops.aten.div.Scalar_mode
    args = ((normal(1000) * 10).to(BF16), 0.3)
    call = Call(
        func=func, traits=traits_of(func), args=args, kwargs={"rounding_mode": mode},
        site=Site("", "other"), index=0, step=0, occurrence=0, signature=(), source="",
    )  # fmt: skip
    out = func(*args, rounding_mode=mode)
    call.out_dtype = out.dtype

    def granted() -> Any:
        reference = choose(call, on_device=False, seed=0)
        [limit] = limits_of(call, out, reference, criterion="calibrated", rtol=1e-4, atol=1e-5)
        return limit["allowed"]

    with_bound = granted()
    monkeypatch.setattr(allowances, "ALLOWANCES", {})
    plain = granted()
    assert (with_bound >= plain).all()
    assert (with_bound > plain).any()
