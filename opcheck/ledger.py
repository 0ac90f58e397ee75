"""The books of a session: every call is checked, skipped with a reason, or an error."""

from __future__ import annotations

from collections import Counter, defaultdict
from time import perf_counter
from types import TracebackType
from typing import Any

from opcheck.calls import traits_of
from opcheck.peaks import peak_bytes
from opcheck.records import CallCount, Coverage, SkipReason, UncheckedSignature, Verdict

__all__ = ["Ledger", "Signature", "spell_signature"]

Signature = tuple[Any, ...]
"""Overload, then dtype and layout class of each tensor argument."""

Place = tuple[str, str, Any]
"""Module FQN, phase, overload."""


class _SignatureCount:
    __slots__ = ("attempts", "calls", "checked", "last_step", "num_steps", "reasons")

    def __init__(self) -> None:
        self.calls = 0
        self.num_steps = 0
        self.last_step = -1
        self.checked = 0
        self.attempts = 0
        """Checked, or crashed while checking: what the budget counts."""
        self.reasons: Counter[SkipReason] = Counter()


class _Checking:
    """Time and memory of one piece of checking; one that raises is not counted."""

    __slots__ = ("_ledger", "_peak", "_start")

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def __enter__(self) -> None:
        self._start, self._peak = perf_counter(), peak_bytes()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self._ledger.check_seconds += perf_counter() - self._start
            self._ledger.check_peak_bytes += peak_bytes() - self._peak


