"""Large calls that act on each element alone: a sample of their elements is judged."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opcheck import _torch
from opcheck.arrays import Array
from opcheck.calls import Call
from opcheck.expected import leaves_of
from opcheck.large_table import FACTORIES
from opcheck.records import SkipReason
from opcheck.sampled import (
    Criterion,
    Judged,
    find_nonfinite,
    judge_parts,
    rng_of,
    sample_of,
)
from opcheck.slices import Kept, distinct, gather_flat, keep, part_of

__all__ = ["ElementsKept", "elements_before", "judge_elements_of"]

NUM_ELEMENTS = 32_768
"""Positions that are looked at: a wrong share of 3e-4 is found every time, of 1e-4 in 93%."""
NUM_EDGES = 64
"""First and last elements, where blocks begin and tails end."""
NUM_EDGE_ROWS = 62
_TILES = (8, 16, 32, 64, 128, 256, 1024)


@dataclass(slots=True)
class ElementsKept:
    """Positions that were chosen, and the arguments there, before an op changed them."""

    positions: dict[int, Array]
    """Place in the lists (0 where there are none) -> flat positions."""
    kept: Kept


def _stretch(shape: tuple[int, ...], rng: np.random.Generator, count: int) -> Array:
    """One position of each stratum, both ends, and tile borders of some rows."""
    total = math.prod(shape)
    if total <= 2 * count:
        return np.arange(total)
    step = total // count
    chosen = [np.arange(count) * step + rng.integers(0, step, count)]
    chosen += [np.arange(NUM_EDGES), np.arange(total - NUM_EDGES, total)]
    width = shape[-1]
    rows = np.concatenate([rng.integers(0, total // width, NUM_EDGE_ROWS), [0, total // width - 1]])
    borders = {
        place
        for tile in _TILES
        for place in (0, tile - 1, tile, width // tile * tile - 1, width // tile * tile, width - 1)
        if 0 <= place < width
    }
    chosen.append((rows[:, None] * width + np.array(sorted(borders))).reshape(-1))
    return distinct(*chosen)


def _shapes(call: Call, out: Any = None) -> dict[int, tuple[int, ...]]:
    """Shape of the elements at each place in the lists; 0 alone for an op on tensors."""
    lists = [
        value
        for param, value in call.traits.bound(call.args, call.kwargs)
        if param.kind == "tensors" and value
    ]
    if lists:
        return {place: tuple(item.shape) for place, item in enumerate(lists[0])}
    shapes = [
        value.shape
        for _, value in call.traits.bound(call.args, call.kwargs)
        if isinstance(value, Tensor)
    ]
    if not shapes or call.traits.base in FACTORIES:
        return {0: tuple(leaves_of(out)[0].value.shape)}
    return {0: tuple(torch.broadcast_shapes(*shapes))}


def _choose(shapes: dict[int, tuple[int, ...]], rng: np.random.Generator) -> dict[int, Array]:
    total = sum(math.prod(shape) for shape in shapes.values())
    return {
        place: _stretch(shape, rng, max(256, NUM_ELEMENTS * math.prod(shape) // max(total, 1)))
        for place, shape in shapes.items()
    }


def _cut(shapes: dict[int, tuple[int, ...]], positions: dict[int, Array]) -> Any:
    def cut(_name: str, value: Any) -> Any:
        if isinstance(value, (list, tuple)) and any(isinstance(item, Tensor) for item in value):
            return [one(item, place) for place, item in enumerate(value)]
        return one(value, 0) if isinstance(value, Tensor) else value

    def one(tensor: Tensor, place: int) -> Tensor:
        if len(shapes) > 1 and tuple(tensor.shape) != shapes[place]:
            return tensor.detach().to("cpu", copy=True)  # the step counts beside the parameters
        return gather_flat(tensor, shapes[place], positions[place])

    return cut


def _nothing_of(_name: str, value: Any) -> Any:
    """Of the tensor that `new_zeros` is called on: it gives dtype and layout."""
    return torch.empty(0, dtype=value.dtype) if isinstance(value, Tensor) else value


def elements_before(call: Call, rng: np.random.Generator) -> ElementsKept:
    """Choose positions of an op that changes its arguments, and keep what stands there."""
    shapes = _shapes(call)
    positions = _choose(shapes, rng)
    return ElementsKept(positions, keep(call, _cut(shapes, positions)))


def judge_elements_of(
    call: Call, out: Any, earlier: ElementsKept | None, criterion: Criterion
) -> Judged | SkipReason:
    """Judge a pointwise op, or one on lists of tensors, by a sample of its elements."""
    shapes = _shapes(call, out)
    if earlier is None:
        positions = _choose(shapes, rng_of(call, criterion.seed))
        for at, leaf in enumerate(leaves_of(out)):
            if at in positions and isinstance(leaf.value, Tensor):
                positions[at] = distinct(positions[at], find_nonfinite(leaf.value))
        kept = None
    else:
        positions, kept = earlier.positions, earlier.kept
    is_list = len(shapes) > 1

    def place(number: int, index: tuple[int, ...]) -> tuple[int, ...]:
        at = number % len(shapes) if is_list else 0
        if len(index) != 1 or index[0] >= positions[at].size:
            return index
        flat = int(positions[at][index[0]])
        return tuple(int(item) for item in np.unravel_index(flat, shapes[at]))

    cut = _nothing_of if call.traits.base in FACTORIES else _cut(shapes, positions)
    part = part_of(
        call,
        out,
        cut=cut,
        cut_result=lambda number, value: _result(value, shapes, positions, number, is_list=is_list),
        place=place,
        kept=kept,
        changes=_sizes_named(call, positions[0].size),
    )
    seen = sum(item.size for item in positions.values())
    total = sum(math.prod(shape) for shape in shapes.values())
    detail = f"{seen:,} of {total:,} elements"
    judged = judge_parts(
        [part],
        criterion,
        sample_of("sampled_elements", _all_results(call, out), call.index, detail),
    )
    if isinstance(judged, SkipReason) or earlier is None:
        return judged
    return _with_unseen_nonfinite(judged, call)


def _result(
    value: Any,
    shapes: dict[int, tuple[int, ...]],
    positions: dict[int, Array],
    number: int,
    *,
    is_list: bool,
) -> Any:
    if not isinstance(value, Tensor):
        return value
    at = number % len(shapes) if is_list else 0
    return gather_flat(value, tuple(value.shape), positions[at])


def _sizes_named(call: Call, count: int) -> dict[str, Any]:
    """A factory makes so many elements and no more."""
    return {
        param.name: [count]
        for param, _ in call.traits.bound(call.args, call.kwargs)
        if param.name == "size"
    }


def _all_results(call: Call, out: Any) -> Any:
    written = [
        value
        for param, value in call.traits.bound(call.args, call.kwargs)
        if param.mutated and value is not None and value is not out
    ]
    return [out, *written]


def _with_unseen_nonfinite(judged: Judged, call: Call) -> Judged:
    """What the op has overwritten cannot be asked for any more."""
    written = [
        tensor
        for param, value in call.traits.bound(call.args, call.kwargs)
        if param.mutated
        for tensor in _torch.tree_leaves(value)
        if isinstance(tensor, Tensor)
    ]
    if not any(find_nonfinite(tensor).size for tensor in written):
        return judged
    note = "NaN or Inf outside of the sample: the op wrote over its input, which is gone"
    return replace(judged, found=replace(judged.found, notes=(*judged.found.notes, note)))
