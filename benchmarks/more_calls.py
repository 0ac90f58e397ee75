"""Calls that OpInfo's samples do not make: Python numbers that 16 bit cannot hold, long sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

__all__ = ["long_sums", "numbers"]

Calls = Iterator[tuple[str, Callable[[], object]]]
_ELEMENTS = 4096
_EDGES = (-0.3, 0.3, 0.7, -0.7)
"""As 16 bit holds them: where a comparison with the number itself turns out otherwise."""


def _normal(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)


def numbers(dtype: torch.dtype) -> Calls:
    """Ops that take Python numbers, on 4,096 elements.

    Args:
        dtype: a real one.
    """
    x = _normal((_ELEMENTS,), dtype, 0)
    x[: 4 * len(_EDGES)] = torch.tensor(_EDGES * 4, dtype=dtype)
    y = _normal((_ELEMENTS,), dtype, 1)
    z = _normal((_ELEMENTS,), dtype, 2).abs() + 0.1
    a, b, c = x.view(64, 64), y.view(64, 64), z.view(64, 64)
    calls: dict[str, Callable[[], object]] = {
        "add": lambda: x + 0.3, "sub": lambda: x - 0.3, "rsub": lambda: 0.3 - x,
        "add, alpha": lambda: torch.add(x, y, alpha=0.3),
        "sub, alpha": lambda: torch.sub(x, y, alpha=0.3),
        "mul": lambda: x * 0.3, "div": lambda: x / 0.3, "reciprocal": lambda: 0.3 / z,
        "remainder": lambda: torch.remainder(x, 0.3), "fmod": lambda: torch.fmod(x, 0.3),
        "floor_divide": lambda: torch.floor_divide(x, 0.3),
        "trunc": lambda: torch.div(x, 0.3, rounding_mode="trunc"),
        "pow": lambda: z**0.3, "pow of a number": lambda: 0.3**x,
        "clamp": lambda: x.clamp(-0.3, 0.7), "clamp_min": lambda: x.clamp(min=0.3),
        "lerp": lambda: torch.lerp(x, y, 0.3), "eq": lambda: x == 0.3, "lt": lambda: x < 0.3,
        "leaky_relu": lambda: F.leaky_relu(x, 0.3), "elu": lambda: F.elu(x, 0.3),
        "celu": lambda: F.celu(x, 0.3), "threshold": lambda: F.threshold(x, 0.3, 0.7),
        "softshrink": lambda: F.softshrink(x, 0.3), "hardshrink": lambda: F.hardshrink(x, 0.3),
        "hardtanh": lambda: F.hardtanh(x, -0.3, 0.3), "softplus": lambda: F.softplus(x, 0.3, 0.7),
        "addcmul": lambda: torch.addcmul(x, y, z, value=0.3),
        "addcdiv": lambda: torch.addcdiv(x, y, z, value=0.3),
        "masked_fill": lambda: x.masked_fill(y > 0, 0.3),
        "where": lambda: torch.where(y > 0, x, 0.3), "xlogy": lambda: torch.xlogy(x, 0.3),
        "huber_loss": lambda: F.huber_loss(x, y, delta=0.3, reduction="none"),
        "smooth_l1_loss": lambda: F.smooth_l1_loss(x, y, beta=0.3, reduction="none"),
        "foreach_add": lambda: torch._foreach_add([x, y], 0.3),
        "foreach_add, alpha": lambda: torch._foreach_add([x], [y], alpha=0.3),
        "foreach_addcmul": lambda: torch._foreach_addcmul([x], [y], [z], 0.3),
        "norm": lambda: torch.linalg.vector_norm(z, 3.3),
        "renorm": lambda: torch.renorm(a, 2, 0, 0.3),
        "layer_norm": lambda: F.layer_norm(a, [64], eps=0.3),
        "addmm": lambda: torch.addmm(a, b, c, beta=0.3, alpha=0.7),
        "addr": lambda: torch.addr(a, b[0], c[0], beta=0.3, alpha=0.7),
        "index_add": lambda: torch.index_add(x, 0, torch.arange(64), y[:64], alpha=0.3),
    }  # fmt: skip
    yield from calls.items()


def long_sums(dtype: torch.dtype) -> Calls:
    """Reductions, norms, products and atomics over thousands of terms, with their gradients.

    Args:
        dtype: a real one.
    """
    x, y = _normal((16, 2048), dtype, 3), _normal((16, 2048), dtype, 4)
    image, kernel = _normal((2, 8, 12, 12), dtype, 5), _normal((6, 8, 3, 3), dtype, 6)
    index = torch.randint(0, 10, (200,), generator=torch.Generator().manual_seed(7))
    rows = _normal((200, 16), dtype, 8)
    heads = [_normal((1, 2, 64, 16), dtype, seed) for seed in (9, 10, 11)]
    weight, bias = _normal((2048,), dtype, 12), _normal((2048,), dtype, 13)
    forward: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
        "sum": (lambda t: t.sum(), [x]), "sum of rows": (lambda t: t.sum(-1), [x]),
        "mean": (lambda t: t.mean(0), [x]), "var": (lambda t: t.var(-1), [x]),
        "norm": (torch.linalg.vector_norm, [x]), "logsumexp": (lambda t: t.logsumexp(-1), [x]),
        "softmax": (lambda t: F.softmax(t, -1), [x]), "gelu": (F.gelu, [x]),
        "log_softmax": (lambda t: F.log_softmax(t, -1), [x]),
        "layer_norm": (lambda t, w, b: F.layer_norm(t, [2048], w, b), [x, weight, bias]),
        "batch_norm": (lambda t, w, b: F.batch_norm(t, None, None, w, b, training=True),
                       [x, weight, bias]),
        "group_norm": (lambda t: F.group_norm(t, 4), [image]),
        "matmul": (lambda a, b: a @ b.T, [x, y]), "linear": (F.linear, [x, y]),
        "conv2d": (F.conv2d, [image, kernel]),
        "attention": (F.scaled_dot_product_attention, heads),
        "cumsum": (lambda t: t.cumsum(-1), [x]),
        "embedding": (lambda t: F.embedding(index, t), [rows]),
        "index_add": (lambda t, s: t.index_add(0, index, s), [rows[:10], rows]),
        "scatter_add": (lambda t, s: t.scatter_add(0, index[:, None].expand(200, 16), s),
                        [rows[:10], rows]),
        "cross_entropy": (lambda t: F.cross_entropy(t, torch.arange(16)), [x]),
        "mse_loss": (F.mse_loss, [x, y]), "avg_pool2d": (lambda t: F.avg_pool2d(t, 3, 1), [image]),
    }  # fmt: skip
    for name, (compute, given) in forward.items():

        def call(compute: Callable[..., Tensor] = compute, given: list[Tensor] = given) -> object:
            leaves = [tensor.detach().clone().requires_grad_() for tensor in given]
            out = compute(*leaves)
            return torch.autograd.grad(out, leaves, torch.ones_like(out) * 0.7)

        yield name, call
