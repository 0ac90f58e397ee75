"""One result of a call, held against the references of that call by the rule that applies to it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opcheck import tolerances as tol
from opcheck.allowances import Allowance, find_allowance
from opcheck.calls import Call
from opcheck.expected import Expected, Leaf
from opcheck.flushing import NOTE, lost_sums, may_flush, nearer
from opcheck.golden_rules import reduction_length
from opcheck.index_rules import INDEX_RULES
from opcheck.reconstruct import RECONSTRUCTED
from opcheck.references import host_array
from opcheck.tensor_kinds import HALF
from opcheck.vectors import Identity
from opcheck.verdicts import (
    Outcome,
    Rule,
    judge_allclose,
    judge_baseline,
    judge_exact,
    judge_golden,
)

__all__ = [
    "Case", "Judged", "allowance_of", "judge_identity", "judge_leaf", "reconstructed", "rule_for",
]  # fmt: skip

Judged = tuple[int, Leaf, Outcome]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A call, and all that its results are judged by."""

    call: Call
    actual: list[Leaf]
    expected: Expected
    criterion: str
    rtol: float
    atol: float


def judge_leaf(case: Case, number: int) -> Outcome | None:
    """One result by its number; None where nothing can be compared in it."""
    value = case.actual[number].value
    wanted = case.expected.first()[number].value
    if value is None:
        return None
    if not isinstance(value, Tensor):
        return _judge_number(value, wanted)
    if not (value.dtype.is_floating_point or value.dtype.is_complex):
        rule = INDEX_RULES.get(case.call.traits.base)
        outcome = judge_exact(host_array(value), host_array(wanted))
        if not outcome.passed and rule is not None and rule(case.call, number, case.actual):
            return judge_exact(host_array(value), host_array(value))
        return outcome
    return _judge_inexact(case, number, value)


def _judge_inexact(case: Case, number: int, value: Tensor) -> Outcome:
    array = host_array(value)
    outcome = _judge_array(case, number, value, array)
    if outcome.passed or case.criterion == "allclose" or not may_flush(case.call):
        return outcome
    golden, flushed = case.expected.golden_array(number), case.expected.flushed_array(number)
    if golden is None or flushed is None or golden.dtype.kind == "c":
        return outcome
    lost = lost_sums(case.call, reduction_length(case.call, value, number))
    again = _judge_array(case, number, value, nearer(array, golden, flushed, lost))
    if again.passed:
        case.expected.notes.append(NOTE)
    return again if again.passed else outcome


def _judge_array(case: Case, number: int, value: Tensor, array: Any) -> Outcome:
    expected = case.expected
    baseline = expected.baseline()
    rule = rule_for(
        case.call, number, value, case.rtol, case.atol, has_baseline=baseline is not None
    )
    wanted = None if baseline is None else host_array(baseline[number].value)
    if case.criterion == "allclose":
        if wanted is None:
            wanted = expected.golden_array(number)
        return judge_allclose(array, wanted, rule=rule)
    draw = expected.draw(number)
    if wanted is None:
        return _judge_by_golden(case, number, array, rule)
    return judge_baseline(
        array,
        wanted,
        golden=lambda: expected.golden_beside(number, array, rule.dtype),
        perturbed=draw if expected.golden() is not None else None,
        rule=rule,
    )


def _judge_by_golden(case: Case, number: int, array: Any, rule: Rule) -> Outcome:
    """The CPU kernel itself is under test; what some of them are known to do is allowed for."""
    expected = case.expected
    golden, draw = expected.golden_array(number), expected.draw(number)
    outcome = judge_golden(array, golden, perturbed=draw, rule=rule)
    if outcome.why == "nonfinite":
        golden = expected.golden_beside(number, array, rule.dtype)
        outcome = judge_golden(array, golden, perturbed=draw, rule=rule)
    if outcome.passed:
        return outcome
    allowance = allowance_of(case.call, number, rule)
    if allowance is None:
        return outcome
    if allowance.nonfinite_where is not None:
        where = allowance.nonfinite_where(expected.reference.inputs(), golden, rule.dtype)
        golden = np.where(where & ~np.isfinite(array), array.astype(np.float64), golden)
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
        reduction_length=reduction_length(call, value, number),
        exact=exact,
        rtol=rtol,
        atol=atol,
    )


def reconstructed(case: Case, outcomes: list[Judged]) -> list[Judged]:
    """What results reconstruct, where a reference cannot tell whether they are right."""
    call, actual = case.call, case.actual
    how = RECONSTRUCTED.get(call.traits.base)
    if how is None:
        return outcomes
    failed = {number for number, _, outcome in outcomes if not outcome.passed}
    if not (failed or how.always) or not failed <= how.outputs:
        return outcomes
    if how.bits_settle and all(item.stage == "bits" for n, _, item in outcomes if n in how.outputs):
        return outcomes
    number = min(failed or how.outputs)
    rule = rule_for(call, number, _widest(actual), case.rtol, case.atol, has_baseline=True)
    arrays = [_widened(host_array(leaf.value)) for leaf in actual]
    with np.errstate(all="ignore"):
        identities = how.identities(call, arrays, rule.dtype)
    judged = [(number, Leaf(item.text, None), judge_identity(item, rule)) for item in identities]
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


def judge_identity(identity: Identity, rule: Rule) -> Outcome:
    """Whether the two sides are as near to each other as they have to be."""
    bound = np.broadcast_to(identity.bound, identity.expected.shape)
    # an exact identity passes the quick test before its bound of 0 is asked
    rule = replace(rule, exact=False, bound=bound)
    return judge_golden(identity.actual, identity.expected, perturbed=None, rule=rule)
