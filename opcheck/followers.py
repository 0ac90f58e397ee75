"""What goes along with checking: the float64 shadow (`blame`) and second runs (`repeat`).

Both see calls that are never checked, too. No verdict hangs on either.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from opcheck.calls import Call, OpTraits
from opcheck.generators import generator_states, have_moved, restore_generators
from opcheck.outside import is_ours, reference_depth
from opcheck.records import Blame, Coverage, OpRecord, SkipReason
from opcheck.references import Reference
from opcheck.repeats import REPEATED_UNCHECKED, Repeats
from opcheck.settings import Settings
from opcheck.shadow import Shadow, is_followed, worded

__all__ = ["Followers"]


class Followers:
    """Of one session; both are None where nobody asked for them."""

    def __init__(self, settings: Settings) -> None:
        self._shadow = (
            Shadow(
                limit_bytes=settings.max_shadow_bytes,
                max_numel=settings.max_numel,
                seed=settings.seed,
            )
            if settings.blame
            else None
        )
        self._repeats = (
            Repeats(max_checks=settings.max_checks, max_numel=settings.max_numel)
            if settings.repeat
            else None
        )
        self.is_on = settings.blame or settings.repeat

    @property
    def follow_values(self) -> bool:
        """Every call has to be seen."""
        return self._shadow is not None

    def watch(self, traits: OpTraits, skip: SkipReason, *, wanted: bool) -> bool:
        """True for a call that is never checked and yet followed or run twice.

        `wanted` is False where the user asked for other ops, modules or steps.
        """
        if self._shadow is not None and is_followed(traits.base, skip):
            return True
        return self._repeats is not None and wanted and skip in REPEATED_UNCHECKED

    def before(self, call: Call, *, in_reach: bool) -> None:
        """About to run. Not `in_reach`: too large, or of a type that nothing can be said of."""
        if self._shadow is not None and in_reach:
            self._shadow.before(call)
        if self._repeats is not None:
            self._repeats.before(call)

    def run_again(self, call: Call, out: Any) -> None:
        """The op gave `out`; its second run is kept in the call."""
        if self._repeats is None:
            return
        depth = reference_depth()
        try:
            call.repeat = self._repeats.after(call, out)
        except BaseException as error:
            if not is_ours(error, depth):
                raise
            call.repeat = None
            self._repeats.crashed()

    def measure(self, call: Call, out: Any, reference: Reference, *, passed: bool) -> Blame | None:
        """A judged call: what was born in it, and what it inherited."""
        if self._shadow is None:
            return None
        blame = self._shadow.follow(call, out, reference)
        return None if blame is None else worded(blame, passed=passed, dtype=call.out_dtype)

    def follow(self, call: Call, out: Any, skip: SkipReason | None) -> None:
        """A call that was not measured."""
        if self._shadow is None or call.followed:
            return
        if call.rng_before is None:
            self._shadow.follow(call, out, None, skip)
            return
        moved = have_moved(call.rng_before, call.args)
        after = generator_states(call.args)
        self._shadow.follow(call, out, None, SkipReason.RANDOM if moved else skip)
        restore_generators(after)

    def crashed(self, call: Call) -> None:
        """Checking or following a call crashed."""
        if self._shadow is not None and not call.followed:
            self._shadow.crashed(call)

    def unseen_ran(self) -> None:
        """Something ran that nobody could see."""
        if self._shadow is not None:
            self._shadow.forget("a compiled region or higher-order op ran")

    def forget(self) -> None:
        """The step is left: what happens outside is not seen."""
        if self._shadow is not None:
            self._shadow.forget()

    # ---- what they found ----

    @staticmethod
    def noted(record: OpRecord, call: Call, blame: Blame | None) -> OpRecord:
        """The record with what is known of the call besides its verdict."""
        if blame is not None:
            record = replace(record, blame=blame)
        repeat = call.repeat
        if repeat is None:
            return record
        notes = record.notes if repeat.same else (*record.notes, repeat.note)
        return replace(record, repeats=repeat.same, notes=notes)

    def completed(self, coverage: Coverage) -> Coverage:
        """The coverage with their counts."""
        if self._shadow is not None:
            coverage = replace(coverage, shadow=self._shadow.counts())
        if self._repeats is not None:
            counts, unequal = self._repeats.counts(), self._repeats.differences
            coverage = replace(coverage, repeat=counts, unrepeatable=unequal)
        return coverage

    @property
    def problem(self) -> str:
        """Traceback of the first crash of ours in each, or ""."""
        problems = [part.problem for part in (self._shadow, self._repeats) if part is not None]
        return "\n".join(problem for problem in problems if problem)
