"""Actual and expected results of one call -> a verdict with its numbers.

Structure first (how many results, None-ness, shapes, dtypes), then values. Arguments that the op
wrote to are results like any other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opcheck import tolerances as tol
from opcheck.allowances import Allowance, find_allowance
from opcheck.calls import Call
from opcheck.declared import expected_dtype
from opcheck.drift import Shift, shift_of
from opcheck.equivalents import has_equivalent, nearest_class, spelled_otherwise
from opcheck.golden_rules import COMPARED_OUTPUTS, SAVED_STATISTICS, reduction_length
from opcheck.index_rules import INDEX_RULES
from opcheck.reconstruct import RECONSTRUCTED, Identity
from opcheck.records import Metrics, Sample, SkipReason
from opcheck.references import Reference, Result, host_array
from opcheck.tensor_kinds import HALF
from opcheck.verdicts import (
    Outcome,
    Rule,
    judge_allclose,
    judge_baseline,
    judge_exact,
    judge_golden,
)

__all__ = [
    "Expected",
    "Judgement",
    "Leaf",
    "allowance_of",
    "judge",
    "leaves_of",
    "results_of",
    "rule_for",
    "spell_tensor",
]


@dataclass(frozen=True, slots=True)
class Leaf:
    """One result: a tensor, a Python number, or None."""

    name: str
    value: Any


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


_Judged = tuple[int, Leaf, Outcome]


def leaves_of(out: Any, name: str = "output") -> list[Leaf]:
    """Results in order; nested lists give one leaf per element."""
    if isinstance(out, (list, tuple)):
        return [
            leaf for number, item in enumerate(out) for leaf in leaves_of(item, f"{name} {number}")
        ]
    return [Leaf(name, out)]


def results_of(out: Any, written: list[tuple[str, Any]]) -> list[Leaf]:
    """Returned values, then written arguments that were not returned."""
    found = leaves_of(out) if out is not None else []
    returned = {id(leaf.value) for leaf in found}
    for name, value in written:
        label = f"argument {name!r} after the call"
        found += [leaf for leaf in leaves_of(value, label) if id(leaf.value) not in returned]
    return found


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
    structure = _structure(call, actual, first, has_dtypes=reference.has_baseline)
    if structure:
        return Judgement(passed=False, reason=structure, compared=1)
    if reference.has_baseline:
        expected_from.notes += _benign_differences(actual, first)
    outcomes: list[_Judged] = []
    chosen = COMPARED_OUTPUTS.get(call.traits.base)
    for number, leaf in enumerate(actual):
        if chosen is not None and number not in chosen:
            continue
        outcome = _judge_leaf(call, number, actual, expected_from, criterion, rtol, atol)
        if outcome is not None:
            outcomes.append((number, leaf, outcome))
    outcomes = _reconstructed(call, actual, outcomes, rtol, atol)
    combined = _combine(outcomes, expected_from.notes)
    if not combined.passed or criterion == "allclose":
        return combined
    return replace(combined, shift=_shift(call, actual, expected_from))


class Expected:
    """The reference's results, each run made when somebody first asks for it."""

    def __init__(self, call: Call, reference: Reference, written: list[str]) -> None:
        self.reference = reference
        self.notes: list[str] = []
        self._written = written
        self._baseline: list[Leaf] | None = None
        self._golden: list[Leaf] | None = None
        self._has_golden = True
        self._call = call

    def _leaves(self, result: Result) -> list[Leaf]:
        return results_of(result.out, list(zip(self._written, result.written, strict=True)))

    def baseline(self) -> list[Leaf] | None:
        """In the dtype of the call; None where there is no independent kernel for it."""
        if self._baseline is None and self.reference.has_baseline:
            self._baseline = self._leaves(self.reference.baseline())
        return self._baseline

    def golden(self) -> list[Leaf] | None:
        """None where no kernel computes it in float64 and a baseline judges alone."""
        if self._golden is None and self._has_golden:
            try:
                self._golden = self._leaves(self.reference.golden())
            except (NotImplementedError, RuntimeError) as error:
                if not self.reference.has_baseline or not is_missing_kernel(error):
                    raise
                self._has_golden = False
                self.notes.append("no float64 kernel: judged by the same-dtype result alone")
        return self._golden

    def first(self) -> list[Leaf]:
        """The baseline, else the golden."""
        found = self.baseline()
        return found if found is not None else self.golden() or []

    def golden_array(self, number: int) -> Any:
        """One result in float64; None where there is none."""
        golden = self.golden()
        if golden is None:
            return None
        value = golden[number].value
        return None if value is None else host_array(value)

    def golden_beside(self, number: int, actual: Any, dtype: str) -> Any:
        """As `golden_array`, by the op's other spelling where that alone has the result's class."""
        golden = self.golden_array(number)
        if golden is None or golden.dtype != np.float64 or not has_equivalent(self.reference):
            return golden
        other = host_array(self._leaves(spelled_otherwise(self.reference))[number].value)
        return nearest_class(actual, golden, other, dtype)

    def draw(self, number: int) -> Callable[[int], Any]:
        """From k to one result of the k-th perturbed golden; of inputs it refuses the golden."""

        def moved(k: int) -> Any:
            try:
                found = self.reference.perturbed(k)
            except (RuntimeError, ValueError, IndexError) as error:
                if is_missing_kernel(error) or "allocate" in str(error):
                    raise
                note = f"inputs moved by one rounding are refused: {_first_line(error)}"
                self.notes += [] if note in self.notes else [note]
                return self.golden_array(number)
            return host_array(self._leaves(found)[number].value)

        return moved


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0][:120]


