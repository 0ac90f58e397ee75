"""Large calls that count values: every element is looked at, and what has to hold of the results.

Unique values ascend, lead back to the elements by the inverse, and their counts add up. Without an
inverse a hash of each element stands for it: 64 bits, summed as often as the counts say. Nothing is
sorted, so that this takes as long as a few passes over the elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from torch import Tensor

from opcheck.arrays import Array
from opcheck.calls import Call
from opcheck.compare import Judgement
from opcheck.golden_rules import argument
from opcheck.records import SkipReason
from opcheck.references import host_array
from opcheck.sampled import Criterion, Judged, sample_of
from opcheck.tolerances import op_class
from opcheck.verdicts import Outcome, Rule, judge_exact, judge_golden

__all__ = ["is_counted", "judge_counted"]

CHUNK = 1 << 18
"""Elements looked at a time."""


@dataclass(frozen=True, slots=True)
class _Claim:
    """Two arrays that have to be equal."""

    output: int
    text: str
    actual: Array
    expected: Array
    start: int = 0
    """Position of the first element in the flat result."""


def is_counted(call: Call) -> bool:
    """Counts values in a way that is known here: not along a dimension."""
    if call.traits.base not in _CLAIMS:
        return False
    x = call.args[0]
    return bool(x.numel()) and not x.dtype.is_complex and argument(call, "dim") is None


def judge_counted(call: Call, out: Any, criterion: Criterion) -> Judged | SkipReason:
    """Judge the values and counts that a call found."""
    results = tuple(out) if isinstance(out, (list, tuple)) else (out,)
    x = call.args[0]
    sample = sample_of(
        "exact_full", results, criterion.seed, f"all {x.numel():,} elements", covers_all=True
    )
    if call.traits.base == "bincount" and argument(call, "weights") is not None:
        return _judged(_weighted(call, results[0], criterion), "float64 sums", sample)
    last: Outcome | None = None
    for claim in _CLAIMS[call.traits.base](call, results):
        last = _placed(judge_exact(claim.actual, claim.expected), claim, results)
        if not last.passed:
            break
    if last is None:
        return SkipReason.NOTHING_TO_COMPARE
    compared = sum(item.numel() for item in results)
    return _judged(replace(last, compared=compared), "invariants", sample)


def _judged(outcome: Outcome, label: str, sample: Callable[[int], Any]) -> Judged:
    found = Judgement(
        passed=outcome.passed, reason=outcome.reason, metrics=outcome.metrics,
        compared=outcome.compared, sample=sample(outcome.compared),
    )  # fmt: skip
    return Judged(found, label)


def _placed(outcome: Outcome, claim: _Claim, results: tuple[Tensor, ...]) -> Outcome:
    """The place in the result, and what was claimed of it."""
    index = outcome.metrics.worst_index
    if index is None:
        return outcome
    shape = tuple(results[claim.output].shape)
    flat = claim.start + int(np.ravel_multi_index(index, claim.actual.shape))
    there = index if flat >= np.prod(shape) else np.unravel_index(flat, shape)
    place = tuple(int(item) for item in there)
    metrics = replace(outcome.metrics, worst_output=claim.output, worst_index=place)
    reason = outcome.reason.replace(f"element {index}", f"element {place}", 1)
    return replace(outcome, metrics=metrics, reason=f"{claim.text}: {reason}")


def _chunks(x: Tensor) -> Iterator[tuple[int, Array]]:
    flat = x.detach().reshape(-1)
    for start in range(0, flat.numel(), CHUNK):
        yield start, host_array(flat[start : start + CHUNK])


# ---- bincount -----------------------------------------------------------------------------------


def _bincount(call: Call, results: tuple[Tensor, ...]) -> Iterator[_Claim]:
    counts = host_array(results[0])
    wanted = np.zeros(counts.size, dtype=np.int64)
    top = int(argument(call, "minlength", 0))
    for _, values in _chunks(call.args[0]):
        top = max(top, int(values.max()) + 1)
        found = np.bincount(values, minlength=wanted.size)
        wanted = _longer(wanted, found.size)
        wanted[: found.size] += found
    yield _Claim(0, "number of counts", np.array([counts.size]), np.array([top]))
    yield _Claim(0, "counts", counts, wanted)


def _longer(values: Array, size: int) -> Array:
    return np.pad(values, (0, max(0, size - values.size)))


def _weighted(call: Call, out: Tensor, criterion: Criterion) -> Outcome:
    """Sums of weights by value, in float64."""
    weights = argument(call, "weights").detach()
    sums = squares = np.zeros(out.numel())
    for start, values in _chunks(call.args[0]):
        some = host_array(weights[start : start + values.size]).astype(np.float64)
        sums = sums + np.bincount(values, some, minlength=sums.size)
        squares = squares + np.bincount(values, np.square(some), minlength=sums.size)
    rule = Rule(
        dtype=str(out.dtype).removeprefix("torch."), op_class=op_class(call.traits.base),
        reduction_length=weights.numel() / max(out.numel(), 1), rtol=criterion.rtol,
        atol=criterion.atol,
    )  # fmt: skip
    eps = float(np.finfo(np.float32).eps) if weights.dtype.itemsize < 8 else 0.0
    return judge_golden(
        host_array(out), sums, perturbed=lambda _: sums + eps * np.sqrt(squares), rule=rule
    )


# ---- unique -------------------------------------------------------------------------------------


def _unique(call: Call, results: tuple[Tensor, ...]) -> Iterator[_Claim]:
    x = call.args[0]
    values = host_array(results[0])
    ordered = values if argument(call, "sorted", True) else np.sort(values)  # noqa: FBT003
    yield from _ascending(ordered)
    if results[1].numel():
        used = np.zeros(values.size, dtype=np.int64)
        for start, found in _chunks(results[1]):
            inside = (found >= 0) & (found < values.size)
            yield _Claim(1, "the inverse points at values", inside, np.ones_like(inside), start)
            elements = host_array(x.detach().reshape(-1)[start : start + found.size])
            yield _Claim(1, "the values by the inverse", values[found], elements, start)
            used += np.bincount(found, minlength=values.size)
    elif results[2].numel():
        yield from _by_hash(x, values, host_array(results[2]))
        return
    else:
        used = np.zeros(values.size, dtype=np.int64)
        num_nan = 0
        for start, elements in _chunks(x):
            num_nan += int(np.isnan(elements).sum())
            at = np.minimum(np.searchsorted(ordered, elements), values.size - 1)
            yield _Claim(0, "each element is among the values", ordered[at], elements, start)
            used += np.bincount(at, minlength=values.size)
        # each NaN is a value of its own, and the search finds all of them at the first
        used[np.isnan(ordered)] = 1
        given = np.array([np.isnan(ordered).sum()])
        yield _Claim(0, "number of NaN", given, np.array([num_nan]))
    if results[2].numel():
        yield _Claim(2, "counts", host_array(results[2]), used)
    yield _Claim(0, "each value is an element", used > 0, np.ones(values.size, dtype=bool))


def _ascending(values: Array) -> Iterator[_Claim]:
    """NaN, each of which is a value of its own, come last."""
    nan = np.isnan(values)
    follows = (values[1:] > values[:-1]) | nan[1:]
    yield _Claim(0, "values ascend", follows, np.ones_like(follows), 1)


def _by_hash(x: Tensor, values: Array, counts: Array) -> Iterator[_Claim]:
    total = np.zeros(1, dtype=np.uint64)
    for _, elements in _chunks(x):
        total += np.sum(_hashes(elements))
    yield _Claim(2, "counts of at least one", counts > 0, np.ones_like(counts, dtype=bool))
    yield _Claim(2, "sum of counts", np.array([counts.sum()]), np.array([x.numel()]))
    again = np.sum(_hashes(values) * counts.astype(np.uint64), keepdims=True)
    yield _Claim(2, "hashes of the values, as often as the counts say", again, total)


def _hashes(values: Array) -> Array:
    """64 well mixed bits of each value; of -0.0 those of 0.0, of NaN always the same."""
    if values.dtype.kind == "f":
        wide = values.astype(np.float64) + 0.0
        wide[np.isnan(wide)] = np.nan
        bits = wide.view(np.uint64)
    else:
        bits = values.astype(np.int64).view(np.uint64)
    # the mixer of SplitMix64 (Steele, Lea, Flood 2014)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Array = bits ^ (bits >> np.uint64(31))
    return mixed


def _unique_consecutive(call: Call, results: tuple[Tensor, ...]) -> Iterator[_Claim]:
    values = host_array(results[0])
    number = 0
    before: Array | None = None
    starts: list[Array] = []
    for start, elements in _chunks(call.args[0]):
        is_new = np.ones(elements.size, dtype=bool)
        is_new[1:] = elements[1:] != elements[:-1]
        is_new[0] = before is None or bool(elements[0] != before)
        before = elements[-1]
        fresh = elements[is_new]
        got = values[number : number + fresh.size]
        yield _Claim(0, "values", got, fresh[: got.size], number)
        if results[1].numel():
            found = host_array(results[1].reshape(-1)[start : start + elements.size])
            yield _Claim(1, "inverse", found, number - 1 + np.cumsum(is_new), start)
        number += fresh.size
        starts.append(start + np.flatnonzero(is_new))
    yield _Claim(0, "number of values", np.array([values.size]), np.array([number]))
    if results[2].numel():
        wanted = np.diff(np.concatenate([*starts, [call.args[0].numel()]]))
        yield _Claim(2, "counts", host_array(results[2]), wanted)


_CLAIMS: Mapping[str, Callable[[Call, tuple[Tensor, ...]], Iterator[_Claim]]] = MappingProxyType(
    {
        "bincount": _bincount,
        "_unique2": _unique,
        "unique_consecutive": _unique_consecutive,
    }
)
