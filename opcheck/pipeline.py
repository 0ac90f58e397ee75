"""The way of a call: admitted, compared, concluded on.

The pipeline is told of calls by the mode and never raises into the step: whatever goes wrong in
here becomes a record with the traceback, and INCONCLUSIVE. It holds the lock and knows the order;
each stage is a module of its own.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from time import perf_counter
from typing import Any

from opcheck.admission import Admission, count_elements
from opcheck.beside import Beside
from opcheck.births import Births
from opcheck.call_records import RunTag, call_crashed, checker_crashed
from opcheck.callers import CallerTracker
from opcheck.calls import Call, place_of
from opcheck.comparison import Comparison
from opcheck.conclusions import Conclusions
from opcheck.followers import Followers
from opcheck.generators import States, generator_states, restore_generators
from opcheck.keepers import CallKeeper
from opcheck.leaving import Exhaustion
from opcheck.ledger import Ledger
from opcheck.modules import ModuleFrame, ModuleTracker
from opcheck.outside import is_ours, outside_everything, reference_depth
from opcheck.overhead import OverheadBudget
from opcheck.policy import Policy
from opcheck.records import Coverage, OpRecord, SkipReason
from opcheck.selftest import Planter
from opcheck.settings import Settings

__all__ = ["Pipeline"]


class Pipeline:
    """One per session; `before`, `after` and `raised` are what the mode calls."""

    def __init__(
        self,
        settings: Settings,
        tracker: ModuleTracker | CallerTracker,
        *,
        run_id: str,
        rank: int,
        emit: Callable[[OpRecord], None],
        policy: Policy | None = None,
        budget: OverheadBudget | None = None,
        keepers: tuple[CallKeeper, ...] = (),
    ) -> None:
        self.ledger = Ledger()
        self.step = 0
        self.num_rests = 0
        self._left_by = ""
        self._problem = ""
        self.lock = threading.RLock()
        self.planter = Planter() if settings.selftest else None
        self._tracker = tracker
        self._budget = budget
        self._run = RunTag(run_id=run_id, rank=rank, criterion=settings.criterion)
        self._followers = Followers(settings)
        self._births = Births()
        self._exhaustion = Exhaustion(settings)
        self._comparison = Comparison(settings, followers=self._followers, planter=self.planter)
        needs_live_calls = keepers or self._followers.is_on or self.planter is not None
        self._beside = (
            Beside(
                settings.workers,
                compare=self._comparison.compare,
                conclude=self._settled,
                charge=self._charge,
            )
            if settings.workers and not needs_live_calls
            else None
        )
        policy = policy or Policy(settings)
        self._admission = Admission(
            settings, ledger=self.ledger, tracker=tracker, policy=policy, budget=budget,
            followers=self._followers, births=self._births, keepers=keepers, beside=self._beside,
        )  # fmt: skip
        self._conclusions = Conclusions(
            self._run, ledger=self.ledger, tracker=tracker, policy=policy, budget=budget,
            followers=self._followers, births=self._births, keepers=keepers, emit=emit,
        )  # fmt: skip

    # ---- told by the mode ----

    def before(
        self, func: Any, types: tuple[type, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Call | bool:
        """A Call to be checked, True to count its result only, False for neither."""
        with self.lock:
            seen = self.ledger.seen
            depth = reference_depth()
            try:
                return self._admission.decide(func, types, args, kwargs, step=self.step)
            except BaseException as error:
                if not is_ours(error, depth):
                    raise
                self._crashed_before(str(func), seen, "looking at this call crashed before it ran")
                return False

    def after(self, call: Call | bool, out: Any) -> None:  # noqa: FBT001 - see Observer
        """The op gave `out`."""
        depth, drawn = reference_depth(), _drawn(call)
        try:
            self._after(call, out)
        except BaseException as error:
            is_crash = is_ours(error, depth)
            if drawn is not None:
                restore_generators(drawn)
            if not is_crash:
                raise
            if isinstance(call, Call):
                with self.lock:
                    self._crashed(call, out)

    def _after(self, call: Call | bool, out: Any) -> None:  # noqa: FBT001
        if isinstance(call, Call) and call.crash is not None:
            raise call.crash
        follows = self._followers.is_on and isinstance(call, Call)
        if follows:  # not under the lock: a kernel may wait for its own threads
            self._timed(self._followers.run_again, call, out)
        with self.lock:
            if call is True or (isinstance(call, Call) and call.counted):
                self.ledger.elements_seen += count_elements(out)
            if not isinstance(call, Call):
                return
            skip = call.skipped or self._check(call, out)
            skip = SkipReason.TOO_LARGE if call.is_large else skip
            if follows:
                self._timed(self._followers.follow, call, out, skip)
            if call.skipped is not None and self._births.first is None:
                self._timed(self._look_at_unchecked, call, out)

    def raised(self, call: Call | bool) -> None:  # noqa: FBT001 - see Observer
        """The op raised: it was seen, and there is nothing to check."""
        if isinstance(call, Call):
            with self.lock:
                if call.skipped is None:
                    self.ledger.skip(SkipReason.OP_RAISED, self.ledger.counts_of(call.signature))
                self._followers.follow(call, None, SkipReason.OP_RAISED)

    # ---- after the op ----

    def _check(self, call: Call, out: Any) -> SkipReason | None:
        """Judge it, or hand it to a worker; why not, where that was not possible."""
        with self.ledger.checking():
            skip = self._admission.refuse_result(call, out)
            is_handed_over = skip is None and self._hand_over(call, out)
            if not is_handed_over:
                counts = self.ledger.counts_of(call.signature)
                skip = skip or self._judge(call, out)
                if skip is not None:
                    self.ledger.skip(skip, counts)
                else:
                    counts.attempts += 1
        return skip

    def _judge(self, call: Call, out: Any) -> SkipReason | None:
        outcome = self._comparison.compare(call, out)
        if isinstance(outcome, SkipReason):
            return outcome
        self._conclusions.conclude(call, out, outcome)
        return None

    def _look_at_unchecked(self, call: Call, out: Any) -> None:
        if call.skipped in (SkipReason.TOO_LARGE, SkipReason.UNSUPPORTED_TYPE):
            return
        with outside_everything():
            self._births.look(call, out, "")

    def _timed(self, work: Callable[..., None], *args: Any) -> None:
        """Do what is no part of the step."""
        start = perf_counter()
        work(*args)
        with self.lock:
            self.ledger.check_seconds += perf_counter() - start

    # ---- workers ----

    def _hand_over(self, call: Call, out: Any) -> bool:
        """True when a worker took it; else all that they have is concluded on first."""
        if self._beside is None:
            return False
        if self._beside.takes(call, out):
            call.in_worker = True
            return True
        self._beside.settle()
        return False

    def _settled(self, call: Call, out: Any, result: Callable[[], Any]) -> None:
        """A worker is done with a call: the rest, in the step's thread and in order of dispatch."""
        depth = reference_depth()
        counts = self.ledger.counts_of(call.signature)
        try:
            outcome = result()
            if isinstance(outcome, SkipReason):
                self.ledger.skip(outcome, counts)
            else:
                self._conclusions.conclude(call, out, outcome)
                counts.attempts += 1
        except BaseException as error:
            if not is_ours(error, depth):
                raise
            self._crashed(call, out)

    def _charge(self, call: Call, seconds: float, waited: float) -> None:
        """What a worker did counts as time spent in checking."""
        if self._budget is not None:
            self._budget.beside(place_of(call), seconds, waited=waited)

    def settle(self) -> None:
        """Wait for what workers have; in another thread than the step's, do nothing."""
        if self._beside is not None and self._beside.is_my_thread:
            with self.lock:
                self._beside.settle()

    def close(self, *, wait: bool) -> None:
        """The context is left: conclude on what workers still have, or drop it; end them."""
        if self._beside is not None:
            with self.lock:
                self._beside.close(wait=wait)

    def left_by(self, exception: str) -> None:
        """The step was cut short by an exception of this class; the first one is kept."""
        with self.lock:
            last = self.ledger.seen - 1
            after = f"after call {last:,}" if last >= 0 else "before any call"
            self._left_by = self._left_by or f"{exception} in step {self.step}, {after}"

    def _settle(self) -> None:
        if self._beside is not None:
            self._beside.settle()

    # ---- modules ----

    def module_ended(self, frame: ModuleFrame, kwargs: Mapping[str, Any], output: Any) -> None:
        """Judge what was held back until now."""
        with self.lock:
            held, frame.held = frame.held, []
            self._settle()
            self._conclusions.module_ended(frame, held, kwargs, output)

    def release(self) -> None:
        """Modules that never ended: what they hold is written as it is."""
        try:
            for frame in self._tracker.drain():
                self.module_ended(frame, {}, None)
        except Exception:  # noqa: BLE001 - our crash must not be the user's
            self.crashed_in("release")

    # ---- crashes of ours ----

    def _crashed(self, call: Call, out: Any) -> None:
        self._followers.crashed(call)
        if call.skipped is not None:  # it is counted already, and only the shadow lost it
            return
        entry = call_crashed(call, out, self._run)
        self.ledger.counts_of(call.signature).attempts += 1
        self._enter_crash(entry)

    def _enter_crash(self, entry: Any) -> None:
        """Into the books; where that crashes as well, it is counted and told of all the same."""
        errors = self.ledger.errors
        try:
            self._conclusions.enter(entry)
        except Exception:  # noqa: BLE001 - our crash must not be the user's
            self.ledger.errors = errors + 1
            self._problem = self._problem or traceback.format_exc()

    def crashed_in(self, where: str) -> None:
        """Something of ours crashed that belongs to no call: counted as if it were one."""
        with self.lock:
            self._crashed_before(f"opcheck.{where}", self.ledger.seen, "the checker itself crashed")

    def _crashed_before(self, name: str, seen: int, reason: str) -> None:
        if self.ledger.seen == seen:  # not even counted
            self.ledger.seen += 1
        index = self.ledger.seen - 1
        self._enter_crash(checker_crashed(name, reason, self._run, index=index, step=self.step))

    @property
    def own_problem(self) -> str:
        """Traceback of the first crash of ours beside checking, or ""."""
        return "\n".join(text for text in (self._problem, self._followers.problem) if text)

    # ---- steps and the sum ----

    def end_step(self) -> None:
        """The next call belongs to the next step."""
        with self.lock:
            self._settle()
            self.release()
            self.step += 1
            if self._budget is not None:
                self._budget.end_step()
            self._exhaustion.step_ended(self.ledger)
            self.ledger.end_step()

    def end_rest(self) -> None:
        """A step ended that nobody looked at."""
        with self.lock:
            self.step += 1
            self.num_rests += 1
            if self._budget is not None:
                self._budget.end_rest()

    @property
    def wants_rest(self) -> bool:
        """Nobody need look at the step that begins now: there would be no time to check it."""
        if self._budget is None:
            return False
        self._budget.may_rest = self._exhaustion.may_rest
        return self._budget.wants_rest

    @property
    def is_used_up(self) -> bool:
        """Nothing of the step that begins now would be checked: nobody need look."""
        return self._exhaustion.is_over(self.step)

    def stop_counting(self) -> None:
        """From now on nobody looks; said once, for the first call that was not seen."""
        if self.ledger.stopped_at is None:
            self.ledger.stopped_at = max(0, self.ledger.seen - 1)

    def compiled_region_ran(self) -> None:
        """Inductor code ran: one call that nobody can look into."""
        with self.lock:
            site = self._tracker.locate()
            self._followers.unseen_ran()
            self.ledger.count((site.module, site.phase, "inductor_compiled_code"))
            self.ledger.skip(SkipReason.INSIDE_COMPILED_REGION)

    def forget_values(self) -> None:
        """The step is left: what happens outside is not seen."""
        with self.lock:
            self._followers.forget()

    def coverage(self) -> Coverage:
        """Everything so far; other threads may be counting."""
        self.settle()
        with self.lock:
            coverage = replace(
                self.ledger.coverage(),
                first_nonfinite=self._births.first,
                left_by=self._left_by,
                overhead=None if self._budget is None else self._budget.summary(),
            )
            if self._beside is not None:
                held = coverage.check_peak_bytes + self._beside.peak_bytes
                coverage = replace(coverage, check_peak_bytes=held)
            return self._followers.completed(coverage)


def _drawn(call: Call | bool) -> States | None:  # noqa: FBT001 - see Observer
    """The generators as the op left them, for the case that looking at it is cut short."""
    if isinstance(call, Call) and call.rng_before is not None:
        return generator_states(call.args)
    return None
