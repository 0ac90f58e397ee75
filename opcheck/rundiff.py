"""Two runs beside each other: what newly fails, what no longer does, what is checked no more.

Calls are paired by step, module, phase, op and occurrence (and rank, where both runs have
several). Both logs are read side by side; what waits for its partner is all that is held.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from opcheck.groups import worse
from opcheck.logrecords import LightCall, light_calls
from opcheck.records import Verdict
from opcheck.review import Run

__all__ = ["Change", "RunDiff", "compare_runs"]

Q_FACTOR = 2.0
"""The largest q of an op in a module counts as changed from this factor on ..."""
Q_FLOOR = 0.1
"""... if the larger one is at least this share of what is allowed."""


@dataclass(kw_only=True)
class Change:
    """Calls of one op in one module and phase to which the same happened."""

    op: str
    module: str
    phase: str
    calls: int = 0
    index_a: int | None = None
    """The first of them, as `--call` takes it; None: it has no partner there."""
    index_b: int | None = None
    q_a: float = 0.0
    q_b: float = 0.0


Changes = dict[tuple[str, str, str], Change]


@dataclass(kw_only=True)
class RunDiff:
    """What changed from run A to run B, each a list in order of first call."""

    a: Run
    b: Run
    num_paired: int = 0
    newly_failing: list[Change] = field(default_factory=list)
    """FAIL in B; not in A, or not checked there."""
    no_longer_failing: list[Change] = field(default_factory=list)
    """FAIL in A, checked in B and not FAIL."""
    failing_unchecked: list[Change] = field(default_factory=list)
    """FAIL in A, not checked in B: nobody knows."""
    still_failing: list[Change] = field(default_factory=list)
    q_changes: list[Change] = field(default_factory=list)
    only_a: list[Change] = field(default_factory=list)
    """Checked calls without a partner."""
    only_b: list[Change] = field(default_factory=list)

    @property
    def verdict(self) -> tuple[Verdict, str]:
        """FAIL: B fails where A did not. INCONCLUSIVE: that cannot be said. With the reason."""
        if self.newly_failing:
            calls = sum(change.calls for change in self.newly_failing)
            return Verdict.FAIL, f"{calls:,} calls fail in B that did not in A"
        if not self.num_paired:
            return Verdict.INCONCLUSIVE, "no call of A has a partner in B"
        if self.failing_unchecked:
            calls = sum(change.calls for change in self.failing_unchecked)
            return Verdict.INCONCLUSIVE, f"{calls:,} calls that fail in A were not checked in B"
        if Verdict.INCONCLUSIVE is self.b.verdict is not self.a.verdict:
            return Verdict.INCONCLUSIVE, f"B is inconclusive: {self.b.verdict_reason}"
        return Verdict.PASS, f"nothing fails in B that did not in A{self._unpaired()}"

    def _unpaired(self) -> str:
        """Of what that is said: calls that one run alone has checked are no evidence."""
        sides = (("A", self.only_a), ("B", self.only_b))
        alone = [(name, sum(item.calls for item in changes)) for name, changes in sides]
        told = " and ".join(f"{calls:,} in {name} only" for name, calls in alone if calls)
        return f"; {self.num_paired:,} calls were checked in both, {told}" if told else ""


Sides = tuple[LightCall | None, LightCall | None]


def _paired(a: Run, b: Run) -> Iterator[Sides]:
    """Both sides of every call; None where there is no partner."""
    with_rank = len(a.ranks) > 1 and len(b.ranks) > 1
    waiting: tuple[dict[Any, LightCall], dict[Any, LightCall]] = ({}, {})
    for sides in zip_longest(light_calls(a.records), light_calls(b.records)):
        for side, call in enumerate(sides):
            if call is None:
                continue
            key = (*call.key, call.rank if with_rank else 0, 0)
            while key in waiting[side]:  # a damaged log: keep both
                key = (*key[:-1], key[-1] + 1)
            partner = waiting[1 - side].pop(key, None)
            if partner is None:
                waiting[side][key] = call
            else:
                yield (partner, call) if side else (call, partner)
    yield from ((call, None) for call in waiting[0].values())
    yield from ((None, call) for call in waiting[1].values())


def _add(changes: Changes, a: LightCall | None, b: LightCall | None) -> None:
    call = a or b
    if call is None:
        return
    key = (call.op, call.module, call.phase)
    change = changes.get(key)
    if change is None:
        change = changes[key] = Change(op=call.op, module=call.module, phase=call.phase)
        change.index_a = a.call if a is not None else None
        change.index_b = b.call if b is not None else None
    change.calls += 1
    change.q_a = worse(change.q_a, a.q) if a is not None else change.q_a
    change.q_b = worse(change.q_b, b.q) if b is not None else change.q_b


def _kind(a: LightCall | None, b: LightCall | None) -> str:
    fails_a = a is not None and a.verdict is Verdict.FAIL
    fails_b = b is not None and b.verdict is Verdict.FAIL
    if fails_b:
        return "still_failing" if fails_a else "newly_failing"
    if fails_a:
        gone = b is None or b.crashed or b.verdict is Verdict.INCONCLUSIVE
        return "failing_unchecked" if gone else "no_longer_failing"
    return ""


def compare_runs(a: Run, b: Run) -> RunDiff:
    """What changed from A to B."""
    names = ("newly_failing", "no_longer_failing", "failing_unchecked", "still_failing")
    found: dict[str, Changes] = {name: {} for name in (*names, "only_a", "only_b", "paired")}
    num_paired = 0
    for left, right in _paired(a, b):
        kind = _kind(left, right)
        if kind:
            _add(found[kind], left, right)
        if left is None:
            _add(found["only_b"], left, right)
        elif right is None:
            _add(found["only_a"], left, right)
        else:
            num_paired += 1
            _add(found["paired"], left, right)
    lists = {name: sorted(changes.values(), key=_order) for name, changes in found.items()}
    paired = lists.pop("paired")
    return RunDiff(
        a=a, b=b, num_paired=num_paired, q_changes=[c for c in paired if _q_changed(c)], **lists
    )


def _order(change: Change) -> int:
    index = change.index_b if change.index_b is not None else change.index_a
    return index or 0


def _q_changed(change: Change) -> bool:
    low, high = sorted((change.q_a, change.q_b))
    if math.isnan(change.q_a) or math.isnan(change.q_b):
        return math.isnan(change.q_a) != math.isnan(change.q_b)
    return high >= Q_FLOOR and high >= Q_FACTOR * low