def is_missing_kernel(error: BaseException) -> bool:
    """True when an exception says that no kernel exists for these arguments."""
    return isinstance(error, NotImplementedError) or "not implemented for" in str(error)


# ---- structure ----------------------------------------------------------------------------------


def _structure(call: Call, actual: list[Leaf], expected: list[Leaf], *, has_dtypes: bool) -> str:
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


# ---- values -------------------------------------------------------------------------------------


def _judge_leaf(
    call: Call,
    number: int,
    actual: list[Leaf],
    expected: Expected,
    criterion: str,
    rtol: float,
    atol: float,
) -> Outcome | None:
    value = actual[number].value
    wanted = expected.first()[number].value
    if value is None:
        return None
    if not isinstance(value, Tensor):
        return _judge_number(value, wanted)
    if not (value.dtype.is_floating_point or value.dtype.is_complex):
        rule = INDEX_RULES.get(call.traits.base)
        outcome = judge_exact(host_array(value), host_array(wanted))
        if not outcome.passed and rule is not None and rule(call, number, actual):
            return judge_exact(host_array(value), host_array(value))
        return outcome
    return _judge_inexact(call, number, value, expected, criterion, rtol, atol)


def _judge_inexact(
    call: Call,
    number: int,
    value: Tensor,
    expected: Expected,
    criterion: str,
    rtol: float,
    atol: float,
) -> Outcome:
    array = host_array(value)
    baseline = expected.baseline()
    rule = rule_for(call, number, value, rtol, atol, has_baseline=baseline is not None)
    wanted = None if baseline is None else host_array(baseline[number].value)
    if criterion == "allclose":
        if wanted is None:
            wanted = expected.golden_array(number)
        return judge_allclose(array, wanted, rule=rule)
    draw = expected.draw(number)
    if wanted is None:
        return _judge_by_golden(call, number, array, expected, rule)
    return judge_baseline(
        array,
        wanted,
        golden=lambda: expected.golden_beside(number, array, rule.dtype),
        perturbed=draw if expected.golden() is not None else None,
        rule=rule,
    )


