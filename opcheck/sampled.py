"""Large calls of which a sample is judged: elements, rows, or blocks, by the rules of any call."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opcheck import _torch
from opcheck.arrays import Array
from opcheck.calls import Call
from opcheck.compare import Judgement, judge, leaves_of
from opcheck.records import Metrics, Sample, SkipReason
from opcheck.references import choose
from opcheck.slices import (
    Kept,
    Part,
    Pick,
    Space,
    gather_flat,
    keep,
    part_of,
    strata,
)

__all__ = [
    "MAX_PART",
    "Criterion",
    "ElementsKept",
    "Judged",
    "elements_before",
    "find_nonfinite",
    "judge_elements_of",
    "judge_parts",
    "pick_rows",
    "rng_of",
]

NUM_ELEMENTS = 32_768
"""Positions of a pointwise op: a wrong share of 3e-4 is found every time, of 1e-4 in 93%."""
NUM_ROWS = 128
NUM_EDGES = 64
"""First and last elements of a pointwise result, where blocks begin and tails end."""
NUM_EDGE_ROWS = 62
_TILES = (8, 16, 32, 64, 128, 256, 1024)
MAX_PART = 1 << 19
"""Elements of one tensor of a part: 4 MiB in float64. A part holds some ten of them at a time."""
MAX_ROWS = 1 << 18
"""Elements of the rows that are picked, one row at least."""
_MOST_IN_ONE_ROW = 1 << 22
_NONFINITE_LOOKED_AT = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Criterion:
    """What judges."""

    name: str
    rtol: float
    atol: float
    seed: int


@dataclass(frozen=True, slots=True)
class Judged:
    """A large call's judgement, and who played the reference."""

    found: Judgement
    label: str


def rng_of(call: Call, seed: int) -> np.random.Generator:
    """The sample depends on the seed and the call alone; the user's generators are not touched."""
    return np.random.default_rng((seed, call.index))


# ---- parts --------------------------------------------------------------------------------------


def judge_parts(
    parts: Iterable[Part], criterion: Criterion, sample: Callable[[int], Sample]
) -> Judged | SkipReason:
    """Judge part after part; the first that fails is the last.

    Args:
        parts: of one large call.
        criterion: as for any call.
        sample: number of elements compared -> what the record says of it.
    """
    judged: list[tuple[Part, Judgement]] = []
    label, skip = "", SkipReason.NOTHING_TO_COMPARE
    compared = 0
    for part in parts:
        result = _judge_part(part, criterion)
        if isinstance(result, SkipReason):
            skip = result
            continue
        label = result.label
        judged.append((part, result.found))
        compared += result.found.compared
        if not result.found.passed:
            break
    if not judged:
        return skip
    part, worst = max(judged, key=lambda item: _badness(item[1]))
    notes = tuple(dict.fromkeys(note for _, found in judged for note in found.notes))
    found = replace(
        worst,
        metrics=_placed(worst.metrics, part),
        reason=_with_place(worst, part),
        notes=notes,
        compared=compared,
        nonfinite=False,
        sample=sample(compared),
    )
    return Judged(found, label)


def _judge_part(part: Part, criterion: Criterion) -> Judged | SkipReason:
    call = part.call
    reference = choose(call, on_device=call.on_device or call.in_kernel, seed=criterion.seed)
    if isinstance(reference, SkipReason):
        return reference
    if part.compared is not None:
        compared, run = part.compared, reference.run
        reference.run = lambda args, kwargs: _only(run(args, kwargs), compared)
    found = judge(
        call, part.out, reference,
        criterion=criterion.name, rtol=criterion.rtol, atol=criterion.atol,
    )  # fmt: skip
    if found.skip is not None:
        return found.skip
    return Judged(found, reference.label)


def _only(out: Any, compared: frozenset[int]) -> Any:
    if not isinstance(out, (list, tuple)):
        return out
    return tuple(item if number in compared else None for number, item in enumerate(out))


def _badness(found: Judgement) -> tuple[bool, float]:
    q = found.metrics.q
    return not found.passed, math.inf if math.isnan(q) else q


def _placed(metrics: Metrics, part: Part) -> Metrics:
    if metrics.worst_index is None:
        return metrics
    return replace(metrics, worst_index=part.place(metrics.worst_output, metrics.worst_index))


