"""Large calls of which a sample is judged: parts of any kind, by the rules of any call."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opcheck.arrays import Array
from opcheck.calls import Call
from opcheck.compare import Judgement, judge
from opcheck.expected import leaves_of
from opcheck.records import Metrics, Sample, SkipReason
from opcheck.references import choose
from opcheck.slices import Part, Pick, Space, strata

__all__ = [
    "MAX_PART",
    "Criterion",
    "Judged",
    "find_nonfinite",
    "judge_parts",
    "pick_rows",
    "rng_of",
]

NUM_ROWS = 128
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
