"""The rule that judged a call, worked out to limits that need no opcheck to be applied."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from torch import Tensor

from opcheck import tolerances as tol
from opcheck.arrays import Array, pair_of, round_to
from opcheck.calls import Call
from opcheck.declared import expected_dtype
from opcheck.expected import Expected, Leaf, results_of
from opcheck.golden_rules import COMPARED_OUTPUTS
from opcheck.interval import interval_limits
from opcheck.leaf_judging import allowance_of, rule_for
from opcheck.measures import beside_or_golden, finite_part
from opcheck.reconstruct import RECONSTRUCTED
from opcheck.references import Reference, host_array
from opcheck.rules import Rule

__all__ = ["Limit", "limits_of"]

Limit = dict[str, Any]
"""As `repro_judge.judge` reads it; `allowed` and `unit` are float64 arrays."""


def limits_of(
    call: Call, out: Any, reference: Reference, *, criterion: str, rtol: float, atol: float
) -> list[Limit]:
    """One limit for each result of a call, those it wrote into its arguments included.

    Args:
        call: as it was judged.
        out: what the op gave.
        reference: who judged it.
        criterion: likewise.
        rtol: of "allclose".
        atol: likewise.

    Raises:
        Anything that the reference raises.
    """
    written = [
        (param.name, value)
        for param, value in call.traits.bound(call.args, call.kwargs)
        if param.mutated and value is not None
    ]
    actual = results_of(out, written)
    expected = Expected(call, reference, [name for name, _ in written])
    first = expected.first()
    chosen = COMPARED_OUTPUTS.get(call.traits.base)
    found: list[Limit] = []
    for number, leaf in enumerate(actual):
        if (chosen is not None and number not in chosen) or number >= len(first):
            found.append({"name": leaf.name, "rule": "none"})
            continue
        limit = _limit(call, number, leaf, first[number], expected, criterion, rtol, atol)
        found.append({"name": leaf.name, **limit})
    return found


def _limit(
    call: Call, number: int, leaf: Leaf, wanted: Leaf, expected: Expected, criterion: str,
    rtol: float, atol: float,
) -> Limit:  # fmt: skip
    value = leaf.value
    if not isinstance(value, Tensor):
        return {"rule": "exact"} if isinstance(value, int) else _plain_number(value)
    if not isinstance(wanted.value, Tensor):
        return {"rule": "exact"}
    has_baseline = expected.baseline() is not None
    limit: Limit = {}
    if call.traits.base not in COMPARED_OUTPUTS:
        limit["shape"] = tuple(wanted.value.shape)
        dtype = wanted.value.dtype
        if not has_baseline:
            dtype = expected_dtype(call, number, value.dtype, golden=dtype)
        limit["dtype"] = str(dtype)
    if not (value.dtype.is_floating_point or value.dtype.is_complex):
        return {**limit, "rule": "exact"}
    if value.shape != wanted.value.shape or value.is_complex() != wanted.value.is_complex():
        return {**limit, "rule": "exact"}
    rule = rule_for(call, number, value, rtol, atol, has_baseline=has_baseline)
    if criterion == "allclose":
        return {**limit, "rule": "allclose", "rtol": rtol, "atol": atol}
    if rule.exact:
        return {**limit, "rule": "exact"}
    limit |= _interval(call, number, value, expected, rule)
    how = RECONSTRUCTED.get(call.traits.base)
    if how is None or number not in how.outputs:
        return limit
    # judged by what it reconstructs, which no short file can do: its magnitudes are compared
    top = float(np.max(limit["allowed"], initial=0.0))
    limit = {key: value for key, value in limit.items() if key not in _OF_EACH_ELEMENT}
    return {**limit, "allowed": top, "magnitude": True}


_OF_EACH_ELEMENT = ("allowed", "unit", "max_shift", "clamp", "from_rounded", "max_rms")


def _plain_number(value: Any) -> Limit:
    if isinstance(value, float):
        return {"rule": "allclose", "rtol": tol.OP_RTOL, "atol": tol.OP_ATOL}
    return {"rule": "none"}


def _interval(call: Call, number: int, value: Tensor, expected: Expected, rule: Rule) -> Limit:
    baseline = expected.baseline()
    beside = None if baseline is None else host_array(baseline[number].value)
    golden = expected.golden_array(number)
    if golden is None:  # no float64 kernel: the same dtype judges alone
        golden = beside
    allowance = allowance_of(call, number, rule) if beside is None else None
    limit: Limit = {"rule": "within", "overflow": tol.ROUNDS_TO_INF[rule.dtype]}
    if allowance is None:
        return limit | _granted(number, value, expected, rule, golden, beside)
    wider = rule.with_allowance(allowance, inputs=expected.reference.inputs(), golden=golden)
    if allowance.nonfinite_where is not None:
        limit["may_overflow"] = True
    if wider.bound is None:
        return limit | _granted(number, value, expected, wider, golden, beside)
    flat = pair_of(golden, np.broadcast_to(wider.bound, golden.shape)).expected
    # the plain rule was asked first: no element may have less than it grants
    plain = _granted(number, value, expected, rule, golden, beside)["allowed"]
    return {**limit, "allowed": np.maximum(flat, plain)}


def _granted(
    number: int, value: Tensor, expected: Expected, rule: Rule, golden: Any, beside: Array | None
) -> Limit:
    """What the interval rule grants."""
    limit: Limit = {}
    with np.errstate(all="ignore"):
        sample = _right_where_not_finite(host_array(value), golden, rule)
        pair = pair_of(sample, golden)
        flat_beside = None if beside is None else pair_of(beside, golden).actual
        if flat_beside is not None:
            flat_beside = beside_or_golden(flat_beside, pair.expected)
        part = finite_part(pair, rule, baseline=flat_beside)
        if not part.kept.actual.size:
            return {"allowed": 0.0}
        kept = flat_beside if flat_beside is None or part.keep is None else flat_beside[part.keep]
        draw = expected.draw(number) if expected.golden() is not None else None
        limits = interval_limits(part, kept, draw, rule)
    limit["allowed"] = limits.allowed
    if math.isfinite(limits.max_shift):
        clamp = tol.SHIFT_CLAMP if rule.is_half else math.inf
        limit |= {
            "max_shift": limits.max_shift, "unit": limits.unit, "clamp": clamp,
            "from_rounded": rule.is_half,
        }  # fmt: skip
    if math.isfinite(limits.max_rms):
        limit["max_rms"] = limits.max_rms
    return limit


def _right_where_not_finite(actual: Array, golden: Array, rule: Rule) -> Array:
    """The limits are those of finite results: a fault that gives NaN must not take them away."""
    if actual.dtype.kind == "c" or np.isfinite(actual).all():
        return actual
    return np.where(np.isfinite(actual), actual, round_to(golden, rule.dtype))
