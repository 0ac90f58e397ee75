"""Resizing: positions of pixels are rounded, and what is more than that is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import interpolate

import opcheck
from opcheck import Verdict
from tests.faults import planted

MODES = ["linear", "bilinear", "bicubic", "trilinear"]
SIZES = [(3, 300), (10, 37), (24, 37), (24, 300), (65, 48)]


def checked(tmp_path, image: Tensor, size: tuple[int, ...], mode: str, **options: Any):
    image.requires_grad_()
    arguments = {"size": size, "mode": mode, **options}
    with opcheck.check(log_dir=tmp_path, quiet=True, include=["*upsample*"]) as session:
        out = interpolate(image, **arguments)
        out.backward(torch.randn_like(out))
    assert session.coverage.checked == 2
    return session


def image_of(mode: str, side: int, dtype: torch.dtype) -> tuple[Tensor, int]:
    num_dims = {"linear": 1, "trilinear": 3}.get(mode, 2)
    torch.manual_seed(side)
    return torch.randn((1, 2) + (side,) * num_dims, dtype=dtype), num_dims


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_any_size_passes(mode: str, align_corners: bool, dtype: torch.dtype, tmp_path) -> None:
    """From 24 to 37 pixels three of four correct float32 results failed."""
    for before, after in SIZES:
        if mode == "trilinear" and max(before, after) > 50:
            continue
        image, num_dims = image_of(mode, before, dtype)
        size = (after,) * num_dims
        session = checked(tmp_path, image, size, mode, align_corners=align_corners)
        assert session.verdict is Verdict.PASS, (before, after, session.failures[0].reason)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_antialiased_passes(mode: str, tmp_path) -> None:
    for before, after in SIZES:
        image, _ = image_of(mode, before, torch.float32)
        session = checked(tmp_path, image, (after, after), mode, antialias=True)
        assert session.verdict is Verdict.PASS, (before, after)


def scaled(out: Tensor) -> Tensor:
    return out * 1.001


def one_pixel(out: Tensor) -> Tensor:
    out = out.clone()
    out[0, 1, -1, -1] += 0.01 * out.abs().max()
    return out


def shifted(out: Tensor) -> Tensor:
    return torch.roll(out, 1, -1)


@pytest.mark.parametrize("spoil", [scaled, one_pixel, shifted])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_faults_are_found(
    mode: str, backward: bool, spoil: Callable[[Tensor], Tensor], tmp_path
) -> None:
    op = f"aten.upsample_{mode}2d{'_backward' if backward else ''}.default"
    image, _ = image_of(mode, 65, torch.float32)
    with planted(op, lambda original: lambda *args, **kwargs: spoil(original(*args, **kwargs))):
        session = checked(tmp_path, image, (100, 100), mode, align_corners=False)
    assert {record.op for record in session.failures} == {op}
