"""Reductions of whole large tensors to one number: computed again in float64, chunk by chunk."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opcheck.arrays import Array
from opcheck.call_dtypes import rounding_dtype
from opcheck.calls import Call
from opcheck.compare import Judgement
from opcheck.golden_rules import argument
from opcheck.policy import describe
from opcheck.records import SkipReason
from opcheck.references import host_array
from opcheck.sampled import Criterion, Judged, judge_parts, sample_of
from opcheck.slices import Part, part_of
from opcheck.tensor_kinds import tensors_within
from opcheck.tolerances import op_class
from opcheck.verdicts import Outcome, Rule, judge_allclose, judge_exact, judge_golden

__all__ = ["WHOLES", "is_whole", "judge_whole"]

CHUNK = 1 << 18
"""Elements summed at a time: 2 MiB in float64."""

Terms = tuple[float, float]
"""Sum of the terms, and the square sum of what each moves when its inputs move by themselves."""


def _chunks(*tensors: Tensor, into: list[Tensor] | None = None) -> Iterator[list[Array]]:
    """Pieces of tensors of one shape, flat and in float64; their strides may differ.

    A piece is gone when the next one is asked for: fresh memory for each took a third longer.
    """
    most = min(CHUNK, max(tensors[0].numel(), 1))
    into = into or [torch.empty(most, dtype=torch.float64) for _ in tensors]
    first = tensors[0]
    if not first.dim():
        tensors = tuple(tensor.reshape(1) for tensor in tensors)
    elif all(tensor.is_contiguous() for tensor in tensors):
        tensors = tuple(tensor.view(-1) for tensor in tensors)
    elif first.dim() > 1 and first.numel() // max(first.shape[0], 1) > CHUNK:
        for number in range(first.shape[0]):
            yield from _chunks(*(tensor[number] for tensor in tensors), into=into)
        return
    step = max(1, CHUNK * tensors[0].shape[0] // max(tensors[0].numel(), 1))
    for start in range(0, tensors[0].shape[0], step):
        pieces = [tensor[start : start + step].to("cpu") for tensor in tensors]
        rooms = [room[: piece.numel()] for room, piece in zip(into, pieces, strict=True)]
        for room, piece in zip(rooms, pieces, strict=True):
            room.view(piece.shape).copy_(piece)  # NumPy takes twice as long to widen
        yield [room.numpy() for room in rooms]


def _added(call: Call) -> Terms:
    total = spread = 0.0
    for (values,) in _chunks(call.args[0].detach()):
        total += float(np.sum(values))
        spread += float(np.dot(values, values))
    return total, spread


def _squared(call: Call) -> Terms:
    total = spread = 0.0
    x = call.args[0].detach()
    if x.dtype.is_complex:  # in a list of norms
        x = torch.view_as_real(x.resolve_conj())
    for (values,) in _chunks(x):
        squares = np.square(values)
        total += float(np.sum(squares))
        spread += 4.0 * float(np.dot(squares, squares))
    return total, spread


def _differences(call: Call) -> Terms:
    total = spread = 0.0
    for left, right in _chunks(call.args[0].detach(), call.args[1].detach()):
        apart = left - right
        total += float(np.dot(apart, apart))
        spread += 4.0 * float(np.sum(np.square(apart) * (np.square(left) + np.square(right))))
    return total, spread


def _sum(call: Call, terms: Terms) -> Terms:
    return terms[0], math.sqrt(terms[1])


def _mean(call: Call, terms: Terms) -> Terms:
    count = max(call.args[0].numel(), 1)
    return terms[0] / count, math.sqrt(terms[1]) / count


def _root(call: Call, terms: Terms) -> Terms:
    root = math.sqrt(terms[0])
    return root, math.sqrt(terms[1]) / (2.0 * root) if root else 0.0


def _loss(call: Call, terms: Terms) -> Terms:
    return (_mean if argument(call, "reduction", 1) == 1 else _sum)(call, terms)


_NORMS = "_foreach_norm.Scalar"

Whole = tuple[Callable[[Call], Terms], Callable[[Call, Terms], Terms]]

WHOLES: Mapping[str, Whole] = MappingProxyType(
    {
        "sum": (_added, _sum),
        "sum.dim_IntList": (_added, _sum),
        "mean": (_added, _mean),
        "mean.dim": (_added, _mean),
        "linalg_vector_norm": (_squared, _root),
        "norm.Scalar": (_squared, _root),
        "norm.ScalarOpt_dim": (_squared, _root),
        "mse_loss": (_differences, _loss),
    }
)
_EXTREMES: Mapping[str, Callable[[Array], Any]] = MappingProxyType(
    {"max": np.max, "min": np.min, "amax": np.max, "amin": np.min}
)


def _named(call: Call) -> str:
    name = call.traits.name.split(".", 1)[1]
    return name if name in WHOLES or name in _EXTREMES else name.removesuffix(".default")


def is_whole(call: Call) -> bool:
    """Reduces all elements of its tensors to one number, in a way that is known here."""
    name = _named(call)
    if name == "nll_loss_forward":
        return bool(call.args[0].dim() == 2) and argument(call, "weight") is None
    if name == _NORMS:
        return bool(argument(call, "ord", 2) == 2)
    if name not in WHOLES and name not in _EXTREMES:
        return False
    x = call.args[0]
    dims = argument(call, "dim")
    reduces_all = dims in (None, []) or (
        isinstance(dims, (list, tuple)) and len({dim % max(x.dim(), 1) for dim in dims}) == x.dim()
    )
    power = argument(call, "ord", argument(call, "p", 2))
    dtype = argument(call, "dtype")
    return bool(
        reduces_all
        and x.dtype.is_floating_point
        and power in (2, None)
        and dtype in (None, x.dtype)
        and not (name == "mse_loss" and argument(call, "reduction", 1) == 0)
    )


def judge_whole(call: Call, out: Any, criterion: Criterion) -> Judged | SkipReason:
    """Judge one number that all elements had a part in."""
    name = _named(call)
    if name == "nll_loss_forward":
        return _judge_loss(call, out, criterion)
    if name == _NORMS:
        return _judge_norms(call, out, criterion)
    if name in _EXTREMES:
        find = _EXTREMES[name]
        found = [float(find(values)) for (values,) in _chunks(call.args[0].detach())]
        outcome = judge_exact(
            host_array(out).astype(np.float64), np.asarray(find(np.array(found))).reshape(out.shape)
        )
    else:
        outcome = _judge_terms(call, out, name, criterion)
    return _judged(call, out, outcome, criterion)


def _judge_terms(call: Call, out: Tensor, name: str, criterion: Criterion) -> Outcome:
    collect, finish = WHOLES[name]
    golden, spread = finish(call, collect(call))
    x = call.args[0]
    rule = Rule(
        dtype=str(out.dtype).removeprefix("torch."),
        op_class=op_class(call.traits.base),
        reduction_length=float(x.numel()),
        rtol=criterion.rtol,
        atol=criterion.atol,
    )
    expected = np.full(tuple(out.shape), golden)
    actual = host_array(out)
    if criterion.name == "allclose":
        return judge_allclose(actual, expected, rule=rule)
    moved = expected + spread * float(torch.finfo(rounding_dtype(call, x.dtype)).eps)
    return judge_golden(actual, expected, perturbed=lambda _: moved, rule=rule)


def _judged(call: Call, out: Any, outcome: Outcome, criterion: Criterion) -> Judged:
    count = sum(leaf.numel() for leaf in tensors_within(call.args))
    sample = sample_of(
        "exact_full", out, criterion.seed, f"all {count:,} elements summed in float64",
        covers_all=True,
    )(outcome.compared)  # fmt: skip
    found = Judgement(
        passed=outcome.passed, reason=outcome.reason, metrics=outcome.metrics,
        compared=outcome.compared, sample=sample,
    )  # fmt: skip
    return Judged(found, "float64 sum")


def _judge_norms(call: Call, out: Any, criterion: Criterion) -> Judged | SkipReason:
    """One norm after the other, as if it were called alone."""
    worst: Judged | None = None
    for number, (tensor, norm) in enumerate(zip(call.args[0], out, strict=True)):
        alone = replace(call, args=(tensor,), kwargs={})
        judged = _judged(
            call, out, _judge_terms(alone, norm, "linalg_vector_norm", criterion), criterion
        )
        metrics = replace(judged.found.metrics, worst_output=number)
        judged = replace(judged, found=replace(judged.found, metrics=metrics))
        if worst is None or not judged.found.passed or metrics.q > worst.found.metrics.q:
            worst = judged
        if not judged.found.passed:
            break
    if worst is None:
        return SkipReason.NOTHING_TO_COMPARE
    sample = worst.found.sample
    if sample is not None:
        sample = replace(sample, num_elements=len(out), share=1.0)
    return replace(worst, found=replace(worst.found, compared=len(out), sample=sample))


def _judge_loss(call: Call, out: Any, criterion: Criterion) -> Judged | SkipReason:
    """Of each row the loss looks at one number: the others need not be looked at."""
    x, target = call.args[0].detach(), argument(call, "target")
    ignored = target == argument(call, "ignore_index", -100)
    columns = torch.where(ignored, 0, target)
    picked = x.gather(1, columns.unsqueeze(1)).to("cpu")
    target = torch.where(ignored, -100, 0).to("cpu")
    small = (picked, target, None, argument(call, "reduction", 1), -100)
    part = part_of(
        call, out, cut=lambda name, value: value, cut_result=lambda number, value: value.to("cpu"),
        place=lambda number, index: index,
    )  # fmt: skip
    part.call.args, part.call.kwargs = small, {}
    part.call.signature = tuple(describe(call.func, small, {}).key)
    detail = f"all {target.numel():,} rows, the element that each is of"
    sample = sample_of("exact_full", out, criterion.seed, detail, covers_all=True)
    parts: list[Part] = [part]
    return judge_parts(parts, criterion, sample)