class Ledger:
    """Counts calls as they pass, and adds them up to a `Coverage`."""

    def __init__(self) -> None:
        self.seen = 0
        self.checked = 0
        self.failed = 0
        self.errors = 0
        self.steps = 0
        self.elements_seen = 0
        self.elements_checked = 0
        self.elements_sampled = 0
        self.check_seconds = 0.0
        self.check_peak_bytes = 0
        self.stopped_at: int | None = None
        """Index of the last call that was counted before the session stopped looking."""
        self.skipped: Counter[SkipReason] = Counter()
        self._signatures: defaultdict[Signature, _SignatureCount] = defaultdict(_SignatureCount)
        self._this_step: dict[Place, int] = {}
        self._earlier_steps: Counter[Place] = Counter()
        self._moved: Counter[Place] = Counter()
        self._judged: dict[tuple[str, str, str], list[int]] = {}
        """(module, phase, op) -> checked, failed, errors."""

    # ---- as calls pass ----

    def count(self, place: Place) -> tuple[int, int]:
        """A call was dispatched: its index in the run and its occurrence in the step."""
        index = self.seen
        self.seen = index + 1
        occurrence = self._this_step.get(place, 0)
        self._this_step[place] = occurrence + 1
        return index, occurrence

    def checking(self) -> _Checking:
        """A context: the time and the peak memory of what is done in it are those of checking."""
        return _Checking(self)

    def moved(self, place: Place, to: Place) -> None:
        """A call that was counted at one place turned out to belong to another."""
        self._moved[place] -= 1
        self._moved[to] += 1

    def signature(self, signature: Signature) -> _SignatureCount:
        """The counts of a computing signature, one call more."""
        counts = self._signatures[signature]
        counts.calls += 1
        if counts.last_step != self.steps:
            counts.last_step = self.steps
            counts.num_steps += 1
        return counts

    def comes_back(self, max_checks: int | None, *, within: int) -> bool:
        """True for a signature with checks left that came in several steps, lately too."""
        return any(
            counts.num_steps > 1
            and counts.attempts
            and (max_checks is None or counts.attempts < max_checks)
            and counts.last_step >= self.steps - within
            for counts in self._signatures.values()
        )

    def counts_of(self, signature: Signature) -> _SignatureCount:
        """The counts of a signature."""
        return self._signatures[signature]

    def skip(self, reason: SkipReason, counts: _SignatureCount | None = None) -> None:
        """A call was not checked."""
        self.skipped[reason] += 1
        if counts is not None:
            counts.reasons[reason] += 1

    def judged(
        self,
        place: tuple[str, str, str],
        signature: Signature,
        verdict: Verdict,
        elements: int,
        *,
        crashed: bool,
        sampled: bool = False,
    ) -> None:
        """A call was checked, or checking it crashed."""
        counts = self._signatures[signature]
        tally = self._judged.setdefault(place, [0, 0, 0])
        if crashed:
            self.errors += 1
            tally[2] += 1
            return
        self.checked += 1
        counts.checked += 1
        if sampled:
            self.elements_sampled += elements
        else:
            self.elements_checked += elements
        tally[0] += 1
        if verdict is Verdict.FAIL:
            self.failed += 1
            tally[1] += 1

    def recant(self, place: tuple[str, str, str], signature: Signature) -> None:
        """A call that was counted as checked crashed after all: its record got lost."""
        self.checked -= 1
        self._signatures[signature].checked -= 1
        self._judged[place][0] -= 1

    @property
    def has_calls_in_step(self) -> bool:
        """False right after a step ended."""
        return bool(self._this_step)

    def end_step(self) -> None:
        """Occurrences count from zero again."""
        if self._this_step:
            self.steps += 1
            self._earlier_steps.update(self._this_step)
            self._this_step.clear()

    # ---- the sum ----

    def coverage(self) -> Coverage:
        """Everything so far.

        What has no outcome yet, or never will because Ctrl-C cut it, is `interrupted`.
        """
        skipped = Counter(self.skipped)
        skipped[SkipReason.INTERRUPTED] += self.seen - self.checked - self.errors - skipped.total()
        computing = {
            signature: counts
            for signature, counts in self._signatures.items()
            if any(reason.is_computation for reason in counts.reasons) or counts.attempts
        }
        unchecked = [
            UncheckedSignature(
                op=traits_of(signature[0]).name,
                signature=spell_signature(signature),
                reason=counts.reasons.most_common(1)[0][0],
                calls=counts.calls,
            )
            for signature, counts in computing.items()
            if not counts.checked and counts.reasons
        ]
        return Coverage(
            seen=self.seen,
            checked=self.checked,
            failed=self.failed,
            errors=self.errors,
            skipped=dict((+skipped).most_common()),
            elements_seen=self.elements_seen,
            elements_checked=self.elements_checked,
            elements_sampled=self.elements_sampled,
            signatures_seen=len(computing),
            signatures_checked=sum(1 for counts in computing.values() if counts.checked),
            unchecked_signatures=tuple(sorted(unchecked, key=lambda item: -item.calls)),
            calls=self._call_counts(),
            steps=self.steps + bool(self._this_step),
            counting_stopped_at=self.stopped_at,
            check_seconds=self.check_seconds,
            check_peak_bytes=self.check_peak_bytes,
        )

    def _call_counts(self) -> tuple[CallCount, ...]:
        seen: Counter[tuple[str, str, str]] = Counter()
        for places in (self._earlier_steps, self._this_step, self._moved):
            for (module, phase, func), number in places.items():
                op = func if isinstance(func, str) else traits_of(func).name
                seen[module, phase, op] += number
        rows = []
        for place, number in seen.items():
            if not number:
                continue
            checked, failed, errors = self._judged.get(place, (0, 0, 0))
            module, phase, op = place
            rows.append(
                CallCount(
                    module=module, phase=phase, op=op, seen=number,
                    checked=checked, failed=failed, errors=errors,
                )
            )  # fmt: skip
        return tuple(rows)


def spell_signature(signature: Signature) -> str:
    """`float32:contiguous, int64:strided`."""
    return ", ".join(
        f"{str(dtype).removeprefix('torch.')}:{layout}"
        for dtype, layout in zip(signature[1::2], signature[2::2], strict=True)
    )
