"""Actual and expected results of one call -> a verdict with its numbers.

Structure first (how many results, None-ness, shapes, dtypes), then values. Arguments that the op
wrote to are results like any other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opcheck import tolerances as tol
from opcheck.allowances import find_allowance
from opcheck.calls import Call
from opcheck.declared import expected_dtype
from opcheck.drift import Shift, shift_of
from opcheck.expected import Expected, Leaf, results_of
from opcheck.golden_rules import COMPARED_OUTPUTS, SAVED_STATISTICS
from opcheck.leaf_judging import Case, Judged, judge_leaf, reconstructed
from opcheck.records import Metrics, Sample, SkipReason
from opcheck.references import Reference, host_array
from opcheck.tensor_kinds import HALF
from opcheck.verdicts import Outcome

__all__ = ["Judgement", "judge", "spell_tensor", "structure_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What became of a call."""

    passed: bool
    reason: str = ""
    metrics: Metrics = field(default_factory=Metrics)
    notes: tuple[str, ...] = ()
    compared: int = 0
    nonfinite: bool = False
    """Some result holds NaN or Inf, as its reference does."""
    skip: SkipReason | None = None
    """It turned out that nothing can be said."""
    shift: Shift | None = None
    """Of the first 16-bit result: how far it is shifted from the correctly rounded one."""
    sample: Sample | None = None
    """Of a large call: what was looked at."""


def judge(
    call: Call, out: Any, reference: Reference, *, criterion: str, rtol: float, atol: float
) -> Judgement:
    """Compare the results of a call with its reference.

    Raises:
        Anything that the reference raises.
    """
    rule = partial(_judged_by, call, out, criterion=criterion, rtol=rtol, atol=atol)
    found = rule(reference)
    if found.passed or found.skip is not None or criterion == "allclose":
        return found
    other = reference.with_numbers_in_float32()
    if other is None:
        return found
    again = rule(other)
    if not again.passed:
        return found
    note = "this kernel keeps Python numbers in float32, where the CPU's rounds them to 16 bit"
    return replace(again, notes=(*again.notes, note))


def _judged_by(
    call: Call, out: Any, reference: Reference, *, criterion: str, rtol: float, atol: float
) -> Judgement:
    actual_written = [
        (param.name, value)
        for param, value in call.traits.bound(call.args, call.kwargs)
        if param.mutated and value is not None
    ]
    actual = results_of(out, actual_written)
    expected_from = Expected(call, reference, [name for name, _ in actual_written])
    first = expected_from.first()
    structure = structure_of(call, actual, first, has_dtypes=reference.has_baseline)
    if structure:
        return Judgement(passed=False, reason=structure, compared=1)
    if reference.has_baseline:
        expected_from.notes += _benign_differences(actual, first)
    case = Case(
        call=call, actual=actual, expected=expected_from,
        criterion=criterion, rtol=rtol, atol=atol,
    )  # fmt: skip
    outcomes: list[Judged] = []
    chosen = COMPARED_OUTPUTS.get(call.traits.base)
    for number, leaf in enumerate(actual):
        if chosen is not None and number not in chosen:
            continue
        outcome = judge_leaf(case, number)
        if outcome is not None:
            outcomes.append((number, leaf, outcome))
    outcomes = reconstructed(case, outcomes)
    combined = _combine(outcomes, expected_from.notes)
    if not combined.passed or criterion == "allclose":
        return combined
    return replace(combined, shift=_shift(call, actual, expected_from))


# ---- structure ----------------------------------------------------------------------------------


def structure_of(call: Call, actual: list[Leaf], expected: list[Leaf], *, has_dtypes: bool) -> str:
    """What is wrong with the results beside their values, "" if nothing is.

    Args:
        call: the call.
        actual: its results.
        expected: those of a reference, or of the meta device.
        has_dtypes: the dtypes are those that the results should have.
    """
    if len(actual) != len(expected):
        return f"{len(actual)} results, expected {len(expected)}"
    compared = COMPARED_OUTPUTS.get(call.traits.base, range(len(actual)))
    for number, (got, want) in enumerate(zip(actual, expected, strict=True)):
        if number not in compared:  # workspaces, which may be None
            continue
        is_tensor, want_tensor = isinstance(got.value, Tensor), isinstance(want.value, Tensor)
        if is_tensor != want_tensor:
            return f"{got.name} is {_kind(got.value)}, expected {_kind(want.value)}"
        if not is_tensor:
            continue
        if got.value.shape != want.value.shape:
            return (
                f"{got.name} has shape {tuple(got.value.shape)}, expected {tuple(want.value.shape)}"
            )
        want_dtype = want.value.dtype
        if not has_dtypes:
            want_dtype = expected_dtype(call, number, got.value.dtype, golden=want_dtype)
        if got.value.dtype != want_dtype and not _may_be_wider(call, number, got.value.dtype):
            return f"{got.name} has dtype {got.value.dtype}, expected {want_dtype}"
    return ""


