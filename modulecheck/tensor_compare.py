"""Two tensors -> are they equal, close, or as near as their precision explains.

Pure functions over snapshots; the rules for values are those of `opcheck.verdicts`. Structure
comes first: a shape, a kind of number (bool, integer, unsigned 64 bit, floating, complex) and,
unless told otherwise, a dtype that differs is a difference whatever the values are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from modulecheck.tensor_rule import coarsest, components, judge_calibrated
from modulecheck.tensor_values import Snapshot, bits_of, dtype_name, values_of
from opcheck.printing import number
from opcheck.records import Metrics
from opcheck.validation import a_flag, a_number, one_of
from opcheck.verdicts import Outcome, Rule, judge_allclose, judge_exact

__all__ = ["CRITERIA", "Comparison", "Criterion", "compare"]

Array: TypeAlias = npt.NDArray[Any]
Index: TypeAlias = tuple[int, ...]

CRITERIA = ("equal", "allclose", "calibrated")
NEIGHBOURS = 2
"""Elements shown to either side of the first differing one, along the last dimension."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Criterion:
    """How two tensors are compared."""

    name: str
    rtol: float = 1e-5
    atol: float = 1e-8
    equal_nan: bool = False
    check_dtype: bool = True

    def __post_init__(self) -> None:
        """Refuse what no comparison can mean.

        Raises:
            ArgumentError: an unknown name, or a tolerance that is negative or not finite.
        """
        one_of("criterion", self.name, allowed=CRITERIA)
        a_number("rtol", self.rtol)
        a_number("atol", self.atol)
        a_flag("equal_nan", self.equal_nan)
        a_flag("check_dtype", self.check_dtype)

    @property
    def word(self) -> str:
        """What the documented line calls a tensor that passes."""
        return "equal" if self.name == "equal" else "close"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One tensor beside the reference."""

    passed: bool
    reason: str = ""
    """One sentence for a person; "" if passed."""
    notes: tuple[str, ...] = ()
    metrics: Metrics = field(default_factory=Metrics)
    num_elements: int = 0
    num_differing: int = 0
    """Elements whose values differ at all, whatever is tolerated."""
    first_index: Index | None = None
    """The first element, in C order, that the criterion refuses."""
    reference_at: Any = None
    actual_at: Any = None
    neighbourhood: tuple[tuple[Index, Any, Any], ...] = ()
    """(index, reference, actual) around the first one."""
    max_ulp: int | None = None
    """Largest distance in representable numbers; None across dtypes and for integers."""


def compare(
    reference: Snapshot, actual: Snapshot, criterion: Criterion, *, precision: str | None = None
) -> Comparison:
    """Judge `actual` by `reference`.

    Args:
        reference: the tensor registered first.
        actual: the other one.
        criterion: what applies.
        precision: for "calibrated", the coarsest dtype that either side computed in so far, where
            that is coarser than the dtypes of the two.
    """
    reference, actual = _numbers_as(reference, actual), _numbers_as(actual, reference)
    kinds = _kind(reference), _kind(actual)
    if kinds[0] != kinds[1]:
        return _different(f"{_dtypes(reference, actual)}: another kind of number", reference)
    shapes = tuple(reference.tensor.shape), tuple(actual.tensor.shape)
    if shapes[0] != shapes[1]:
        return _different(f"shape {shapes[1]} against {shapes[0]} in the reference", reference)
    same_dtype = reference.tensor.dtype == actual.tensor.dtype
    pair = _Pair.of(reference, actual)
    found = _judge(pair, criterion, precision) if pair.reference.size else _EMPTY
    if same_dtype:
        return found
    if not criterion.check_dtype:
        return replace(found, notes=(*found.notes, _dtypes(reference, actual)))
    values = f"the values differ as well: {found.reason}" if found.reason else "the values agree"
    if not found.reason and criterion.name == "allclose":
        values = "the values are close"
    reason = f"{_dtypes(reference, actual)}; {values} (check_dtype=False compares values alone)"
    return replace(found, passed=False, reason=reason)


_EMPTY = Comparison(passed=True, notes=("no elements",))


def _different(reason: str, reference: Snapshot) -> Comparison:
    metrics = Metrics(q=math.inf, allclose=False)
    return Comparison(
        passed=False, reason=reason, metrics=metrics, num_elements=reference.tensor.numel()
    )


def _dtypes(reference: Snapshot, actual: Snapshot) -> str:
    names = dtype_name(actual.tensor.dtype), dtype_name(reference.tensor.dtype)
    return f"dtype {names[0]} against {names[1]} in the reference"


def _kind(value: Snapshot) -> str:
    dtype = value.tensor.dtype
    if dtype.is_complex:
        return "complex"
    if dtype.is_floating_point:
        return "floating"
    return {torch.bool: "bool", torch.uint64: "unsigned"}.get(dtype, "integer")


def _numbers_as(value: Snapshot, other: Snapshot) -> Snapshot:
    """A Python number in the dtype of its partner, where that loses no kind."""
    order = ("bool", "integer", "unsigned", "floating", "complex")
    if not value.is_number or _kind(value) == "bool":
        return value
    if order.index(_kind(value)) > order.index(_kind(other)) or _kind(other) == "bool":
        return value
    return Snapshot(value.tensor.to(other.tensor.dtype), is_number=True)


# ---- values -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two tensors of one shape and kind as arrays."""

    reference: Array
    actual: Array
    dtypes: tuple[str, str]
    sides: tuple[Snapshot, Snapshot]

    @classmethod
    def of(cls, reference: Snapshot, actual: Snapshot) -> _Pair:
        arrays = values_of(reference.tensor), values_of(actual.tensor)
        names = dtype_name(reference.tensor.dtype), dtype_name(actual.tensor.dtype)
        return cls(*arrays, names, (reference, actual))

    @property
    def is_inexact(self) -> bool:
        return self.reference.dtype.kind in "fc"

    def shared_nan(self) -> Array | None:
        """Where both are NaN; None: nowhere."""
        if not self.is_inexact:
            return None
        with np.errstate(all="ignore"):
            both: Array = np.isnan(self.reference) & np.isnan(self.actual)
        return both if both.any() else None


