"""A small kernel library in plain torch, as a vendor might write one: 34 kernels over ATen ops.

The kernels are built of a few ops that the library does not register itself (`addcmul`, `baddbmm`,
`cumsum`, `exp2`, ...), so that a wrong kernel makes no other one wrong. Reductions and functions
are computed in float64 and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Kernel = Callable[..., Any]


# ---- building blocks ----------------------------------------------------------------------------


def product(a: Tensor, b: Any) -> Tensor:
    b = _tensor_like(b, a)
    return torch.addcmul(torch.zeros((), dtype=a.dtype, device=a.device), a, b)


def scaled_sum(a: Tensor, b: Any, scale: float = 1) -> Tensor:
    b = _tensor_like(b, a)
    return torch.addcmul(a, b, torch.ones((), dtype=a.dtype, device=a.device), value=scale)


def quotient(a: Tensor, b: Any) -> Tensor:
    b = _tensor_like(b, a)
    if not a.is_floating_point():
        a, b = a.float(), b.float()
    return torch.addcdiv(torch.zeros((), dtype=a.dtype, device=a.device), a, b)


def _tensor_like(value: Any, like: Tensor) -> Tensor:
    if isinstance(value, Tensor):
        return value
    dtype = like.dtype if like.is_floating_point() else None
    return torch.tensor(value, dtype=dtype, device=like.device)


def total(x: Tensor, dims: Any, keepdim: bool) -> Tensor:
    """The sum in float64: the last running sum over the reduced dims, laid side by side."""
    dims = tuple(range(x.dim())) if not dims else tuple(dim % x.dim() for dim in dims)
    kept = [dim for dim in range(x.dim()) if dim not in dims]
    flat = x.double().permute(*kept, *dims).flatten(len(kept))
    sums = flat.cumsum(-1).select(-1, -1)
    return sums.reshape([1 if d in dims else n for d, n in enumerate(x.shape)]) if keepdim else sums


def product_of_matrices(a: Tensor, b: Tensor) -> Tensor:
    empty = torch.zeros((), dtype=a.dtype, device=a.device)
    return torch.baddbmm(empty, a.unsqueeze(0), b.unsqueeze(0), beta=0).squeeze(0)


# ---- pointwise ----------------------------------------------------------------------------------


def add(a: Tensor, b: Any, *, alpha: float = 1) -> Tensor:
    return scaled_sum(a, b, alpha)


def sub(a: Tensor, b: Any, *, alpha: float = 1) -> Tensor:
    return scaled_sum(a, b, -alpha)


def mul(a: Tensor, b: Any) -> Tensor:
    return product(a, b)


def div(a: Tensor, b: Any) -> Tensor:
    return quotient(a, b)


def neg(x: Tensor) -> Tensor:
    return product(x, -1)


def exp(x: Tensor) -> Tensor:
    return torch.exp2(product(x.double(), math.log2(math.e))).to(x.dtype)


def sqrt(x: Tensor) -> Tensor:
    return torch.pow(x.double(), 0.5).to(x.dtype)


def rsqrt(x: Tensor) -> Tensor:
    return torch.pow(x.double(), -0.5).to(x.dtype)


def _sigmoid_in_float64(x: Tensor) -> Tensor:
    half = torch.full((), 0.5, dtype=torch.float64, device=x.device)
    return torch.addcmul(half, torch.tanh(product(x.double(), 0.5)), half)


def sigmoid(x: Tensor) -> Tensor:
    return _sigmoid_in_float64(x).to(x.dtype)


def silu(x: Tensor) -> Tensor:
    return product(x.double(), _sigmoid_in_float64(x)).to(x.dtype)


def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    wide = x.double()
    if approximate == "tanh":
        inner = product(scaled_sum(wide, torch.pow(wide, 3), 0.044715), math.sqrt(2 / math.pi))
        phi = torch.tanh(inner)
    else:
        phi = torch.erf(product(wide, math.sqrt(0.5)))
    half = product(wide, 0.5)
    return torch.addcmul(half, half, phi).to(x.dtype)


def relu(x: Tensor) -> Tensor:
    return torch.clamp(x, min=0)


# ---- reductions ---------------------------------------------------------------------------------


def sum_dim(x: Tensor, dim: Any, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    return total(x, dim, keepdim).to(dtype or x.dtype)


def mean_dim(x: Tensor, dim: Any, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    sums = total(x, dim, keepdim)
    return product(sums, max(sums.numel(), 1) / x.numel()).to(dtype or x.dtype)


def amax(x: Tensor, dim: Any = (), keepdim: bool = False) -> Tensor:
    dims = sorted(dim or range(x.dim()), reverse=True)
    for each in dims:
        x = x.sort(each).values.narrow(each, x.shape[each] - 1, 1)
    return x if keepdim else x.squeeze(dims)


def argmax(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    if dim is None:
        return x.flatten().sort(dim=0, descending=True, stable=True).indices.select(0, 0)
    order = x.sort(dim=dim, descending=True, stable=True).indices.narrow(dim, 0, 1)
    return order if keepdim else order.squeeze(dim)


def vector_norm(
    x: Tensor, order: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    powers = torch.pow(torch.maximum(x, product(x, -1)).double(), order)
    return torch.pow(total(powers, dim, keepdim), 1 / order).to(dtype or x.dtype)


# ---- matrices -----------------------------------------------------------------------------------


def mm(a: Tensor, b: Tensor) -> Tensor:
    return product_of_matrices(a, b)


def addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    whole = bias.expand(a.shape[0], b.shape[1]).unsqueeze(0)
    return torch.baddbmm(whole, a.unsqueeze(0), b.unsqueeze(0), beta=beta, alpha=alpha).squeeze(0)


def bmm(a: Tensor, b: Tensor) -> Tensor:
    return torch.baddbmm(torch.zeros((), dtype=a.dtype, device=a.device), a, b, beta=0)


# ---- norms and softmax --------------------------------------------------------------------------


def layer_norm(
    x: Tensor, shape: Any, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    dims = tuple(range(x.dim() - len(shape), x.dim()))
    count = math.prod(shape)
    wide = x.double()
    mean = product(total(wide, dims, True), 1 / count)
    centred = scaled_sum(wide, mean, -1)
    variance = product(total(product(centred, centred), dims, True), 1 / count)
    rstd = torch.pow(scaled_sum(variance, eps), -0.5)
    out = product(centred, rstd)
    if weight is not None:
        out = product(out, weight.double())
    if bias is not None:
        out = scaled_sum(out, bias.double())
    return out.to(x.dtype), mean.to(x.dtype), rstd.to(x.dtype)


def _log_softmax_in_float64(x: Tensor, dim: int) -> Tensor:
    wide = x.double()
    largest = wide.sort(dim).values.narrow(dim, x.shape[dim] - 1, 1)
    centred = scaled_sum(wide, largest, -1)
    log_total = torch.logcumsumexp(centred, dim).narrow(dim, x.shape[dim] - 1, 1)
    return scaled_sum(centred, log_total, -1)


def softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    dtype = torch.float32 if half_to_float else x.dtype
    return torch.exp2(product(_log_softmax_in_float64(x, dim), math.log2(math.e))).to(dtype)


def log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return _log_softmax_in_float64(x, dim).to(torch.float32 if half_to_float else x.dtype)


def softmax_backward(grad: Tensor, out: Tensor, dim: int, input_dtype: Any) -> Tensor:
    inner = total(product(grad.double(), out.double()), (dim,), True)
    return product(scaled_sum(grad.double(), inner, -1), out.double()).to(input_dtype)


# ---- in place, lists ----------------------------------------------------------------------------


def add_(target: Tensor, other: Any, *, alpha: float = 1) -> Tensor:
    return target.copy_(scaled_sum(target, other, alpha))


def mul_(target: Tensor, other: Any) -> Tensor:
    return target.copy_(product(target, other))


def relu_(target: Tensor) -> Tensor:
    return target.clamp_(min=0)


def foreach_add_(targets: Any, others: Any, *, alpha: float = 1) -> None:
    for target, other in zip(targets, others, strict=True):
        target.copy_(scaled_sum(target, other, alpha))


def foreach_mul(tensors: Any, scalar: float) -> list[Tensor]:
    return [product(tensor, scalar) for tensor in tensors]


def foreach_addcdiv_(targets: Any, a: Any, b: Any, value: float = 1) -> None:
    for target, over, under in zip(targets, a, b, strict=True):
        target.copy_(scaled_sum(target, quotient(over, under), value))


# ---- indices ------------------------------------------------------------------------------------


def index_select(x: Tensor, dim: int, index: Tensor) -> Tensor:
    shape = [1] * x.dim()
    shape[dim] = index.numel()
    whole = [index.numel() if d == dim % x.dim() else n for d, n in enumerate(x.shape)]
    return torch.gather(x, dim, index.reshape(shape).expand(whole))


def embedding(weight: Tensor, indices: Tensor, *_: Any) -> Tensor:
    flat = indices.flatten().unsqueeze(-1).expand(-1, weight.shape[1])
    return torch.gather(weight, 0, flat).reshape(*indices.shape, weight.shape[1])


def index_add(x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Tensor:
    shape = [1] * source.dim()
    shape[dim] = index.numel()
    where = index.reshape(shape).expand(source.shape)
    return torch.scatter_add(x, dim, where, product(source, alpha))


def masked_fill(x: Tensor, mask: Tensor, value: Any) -> Tensor:
    return torch.where(mask, _tensor_like(value, x), x)


KERNELS: dict[str, Kernel] = {
    "add.Tensor": add, "sub.Tensor": sub, "mul.Tensor": mul, "div.Tensor": div, "neg": neg,
    "exp": exp, "sqrt": sqrt, "rsqrt": rsqrt, "sigmoid": sigmoid, "silu": silu, "gelu": gelu,
    "relu": relu, "sum.dim_IntList": sum_dim, "mean.dim": mean_dim, "amax": amax, "argmax": argmax,
    "linalg_vector_norm": vector_norm, "mm": mm, "addmm": addmm, "bmm": bmm,
    "native_layer_norm": layer_norm, "_softmax": softmax, "_log_softmax": log_softmax,
    "_softmax_backward_data": softmax_backward, "add_.Tensor": add_, "mul_.Tensor": mul_,
    "relu_": relu_, "_foreach_add_.List": foreach_add_, "_foreach_mul.Scalar": foreach_mul,
    "_foreach_addcdiv_.Scalar": foreach_addcdiv_, "index_select": index_select,
    "embedding": embedding, "index_add": index_add, "masked_fill.Scalar": masked_fill,
}  # fmt: skip
CONFIG = list(KERNELS.items())


# ---- one wrong kernel ---------------------------------------------------------------------------


def spoiled(kernel: Kernel, factor: float = 1.01) -> Kernel:
    """`kernel` with its first result, or what it wrote to, too large; indices off by one."""

    def spoil(x: Tensor) -> Tensor:
        if x.is_floating_point() or x.is_complex():
            return product(x, factor)
        return torch.bitwise_xor(x, torch.ones_like(x))

    def wrong(*args: Any, **kwargs: Any) -> Any:
        out = kernel(*args, **kwargs)
        if out is None:
            args[0][0].copy_(spoil(args[0][0]))
        elif isinstance(out, Tensor):
            out = out.copy_(spoil(out)) if out is args[0] else spoil(out)
        else:
            out = type(out)([spoil(out[0]), *out[1:]])
        return out

    wrong.__name__ = kernel.__name__
    return wrong


# ---- calls --------------------------------------------------------------------------------------


@dataclass
class Inputs:
    """Tensors that the calls share, on one device."""

    matrix: Tensor
    other: Tensor
    positive: Tensor
    batch: Tensor
    index: Tensor
    mask: Tensor


def make_inputs(device: str = "cpu") -> Inputs:
    random = torch.Generator().manual_seed(0)
    matrix, other = torch.randn(6, 8, generator=random), torch.randn(6, 8, generator=random)
    batch = torch.randn(3, 4, 5, generator=random)
    index = torch.tensor([4, 0, 2, 2])
    return Inputs(
        *(
            tensor.to(device)
            for tensor in (matrix, other, other.abs() + 0.5, batch, index, matrix > 0)
        )
    )


def calls(of: Inputs) -> dict[str, Callable[[], Any]]:
    """What reaches each kernel, by op key."""
    a, b, positive, batch = of.matrix, of.other, of.positive, of.batch
    index, mask, aten = of.index, of.mask, torch.ops.aten
    return {
        "add.Tensor": lambda: [torch.add(a, b, alpha=2), a + 1.5, a.t() + b.t()],
        "sub.Tensor": lambda: [a - b, a - 0.25],
        "mul.Tensor": lambda: [a * b, a * 3],
        "div.Tensor": lambda: [a / positive, a / 2],
        "neg": lambda: -a,
        "exp": lambda: torch.exp(a),
        "sqrt": lambda: torch.sqrt(positive),
        "rsqrt": lambda: torch.rsqrt(positive),
        "sigmoid": lambda: torch.sigmoid(a),
        "silu": lambda: torch.nn.functional.silu(a),
        "gelu": lambda: torch.nn.functional.gelu(a, approximate="tanh"),
        "relu": lambda: torch.relu(a),
        "sum.dim_IntList": lambda: [a.sum(1), batch.sum((0, 2), keepdim=True)],
        "mean.dim": lambda: batch.mean((1, 2)),
        "amax": lambda: a.amax(1, keepdim=True),
        "argmax": lambda: a.argmax(1),
        "linalg_vector_norm": lambda: torch.linalg.vector_norm(a, dim=1),
        "mm": lambda: a @ b.t(),
        "addmm": lambda: torch.addmm(a[:, :6], a, b.t(), beta=0.5),
        "bmm": lambda: torch.bmm(batch, batch.transpose(1, 2)),
        "native_layer_norm": lambda: aten.native_layer_norm(a, [8], b[0], b[1], 1e-5),
        "_softmax": lambda: torch.softmax(a, 1),
        "_log_softmax": lambda: torch.log_softmax(a, 0),
        "_softmax_backward_data": lambda: aten._softmax_backward_data(a, b, 1, torch.float32),
        "add_.Tensor": lambda: a.clone().add_(b, alpha=0.5),
        "mul_.Tensor": lambda: a.clone().mul_(2),
        "relu_": lambda: a.clone().relu_(),
        "_foreach_add_.List": lambda: torch._foreach_add_([a.clone(), b.clone()], [b, a], alpha=2),
        "_foreach_mul.Scalar": lambda: torch._foreach_mul([a, batch], 1.5),
        "_foreach_addcdiv_.Scalar": lambda: torch._foreach_addcdiv_([a.clone()], [b], [positive]),
        "index_select": lambda: torch.index_select(a, 0, index),
        "embedding": lambda: torch.nn.functional.embedding(index.reshape(2, 2), a),
        "index_add": lambda: torch.index_add(a, 0, index, b[:4]),
        "masked_fill.Scalar": lambda: a.masked_fill(mask, -2.0),
    }
