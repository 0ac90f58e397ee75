"""A group of tensors -> its record."""

from __future__ import annotations

from typing import Any

from modulecheck.tensor_compare import Comparison, Criterion, compare
from modulecheck.tensor_groups import Entry, Group
from modulecheck.tensor_records import TensorRecord
from modulecheck.tensor_rule import COARSENESS, coarsest
from opcheck.errors import ArgumentError
from opcheck.records import Verdict

__all__ = ["judge_group", "precision_of"]


def judge_group(
    group: Group, criterion: Criterion, *, index: int, precision: Any = None
) -> TensorRecord:
    """Hold the first tensor against each of the others; the first one that differs is shown.

    Raises:
        ArgumentError: `precision` names no floating dtype.
        TensorFileError: a tensor cannot be read back.
    """
    entries = group.entries
    given = _precision_name(precision)
    found, failing = Comparison(passed=True), ""
    if len(entries) > 1:
        reference = entries[0].stored.load()
        found_any = False
        for entry, side in zip(entries[1:], group.names[1:], strict=True):
            coarse = _coarse(given, entries[0], entry)
            one = compare(reference, entry.stored.load(), criterion, precision=coarse)
            if not found_any or (found.passed and not one.passed):
                found, found_any = one, True
                failing = "" if one.passed else side
    verdict = Verdict.FAIL if not found.passed else Verdict.PASS
    reason = found.reason
    if verdict is Verdict.PASS and (len(entries) < 2 or group.missing):
        verdict, reason = Verdict.INCONCLUSIVE, _alone(group)
    return TensorRecord(
        tag=group.tag,
        verdict=verdict,
        reason=reason,
        notes=(*found.notes, *_devices(group)),
        metrics=found.metrics,
        num_tensors=len(entries),
        sides=tuple(group.names),
        missing_sides=group.missing,
        failing_side=failing,
        descriptions=tuple(entry.stored.description for entry in entries),
        num_elements=found.num_elements,
        num_differing=found.num_differing,
        first_index=found.first_index,
        reference_at=found.reference_at,
        actual_at=found.actual_at,
        neighbourhood=found.neighbourhood,
        max_ulp=found.max_ulp,
        site=entries[0].site,
        index=index,
        criterion=criterion.name,
        rtol=criterion.rtol,
        atol=criterion.atol,
        word=criterion.word,
    )


def precision_of(reference: Entry, entry: Entry, precision: Any = None) -> str | None:
    """The coarsest dtype that one side of a pair has shown or that is given; None: none is known.

    Raises:
        ArgumentError: `precision` names no floating dtype.
    """
    return _coarse(_precision_name(precision), reference, entry)


def _coarse(given: str | None, reference: Entry, entry: Entry) -> str | None:
    known = [given, reference.precision, entry.precision]
    return coarsest(*known) if any(known) else None


def _devices(group: Group) -> list[str]:
    devices = dict.fromkeys(entry.device for entry in group.entries)
    return [f"devices {', '.join(devices)}; compared on the CPU"] if len(devices) > 1 else []


def _alone(group: Group) -> str:
    if group.missing:
        return f"seen by {', '.join(group.names)} only, not by {', '.join(group.missing)}"
    return f"registered once ({group.names[0]}), nothing to compare it with"


def _precision_name(precision: Any) -> str | None:
    if precision is None:
        return None
    name = str(precision).removeprefix("torch.")
    if name not in COARSENESS:
        raise ArgumentError(f"precision: expected one of {list(COARSENESS)}, got {precision!r}")
    return name