def _judge(pair: _Pair, criterion: Criterion, precision: str | None) -> Comparison:
    shared_nan = pair.shared_nan()
    outcome, allowed = _outcome(pair, criterion, precision)
    differing = _differing(pair, shared_nan)
    num_differing = int(np.count_nonzero(differing))
    refuse_nan = shared_nan is not None and not criterion.equal_nan
    passed = outcome.passed and not refuse_nan
    found = Comparison(
        passed=passed,
        notes=_notes(pair, num_differing, shared_nan),
        metrics=outcome.metrics,
        num_elements=pair.reference.size,
        num_differing=num_differing,
        max_ulp=_max_ulp(pair),
    )
    if passed:
        return found
    if outcome.passed and shared_nan is not None:
        count = int(np.count_nonzero(shared_nan))
        reason = (
            f"only NaN differs: {count} of {pair.reference.size} elements are NaN on both sides, at"
            " the same places (equal_nan=True accepts them)"
        )
        found = replace(found, reason=reason, metrics=replace(outcome.metrics, num_nonfinite=count))
        return _with_place(found, pair, shared_nan)
    refused = differing if allowed is None else _beyond(pair, allowed)
    found = _with_place(found, pair, refused if refused.any() else differing)
    return replace(found, reason=_reason(found, outcome, criterion, shared_nan))


def _outcome(
    pair: _Pair, criterion: Criterion, precision: str | None
) -> tuple[Outcome, Array | None]:
    """What the rule says, and the error it allows each element (component); None: none."""
    if not pair.is_inexact or criterion.name == "equal":
        return judge_exact(pair.actual, _like(pair.reference, pair.actual)), None
    reference = _like(pair.reference, pair.actual)
    if criterion.name == "allclose":
        rule = Rule(dtype="float64", rtol=criterion.rtol, atol=criterion.atol)
        magnitude = np.absolute(components(reference).astype(np.float64))
        with np.errstate(all="ignore"):
            allowed = criterion.atol + criterion.rtol * magnitude
        return judge_allclose(pair.actual, reference, rule=rule), allowed
    return judge_calibrated(pair.actual, reference, coarsest(*pair.dtypes, precision))


def _like(reference: Array, actual: Array) -> Array:
    """One of two arrays of different width of a kind, widened: exact."""
    return reference.astype(np.result_type(reference, actual), copy=False)


# ---- what differs -------------------------------------------------------------------------------


def _differing(pair: _Pair, shared_nan: Array | None) -> Array:
    different: Array = pair.actual != _like(pair.reference, pair.actual)
    return different if shared_nan is None else different & ~shared_nan


