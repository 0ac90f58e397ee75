"""The rule of `opcheck.verdicts`, stated once more in torch, slowly and without shortcuts.

Shares no code and no table with the package: what the two say about random results is compared.
Every tensor here is one-dimensional; a result comes in its own dtype, goldens in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)
LIMITS = {"std": (6, 0.5, 4), "mm": (24, 0.5, 8), "atom": (24, 2, 8), "scan": (48, 8, math.inf)}


def components(values: Tensor) -> Tensor:
    values = torch.view_as_real(values).reshape(-1) if values.is_complex() else values
    return values.to(torch.float64)


def component_dtype(dtype: torch.dtype) -> torch.dtype:
    return {torch.complex64: torch.float32, torch.complex128: torch.float64}.get(dtype, dtype)


def ec(dtype: torch.dtype) -> float:
    return torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps


def kind(values: Tensor) -> Tensor:
    return torch.where(values.isnan(), 9, values.isinf() * values.sgn()).to(torch.int64)


def rms(values: Tensor) -> float:
    if not len(values):
        return 0.0
    top = float(values.abs().max())
    return top * float((values / top).square().mean().sqrt()) if 0 < top < math.inf else top


def ulp(values: Tensor, dtype: torch.dtype) -> Tensor:
    info = torch.finfo(dtype)
    exponent = torch.frexp(values).exponent - 1
    steps = torch.ldexp(torch.full_like(values, info.eps), exponent)
    steps = torch.where(values == 0, 0.0, steps)
    return steps.clamp_min(info.smallest_normal * info.eps)


def local(values: Tensor, steps: Tensor) -> Tensor:
    return (steps * rms(values / steps)).clamp_max(rms(values))


def typical(values: Tensor) -> float:
    """rms, and not that of a few huge elements."""
    nonzero = values[values != 0].abs()
    return min(rms(values), 1e3 * float(nonzero.median())) if len(nonzero) else 0.0


def floor_size(values: Tensor) -> float:
    """What an absolute error is relative to: `typical`, without a fill value."""
    nonzero = values[values != 0].abs()
    if len(nonzero):
        top = float(nonzero.max())
        fill, rest = nonzero >= 0.99 * top, nonzero < top / 100
        few = min(int(fill.sum()), int(rest.sum())) < 64 or 16 * fill.sum() < rest.sum()
        if bool((fill | rest).all()) and not few and 1e3 <= top < math.inf:
            return typical(nonzero[rest])
    return typical(values)


def varied(values: Tensor, dtype: torch.dtype) -> bool:
    first = values[:4096]
    if len(values) < 64 or len(first.to(dtype).unique()) < 16:
        return False
    weights = first[first != 0].float().unique(return_counts=True)[1].double()
    different = float(weights.sum() ** 2 / weights.square().sum())  # Kish
    return different >= min(64, float(weights.sum()) / 2)


class Setting:
    """Allowance of finite float64 goldens, and what the tests on top of it need."""

    def __init__(self, golden: Tensor, draws: Sequence[Tensor], dtype: torch.dtype) -> None:
        info, half = torch.finfo(dtype), dtype in HALF
        flush = info.smallest_normal * (info.eps if dtype == torch.float16 else 1)
        self.steps = ulp(golden, dtype) + flush
        sensitivity = torch.zeros_like(golden)
        for draw in draws:
            moved = (draw - golden).abs()
            sensitivity = sensitivity.maximum(torch.where(moved.isfinite(), moved, 0.0))
        sensitivity = sensitivity.maximum(0.25 * local(sensitivity, self.steps))
        self.typical = typical(golden)
        # among subnormals correct rounding errs by their spacing, however small the numbers
        self.rounding = 0.25 * info.eps * max(self.typical, info.smallest_normal)
        # a result that cancels is rounding alone, however small it is itself
        self.rounding = max(self.rounding, 0.25 * rms(0.25 * sensitivity))
        self.allowance = self.steps + (0.25 if half else 1.0) * sensitivity
        self.allowance = self.allowance + ec(dtype) * floor_size(golden)

    def shift(self, error: Tensor, golden: Tensor) -> float:
        return abs(float(self.shifts(error, golden).mean()))

    def shifts(self, error: Tensor, golden: Tensor) -> Tensor:
        return (error / self.steps).clamp(-8, 8) * golden.sgn()

    def is_shifted(self, error: Tensor, golden: Tensor, limit: float) -> bool:
        """Beyond the limit, and not by the luck of few elements that differ much."""
        shifts = self.shifts(error, golden)
        luck = float(shifts.var(correction=0)) / len(shifts)
        return float(shifts.mean()) ** 2 > max(limit**2, 25 * luck)


def judge_golden(
    actual: Tensor, golden: Tensor, draws: Sequence[Tensor], op_class: str, length: float
) -> str:
    """Why it fails; "" for a PASS."""
    dtype = component_dtype(actual.dtype)
    got, want = components(actual), components(golden)
    if not torch.equal(kind(got), kind(want.to(dtype))):
        return "nonfinite"
    keep = got.isfinite() & want.isfinite()
    got, want = got[keep], want[keep]
    if not len(got):
        return ""
    half = dtype in HALF
    error = got - want
    if float((error.abs() / (ulp(want, dtype) + ec(dtype) * floor_size(want))).max()) <= (
        1.01 if half else 8
    ):
        return ""
    setting = Setting(want, [components(draw)[keep] for draw in draws], dtype)
    most, shift, ratio = LIMITS[op_class]
    limit = most if half else 32 * max(1, math.sqrt(length) / 64)
    if float((error.abs() / setting.allowance).max()) > limit:
        return "elem"
    if not half or len(got) < 64:
        return ""
    rounded = want.to(dtype).to(torch.float64)
    if varied(want, dtype) and setting.is_shifted(got - rounded, want, shift):
        return "bias"
    return "rmse" if rms(error) > 2 * ratio * max(setting.rounding, 1e-300) else ""


def quick(actual: Tensor, baseline: Tensor) -> bool:
    """The test against the same-dtype result alone."""
    dtype = component_dtype(actual.dtype)
    got, want = components(actual), components(baseline)
    if not torch.equal(kind(got), kind(want)):
        return False
    keep = got.isfinite()
    got, want = got[keep], want[keep]
    if not len(got):
        return True
    share = (got - want) / (ulp(want, dtype) + ec(dtype) * floor_size(want))
    if dtype not in HALF:
        return float(share.abs().max()) <= 8
    shifted = len(got) >= 64 and abs(float((share * want.sgn()).mean())) > 0.1
    return float(share.abs().max()) <= 1.01 and not shifted


def judge_baseline(
    actual: Tensor,
    baseline: Tensor,
    golden: Tensor,
    draws: Sequence[Tensor],
    op_class: str,
    length: float,
) -> str:
    """Why it fails; "" for a PASS."""
    if quick(actual, baseline):
        return ""
    dtype = component_dtype(actual.dtype)
    got, ref, want = components(actual), components(baseline), components(golden)
    kinds = kind(got), kind(ref), kind(want.to(dtype))
    if bool(((kinds[0] != kinds[1]) & (kinds[0] != kinds[2])).any()):
        return "nonfinite"
    ref = torch.where(ref.isfinite(), ref, want)  # there the golden alone judges
    keep = got.isfinite() & ref.isfinite() & (kinds[2] == 0)
    got, ref, want = got[keep], ref[keep], want[keep]
    if not len(got):
        return ""
    setting = Setting(want, [components(draw)[keep] for draw in draws], dtype)
    allowance = setting.allowance + local((ref - want).abs(), setting.steps)
    low, high = ref.minimum(want), ref.maximum(want)
    distance = (low - got).maximum(got - high).clamp_min(0)
    most, shift, ratio = LIMITS[op_class]
    growth = max(1, math.sqrt(length) / 64)
    if float((distance / allowance).max()) > (most if dtype in HALF else 32 * growth):
        return "elem"
    if dtype in HALF:
        rounded = want.to(dtype).to(torch.float64)
        most = shift + 2 * setting.shift(ref - rounded, want)
        if varied(want, dtype) and setting.is_shifted(got - rounded, want, most):
            return "bias"
        yardstick = max(rms(ref - want), setting.rounding, 1e-300)
        return "rmse" if len(got) >= 64 and rms(got - want) > ratio * yardstick else ""
    mean = abs(float(((got - want) / allowance * want.sgn()).mean()))
    own = abs(float(((ref - want) / allowance * want.sgn()).mean()))
    return "bias" if varied(want, dtype) and mean > 2 * growth + 4 * own else ""
