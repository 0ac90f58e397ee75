"""Float64 op by op, for modules that refuse float64 as a whole or fall back to a narrower dtype.

Every op gets its floating inputs in float64 and gives float64, whatever dtype the module's code
names. A cast that rounds more than the module's own dtype does is the program's wish, and is kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from modulecheck import _torch
from opcheck import tolerances as tol
from opcheck.golden_rules import wider
from opcheck.modes import Mode

__all__ = ["OpByOp", "eps_of"]

_ROUNDS_NOTHING = 0.0


def eps_of(dtype: torch.dtype) -> float:
    """Rounding of a dtype; 0 of those that do not round, float16's of 8-bit floats."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return _ROUNDS_NOTHING
    real = dtype.to_real() if dtype.is_complex else dtype
    return tol.EPS.get(str(real).removeprefix("torch."), tol.EPS["float16"])


class NarrowWatch(Mode):
    """Notices ops that give less than float64 in a float64 run: the code names their dtype."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype: torch.dtype | None = None

    def _handle(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        if self.dtype is None:
            for item in out if isinstance(out, (list, tuple)) else (out,):
                if isinstance(item, Tensor) and eps_of(item.dtype) > tol.EPS["float64"]:
                    self.dtype = item.dtype
        return out


class OpByOp(Mode):
    """Widens the inputs of every op; for the forward and the backward of one run."""

    def __init__(self, own_eps: float) -> None:
        """Start.

        Args:
            own_eps: rounding of the finest dtype among the module's parameters and inputs.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._own_eps = own_eps

    def _handle(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kwargs = dict(kwargs)
        if isinstance(func, _torch.HigherOrderOperator) or func.is_view:
            return func(*args, **kwargs)
        if func is torch.ops.aten._grouped_mm.default:
            return _grouped_mm(*_each(_wide, args), **_each(_wide, kwargs))
        dtype = kwargs.get("dtype")
        if isinstance(dtype, torch.dtype) and _is_cast(args) and not self._rounds(dtype):
            kwargs["dtype"] = wider(dtype)
        if _writes(func):  # what is written to stays itself
            return func(*args, **kwargs)
        return _each(_wide, func(*_each(_wide, args), **_each(_wide, kwargs)))

    def _rounds(self, dtype: torch.dtype) -> bool:
        return eps_of(dtype) > self._own_eps


def _is_cast(args: tuple[Any, ...]) -> bool:
    """A tensor is turned into another dtype; a factory makes its values in the one it names."""
    return bool(args) and isinstance(args[0], Tensor)


def _writes(func: Any) -> bool:
    return bool(_torch.is_mutable(func))


def _wide(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype != wider(value.dtype):
        return value.to(wider(value.dtype))
    return value


def _each(convert: Any, value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_each(convert, item) for item in value)
    if isinstance(value, dict):
        return {key: _each(convert, item) for key, item in value.items()}
    return convert(value)


def _grouped_mm(
    left: Tensor, right: Tensor, offs: Tensor | None = None, bias: Any = None, out_dtype: Any = None
) -> Tensor:
    """One product a group; the kernel takes no float64.

    Args:
        left: (rows, k) or (groups, rows, k).
        right: (groups, k, columns) or (k, columns).
        offs: where each group ends, on the axis that has no axis of groups: rows, columns, or k
            where neither side has.
        bias: not taken by the kernel either.
        out_dtype: float64 instead.
    """
    if offs is None:
        return torch.bmm(left, right)
    ends = [int(end) for end in offs]
    groups = list(zip([0, *ends[:-1]], ends, strict=True))
    if left.dim() == 2 and right.dim() == 3:
        out = left.new_zeros(left.shape[0], right.shape[-1])
        for number, (start, end) in enumerate(groups):
            out[start:end] = left[start:end] @ right[number]
    elif left.dim() == 3:
        out = left.new_zeros(left.shape[1], right.shape[-1])
        for number, (start, end) in enumerate(groups):
            out[:, start:end] = left[number] @ right[:, start:end]
    else:
        parts = [left[:, start:end] @ right[start:end] for start, end in groups]
        out = torch.stack(parts)
    return out