def _beyond(pair: _Pair, allowed: Array) -> Array:
    """Elements whose error is not within what is allowed, component by component."""
    actual, reference = components(pair.actual), components(pair.reference)
    with np.errstate(all="ignore"):
        error = np.absolute(np.subtract(actual, reference, dtype=np.float64))
    beyond: Array = ~(error <= allowed)
    beyond &= ~((actual == reference) | (np.isnan(actual) & np.isnan(reference)))
    if pair.reference.dtype.kind == "c":
        beyond = np.any(beyond.reshape(-1, 2), axis=1)
    return beyond.reshape(pair.reference.shape)


def _with_place(found: Comparison, pair: _Pair, refused: Array | None) -> Comparison:
    if refused is None or not refused.any():
        return found
    flat = int(np.argmax(refused))
    row = pair.reference.shape[-1] if pair.reference.ndim else 1
    start = max(flat - flat % row, flat - NEIGHBOURS)
    stop = min(flat - flat % row + row, flat + NEIGHBOURS + 1)
    around = tuple(_at(pair, place) for place in range(start, stop))
    index, reference_at, actual_at = _at(pair, flat)
    return replace(
        found,
        first_index=index,
        reference_at=reference_at,
        actual_at=actual_at,
        neighbourhood=around,
    )


def _at(pair: _Pair, flat: int) -> tuple[Index, Any, Any]:
    index = tuple(int(i) for i in np.unravel_index(flat, pair.reference.shape))
    return index, pair.reference[index].item(), pair.actual[index].item()


def _max_ulp(pair: _Pair) -> int | None:
    """Largest distance of finite elements, counted in numbers of their dtype."""
    first, second = pair.sides
    if first.tensor.dtype != second.tensor.dtype or not pair.is_inexact:
        return None
    if np.array_equal(pair.reference, pair.actual):
        return 0
    places = [_ordinals(side) for side in pair.sides]
    finite = np.isfinite(components(pair.reference)) & np.isfinite(components(pair.actual))
    low, high = (pick(*places)[finite] for pick in (np.minimum, np.maximum))
    # int64 differences may wrap around, as unsigned they are right
    gap = high.view(np.uint64) - low.view(np.uint64)
    return int(gap.max()) if gap.size else None


def _ordinals(side: Snapshot) -> Array:
    """Consecutive integers for consecutive numbers; both zeros are 0."""
    bits = components(bits_of(side.tensor))
    signed = bits.view(f"i{bits.itemsize}").astype(np.int64)
    lowest = np.int64(-(2 ** (8 * bits.itemsize - 1)))
    return np.where(signed < 0, lowest - signed, signed)


def _notes(pair: _Pair, num_differing: int, shared_nan: Array | None) -> tuple[str, ...]:
    notes = []
    if shared_nan is not None:
        notes.append(f"{int(np.count_nonzero(shared_nan))} elements are NaN on both sides")
    if pair.is_inexact and not num_differing:
        signs = [np.signbit(components(side)) for side in (pair.reference, pair.actual)]
        zeros = components(pair.reference) == 0
        count = int(np.count_nonzero((signs[0] != signs[1]) & zeros))
        if count:
            notes.append(f"the sign of zero differs in {count} elements")
    return tuple(notes)


def _told_apart(*values: Any) -> list[str]:
    """Short where that shows that the values differ, else every digit."""
    short = [number(value) for value in values]
    return short if len(set(short)) > 1 else [repr(value) for value in values]


def _reason(
    found: Comparison, outcome: Outcome, criterion: Criterion, shared_nan: Array | None
) -> str:
    """Counts, the first element, the largest errors; `3 of 24 elements differ (12.5%), ...`."""
    share = found.num_differing / found.num_elements
    first = f"{found.num_differing} of {found.num_elements} elements differ ({share:.2%})"
    if found.first_index is not None:
        where = f"first at {found.first_index}" if found.first_index else "the value"
        values = " against ".join(_told_apart(found.actual_at, found.reference_at))
        first += f", {where}: {values} in the reference"
    parts = [first]
    metrics = found.metrics
    if criterion.name != "equal" and metrics.num_out:
        parts.append(f"{metrics.num_out} beyond what is allowed")
    if outcome.why in ("rmse", "bias"):
        parts.append(outcome.reason)
    if metrics.num_nonfinite:
        parts.append(f"NaN or Inf differ in {metrics.num_nonfinite}")
    parts.append(f"max_abs {metrics.max_abs:.3e}, max_rel {metrics.max_rel:.3e}")
    if found.max_ulp is not None:
        parts[-1] += f", {found.max_ulp} ulp"
    if shared_nan is not None and not criterion.equal_nan:
        count = int(np.count_nonzero(shared_nan))
        parts.append(f"besides, {count} elements are NaN on both sides (equal_nan=True accepts)")
    return "; ".join(parts)
