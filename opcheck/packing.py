"""Tensors to compact storages on the CPU and views of them, and back.

Strides, offsets, shared memory and conjugate bits come back as they were; of a large storage only
what the views reach is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opcheck import _torch

__all__ = ["Packed", "View", "map_tree", "nbytes_of", "pack", "tree_items", "unpack"]

ALIGNMENT = 16
"""Bytes; no dtype is larger, so that views of any dtype stay aligned."""


@dataclass(frozen=True, slots=True)
class View:
    """One tensor: where it lies in which storage."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """In elements of `dtype`."""
    device: str
    is_conj: bool = False
    is_neg: bool = False

    @property
    def is_plain(self) -> bool:
        """Contiguous from the beginning of its storage on."""
        return not (self.offset or self.is_conj or self.is_neg) and self.stride == contiguous(
            self.size
        )

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.size)


@dataclass(slots=True)
class Packed:
    """A nest of lists, tuples and dicts with a `View` for each tensor, and what they view."""

    tree: Any
    storages: list[Tensor]
    """Flat, on the CPU; uint8 where views of several dtypes share one."""

    @property
    def nbytes(self) -> int:
        """Of all storages."""
        return sum(item.numel() * item.element_size() for item in self.storages)

    def views(self) -> list[View]:
        """In order, the same one as often as it is there."""
        return [item for item in tree_items(self.tree) if isinstance(item, View)]


def contiguous(size: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    strides: list[int] = []
    step = 1
    for extent in reversed(size):
        strides.insert(0, step)
        step *= max(extent, 1)
    return tuple(strides)


# ---- trees --------------------------------------------------------------------------------------


def map_tree(tree: Any, change: Callable[[Any], Any]) -> Any:
    """The same nest with every leaf changed."""
    if isinstance(tree, (list, tuple)):
        items = [map_tree(item, change) for item in tree]
        return items if isinstance(tree, list) else tuple(items)
    if isinstance(tree, dict):
        return {key: map_tree(item, change) for key, item in tree.items()}
    return change(tree)


def tree_items(tree: Any) -> Iterator[Any]:
    """The leaves in order."""
    if isinstance(tree, (list, tuple)):
        for item in tree:
            yield from tree_items(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from tree_items(item)
    else:
        yield tree


# ---- packing ------------------------------------------------------------------------------------


def _extent(tensor: Tensor) -> int:
    """Elements from the first to the last one that the tensor reaches."""
    if not tensor.numel():
        return 0
    spans = ((size - 1) * step for size, step in zip(tensor.size(), tensor.stride(), strict=True))
    return 1 + sum(spans)


def _bounds(tensors: list[Tensor]) -> tuple[int, int]:
    """First byte, and the one after the last, that these tensors reach in their storage."""
    reached = [item for item in tensors if item.numel()]
    if not reached:
        return 0, 0
    starts = [int(item.storage_offset()) * item.element_size() for item in reached]
    ends = [
        start + _extent(item) * item.element_size()
        for start, item in zip(starts, reached, strict=True)
    ]
    first = min(starts)
    if len({item.dtype for item in reached}) > 1:
        first -= first % ALIGNMENT
    return int(first), int(max(ends))


def _groups(tree: Any) -> dict[int, list[Tensor]]:
    """Plain tensors by storage."""
    groups: dict[int, list[Tensor]] = {}
    for item in tree_items(tree):
        if isinstance(item, Tensor):
            groups.setdefault(_torch.memory_of(item), []).append(item.detach())
    return groups


def nbytes_of(tree: Any) -> int:
    """How large `pack` would make it."""
    total = 0
    for tensors in _groups(tree).values():
        first, last = _bounds(tensors)
        total += last - first
    return total


def pack(tree: Any, before: Mapping[int, Tensor] | None = None) -> Packed:
    """Copy every tensor of a nest.

    Args:
        tree: lists, tuples, dicts; plain strided tensors and anything else.
        before: id of a tensor -> what it held earlier, which is kept in the place of what it holds
            now.

    Returns:
        Copies that share memory where the originals do.
    """
    storages: list[Tensor] = []
    begins: dict[int, tuple[int, int]] = {}
    for key, tensors in _groups(tree).items():
        first, last = _bounds(tensors)
        begins[key] = len(storages), first
        storages.append(_copied(tensors, first, last))
    views: dict[int, View] = {}
    for item in tree_items(tree):
        if isinstance(item, Tensor) and id(item) not in views:
            place, first = begins[_torch.memory_of(item)]
            views[id(item)] = _view_of(item, place, first)
    packed = Packed(
        map_tree(tree, lambda item: views[id(item)] if isinstance(item, Tensor) else item), storages
    )
    for key, values in (before or {}).items():
        if key in views:
            _write(packed.storages[views[key].storage], views[key], values)
    return packed


def _copied(tensors: list[Tensor], first: int, last: int) -> Tensor:
    some = tensors[0]
    flat = torch.empty(0, dtype=torch.uint8, device=some.device)
    flat = flat.set_(some.untyped_storage(), first, (last - first,), (1,)).to("cpu", copy=True)
    dtypes = {item.dtype for item in tensors}
    return flat.view(some.dtype) if len(dtypes) == 1 else flat


def _view_of(tensor: Tensor, storage: int, first: int) -> View:
    size, width = tuple(tensor.size()), tensor.element_size()
    offset = int(tensor.storage_offset()) - first // width if tensor.numel() else 0
    return View(
        storage, tensor.dtype, size, tuple(tensor.stride()), offset, str(tensor.device),
        tensor.is_conj(), tensor.is_neg(),
    )  # fmt: skip


def _write(storage: Tensor, view: View, values: Tensor) -> None:
    """Put other values where a view lies; where elements share memory, one of them is enough."""
    target = placed(storage, view)
    for dim, step in enumerate(view.stride):
        if step == 0 and view.size[dim] > 1:
            target, values = target.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    target.copy_(values)


def placed(storage: Tensor, view: View) -> Tensor:
    """The tensor that a view describes, in the memory of `storage`."""
    flat = storage if storage.dtype == view.dtype else storage.view(view.dtype)
    tensor = flat.as_strided(view.size, view.stride, view.offset)
    if view.is_conj:
        tensor = tensor.conj()
    return _torch.neg_view(tensor) if view.is_neg else tensor


def unpack(packed: Packed, *, device: str | None = None) -> Any:
    """The nest again, every tensor in fresh memory.

    Args:
        packed: is not changed.
        device: where to; None: where each tensor was.
    """
    homes = {view.storage: device or view.device for view in packed.views()}
    fresh = {place: packed.storages[place].to(home, copy=True) for place, home in homes.items()}
    made: dict[View, Tensor] = {}

    def rebuilt(item: Any) -> Any:
        if not isinstance(item, View):
            return item
        if item not in made:
            made[item] = placed(fresh[item.storage], item)
        return made[item]

    return map_tree(packed.tree, rebuilt)
