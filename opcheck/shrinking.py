"""Arguments made smaller while a fault survives: fewer rows, smaller dims, simpler numbers.

A candidate is the arguments with some indices of some dimensions left out, or with other values.
Which dimensions belong together is not known: those of one size are tried together first, then in
smaller groups. Strides keep their order, shared memory stays shared (and is left as it is).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from opcheck.outside import outside_everything
from opcheck.packing import Packed, View, map_tree, placed, tree_items

__all__ = ["Shrunk", "shrink"]

MAX_TOGETHER = 5
"""Dimensions of one size of which every group is tried; of more, only the likely ones."""
FEW = 64
"""So many numbers are simplified one by one."""

Fails = Callable[[Packed], bool]
"""True when the fault is there with these arguments; never raises."""
Progress = Callable[[Packed], None]


@dataclass(frozen=True, slots=True)
class Shrunk:
    """The smallest arguments found."""

    arguments: Packed
    num_runs: int
    out_of_time: bool


@dataclass(frozen=True, slots=True)
class _Slot:
    """Stands in the tree for a tensor."""

    number: int


@dataclass(frozen=True, slots=True)
class _Candidate:
    tree: Any
    """Of the arguments, with a `_Slot` for each tensor."""
    values: tuple[Tensor | None, ...]
    """By slot; None where the memory is shared and stays as it is."""


_Place = tuple[str, Any, int]
"""("dim", slot, dimension) or ("int", path, 0) or ("list", path, 0)."""


def shrink(
    arguments: Packed, fails: Fails, *, seconds: float, progress: Progress | None = None
) -> Shrunk:
    """Look for smaller arguments with which the fault is still there.

    Args:
        arguments: with these it is.
        fails: asks for one candidate.
        seconds: after which no further candidate is tried.
        progress: told of each smaller one.
    """
    search = _Search(arguments, fails, time.monotonic() + seconds, progress)
    out_of_time = False
    try:
        search.cut_lists()
        search.cut_dims()
        search.simplify()
        search.cut_dims()
    except _OutOfTime:
        out_of_time = True
    return Shrunk(search.packed(search.best), search.num_runs, out_of_time)


class _OutOfTime(Exception):  # noqa: N818 - how the search ends
    pass


class _Search:
    def __init__(
        self, arguments: Packed, fails: Fails, deadline: float, progress: Progress | None
    ) -> None:
        self._original = arguments
        self._fails, self._deadline, self._progress = fails, deadline, progress
        self.num_runs = 0
        views = list(dict.fromkeys(arguments.views()))
        sharing = [view.storage for view in views]
        self._views = views
        slots = {view: _Slot(number) for number, view in enumerate(views)}
        tree = map_tree(
            arguments.tree, lambda item: slots[item] if isinstance(item, View) else item
        )
        with outside_everything():
            values = tuple(
                placed(arguments.storages[view.storage], view).clone(
                    memory_format=torch.contiguous_format
                )
                if sharing.count(view.storage) == 1
                else None
                for view in views
            )
        self.best = _Candidate(tree, values)

    # ---- candidates ----

    def packed(self, candidate: _Candidate) -> Packed:
        """The arguments of a candidate, laid out in memory as the original ones."""
        storages: list[Tensor] = []
        views: dict[int, View] = {}
        shared: dict[int, int] = {}
        used = {item.number for item in tree_items(candidate.tree) if isinstance(item, _Slot)}
        with outside_everything():
            for slot in sorted(used):
                view, values = self._views[slot], candidate.values[slot]
                if values is not None:
                    storage, views[slot] = _laid_out(values, view, len(storages))
                    storages.append(storage)
                    continue
                if view.storage not in shared:
                    shared[view.storage] = len(storages)
                    storages.append(self._original.storages[view.storage])
                views[slot] = replace(view, storage=shared[view.storage])
        tree = map_tree(
            candidate.tree, lambda item: views[item.number] if isinstance(item, _Slot) else item
        )
        return Packed(tree, storages)

    def accepts(self, candidate: _Candidate) -> bool:
        """Try it; where the fault survives it is the best one from now on."""
        if time.monotonic() > self._deadline:
            raise _OutOfTime
        packed = self.packed(candidate)
        self.num_runs += 1
        if not self._fails(packed):
            return False
        self.best = candidate
        if self._progress is not None:
            self._progress(packed)
        return True

    # ---- fewer ----

    def cut_lists(self) -> None:
        """Leave out tensors of lists, the same ones of lists that are as long."""
        lengths: dict[int, list[_Place]] = {}
        for path, items in _lists(self.best.tree):
            if len(items) > 1:
                lengths.setdefault(len(items), []).append(("list", path, 0))
        for length, places in sorted(lengths.items(), reverse=True):
            self._cut(places, length)

    def cut_dims(self) -> None:
        """Leave out indices of dimensions, largest first."""
        for size in sorted(self._sizes(), reverse=True):
            places = self._places(size)
            for group in _groups(places, self.best):
                if any(self._size_of(place) != size for place in group):
                    continue  # an earlier group has cut it
                self._cut(list(group), size)

    def _sizes(self) -> set[int]:
        found = {size for values in self.best.values if values is not None for size in values.shape}
        return {size for size in found if size > 1}

    def _places(self, size: int) -> list[_Place]:
        places: list[_Place] = [
            ("dim", slot, dim)
            for slot, values in enumerate(self.best.values)
            if values is not None
            for dim, extent in enumerate(values.shape)
            if extent == size
        ]
        ints: list[_Place] = [
            ("int", path, 0) for path, value in _ints(self.best.tree) if value == size
        ]
        return places + ints

    def _size_of(self, place: _Place) -> int:
        kind, where, dim = place
        if kind == "dim":
            values = self.best.values[where]
            return 0 if values is None else values.shape[dim]
        return int(_at(self.best.tree, where))

    def _cut(self, places: list[_Place], size: int) -> None:
        """Keep a half as long as one does; then leave out smaller pieces."""
        base, keep = self.best, list(range(size))
        while len(keep) > 1:
            middle = len(keep) // 2
            halves = [keep[:middle], keep[middle:]]
            for half in halves:
                if self.accepts(_cut_to(base, places, half)):
                    keep = half
                    break
            else:
                break
        piece = len(keep) // 4
        while piece >= 1 and len(keep) > 2:
            start = 0
            while start < len(keep):
                rest = keep[:start] + keep[start + piece :]
                if rest and self.accepts(_cut_to(base, places, rest)):
                    keep = rest
                else:
                    start += piece
            piece //= 2
            if len(keep) > FEW:  # nothing goes: the fault needs the size
                break

    # ---- simpler ----

    def simplify(self) -> None:
        """Zeros, ones or rounded numbers: of whole tensors, then one by one where they are few."""
        for slot in range(len(self.best.values)):
            for change in _CHANGES:
                values = self.best.values[slot]
                if values is None or not values.numel():
                    break
                new = _changed(values, change)
                if new is not None and self.accepts(self._with(slot, new)):
                    break
        for slot, values in enumerate(self.best.values):
            if values is not None and 1 < values.numel() <= FEW:
                self._simplify_elements(slot)

    def _simplify_elements(self, slot: int) -> None:
        values = self.best.values[slot]
        for place in range(0 if values is None else values.numel()):
            for change in _CHANGES:
                now = self.best.values[slot]
                new = None if now is None else _changed(now, change, place)
                if new is not None and self.accepts(self._with(slot, new)):
                    break

    def _with(self, slot: int, values: Tensor) -> _Candidate:
        new = list(self.best.values)
        new[slot] = values
        return replace(self.best, values=tuple(new))


# ---- values -------------------------------------------------------------------------------------


def _rounded(decimals: int) -> Callable[[Tensor], Tensor | None]:
    def change(values: Tensor) -> Tensor | None:
        if not values.is_floating_point():
            return None
        return values.double().round(decimals=decimals).to(values.dtype)

    return change


_CHANGES: tuple[Callable[[Tensor], Tensor | None], ...] = (
    torch.zeros_like,
    torch.ones_like,
    _rounded(0),
    _rounded(1),
    _rounded(2),
)
"""From the simplest on; the first one with which the fault survives is taken."""


def _changed(
    values: Tensor, change: Callable[[Tensor], Tensor | None], place: int | None = None
) -> Tensor | None:
    """Changed in one element or in all; None: that is how it is already."""
    with outside_everything():
        old = values if place is None else values.view(-1)[place]
        new = change(old)
        if new is None or torch.equal(new, old):
            return None
        if place is None:
            return new
        copy = values.clone()
        copy.view(-1)[place] = new
        return copy


def _laid_out(values: Tensor, like: View, storage: int) -> tuple[Tensor, View]:
    """Memory for values, and the view of it: dimensions in the order of the strides of `like`."""
    size = tuple(values.shape)
    stride = [0] * len(size)
    step, padded = 1, False
    order = sorted(range(len(size)), key=lambda dim: (like.stride[dim], -dim))
    dense = 1
    for dim in order:
        if like.stride[dim] == 0 and like.size[dim] > 1:
            values = values.narrow(dim, 0, 1)
            continue
        if like.size[dim] > 1 and like.stride[dim] > dense and not padded:
            step, padded = step + 1, True  # rows of a wider tensor stay rows of a wider one
        stride[dim] = step
        step *= max(size[dim], 1)
        if like.size[dim] > 1:
            dense = like.stride[dim] * like.size[dim]
    extent = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if 0 not in size else 0
    view = replace(like, storage=storage, size=size, stride=tuple(stride), offset=0)
    flat = torch.zeros(extent, dtype=like.dtype)
    target = placed(flat, replace(view, size=tuple(values.shape)))
    if values.numel():
        target.copy_(values)
    return flat, view


# ---- dimensions ---------------------------------------------------------------------------------


def _groups(places: list[_Place], best: _Candidate) -> Iterator[tuple[_Place, ...]]:
    """Places of one size that may belong together, the largest groups first."""
    if len(places) <= MAX_TOGETHER:
        for count in range(len(places), 0, -1):
            for group in itertools.combinations(places, count):
                if any(kind == "dim" for kind, _, _ in group):
                    yield group
        return
    yield tuple(places)
    dims = [place for place in places if place[0] == "dim"]
    yield tuple(dims)
    by_end: dict[int, list[_Place]] = {}
    for place in dims:
        values = best.values[place[1]]
        if values is not None:
            by_end.setdefault(values.dim() - place[2], []).append(place)
    yield from (tuple(group) for group in by_end.values())
    yield from ((place,) for place in dims)


def _cut_to(candidate: _Candidate, places: list[_Place], keep: list[int]) -> _Candidate:
    tree, values = candidate.tree, list(candidate.values)
    index = torch.tensor(keep)
    for kind, where, dim in places:
        if kind == "int":
            tree = _replaced(tree, where, len(keep))
        elif kind == "list":
            items = _at(tree, where)
            tree = _replaced(tree, where, type(items)(items[place] for place in keep))
        else:
            old = values[where]
            if old is not None:
                with outside_everything():
                    values[where] = old.index_select(dim, index)
    return _Candidate(tree, tuple(values))


# ---- paths --------------------------------------------------------------------------------------


def _walk(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    yield path, tree
    if isinstance(tree, dict):
        for key, item in tree.items():
            yield from _walk(item, (*path, key))
    elif isinstance(tree, (list, tuple)):
        for place, item in enumerate(tree):
            yield from _walk(item, (*path, place))


def _ints(tree: Any) -> Iterator[tuple[tuple[Any, ...], int]]:
    for path, item in _walk(tree):
        if type(item) is int:
            yield path, item


def _lists(tree: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Lists of an argument, that of the positional arguments aside."""
    for path, item in _walk(tree):
        if len(path) > 1 and isinstance(item, (list, tuple)):
            yield path, item


def _at(tree: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        tree = tree[step]
    return tree


def _replaced(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    first, rest = path[0], path[1:]
    if isinstance(tree, dict):
        return {
            key: _replaced(item, rest, value) if key == first else item
            for key, item in tree.items()
        }
    items = [_replaced(item, rest, value) if n == first else item for n, item in enumerate(tree)]
    return items if isinstance(tree, list) else tuple(items)
