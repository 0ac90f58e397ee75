"""Sums of a convolution's results over channels and images, beside what they have to be.

`convolutions.py` says why they can be had at the cost of one channel of one image.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opcheck.arrays import Array
from opcheck.calls import Call
from opcheck.factors import factor_step
from opcheck.golden_rules import argument
from opcheck.projection import Residual, random_signs, residual_of

__all__ = ["forward_sums", "input_sums", "weight_sums"]

MAX_IMAGES = 1 << 20
"""Elements of images that are widened at a time."""
_FORWARD, _TRANSPOSED = False, True


def _geometry(call: Call) -> tuple[list[int], list[int], list[int]]:
    stride, padding, dilation = (
        list(argument(call, name)) for name in ("stride", "padding", "dilation")
    )
    return stride, padding, dilation


def _convolve(call: Call, x: Tensor, weight: Tensor) -> Tensor:
    stride, padding, dilation = _geometry(call)
    zeros = [0] * (x.dim() - 2)
    found: Tensor = torch.ops.aten.convolution(
        x, weight, None, stride, padding, dilation, _FORWARD, zeros, 1
    )
    return found


def _folded(tensor: Tensor, start: int, signs: Tensor) -> tuple[Tensor, Tensor]:
    """Signed sum of some images, and the sum of their squares, float32 [1, C, ...]."""
    total = squares = None
    for number in range(len(signs)):
        image = tensor[start + number : start + number + 1].detach().to("cpu").float()
        term, square = image * signs[number], image.square()
        total = term if total is None else total.add_(term)
        squares = square if squares is None else squares.add_(square)
    if total is None or squares is None:
        raise ValueError("signs: expected at least one")
    return total, squares


def _channel_sums(
    tensor: Tensor, start: int, signs: Tensor, channels: Tensor
) -> tuple[Array, Array]:
    """Signed sum over images and channels, and the sum of squares of its terms, float64, flat."""
    total: Any = 0.0
    squares: Any = 0.0
    shape = (-1, *[1] * (tensor.dim() - 2))
    for number in range(len(signs)):
        term = tensor[start + number].detach().to("cpu").float() * channels.view(shape)
        norm = torch.linalg.vector_norm(term, dim=0).to(torch.float64)
        total = total + term.sum(0).to(torch.float64) * float(signs[number])
        squares = squares + norm.square_()
    return total.numpy().reshape(-1), squares.numpy().reshape(-1)


def _residual(
    call: Call, rows: list[tuple[Array, Array, Array]], inputs: Any, *, depth: float, dtype: Any
) -> Residual:
    actual, expected, squares = (np.stack(item) for item in zip(*rows, strict=True))
    x = argument(call, "input")
    return residual_of(
        actual, expected, squares, inputs=inputs, dtype=dtype, input_dtype=x.dtype, depth=depth,
        factor_step=factor_step(call, x), other_hardware=call.on_device, block=1,
    )  # fmt: skip


def forward_sums(
    call: Call, out: Tensor, starts: Array, fold: int, rng: np.random.Generator
) -> Residual:
    """Sums over `fold` images from each of `starts` and over all output channels."""
    x, weight, bias = argument(call, "input"), argument(call, "weight"), argument(call, "bias")
    channels = random_signs(weight.shape[0], rng, torch.float32)
    signs = random_signs(fold, rng, torch.float32)
    shape = (-1, *[1] * (weight.dim() - 1))
    w = weight.detach().to("cpu").float()
    projected = (w * channels.view(shape)).sum(0, keepdim=True)
    added = 0.0
    if bias is not None:
        added = float(bias.detach().to("cpu").float() @ channels) * float(signs.sum())
    rows, squares = [], []
    for start in starts:
        folded, square = _folded(x, int(start), signs)
        expected = _convolve(call, folded, projected).reshape(-1).to(torch.float64).numpy() + added
        actual, size = _channel_sums(out, int(start), signs, channels)
        rows.append((actual, expected, size))
        squares.append(square)

    def inputs(hot: Array) -> Array:
        second = w.square().sum(0, keepdim=True)
        return np.stack([_convolve(call, squares[row], second).reshape(-1).numpy() for row in hot])

    return _residual(call, rows, inputs, depth=float(w[0].numel()), dtype=out.dtype)


def input_sums(
    call: Call, out: Tensor, starts: Array, fold: int, rng: np.random.Generator
) -> Residual:
    """As `forward_sums`, of the input gradient and over all input channels."""
    grad, weight = argument(call, "grad_output"), argument(call, "weight")
    channels = random_signs(weight.shape[1], rng, torch.float32)
    signs = random_signs(fold, rng, torch.float32)
    w = weight.detach().to("cpu").float()
    projected = (w * channels.view(1, -1, *[1] * (w.dim() - 2))).sum(1, keepdim=True)
    size = tuple(out.shape[2:])
    rows, squares = [], []
    for start in starts:
        folded, square = _folded(grad, int(start), signs)
        expected = _transposed(call, folded, projected, size).reshape(-1)
        actual, scale = _channel_sums(out, int(start), signs, channels)
        rows.append((actual, expected.to(torch.float64).numpy(), scale))
        squares.append(square)

    def inputs(hot: Array) -> Array:
        second = w.square().sum(1, keepdim=True)
        found = [_transposed(call, squares[row], second, size).reshape(-1).numpy() for row in hot]
        return np.stack(found)

    depth = float(w.numel() / max(w.shape[1], 1))
    return _residual(call, rows, inputs, depth=depth, dtype=out.dtype)


def _transposed(call: Call, grad: Tensor, weight: Tensor, size: tuple[int, ...]) -> Tensor:
    stride, padding, dilation = _geometry(call)
    missing = [
        size[dim]
        - ((grad.shape[2 + dim] - 1) * stride[dim % len(stride)]
           - 2 * padding[dim % len(padding)]
           + dilation[dim % len(dilation)] * (weight.shape[2 + dim] - 1) + 1)
        for dim in range(len(size))
    ]  # fmt: skip
    found: Tensor = torch.ops.aten.convolution(
        grad, weight, None, stride, padding, dilation, _TRANSPOSED, missing, 1
    )
    return found


def weight_sums(call: Call, out: Tensor, rng: np.random.Generator) -> Residual:
    """Sums over the output channels: all images, since each weight gradient is of all of them."""
    grad, x = argument(call, "grad_output"), argument(call, "input")
    weight = argument(call, "weight")
    channels = random_signs(out.shape[0], rng, torch.float32)
    expected: Any = 0.0
    for start, stop in _image_chunks(x):
        images = x[start:stop].detach().to("cpu").float()
        shape = (1, -1, *[1] * (grad.dim() - 2))
        part = grad[start:stop].detach().to("cpu").float()
        summed = (part * channels.view(shape)).sum(1, keepdim=True)
        expected = expected + _weight_gradient(call, summed, images, weight)
    actual, squares = _flat_sums(out, channels)
    shape = (out.shape[1], -1)

    def inputs(hot: Array) -> Array:
        total: Any = 0.0
        for start, stop in _image_chunks(x):
            images = x[start:stop].detach().to("cpu").float().square()
            part = grad[start:stop].detach().to("cpu").float().square().sum(1, keepdim=True)
            total = total + _weight_gradient(call, part, images, weight)
        found: Array = total.numpy().reshape(shape)[hot]
        return found

    depth = grad.numel() / max(grad.shape[1], 1)
    rows = [
        (left, right, size)
        for left, right, size in zip(
            actual.reshape(shape), expected.numpy().reshape(shape), squares.reshape(shape),
            strict=True,
        )
    ]  # fmt: skip
    return _residual(call, rows, inputs, depth=depth, dtype=out.dtype)


def _image_chunks(x: Tensor) -> Iterator[tuple[int, int]]:
    step = max(1, MAX_IMAGES // max(1, x.numel() // max(x.shape[0], 1)))
    for start in range(0, x.shape[0], step):
        yield start, min(x.shape[0], start + step)


def _weight_gradient(call: Call, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    stride, padding, dilation = _geometry(call)
    one = torch.zeros(1, *weight.shape[1:])
    found = torch.ops.aten.convolution_backward(
        grad, x, one, None, stride, padding, dilation, _FORWARD, [0] * (x.dim() - 2), 1,
        [False, True, False],
    )  # fmt: skip
    gradient: Tensor = found[1].to(torch.float64)
    return gradient


def _flat_sums(tensor: Tensor, channels: Tensor) -> tuple[Array, Array]:
    values = tensor.detach().to("cpu").float() * channels.view(-1, *[1] * (tensor.dim() - 1))
    squares = torch.linalg.vector_norm(values, dim=0).to(torch.float64).square_()
    return values.sum(0).to(torch.float64).numpy(), squares.numpy()