def _may_be_wider(call: Call, number: int, actual: torch.dtype) -> bool:
    """Statistics of 16-bit inputs, which some kernels keep in float32."""
    if number not in SAVED_STATISTICS.get(call.traits.base, ()):
        return False
    return actual is torch.float32 or (actual in HALF and actual in call.signature)


def _benign_differences(actual: list[Leaf], expected: list[Leaf]) -> list[str]:
    """What differs from the same-dtype result and is no fault: strides, the sign of zeros."""
    notes = []
    for got, want in zip(actual, expected, strict=True):
        if not (isinstance(got.value, Tensor) and isinstance(want.value, Tensor)):
            continue
        strides, wanted = _strides(got.value), _strides(want.value)
        if strides != wanted:
            notes.append(f"{got.name} has strides {strides}, the cpu kernel gives {wanted}")
        left, right = host_array(got.value), host_array(want.value)
        if left.dtype.kind == "f" and left.shape == right.shape:
            other_sign = (left == 0) & (right == 0) & (np.signbit(left) != np.signbit(right))
            if other_sign.any():
                notes.append(f"{got.name}: {int(other_sign.sum())} zeros have the other sign")
    return notes


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """Strides where they mean something: not of size-1 dimensions, not of empty tensors."""
    if not tensor.numel():
        return ()
    return tuple(
        stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1
    )


def _kind(value: Any) -> str:
    return "None" if value is None else type(value).__name__


def _shift(call: Call, actual: list[Leaf], expected: Expected) -> Shift | None:
    """Left out: what is summed in 16 bit, moves data, or is known to be weak."""
    traits = call.traits
    value = actual[0].value if actual else None
    if not isinstance(value, Tensor) or value.dtype not in HALF:
        return None
    if tol.op_class(traits.base) in ("atom", "scan") or traits.name in tol.EXACT_OPS:
        return None
    dtype = str(value.dtype).removeprefix("torch.")
    name = traits.qualified.removeprefix("aten::")
    if find_allowance(name, dtype=dtype, half_inputs=True) is not None:
        return None
    wanted = expected.first()[0].value
    return shift_of(host_array(value), host_array(wanted), dtype=dtype)


# ---- the sum ------------------------------------------------------------------------------------


def _combine(outcomes: list[Judged], notes: list[str]) -> Judgement:
    compared = sum(outcome.compared for _, _, outcome in outcomes)
    if not compared:
        return Judgement(passed=False, skip=SkipReason.NOTHING_TO_COMPARE)
    failed = [item for item in outcomes if not item[2].passed]
    number, leaf, worst = max(failed or outcomes, key=lambda item: _rank(item[2]))
    metrics = _placed(worst.metrics, number)
    nonfinite = any(not outcome.finite for _, _, outcome in outcomes)
    if not failed:
        return Judgement(
            passed=True, metrics=metrics, notes=tuple(notes), compared=compared, nonfinite=nonfinite
        )
    where = f"{leaf.name}: " if len(outcomes) > 1 else ""
    return Judgement(
        passed=False,
        reason=where + worst.reason,
        metrics=metrics,
        notes=tuple(notes),
        compared=compared,
        nonfinite=nonfinite,
    )


def _rank(outcome: Outcome) -> float:
    q = outcome.metrics.q
    if outcome.metrics.num_nonfinite:
        return math.inf
    return math.inf if math.isnan(q) else q


def _placed(metrics: Metrics, number: int) -> Metrics:
    if number == 0:
        return metrics
    values = {name: getattr(metrics, name) for name in Metrics.__dataclass_fields__}
    values["worst_output"] = number
    return Metrics(**values)


def spell_tensor(value: Any) -> Iterator[str]:
    """`(2, 3):torch.float16` for each tensor in a value."""
    if isinstance(value, Tensor):
        yield f"{tuple(value.shape)}:{value.dtype}"
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from spell_tensor(item)
