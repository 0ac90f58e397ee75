"""The dtypes that a call computes in, and its Python numbers as such a kernel sees them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from opcheck.calls import Call
from opcheck.golden_rules import SCALARS_IN_FLOAT32, Bound, wider
from opcheck.tensor_kinds import HALF, tensors_in

__all__ = [
    "computing_dtype",
    "input_dtypes",
    "is_inexact",
    "is_narrow",
    "name_dtypes",
    "number_tensor",
    "real_name",
    "rounded_number",
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


def computing_dtype(call: Call) -> torch.dtype | None:
    """The floating dtype in which a call with Python numbers computes, None for integer calls."""
    if call.out_dtype is not None and input_dtypes(call) and _names_dtype(call):
        # full_like(x, 0.3, dtype=float64); a factory without tensors reads its numbers as doubles
        named: torch.dtype = call.out_dtype
        return named
    found: torch.dtype | None = None
    for tensor in tensors_in(call.args):
        dtype = tensor.dtype
        if is_inexact(dtype):
            found = dtype if found is None else torch.promote_types(found, dtype)
    if found in HALF and (
        call.traits.base.rstrip("_").removeprefix("_foreach_") in SCALARS_IN_FLOAT32
    ):
        return torch.float32
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
    dtype = computing_dtype(call)
    if isinstance(value, int) and abs(value) <= 256:
        return value
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
