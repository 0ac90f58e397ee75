"""Records counted by rank, op, module and phase: all that a report is made of.

A log of a million records has a few hundred groups; of each the first failing record is kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from opcheck.globs import module_matches, op_matches
from opcheck.records import (
    PHASES,
    CallCount,
    Coverage,
    OpRecord,
    Overhead,
    UncheckedSignature,
    Verdict,
)
from opcheck.validation import a_count, a_string, one_of

__all__ = [
    "Filter",
    "Group",
    "Groups",
    "Tally",
    "add_coverages",
    "group_records",
    "importance",
    "order_of",
    "worse",
]


def order_of(record: OpRecord) -> tuple[int, int]:
    """What came first: by step, then by call."""
    return record.step, record.index


def worse(left: float, right: float) -> float:
    """The larger q; NaN is worse than everything."""
    return left if math.isnan(left) or left >= right else right


@dataclass(frozen=True, kw_only=True)
class Filter:
    """Which records to look at; None is all of them."""

    op: str | None = None
    module: str | None = None
    phase: str | None = None
    step: int | None = None

    def __post_init__(self) -> None:
        """Refuse what no record can be.

        Raises:
            ArgumentError, ArgumentTypeError: the message names the field.
        """
        a_string("op", self.op, optional=True)
        a_string("module", self.module, optional=True)
        one_of("phase", self.phase, allowed=PHASES, optional=True)
        a_count("step", self.step, optional=True)

    def __str__(self) -> str:
        chosen = {"op": self.op, "module": self.module, "phase": self.phase, "step": self.step}
        return ", ".join(f"{name} {value}" for name, value in chosen.items() if value is not None)

    def takes_group(self, op: str, module: str, phase: str) -> bool:
        """Whether records of this op, module and phase are looked at (the step apart)."""
        return (
            (self.op is None or op_matches(op, self.op))
            and (self.module is None or module_matches(module, self.module))
            and (self.phase is None or phase == self.phase)
        )

    def takes(self, record: OpRecord) -> bool:
        """Whether this record is looked at."""
        return (self.step is None or record.step == self.step) and self.takes_group(
            record.op, record.module, record.phase
        )


@dataclass(slots=True, kw_only=True)
class Group:
    """Records of one op in one module and phase, on one rank."""

    rank: int
    op: str
    module: str
    phase: str
    checked: int = 0
    """Records without a crash of ours."""
    failed: int = 0
    inconclusive: int = 0
    errors: int = 0
    max_q: float = 0.0
    first_failure: OpRecord | None = None
    first_error: OpRecord | None = None

    def add(self, record: OpRecord) -> None:
        """Count one record of this group."""
        if record.error is not None:
            self.errors += 1
            if self.first_error is None or order_of(record) < order_of(self.first_error):
                self.first_error = record
            return
        self.checked += 1
        self.max_q = worse(self.max_q, record.metrics.q)
        if record.verdict is Verdict.FAIL:
            self.failed += 1
            if self.first_failure is None or order_of(record) < order_of(self.first_failure):
                self.first_failure = record
        elif record.verdict is Verdict.INCONCLUSIVE:
            self.inconclusive += 1


class Groups:
    """Records counted as they come."""

    def __init__(self) -> None:
        self._groups: dict[tuple[int, str, str, str], Group] = {}

    def add(self, record: OpRecord) -> None:
        """One more."""
        key = (record.rank, record.op, record.module, record.phase)
        group = self._groups.get(key)
        if group is None:
            group = Group(rank=record.rank, op=record.op, module=record.module, phase=record.phase)
            self._groups[key] = group
        group.add(record)

    def all(self) -> list[Group]:
        """In the order of their first record."""
        return list(self._groups.values())


def group_records(records: Iterable[OpRecord]) -> list[Group]:
    """The groups of these records, in the order of their first record."""
    groups = Groups()
    for record in records:
        groups.add(record)
    return groups.all()


@dataclass(slots=True, kw_only=True)
class Tally:
    """The sums of several groups: of an op, or of a module."""

    name: str
    seen: int | None = None
    """Dispatched calls, where the log says it."""
    checked: int = 0
    failed: int = 0
    inconclusive: int = 0
    errors: int = 0
    max_q: float = 0.0
    phases: set[str] = field(default_factory=set)
    failing_phases: set[str] = field(default_factory=set)
    ranks: set[int] = field(default_factory=set)
    failing_ranks: set[int] = field(default_factory=set)
    first_failure: OpRecord | None = None

    def add(self, group: Group) -> None:
        """Add the numbers of a group."""
        self.checked += group.checked
        self.failed += group.failed
        self.inconclusive += group.inconclusive
        self.errors += group.errors
        self.max_q = worse(self.max_q, group.max_q)
        self.phases.add(group.phase)
        self.ranks.add(group.rank)
        if group.failed:
            self.failing_phases.add(group.phase)
            self.failing_ranks.add(group.rank)
        first = group.first_failure
        if first is not None and (
            self.first_failure is None or order_of(first) < order_of(self.first_failure)
        ):
            self.first_failure = first


def importance(tally: Tally) -> tuple[bool, tuple[int, int], float, str]:
    """Sort key: first divergence first, then the largest q."""
    first = tally.first_failure
    order = order_of(first) if first is not None else (0, 0)
    largest = math.inf if math.isnan(tally.max_q) else tally.max_q
    return first is None, order, -largest, tally.name


def add_coverages(coverages: Sequence[Coverage]) -> Coverage:
    """The coverage of several ranks as one; signatures count once."""
    if len(coverages) == 1:
        return coverages[0]

    def total(name: str) -> Any:
        return sum(getattr(coverage, name) for coverage in coverages)

    skipped: dict[Any, int] = {}
    calls: dict[tuple[str, str, str], CallCount] = {}
    unchecked: dict[tuple[str, str, str], UncheckedSignature] = {}
    for coverage in coverages:
        for reason, count in coverage.skipped.items():
            skipped[reason] = skipped.get(reason, 0) + count
        for call in coverage.calls:
            key = (call.module, call.phase, call.op)
            calls[key] = _add_counts(calls[key], call) if key in calls else call
        for item in coverage.unchecked_signatures:
            key = (item.op, item.signature, item.reason.value)
            before = unchecked[key].calls if key in unchecked else 0
            unchecked[key] = replace(item, calls=before + item.calls)
    stops = [c.counting_stopped_at for c in coverages if c.counting_stopped_at is not None]
    births = [c.first_nonfinite for c in coverages if c.first_nonfinite is not None]
    sums = (
        "seen", "checked", "failed", "errors", "elements_seen", "elements_checked",
        "elements_sampled",
    )  # fmt: skip
    return Coverage(
        **{name: total(name) for name in sums},
        skipped=skipped,
        signatures_seen=max((c.signatures_seen for c in coverages), default=0),
        signatures_checked=min((c.signatures_checked for c in coverages), default=0),
        unchecked_signatures=tuple(unchecked.values()),
        calls=tuple(calls.values()),
        counting_stopped_at=min(stops, default=None),
        left_by=next((c.left_by for c in coverages if c.left_by), ""),
        steps=max((c.steps for c in coverages), default=0),
        check_seconds=total("check_seconds"),
        check_peak_bytes=max((c.check_peak_bytes for c in coverages), default=0),
        overhead=_add_overheads([c.overhead for c in coverages if c.overhead is not None]),
        first_nonfinite=min(births, key=lambda b: (b.step, b.index), default=None),
        shadow=_add_mappings([c.shadow for c in coverages]),
        repeat=_add_mappings([c.repeat for c in coverages]),
        unrepeatable=tuple(item for c in coverages for item in c.unrepeatable),
    )


def _add_overheads(shares: list[Overhead]) -> Overhead | None:
    """Times and places are added; the slowest rank says how many steps are left."""
    if not shares:
        return None
    steps = [share.steps_left for share in shares]
    return Overhead(
        own_seconds=sum(share.own_seconds for share in shares),
        allowed_seconds=sum(share.allowed_seconds for share in shares),
        spent_seconds=sum(share.spent_seconds for share in shares),
        num_places=sum(share.num_places for share in shares),
        num_left=sum(share.num_left for share in shares),
        steps_left=None if None in steps else max(s for s in steps if s is not None),
        counting_seconds=sum(share.counting_seconds for share in shares),
        setup_seconds=sum(share.setup_seconds for share in shares),
        num_steps=max(share.num_steps for share in shares),
        num_rests=max(share.num_rests for share in shares),
    )


def _add_mappings(mappings: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Counts are added; of bytes each rank has its own, and the largest is shown."""
    found: dict[str, int] = {}
    for mapping in mappings:
        for name, count in mapping.items():
            known = found.get(name, 0)
            found[name] = max(known, count) if name.endswith("bytes") else known + count
    return found


def _add_counts(left: CallCount, right: CallCount) -> CallCount:
    return replace(
        left,
        seen=left.seen + right.seen,
        checked=left.checked + right.checked,
        failed=left.failed + right.failed,
        errors=left.errors + right.errors,
    )
