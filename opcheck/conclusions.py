"""What follows of a comparison: evidence over many calls, the record, the books, the sinks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from time import perf_counter
from typing import Any

from opcheck.births import Births, sentence
from opcheck.call_records import Entry, RunTag, record_of
from opcheck.callers import CallerTracker
from opcheck.calls import Call, Site
from opcheck.compare import Judgement
from opcheck.comparison import Outcome
from opcheck.drift import Drift
from opcheck.followers import Followers
from opcheck.held import can_hold, made_nonfinite, with_origin
from opcheck.keepers import CallKeeper
from opcheck.kernel_inputs import with_changed_inputs
from opcheck.ledger import Ledger
from opcheck.modules import ModuleFrame, ModuleTracker
from opcheck.outside import outside_everything
from opcheck.overhead import OverheadBudget
from opcheck.policy import Policy
from opcheck.records import OpRecord, Verdict

__all__ = ["Conclusions"]


class Conclusions:
    """Of one session; everything that remembers earlier calls happens here, in their order."""

    def __init__(
        self,
        run: RunTag,
        *,
        ledger: Ledger,
        tracker: ModuleTracker | CallerTracker,
        policy: Policy,
        budget: OverheadBudget | None,
        followers: Followers,
        births: Births,
        keepers: tuple[CallKeeper, ...],
        emit: Callable[[OpRecord], None],
    ) -> None:
        self._run = run
        self._ledger = ledger
        self._tracker = tracker
        self._policy = policy
        self._budget = budget
        self._followers = followers
        self._births = births
        self._keepers = keepers
        self._emit = emit
        self._drift = Drift()

    def conclude(self, call: Call, out: Any, outcome: Outcome) -> None:
        """A call was compared: its record is written, or held until its module ends."""
        with outside_everything():
            found = outcome.judged.found
            if call.in_kernel and found.passed:
                found = with_changed_inputs(call, out, found)
            found = self._with_drift(call, found)
            if not found.passed and call.site.phase == "optimizer":
                self._blame_owner(call, found.metrics.worst_output)
            if found.nonfinite or not found.passed:
                found = self._with_birth(call, out, found)
            born = made_nonfinite(call, out, found)
            is_open = born and can_hold(call)
            if born and not is_open:
                note = f"{call.traits.name} made a non-finite value of finite inputs"
                found = replace(found, notes=(*found.notes, note))
            record = record_of(call, out, found, outcome, self._run)
            record = self._followers.noted(record, call, outcome.blame)
        for keeper in self._keepers:
            keeper.judged(call, out, record, is_open=is_open)
        entry = Entry(record, call.site, call.signature, found.compared)
        if is_open and call.frame is not None:
            call.frame.held.append(entry)
        else:
            self.enter(entry)

    def module_ended(
        self, frame: ModuleFrame, held: list[Entry], kwargs: Mapping[str, Any], output: Any
    ) -> None:
        """Decide on what was held until a module gave `output` (None: it never ended)."""
        for entry in held:
            start = perf_counter()
            try:
                record = with_origin(entry.record, frame, kwargs, output, self._tracker)
            finally:
                self._ledger.check_seconds += perf_counter() - start
            self.enter(replace(entry, record=record))

    def enter(self, entry: Entry) -> None:
        """A record is final: into the books with it, and out to who listens."""
        record = entry.record
        place = (entry.site.module, entry.site.phase, record.op)
        self._ledger.judged(
            place,
            entry.signature,
            record.verdict,
            entry.num_compared,
            crashed=record.error is not None,
            sampled=record.sample is not None and not record.sample.covers_all,
        )
        try:
            self._tell(record)
        except Exception:
            if record.error is None:  # a crash of ours, which is counted as one
                self._ledger.recant(place, entry.signature)
            raise

    def _tell(self, record: OpRecord) -> None:
        self._policy.judged(record)
        if self._budget is not None and record.verdict is Verdict.FAIL:
            self._budget.failed(record.op)
        self._births.concluded(record)
        for keeper in self._keepers:
            keeper.concluded(record)
        self._emit(record)

    # ---- what earlier calls say ----

    def _with_drift(self, call: Call, found: Judgement) -> Judgement:
        """Fail the call that tips the evidence of many over."""
        if not found.passed or found.shift is None:
            return found
        site = call.site
        tipped = self._drift.add(call.traits.name, site.module, site.phase, found.shift)
        if tipped is None:
            return found
        metrics = replace(found.metrics, mean_shift=tipped.mean)
        return replace(found, passed=False, reason=tipped.reason, metrics=metrics)

    def _with_birth(self, call: Call, out: Any, found: Judgement) -> Judgement:
        """With a note on the call that brought the first NaN or Inf of the run."""
        verdict = Verdict.PASS if found.passed else Verdict.FAIL
        birth = self._births.look(call, out, verdict.value)
        return found if birth is None else replace(found, notes=(*found.notes, sentence(birth)))

    def _blame_owner(self, call: Call, output: int) -> None:
        """Lists of all parameters belong to no module; the tensor that is wrong in them does."""
        first = call.args[0] if call.args else None
        if call.site.module or not isinstance(first, (list, tuple)) or not first:
            return
        # results and written lists are as long as the first list, one after the other
        owner = self._tracker.owner([first[output % len(first)]])
        if owner:
            place = call.site.module, call.site.phase, call.func
            call.site = Site(owner, call.site.phase)
            self._ledger.moved(place, (owner, call.site.phase, call.func))
