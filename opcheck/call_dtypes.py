"""The dtypes that a call computes in, and its Python numbers as such a kernel sees them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from opcheck import _torch
from opcheck.calls import Call
from opcheck.golden_rules import (
    NUMBER_TENSORS_IN_FLOAT32,
    ROUNDED_INSIDE,
    SCALARS_IN_FLOAT32,
    Bound,
    wider,
)
from opcheck.tensor_kinds import HALF, tensors_in

__all__ = [
    "as_number",
    "computing_dtype",
    "input_dtypes",
    "is_inexact",
    "is_narrow",
    "name_dtypes",
    "number_tensor",
    "real_name",
    "rounded_number",
    "rounding_dtype",
]


def is_inexact(dtype: torch.dtype) -> bool:
    """True for floating and complex dtypes."""
    return dtype.is_floating_point or dtype.is_complex


def is_narrow(dtype: torch.dtype | None) -> bool:
    """True for an inexact dtype that has a wider twin."""
    return dtype is not None and is_inexact(dtype) and wider(dtype) is not dtype


def input_dtypes(call: Call) -> tuple[torch.dtype, ...]:
    """Of the tensors that a call is given."""
    return call.signature[1::2]


def real_name(dtype: torch.dtype) -> str:
    """`float32` of float32 and of complex64."""
    real = {torch.complex64: torch.float32, torch.complex128: torch.float64}.get(dtype, dtype)
    return str(real).removeprefix("torch.")


def rounding_dtype(call: Call, dtype: torch.dtype) -> torch.dtype:
    """The dtype whose spacings an argument of a call is uncertain by.

    That of the argument, or of the result where that is finer: a float32 result of a 16-bit
    argument was computed from the very numbers that stand there, and rounded as float32 at most.
    Moved by a spacing of bfloat16, `x + y.bfloat16()` might be off by 5%.
    """
    result = call.out_dtype or _written_dtype(call)
    if result is None or not is_inexact(dtype) or call.traits.base in ROUNDED_INSIDE:
        return dtype
    finer = torch.finfo(result).eps < torch.finfo(dtype).eps
    return result if finer else dtype


def _written_dtype(call: Call) -> torch.dtype | None:
    """Of the first inexact tensor that an op writes to and does not return."""
    if not call.traits.mutates:
        return None
    bound = call.traits.bound(call.args, call.kwargs)
    written = tensors_in(value for param, value in bound if param.mutated)
    return next((tensor.dtype for tensor in written if is_inexact(tensor.dtype)), None)


def computing_dtype(call: Call) -> torch.dtype | None:
    """The floating dtype in which a call with Python numbers computes, None for integer calls."""
    if call.out_dtype is not None and input_dtypes(call) and _names_dtype(call):
        # full_like(x, 0.3, dtype=float64); a factory without tensors reads its numbers as doubles
        named: torch.dtype = call.out_dtype
        return named
    found = _promoted(call)
    return _in_float32(call, found, SCALARS_IN_FLOAT32)


def _in_float32(call: Call, dtype: torch.dtype | None, ops: frozenset[str]) -> torch.dtype | None:
    """float32 for a 16-bit dtype where the op, in any of its spellings, is one of these."""
    base = call.traits.base.rstrip("_").removeprefix("_foreach_")
    return torch.float32 if dtype in HALF and base in ops else dtype


def _promoted(call: Call) -> torch.dtype | None:
    """What the inexact tensors of a call promote to, None where there are none."""
    if call.promoted is None:
        call.promoted = (_promotion(call),)
    found: torch.dtype | None = call.promoted[0]
    return found


def _promotion(call: Call) -> torch.dtype | None:
    inexact = [tensor for tensor in tensors_in(call.args) if is_inexact(tensor.dtype)]
    with_dims = [tensor for tensor in inexact if tensor.dim()]
    is_complex = any(tensor.is_complex() for tensor in inexact)
    if any(tensor.is_complex() == is_complex for tensor in with_dims):
        inexact = with_dims  # beside these the others are as good as numbers
    found: torch.dtype | None = None
    for tensor in inexact:
        found = tensor.dtype if found is None else torch.promote_types(found, tensor.dtype)
    return found


def _names_dtype(call: Call) -> bool:
    return any(
        param.kind == "dtype" and value is not None
        for param, value in call.traits.bound(call.args, call.kwargs)
    )


_NUMPY_FLOATS: dict[torch.dtype, type[np.floating[Any]]] = {
    torch.float32: np.float32,
    torch.complex64: np.float32,
    torch.float16: np.float16,
}


def rounded_number(call: Call, value: float) -> float:
    """A Python number as the kernel sees it: in the dtype that the op computes in."""
    if isinstance(value, int) and abs(value) <= 256:
        return value
    return _rounded(value, computing_dtype(call))


def _rounded(value: float, dtype: torch.dtype | None) -> float:
    if dtype is torch.bfloat16:
        bits = np.float32(value).view(np.uint32)
        if not np.isfinite(np.float32(value)):
            return value
        rounded = (np.uint64(bits) + 0x7FFF + ((np.uint64(bits) >> 16) & 1)) & 0xFFFF0000
        return float(np.uint32(rounded).view(np.float32))
    kind = _NUMPY_FLOATS.get(dtype) if dtype is not None else None
    if kind is None:
        return value
    with np.errstate(over="ignore"):
        return float(kind(value))


def as_number(call: Call, tensor: Tensor) -> float | None:
    """What a pointwise op sees of a 0-dim tensor that is wider than what it computes in, else None.

    `x > torch.tensor(0.3)` of a bfloat16 `x` asks for more than 0.30078125.
    """
    if tensor.dim() or not tensor.is_floating_point():
        return None
    dtype = _promoted(call) if "pointwise" in _torch.tags_of(call.func) else None
    if dtype is None or torch.finfo(dtype).eps <= torch.finfo(tensor.dtype).eps:
        return None
    return _rounded(float(tensor), _in_float32(call, dtype, NUMBER_TENSORS_IN_FLOAT32))


def number_tensor(call: Call, value: Any, *, wide: bool) -> Tensor:
    """A Python number as the 0-dim tensor that takes its place."""
    dtype = computing_dtype(call)
    if wide and dtype is not None:
        return torch.tensor(value, dtype=torch.float64)
    tensors = [item for item in call.args if isinstance(item, Tensor)]
    if tensors and not any(item.dim() for item in tensors):  # here a 0-dim tensor would promote
        return torch.tensor(value, dtype=torch.result_type(tensors[0], value))
    if isinstance(value, float):
        return torch.tensor(value, dtype=dtype or torch.get_default_dtype())
    return torch.tensor(value)


def name_dtypes(call: Call, bound: Bound) -> None:
    """Arguments that name a dtype name its float64 twin; what they round is rounded first."""
    for param in call.traits.params:
        if param.kind != "dtype":
            continue
        dtype = bound.get(param.name)
        if dtype is not None:
            _round_first(call, bound, dtype)
            bound[param.name] = wider(dtype)
        elif not input_dtypes(call) and call.out_dtype is not None:  # a factory
            bound[param.name] = wider(call.out_dtype)


def _round_first(call: Call, bound: Bound, dtype: torch.dtype) -> None:
    """`sum(x, dtype=bfloat16)` of a float32 tensor sums the rounded elements."""
    name = call.traits.params[0].name
    given, source = call.args[0] if call.args else None, bound.get(name)
    if not isinstance(given, Tensor) or not isinstance(source, Tensor):
        return
    if not (given.dtype.is_floating_point and dtype.is_floating_point):
        return
    if torch.finfo(dtype).eps > torch.finfo(given.dtype).eps:
        bound[name] = source.to(dtype).to(torch.float64)
