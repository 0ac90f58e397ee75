"""Vectors of a call judged by what they have to do alone: of large matrices, and in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opcheck.arrays import Array
from opcheck.calls import Call
from opcheck.compare import Judgement, structure_of
from opcheck.declared import declared_results
from opcheck.expected import Leaf, leaves_of
from opcheck.leaf_judging import judge_identity, rule_for
from opcheck.records import SkipReason
from opcheck.references import wide_array
from opcheck.sampled import Criterion, Judged, rng_of, sample_of
from opcheck.vectors import VECTORS, Mix, has_vectors, matrices_of
from opcheck.verdicts import Outcome

__all__ = ["has_vectors", "judge_decomposed"]

LABEL = "what it reconstructs"
GROUP = 16
"""Columns of a large call that are summed: what is left costs some 5% of a decomposition, and finds
exchanged neighbours of 2,000 eigenvalues, which sums of all columns would not."""
MAX_TOGETHER = 1 << 20
"""Elements of the matrices that are judged at a time, one matrix at least."""


def judge_decomposed(call: Call, out: Any, criterion: Criterion) -> Judged | SkipReason:
    """Judge every vector of a call; in large ones, of sums of some columns.

    Raises:
        numpy.linalg.LinAlgError: NumPy cannot decompose a matrix that torch has decomposed.
    """
    actual = leaves_of(out)
    declared = declared_results(call)
    if declared is None:
        return SkipReason.REFERENCE_NOT_AVAILABLE
    structure = structure_of(call, actual, leaves_of(declared), has_dtypes=True)
    if structure:
        found = Judgement(passed=False, reason=structure, compared=1)
        return Judged(found, LABEL)
    worst: tuple[str, Outcome] | None = None
    compared = 0
    for text, outcome, count in _outcomes(call, actual, criterion):
        compared += count
        if worst is None or not outcome.passed or outcome.metrics.q > worst[1].metrics.q:
            worst = text, outcome
        if not outcome.passed:
            break
    if worst is None:
        return SkipReason.NOTHING_TO_COMPARE
    text, outcome = worst
    reason = "" if outcome.passed else f"{text}: {outcome.reason}"
    sample = None
    if call.is_large:
        detail = f"all columns, in sums of {GROUP}"
        sample = sample_of("projection", out, criterion.seed, detail, covers_all=True)(compared)
    return Judged(
        Judgement(
            passed=outcome.passed, reason=reason, metrics=outcome.metrics, compared=compared,
            sample=sample,
        ),
        LABEL,
    )  # fmt: skip


def _outcomes(
    call: Call, actual: list[Leaf], criterion: Criterion
) -> Iterator[tuple[str, Outcome, int]]:
    """What has to hold, whether it does, and of how many further elements of the results."""
    first = next(leaf.value for leaf in actual if leaf.value.numel())
    rule = rule_for(call, 0, first, criterion.rtol, criterion.atol, has_baseline=False)
    mix = Mix(GROUP, rng_of(call, criterion.seed)) if call.is_large else Mix()
    for given, results in _together(matrices_of(call), [leaf.value for leaf in actual]):
        count = sum(item.size for item in results)
        with np.errstate(all="ignore"):
            for item in VECTORS[call.traits.base](call, given, results, rule.dtype, mix):
                yield item.text, judge_identity(item, rule), count
                count = 0


def _together(matrices: Tensor, results: list[Tensor]) -> Iterator[tuple[Array, list[Array]]]:
    """Some matrices at a time with their results; without those that hold NaN or Inf."""
    size = math.prod(matrices.shape[-2:])
    batch = matrices.numel() // size
    given = matrices.detach().reshape(batch, *matrices.shape[-2:])
    flat = [
        item.detach().reshape(batch, *item.shape[matrices.dim() - 2 :])
        if item.numel()  # what was not asked for is of any shape
        else torch.zeros(batch, 0)
        for item in results
    ]
    step = max(1, MAX_TOGETHER // size)
    for start in range(0, batch, step):
        part = wide_array(given[start : start + step])
        keep = np.isfinite(part).all(axis=(-2, -1))
        if keep.any():
            found = [wide_array(item[start : start + step]) for item in flat]
            yield (part, found) if keep.all() else (part[keep], [item[keep] for item in found])