def _with_place(found: Judgement, part: Part) -> str:
    """The reason names the element of the part; a person wants that of the result."""
    index = found.metrics.worst_index
    if index is None:
        return found.reason
    there = part.place(found.metrics.worst_output, index)
    return found.reason.replace(f"element {index}", f"element {there}", 1)


def sample_of(
    strategy: str, out: Any, seed: int, detail: str, *, covers_all: bool = False
) -> Callable[[int], Sample]:
    """What a record says, given how many elements were compared."""
    total = sum(leaf.value.numel() for leaf in leaves_of(out) if isinstance(leaf.value, Tensor))

    def sample(compared: int) -> Sample:
        share = min(1.0, compared / max(total, compared, 1))
        return Sample(
            strategy=strategy, seed=seed, num_elements=compared, share=share,
            covers_all=covers_all or share == 1.0, detail=detail,
        )  # fmt: skip

    return sample


# ---- rows ---------------------------------------------------------------------------------------


def pick_rows(
    call: Call, space: Space, rng: np.random.Generator, *, count: int = NUM_ROWS,
    also: Sequence[Array] = (),
) -> Pick | None:  # fmt: skip
    """Rows of a space, one of each stratum and those `also` named; None where one is too large.

    Args:
        call: its arguments tell how large a row is.
        space: where the rows lie.
        rng: draws them.
        count: at most, about.
        also: further positions, one array for each axis.
    """
    largest = 1
    for param, value in call.traits.bound(call.args, call.kwargs):
        if param.name not in space.tensors:
            continue
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            dims = space.tensors[param.name]
            rows = math.prod(tensor.shape[dim] for dim in dims)
            largest = max(largest, tensor.numel() // max(rows, 1))
    if largest > _MOST_IN_ONE_ROW:
        return None
    flat = strata(space.count, max(1, min(count, MAX_ROWS // largest)), rng)
    if largest > MAX_PART:
        flat = flat[:1]
    index = np.unravel_index(flat, space.sizes)
    if also:
        index = tuple(np.concatenate([a, b]) for a, b in zip(index, also, strict=True))
    return Pick(space, tuple(np.asarray(item, dtype=np.int64) for item in index))


def find_nonfinite(tensor: Tensor) -> Array:
    """Flat positions of the first few NaN and Inf of a result; every element is looked at."""
    if not (tensor.dtype.is_floating_point or tensor.dtype.is_complex) or not tensor.numel():
        return np.zeros(0, dtype=np.int64)
    plain = tensor.detach()
    parts = torch.view_as_real(plain.resolve_conj()) if plain.is_complex() else plain
    low, high = torch.aminmax(parts)
    if math.isfinite(low) and math.isfinite(high):
        return np.zeros(0, dtype=np.int64)
    found: list[Array] = []
    per_row = plain.numel() // max(plain.shape[0], 1) if plain.dim() else 1
    step = max(1, MAX_PART // max(per_row, 1))
    for start in range(0, plain.shape[0] if plain.dim() else 1, step):
        rows = plain[start : start + step] if plain.dim() else plain
        bad = torch.isfinite(rows).logical_not_().reshape(-1).nonzero().reshape(-1)
        if bad.numel():
            found.append(bad[:_NONFINITE_LOOKED_AT].to("cpu").numpy() + start * per_row)
        if sum(item.size for item in found) >= _NONFINITE_LOOKED_AT:
            break
    return np.concatenate(found)[:_NONFINITE_LOOKED_AT]


def nonfinite_places(tensor: Tensor) -> Array:
    """Coordinates of the first few NaN and Inf of a result, [places, dimensions]."""
    positions = find_nonfinite(tensor)
    return np.stack(np.unravel_index(positions, tuple(tensor.shape)), axis=1)


def nonfinite_rows(space: Space, out: Any) -> tuple[Array, ...]:
    """The slices of a space that hold NaN or Inf, the first few."""
    leaves = [leaf.value for leaf in leaves_of(out)]
    number = min(space.outputs)
    if number >= len(leaves) or not isinstance(leaves[number], Tensor):
        return ()
    result = leaves[number]
    places = nonfinite_places(result)
    if not places.size:
        return ()
    return tuple(np.unique(places[:, list(space.outputs[number])], axis=0)[:4].T)


# ---- elements -----------------------------------------------------------------------------------


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
    return np.unique(np.concatenate(chosen))


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
    if not shapes:
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
                positions[at] = np.union1d(positions[at], find_nonfinite(leaf.value))
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

    cut = _cut(shapes, positions)
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
