"""Wrong kernels, planted over the CPU key for the length of a `with` block.

Each takes the original kernel before it is covered, calls it, and spoils the result a little. What
the fault itself computes goes through original kernels or indexing, never through its own op.
While a fault is planted everything in the process goes through it: the step, autograd, and any
checker that does not keep the originals.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CallOriginal = Callable[..., Any]
WrongKernel = Callable[..., Any]


@dataclass
class Planted:
    """A fault while it is in force."""

    op: str
    """Full overload name, `aten.gelu.default`."""
    calls: int = 0
    """How often the wrong kernel ran."""


@contextmanager
def planted(op: str, make_wrong: Callable[[CallOriginal], WrongKernel]) -> Iterator[Planted]:
    """Replace the CPU kernel of `op` by `make_wrong(original)`.

    Args:
        op: full overload name, `aten.gelu.default`.
        make_wrong: given the original kernel as a function, returns the wrong one.
    """
    namespace, name, overload = op.split(".")
    schema_name = name if overload == "default" else f"{name}.{overload}"
    kernel = torch.library.get_kernel(f"{namespace}::{schema_name}", "CPU")
    schema = getattr(getattr(getattr(torch.ops, namespace), name), overload)._schema
    takes_tensor = [str(argument.type) == "Tensor" for argument in schema.arguments]
    fault = Planted(op)

    def run(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        def original(*given: Any, **given_kwargs: Any) -> Any:
            return kernel.call_boxed(keyset, *given, **given_kwargs)

        fault.calls += 1
        tensors = [
            _as_tensor(value, like=args[0]) if is_tensor else value
            for value, is_tensor in zip(args, takes_tensor, strict=False)
        ]
        return make_wrong(original)(*tensors, **kwargs)

    library = torch.library.Library(namespace, "IMPL")
    try:
        with warnings.catch_warnings():
            # torch tells once a process that a kernel was overridden, which is the point here
            warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered")
            library.impl(schema_name, run, "CPU", with_keyset=True)
        yield fault
    finally:
        library._destroy()


def _as_tensor(value: Any, *, like: Tensor) -> Tensor:
    """Numbers reach a Python kernel as they are, but a kernel that is called takes tensors."""
    if isinstance(value, (bool, int, float, complex)):
        return torch.tensor(value, dtype=torch.result_type(like, value))
    return value


def _scaled(tensor: Tensor, factor: float) -> Tensor:
    """Multiply by an op that no fault of this file covers."""
    return torch.lerp(torch.zeros_like(tensor), tensor, factor)


def spoiled(
    change: Callable[[Tensor], object], *, result: int = 0
) -> Callable[[CallOriginal], WrongKernel]:
    """What `planted` makes of a kernel: one of its results is changed in place."""

    def make_wrong(original: CallOriginal) -> WrongKernel:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            out = original(*args, **kwargs)
            change(out[result] if isinstance(out, (tuple, list)) else out)
            return out

        return kernel

    return make_wrong


# ---- forward ------------------------------------------------------------------------------------


def gelu_off_by(relative: float = 1e-3) -> AbstractContextManager[Planted]:
    """Plant a gelu that is too large by a relative amount."""

    def make_wrong(original: CallOriginal) -> WrongKernel:
        return lambda *args, **kwargs: _scaled(original(*args, **kwargs), 1 + relative)

    return planted("aten.gelu.default", make_wrong)


def layer_norm_with_eps(wrong_eps: float = 1e-3) -> AbstractContextManager[Planted]:
    """Plant a layer norm that uses another eps in float32; other dtypes are right."""

    def make_wrong(original: CallOriginal) -> WrongKernel:
        def layer_norm(
            inputs: Tensor, shape: Any, weight: Tensor | None, bias: Tensor | None, eps: float
        ) -> Any:
            eps_used = wrong_eps if inputs.dtype == torch.float32 else eps
            return original(inputs, shape, weight, bias, eps_used)

        return layer_norm

    return planted("aten.native_layer_norm.default", make_wrong)


def softmax_ignoring_strides() -> AbstractContextManager[Planted]:
    """Plant a softmax that reads its input in memory order, as if it were contiguous."""

    def make_wrong(original: CallOriginal) -> WrongKernel:
        def softmax(scores: Tensor, dim: int, half_to_float: bool) -> Tensor:
            contiguous_strides = torch.empty(scores.shape, device="meta").stride()
            misread = scores.as_strided(scores.shape, contiguous_strides)
            return original(misread, dim, half_to_float)

        return softmax

    return planted("aten._softmax.default", make_wrong)


def softmax_with_last_column_zero() -> AbstractContextManager[Planted]:
    """Plant a softmax that does not write the last column."""

    def make_wrong(original: CallOriginal) -> WrongKernel:
        def softmax(scores: Tensor, dim: int, half_to_float: bool) -> Tensor:
            probabilities = original(scores, dim, half_to_float)
            probabilities.select(dim, -1).zero_()
            return probabilities

        return softmax

    return planted("aten._softmax.default", make_wrong)


def sub_off_by(relative: float = 1e-3) -> AbstractContextManager[Planted]:
    """Plant a subtraction of floating point tensors whose result is too large."""

    def make_wrong(original: CallOriginal) -> WrongKernel:
        def sub(*args: Any, **kwargs: Any) -> Tensor:
            result = original(*args, **kwargs)
            return _scaled(result, 1 + relative) if result.is_floating_point() else result

        return sub

    return planted("aten.sub.Tensor", make_wrong)


def masked_select_in_float64() -> AbstractContextManager[Planted]:
    """Plant a masked_select with the right values in another dtype; the op declares none."""

    def make_wrong(original: CallOriginal) -> WrongKernel:
        return lambda *args: original(*args).double()

    return planted("aten.masked_select.default", make_wrong)


def gelu_in_float64() -> AbstractContextManager[Planted]:
    """Plant a gelu with the right values in another dtype than it declares."""

    def make_wrong(original: CallOriginal) -> WrongKernel:
        return lambda *args, **kwargs: original(*args, **kwargs).double()

    return planted("aten.gelu.default", make_wrong)


# ---- backward -----------------------------------------------------------------------------------


def gelu_backward_off_by(relative: float = 1e-3) -> AbstractContextManager[Planted]:
    """Plant a backward of gelu that is too large by a relative amount."""

    def make_wrong(original: CallOriginal) -> WrongKernel:
        return lambda *args, **kwargs: _scaled(original(*args, **kwargs), 1 + relative)

    return planted("aten.gelu_backward.default", make_wrong)


def threshold_backward_with_closed_mask() -> AbstractContextManager[Planted]:
    """Plant a backward of relu that lets the gradient pass where the result is exactly 0."""

    def make_wrong(original: CallOriginal) -> WrongKernel:
        def threshold_backward(grad_output: Tensor, result: Tensor, threshold: Any) -> Tensor:
            right = original(grad_output, result, threshold)
            return torch.where(result >= threshold, grad_output, right)

        return threshold_backward

    return planted("aten.threshold_backward.default", make_wrong)


def layer_norm_backward_without_last_row() -> AbstractContextManager[Planted]:
    """Plant a backward of layer norm whose bias gradient leaves out the last row."""

    def make_wrong(original: CallOriginal) -> WrongKernel:
        def layer_norm_backward(grad_output: Tensor, inputs: Tensor, *rest: Any) -> Any:
            grad_input, grad_weight, grad_bias = original(grad_output, inputs, *rest)
            if grad_bias is not None:
                rows = grad_output.reshape(-1, grad_bias.numel())
                grad_bias = rows[:-1].sum(0).reshape(grad_bias.shape)
            return grad_input, grad_weight, grad_bias

        return layer_norm_backward

    return planted("aten.native_layer_norm_backward.default", make_wrong)


# ---- in place -----------------------------------------------------------------------------------


def add_inplace_off_by(relative: float = 1e-3) -> AbstractContextManager[Planted]:
    """Plant an `add_` of floating point tensors that adds a little too much."""

    def make_wrong(original: CallOriginal) -> WrongKernel:
        def add_(target: Tensor, other: Any, *, alpha: Any = 1) -> Tensor:
            factor = 1 + relative if target.is_floating_point() else 1
            return original(target, other, alpha=alpha * factor)

        return add_

    return planted("aten.add_.Tensor", make_wrong)


def mul_inplace_off_by(relative: float = 1e-3) -> AbstractContextManager[Planted]:
    """Plant a `mul_` of floating point tensors whose result is too large."""

    def make_wrong(original: CallOriginal) -> WrongKernel:
        def mul_(target: Tensor, other: Any) -> Tensor:
            original(target, other)
            if target.is_floating_point():
                original(target, _as_tensor(1 + relative, like=target))
            return target

        return mul_

    return planted("aten.mul_.Tensor", make_wrong)


# ---- lists --------------------------------------------------------------------------------------


def foreach_add_without_last_tensor() -> AbstractContextManager[Planted]:
    """Plant a `_foreach_add_` that leaves the last tensor of the list as it was."""

    def make_wrong(original: CallOriginal) -> WrongKernel:
        def foreach_add_(targets: Any, others: Any, *, alpha: Any = 1) -> Any:
            return original(targets[:-1], others[:-1], alpha=alpha)

        return foreach_add_

    return planted("aten._foreach_add_.List", make_wrong)


def foreach_add_scalar_off_by(relative: float = 1e-3) -> AbstractContextManager[Planted]:
    """Plant a `_foreach_add_` of a number that adds a little too much to every tensor."""

    def make_wrong(original: CallOriginal) -> WrongKernel:
        def foreach_add_(targets: Any, scalar: Any) -> Any:
            return original(targets, scalar * (1 + relative))

        return foreach_add_

    return planted("aten._foreach_add_.Scalar", make_wrong)
