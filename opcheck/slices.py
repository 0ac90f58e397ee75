"""Part of a large call as a call of its own: some slices of its tensors, all on the CPU and small.

Many ops treat slices of their tensors independently: a softmax its rows, a product the rows of one
and the columns of the other matrix. A `Space` says along which dimensions; picking some slices
gives a call whose right results are the same slices of the right results. Reference, comparison
and tolerances of the small call are those of any call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opcheck import _torch
from opcheck.arrays import Array
from opcheck.calls import Call
from opcheck.policy import describe
from opcheck.written import memory_written

__all__ = [
    "Cut",
    "Kept",
    "Part",
    "Pick",
    "Space",
    "cut_with",
    "distinct",
    "gather_flat",
    "keep",
    "one_in",
    "part_of",
    "part_of_slices",
    "strata",
    "take",
]

Dims = tuple[int, ...]
Index = tuple[Array, ...]
"""For each axis of a space the positions that were picked, all of one length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Axes along which one call treats its slices independently."""

    sizes: tuple[int, ...]
    """Of the axes."""
    tensors: Mapping[str, Dims]
    """Parameter name -> its dimension for each axis; parameters not named stay whole."""
    outputs: Mapping[int, Dims]
    """Number of a result -> its dimension for each axis; results not named are not compared."""
    changes: Mapping[str, Callable[[int], Any]] = field(default_factory=dict)
    """Parameters that name sizes or results: number of slices -> value."""

    @property
    def count(self) -> int:
        """How many slices there are."""
        return int(np.prod(self.sizes))


@dataclass(frozen=True, slots=True)
class Pick:
    """Slices picked out of a space."""

    space: Space
    index: Index

    @property
    def count(self) -> int:
        """How many."""
        return int(self.index[0].size)


@dataclass(slots=True)
class Part:
    """A small call with what the large one gave there."""

    call: Call
    out: Any
    place: Callable[[int, tuple[int, ...]], tuple[int, ...]]
    """(number of a result, index in it) -> index in the large result."""
    compared: frozenset[int] | None = None
    """Results that mean something; None: all."""


def take(tensor: Tensor, dims: Dims, index: Index) -> Tensor:
    """Some slices of a tensor, copied to the CPU.

    Args:
        tensor: of any strides, on any device.
        dims: one dimension for each axis, ascending.
        index: positions along each of them, of one length n.

    Returns:
        As many dimensions as `tensor`: n slices along the first of `dims`, size 1 along the others.
    """
    plain = tensor.detach()
    if len(dims) == 1:
        return _take_along(plain, dims[0], index[0]).to("cpu")
    rest = [dim for dim in range(plain.dim()) if dim not in dims]
    places = tuple(torch.from_numpy(item).to(plain.device) for item in index)
    found = plain.permute(*dims, *rest)[places]
    before = sum(dim < dims[0] for dim in rest)
    found = found.movedim(0, before).contiguous()
    # contiguous, as batched LAPACK kernels trust the strides of dimensions of size 1
    for dim in dims[1:]:
        found = found.unsqueeze(dim)
    return found.to("cpu")


def gather_flat(tensor: Tensor, shape: tuple[int, ...], positions: Array) -> Tensor:
    """Values of a tensor, broadcast to `shape`, at flat positions; nothing else is read or made.

    A tensor without dimensions stays as it is: it takes no part in the promotion of dtypes.
    """
    plain = tensor.detach()
    if not plain.dim():
        return plain.to("cpu", copy=True)
    if plain.is_contiguous() and tuple(plain.shape) == shape:
        offsets, flat = positions, plain.view(-1)
    else:
        wide = plain.expand(shape)
        offsets, rest = np.zeros_like(positions), positions
        for size, stride in zip(reversed(wide.shape), reversed(wide.stride()), strict=True):
            offsets = offsets + (rest % size) * stride
            rest = rest // size
        span = 1 + sum(
            (size - 1) * stride for size, stride in zip(plain.shape, plain.stride(), strict=True)
        )
        flat = plain.as_strided((span,), (1,), plain.storage_offset())
    return flat[torch.from_numpy(offsets).to(plain.device)].to("cpu")


def distinct(*runs: Array) -> Array:
    """The positions of some runs, each ascending or short, in order and each once.

    `np.unique` hashes whole numbers, which takes fifty times as long.
    """
    merged = np.sort(np.concatenate(runs), kind="stable")
    return merged[np.concatenate([[True], merged[1:] != merged[:-1]])] if merged.size else merged


def strata(total: int, count: int, rng: np.random.Generator) -> Array:
    """About `count` of `total` positions: one of each stratum, the first and the last."""
    if total <= count:
        return np.arange(total)
    edges = np.linspace(0, total, count + 1).astype(np.int64)
    chosen = rng.integers(edges[:-1], np.maximum(edges[1:], edges[:-1] + 1))
    return distinct(chosen, np.array([0, total - 1]))


def one_in(total: int, step: int, rng: np.random.Generator) -> Array:
    """One position of each block of `step`, the first and the last."""
    starts = np.arange(0, total, step)
    chosen = rng.integers(starts, np.minimum(starts + step, total))
    return distinct(chosen, np.array([0, total - 1]))


# ---- a part of a call ---------------------------------------------------------------------------

Cut = Callable[[str, Any], Any]
"""(parameter name, argument) -> its part."""


@dataclass(slots=True)
class Kept:
    """Parts of the arguments from before the op ran."""

    args: dict[str, Any]


def keep(call: Call, cut: Cut) -> Kept:
    """Cut the arguments of a call that is about to change some of them."""
    pairs = _bound(call)
    written = memory_written(call)

    def own(value: Any) -> Any:
        """Not the memory that the op writes to: a tensor that stayed whole is copied."""
        if isinstance(value, Tensor) and _torch.memory_of(value) in written:
            return value.clone()
        return value

    return Kept({param.name: _torch.tree_map(own, cut(param.name, v)) for param, v in pairs})


def _take_along(plain: Tensor, dim: int, index: Array) -> Tensor:
    places = torch.from_numpy(index).to(plain.device)
    if dim and plain.is_contiguous():  # takes a third of the time of indexing; otherwise six times
        return plain.index_select(dim, places)
    if plain.dim() == 2 and not dim and plain.t().is_contiguous():
        return plain.t().index_select(1, places).t()
    return plain.movedim(dim, 0)[places].movedim(0, dim)


def part_of(
    call: Call,
    out: Any,
    *,
    cut: Cut,
    cut_result: Callable[[int, Any], Any],
    place: Callable[[int, tuple[int, ...]], tuple[int, ...]],
    kept: Kept | None = None,
    changes: Mapping[str, Any] | None = None,
    compared: frozenset[int] | None = None,
) -> Part:
    """Cut a call that has run.

    Args:
        call: the large call.
        out: what it gave.
        cut: gives the part of an argument.
        cut_result: gives the part of the n-th result.
        place: see `Part`.
        kept: the parts from before the op ran, where it changes arguments.
        changes: arguments that are replaced.
        compared: see `Part`.
    """
    before: dict[int, Tensor] = {}
    bound: dict[str, Any] = {}
    same: dict[int, Any] = {}
    for param, value in _bound(call):
        if param.name in (changes or {}):
            continue
        earlier = kept.args[param.name] if kept is not None else None
        if kept is not None and not param.mutated:
            bound[param.name] = earlier
            continue
        new = cut(param.name, value)
        bound[param.name] = new
        for old, small, first in _tensor_triples(value, new, earlier):
            same[id(old)] = small
            if first is not None:
                before[id(small)] = first
    bound.update(changes or {})
    positional, kwargs = call.traits.spread(bound)
    args = tuple(positional)
    number = iter(range(1 << 30))

    def result(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [result(item) for item in value]
        place_of_it = next(number)
        if compared is not None and place_of_it not in compared:
            return None
        known = same.get(id(value))
        return known if known is not None else cut_result(place_of_it, value)

    small = replace(
        call,
        args=args,
        kwargs=kwargs,
        before=before,
        before_groups=False,
        wide_storages={},
        signature=tuple(describe(call.func, args, kwargs).key),
        device_type=_device_type(call),
        large=None,
    )
    return Part(small, None if out is None else result(out), place, compared)


def _bound(call: Call) -> list[Any]:
    return call.traits.bound(call.args, call.kwargs)


def _tensor_triples(value: Any, new: Any, earlier: Any) -> list[tuple[Any, Any, Any]]:
    if isinstance(value, Tensor):
        return [(value, new, earlier)]
    if isinstance(value, (list, tuple)) and any(isinstance(item, Tensor) for item in value):
        first = [None] * len(value) if earlier is None else earlier
        return list(zip(value, new, first, strict=True))
    return []


def _device_type(call: Call) -> str:
    for leaf in _torch.tree_leaves((call.args, call.kwargs)):
        if isinstance(leaf, Tensor) and leaf.device.type != "cpu":
            return leaf.device.type
    return ""


def cut_with(picks: list[Pick]) -> Cut:
    """Cut arguments along the axes of one or more spaces."""

    def cut(name: str, value: Any) -> Any:
        if isinstance(value, (list, tuple)) and any(isinstance(item, Tensor) for item in value):
            return [cut(name, item) for item in value]
        if not isinstance(value, Tensor):
            return value
        small = value
        for pick in picks:
            dims = pick.space.tensors.get(name)
            if dims is not None:
                small = take(small, dims, pick.index)
        return small.detach().to("cpu") if small is value else small

    return cut


def part_of_slices(call: Call, out: Any, picks: list[Pick], kept: Kept | None = None) -> Part:
    """The part of a call that the slices picked in one or more spaces make."""
    compared = frozenset.intersection(*(frozenset(pick.space.outputs) for pick in picks))
    changes: dict[str, Any] = {}
    for pick in picks:
        changes.update({name: make(pick.count) for name, make in pick.space.changes.items()})

    def cut_result(number: int, value: Any) -> Any:
        for pick in picks:
            if isinstance(value, Tensor):
                value = take(value, pick.space.outputs[number], pick.index)
        return value

    def place(number: int, index: tuple[int, ...]) -> tuple[int, ...]:
        found = list(index)
        for pick in picks:
            dims = pick.space.outputs.get(number)
            if dims is not None and len(index) > max(dims):
                at = index[dims[0]]
                for dim, positions in zip(dims, pick.index, strict=True):
                    found[dim] = int(positions[at])
        return tuple(found)

    return part_of(
        call,
        out,
        cut=cut_with(picks),
        cut_result=cut_result,
        place=place,
        kept=kept,
        changes=changes,
        compared=compared if _has_others(out, compared) else None,
    )


def _has_others(out: Any, compared: frozenset[int]) -> bool:
    leaves = out if isinstance(out, (list, tuple)) else [out]
    return len(compared) < len(leaves)