def _judge_by_golden(
    call: Call, number: int, array: Any, expected: Expected, rule: Rule
) -> Outcome:
    """The CPU kernel itself is under test; what some of them are known to do is allowed for."""
    golden, draw = expected.golden_array(number), expected.draw(number)
    outcome = judge_golden(array, golden, perturbed=draw, rule=rule)
    if outcome.why == "nonfinite":
        golden = expected.golden_beside(number, array, rule.dtype)
        outcome = judge_golden(array, golden, perturbed=draw, rule=rule)
    if outcome.passed:
        return outcome
    allowance = allowance_of(call, number, rule)
    if allowance is None:
        return outcome
    if allowance.nonfinite_elsewhere:
        golden = np.where(np.isfinite(array), golden, array.astype(np.float64))
    wider_rule = rule.with_allowance(allowance, inputs=expected.reference.inputs(), golden=golden)
    outcome = judge_golden(array, golden, perturbed=draw, rule=wider_rule)
    if outcome.passed:
        expected.notes.append(allowance.note or f"a named allowance applies: {allowance.evidence}")
    return outcome


def allowance_of(call: Call, number: int, rule: Rule) -> Allowance | None:
    """The named allowance of torch's own kernel for one result of a call."""
    return find_allowance(
        call.traits.qualified.removeprefix("aten::"),
        dtype=rule.dtype,
        output=number,
        half_inputs=any(dtype in HALF for dtype in call.signature[1::2]),
    )


def _judge_number(actual: Any, expected: Any) -> Outcome | None:
    """A Python number: exactly equal, or (floats) within float32 rounding."""
    if isinstance(actual, int):
        return judge_exact(np.asarray(actual), np.asarray(expected))
    if isinstance(actual, float) and isinstance(expected, (int, float)):
        rule = Rule(dtype="float32", rtol=tol.OP_RTOL, atol=tol.OP_ATOL)
        return judge_golden(
            np.asarray(actual), np.asarray(float(expected)), perturbed=None, rule=rule
        )
    return None


def rule_for(
    call: Call, number: int, value: Tensor, rtol: float, atol: float, *, has_baseline: bool
) -> Rule:
    """What applies to one result of a call, named allowances aside."""
    real = torch.empty(0, dtype=value.dtype).real.dtype if value.dtype.is_complex else value.dtype
    traits = call.traits
    exact = (
        traits.name in tol.EXACT_OPS
        and not value.dtype.is_complex
        and (has_baseline or traits.name not in tol.EXACT_BESIDE_BASELINE_ONLY)
    )
    return Rule(
        dtype=str(real).removeprefix("torch."),
        op_class=tol.op_class(traits.base),
        reduction_length=reduction_length(call, value),
        exact=exact,
        rtol=rtol,
        atol=atol,
    )


def _reconstructed(
    call: Call, actual: list[Leaf], outcomes: list[_Judged], rtol: float, atol: float
) -> list[_Judged]:
    """Outputs that differ from the reference, where they can be right all the same."""
    how = RECONSTRUCTED.get(call.traits.base)
    if how is None:
        return outcomes
    failed = {number for number, _, outcome in outcomes if not outcome.passed}
    if not failed or not failed <= how.outputs:
        return outcomes
    rule = rule_for(call, min(failed), _widest(actual), rtol, atol, has_baseline=True)
    arrays = [_widened(host_array(leaf.value)) for leaf in actual]
    with np.errstate(all="ignore"):
        identities = how.identities(call, arrays, tol.EPS[rule.dtype])
    judged = [
        (min(failed), Leaf(item.text, None), _judge_identity(item, rule)) for item in identities
    ]
    others = [item for item in outcomes if item[0] not in failed]
    return others + judged if judged else outcomes


def _widened(array: Any) -> Any:
    """float64 or complex128; integers as they are."""
    wide = {"f": np.float64, "c": np.complex128}.get(array.dtype.kind)
    return array if wide is None else array.astype(wide)


def _widest(actual: list[Leaf]) -> Tensor:
    inexact = [leaf.value for leaf in actual if leaf.value.is_floating_point()]
    found: Tensor = (inexact or [leaf.value for leaf in actual])[0]
    return found


def _judge_identity(identity: Identity, rule: Rule) -> Outcome:
    bound = np.broadcast_to(identity.bound, identity.expected.shape)
    # an exact identity passes the quick test before its bound of 0 is asked
    rule = replace(rule, exact=False, bound=bound)
    return judge_golden(identity.actual, identity.expected, perturbed=None, rule=rule)


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


def _combine(outcomes: list[_Judged], notes: list[str]) -> Judgement:
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
