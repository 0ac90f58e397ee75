"""Corners of an op: where two branches meet, so that its gradient jumps and its value does not.

A `Corner` says how far each element is from such a place. Moving the element across, by no more
than that distance again, makes the op, and the gradient formula that kept its input, take the other
branch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from modulecheck import _torch

__all__ = ["Corner", "corners_of", "hides_corners"]


@dataclass(frozen=True, slots=True)
class Corner:
    """One kind of corner of one call."""

    tensor: Tensor
    """The input of the call whose elements are on one side or the other."""
    gap: Tensor
    """Signed distance: an element moved by `-gap` lies on the corner."""
    place: Tensor | None = None
    """Flat index in `tensor` of each gap; None: the gaps are those of all elements in order."""
    tie: bool = False
    """Exactly on the corner the gradient is a third one."""

    def index(self, number: int) -> int:
        """Flat index in `tensor` of one gap."""
        return number if self.place is None else int(self.place.reshape(-1)[number])

    def put(self, number: int, element: int, side: int, size: float) -> None:
        """Have an element on a side: 1 above the corner by `size`, -1 below, 0 on it.

        Args:
            number: which gap.
            element: flat index of the element; where another one is now the runner-up, that one is
                put on the other side of it.
            side: of the element.
            size: how far from the corner it is put, if it has to move.
        """
        index = self.index(number)
        side = side if index == element else -side
        gap = float(self.gap.reshape(-1)[number])
        if gap * side > 0:
            return
        # `.data`: the version counter says nothing of it
        memory = self.tensor.data
        place = tuple(int(item) for item in np.unravel_index(index, memory.shape))
        memory[place] -= gap
        memory[place] += side * size


_CONSTANTS: dict[str, tuple[str | float, ...]] = {
    "relu": (0.0,),
    "threshold": ("threshold",),
    "hardtanh": ("min_val", "max_val"),
    "clamp": ("min", "max"),
    "clamp_min": ("min",),
    "clamp_max": ("max",),
    "leaky_relu": (0.0,),
    "elu": (0.0,),
    "rrelu_with_noise": (0.0,),
    "_prelu_kernel": (0.0,),
    "abs": (0.0,),
    "hardswish": (-3.0, 3.0),
    "hardsigmoid": (-3.0, 3.0),
    "softshrink": ("lambd", "-lambd"),
    "gt": ("other",),
    "ge": ("other",),
    "lt": ("other",),
    "le": ("other",),
    "maximum": ("other",),
    "minimum": ("other",),
    "fmax": ("other",),
    "fmin": ("other",),
}
"""Element-wise ops, and the arguments or numbers at which their branches meet. A comparison is one
because `where` and products with its result are."""
_TIES = frozenset({"abs", "maximum", "minimum", "fmax", "fmin", "amax", "amin", "max", "min"})
"""abs has the gradient 0 at 0; between equal operands the others share it out."""
_EXTREMES = {"amax": 1, "amin": -1, "max": 1, "min": -1}
_POOLS = {"max_pool2d_with_indices": 2, "max_pool3d_with_indices": 3}
_HIDDEN = frozenset(
    {
        "adaptive_max_pool2d", "adaptive_max_pool3d", "fractional_max_pool2d",
        "fractional_max_pool3d", "sort", "topk", "median", "nanmedian", "mode", "kthvalue",
        "cummax", "cummin", "aminmax", "index_reduce", "scatter_reduce", "segment_reduce",
        "_embedding_bag", "rnn_relu", "rnn_relu_cell", "renorm", "_cdist_forward",
        "_pdist_forward", "multilabel_margin_loss_forward", "multi_margin_loss",
    }
)  # fmt: skip


def hides_corners(func: Any) -> bool:
    """True for ops that may have corners which `corners_of` does not give."""
    if isinstance(func, _torch.HigherOrderOperator):
        return True
    return func.namespace not in ("aten", "prims") or _name(func) in _HIDDEN


def corners_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Corner]:
    """The corners of one call, for its floating inputs; empty for ops that have none."""
    name = "" if isinstance(func, _torch.HigherOrderOperator) else _name(func)
    find = _finder(name)
    if find is None or not args or not _is_real(args[0]) or not args[0].numel():
        return []
    return list(find(name, _bound(func, args, kwargs)))


def _name(func: Any) -> str:
    return str(func.overloadpacket.__name__).removesuffix("_")


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _bound(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    parameters = _torch.schema_of(func).arguments
    bound = {item.name: item.default_value for item in parameters if item.has_default_value()}
    bound.update(zip((item.name for item in parameters), args, strict=False))
    return {**bound, **kwargs}


Finder = Callable[[str, dict[str, Any]], Iterator[Corner]]


def _finder(name: str) -> Finder | None:
    if name in _CONSTANTS:
        return _element_wise
    if name in _EXTREMES:
        return _extreme
    return _pooled if name in _POOLS else None


def _element_wise(name: str, given: dict[str, Any]) -> Iterator[Corner]:
    for what in _CONSTANTS[name]:
        corner: Any = what
        if isinstance(what, str):
            corner = given[what.removeprefix("-")]
            corner = -corner if what.startswith("-") else corner
        if corner is None or isinstance(corner, bool):
            continue
        left = given["self"]
        if not isinstance(corner, Tensor) or corner.is_floating_point():
            yield from _between(left, corner, tie=name in _TIES)


def _between(left: Tensor, right: Any, *, tie: bool) -> Iterator[Corner]:
    """Where two operands are equal; the one that has the shape of the result is moved."""
    gap = left - right
    if left.shape == gap.shape:
        yield Corner(left, gap, tie=tie)
    elif isinstance(right, Tensor) and right.shape == gap.shape:
        yield Corner(right, -gap, tie=tie)


def _extreme(name: str, given: dict[str, Any]) -> Iterator[Corner]:
    source, sign = given["self"], _EXTREMES[name]
    if _is_real(given.get("other")):
        yield from _between(source, given["other"], tie=True)
        return
    dims = given.get("dim")
    dims = [dims] if isinstance(dims, int) else list(dims or range(source.dim()))
    dims = [dim % max(source.dim(), 1) for dim in dims]
    if source.dim() == 0:
        return
    last = list(range(source.dim() - len(dims), source.dim()))
    numbers = torch.arange(source.numel(), device=source.device).view(source.shape)
    rows, where = (
        item.movedim(dims, last).flatten(source.dim() - len(dims)) for item in (source, numbers)
    )
    tie = name in _TIES and not isinstance(given.get("dim"), int)
    yield from _second_best(source, rows * sign, where, sign, tie=tie)


def _second_best(
    source: Tensor, rows: Tensor, where: Tensor, sign: int, *, tie: bool
) -> Iterator[Corner]:
    """The runner-up of each row; across its corner it is the largest."""
    if rows.shape[-1] < 2:
        return
    best, place = rows.topk(2, dim=-1)
    gap = (best[..., 1] - best[..., 0]) * sign
    yield Corner(source, gap, where.gather(-1, place[..., 1:])[..., 0], tie)


def _pooled(name: str, given: dict[str, Any]) -> Iterator[Corner]:
    source, num = given["self"], _POOLS[name]
    kernel = _each(given["kernel_size"], num)
    stride = _each(given["stride"] or given["kernel_size"], num)
    padding, dilation = _each(given["padding"], num), _each(given["dilation"], num)
    more = [step - 1 if given["ceil_mode"] else 0 for step in stride]
    numbers = torch.arange(source.numel(), device=source.device).view(source.shape)
    pads = [side for a, b in zip(padding, more, strict=True) for side in (a + b, a)][::-1]
    rows = _windows(_padded(source, pads, float("-inf")), kernel, stride, dilation)
    where = _windows(_padded(numbers, pads, -1), kernel, stride, dilation)
    yield from _second_best(source, rows, where, 1, tie=False)


def _each(value: Any, num: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * num if len(values) == 1 else values


def _padded(source: Tensor, pads: list[int], fill: float) -> Tensor:
    return torch.nn.functional.pad(source, pads, value=fill)


def _windows(rows: Tensor, kernel: list[int], stride: list[int], dilation: list[int]) -> Tensor:
    """Every window as a row, in place of the spatial dimensions."""
    first = rows.dim() - len(kernel)
    for place, (size, step, apart) in enumerate(zip(kernel, stride, dilation, strict=True)):
        rows = rows.unfold(first + place, (size - 1) * apart + 1, step)[..., ::apart]
    return rows.flatten(first + len(kernel))
