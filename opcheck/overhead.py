"""Which calls are checked within a share of the step's own time. No torch and no clock of its own.

An account is fed with `max_overhead` times the time that the step itself took, and charged with
every second spent in the checker. A call is checked when its estimated cost is on the account,
beyond a reserve that calls of less value leave for those of more. What it really cost is charged
afterwards, so a wrong estimate is a debt that later calls pay back.

By value: the first calls of a signature, and of an op that failed elsewhere, at a new place; then
signatures that were rarely checked; then the place (module, phase, op, argument types) that was
checked least, so that every module's ops come up over several steps; last the rest.

Looking at calls costs time as well, checked or not. Where that would take more than half of what
is allowed, whole steps are left alone until the account bears a look and as much checking.
"""

from __future__ import annotations

import math
import random
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from time import perf_counter

from opcheck.records import Overhead
from opcheck.steptimes import StepTimes
from opcheck.waiting import FIRST, LEAST, RARE, REST, Place, Waiting

__all__ = ["OverheadBudget"]

TURNS = 10
"""Steps for which a place that was seen is waited for: steps of several kinds take turns."""
RARELY = 3
"""Checks of a signature below which it counts as rare."""
BASE_SECONDS = 2e-4
SECONDS_PER_ELEMENT = 5e-8
"""Of a check, where nothing is known of the op. Only the first estimate hangs on these."""
FEW_ELEMENTS = 30_000
"""Below so many a check costs the same: numbers of elements are compared with this added."""
TIMES_OP = 8.0
"""A check beside the op itself, where that was seen to run and no check was."""
SMOOTHING = 0.3
"""Weight of the newest measurement."""


class _Known:
    """What is known of a place."""

    __slots__ = ("attempts", "cost", "last_step", "numel", "op_seconds", "was_dropped")

    def __init__(self) -> None:
        self.attempts = 0
        self.cost: float | None = None
        self.op_seconds: float | None = None
        self.numel = 0
        self.last_step = 0
        self.was_dropped = False


class _Rhythm:
    """Rests that last one step more at random.

    Steps of several kinds take turns (two optimizers). Rests of an even rhythm would meet the same
    kind again and again, and another one never be seen.
    """

    def __init__(self) -> None:
        self._tosses = random.Random(0)
        self.rests_on = False

    def looked(self) -> None:
        """A step was looked at."""
        self.rests_on = False

    def rested(self) -> None:
        """A step was left alone."""
        self.rests_on = self._tosses.random() < 0.5


class OverheadBudget:
    """Of one session. Decides from seconds alone: the same call gets the same verdict anyway.

    Args:
        ratio: seconds of checking allowed for each second of the step's own.
        clock: seconds, monotonic.
    """

    def __init__(self, ratio: float, *, clock: Callable[[], float] = perf_counter) -> None:
        self.ratio = ratio
        self.dropped: Place | None = None
        """What the last answer of `admits` was no to, until somebody takes it away."""
        self.may_rest = False
        """Steps may go by that nobody looks at."""
        self._clock = clock
        self._lock = threading.Lock()
        self._elapsed = 0.0
        self._since: float | None = None
        self._setup: float | None = None
        self._left_at = 0.0
        self._owed = 0.0
        self._spent = 0.0
        self._clocked = 0.0
        """Of what was spent, the part that clocks saw."""
        self._hidden = 0.0
        """Estimated costs that no clock saw, as estimated."""
        self._checking = 0.0
        """Of what was spent, that of checks."""
        self._times = StepTimes()
        self._at_step = (0.0, 0.0, 0.0, 0.0)
        """Elapsed, clocked, hidden and counting seconds when the present step began."""
        self._num_rests = 0
        self._rhythm = _Rhythm()
        self._op_seconds = 0.0
        self._step = 0
        self._level = 0
        """Every place seen lately was checked so many times."""
        self._places: dict[Place, _Known] = {}
        self._attempts: Counter[tuple[Hashable, ...]] = Counter()
        self._rates: dict[Hashable, float] = {}
        """Overload -> seconds of a check for each element."""
        self._failed: set[str] = set()
        self._capped: set[tuple[Hashable, ...]] = set()
        self._beside = 0.0
        """Seconds that workers were busy."""
        self.waited = 0.0
        """Seconds in which the step's thread did nothing but wait for workers."""
        self._waiting = Waiting()
        """Dropped lately."""

    # ---- time ----

    @contextmanager
    def entering(self) -> Iterator[None]:
        """The context is being entered, and then the step's time runs."""
        start = self._clock()
        self._since = start
        try:
            yield
        finally:
            if self._setup is None:  # paid once, however many steps there will be
                self._since = self._clock()
                self._setup = self._since - start
            else:
                self._elapsed += self._owed
                self.spend(self._clock() - start + self._owed)
            self._owed = 0.0

    def left(self) -> None:
        """The context ends."""
        if self._since is not None:
            self._left_at = self._clock()
            self._elapsed += self._left_at - self._since
            self._since = None

    def gone(self) -> None:
        """All that had to be done after the context was left is done; the next one pays for it."""
        self._owed = self._clock() - self._left_at

    def spend(self, seconds: float, *, hidden: float = 0.0) -> float:
        """So much of the time was the checker's.

        Args:
            seconds: seen by a clock.
            hidden: beyond them, estimated.

        Returns:
            Both, the estimate corrected by what whole steps told of it so far.
        """
        total = seconds + self._times.scale * hidden
        with self._lock:
            self._clocked += seconds
            self._hidden += hidden
            self._spent += total
        return total

    @contextmanager
    def charged(self) -> Iterator[None]:
        """What runs in here is the checker's."""
        start = self._clock()
        try:
            yield
        finally:
            self.spend(self._clock() - start)

    @property
    def _elapsed_seconds(self) -> float:
        return self._elapsed + (0.0 if self._since is None else self._clock() - self._since)

    @property
    def own_seconds(self) -> float:
        """The step's own, so far."""
        # what is charged is in part an estimate: the ops' own time is the step's in any case, but
        # for what workers may have taken from it
        ops = max(0.0, self._op_seconds - self._beside)
        return max(ops, self._elapsed_seconds - self._spent)

    @property
    def balance(self) -> float:
        """Seconds that may be spent now; negative after a check that cost more than was there."""
        return self.ratio * self.own_seconds - self._spent

    # ---- calls ----

    def admits(self, place: Place, *, op: str, numel: int) -> bool:
        """Whether this call is checked.

        Args:
            place: where it is, and its signature.
            op: its full overload name.
            numel: elements of its largest argument.
        """
        known = self._places.get(place)
        if known is None:
            known = self._places[place] = _Known()
        known.last_step, known.numel = self._step, numel
        value = self._value(place, known, op)
        estimate = self._estimate(place, known)
        beyond = self.balance - estimate
        if beyond < 0 or beyond < self._reserve(value):
            known.was_dropped = True
            self.dropped = place
            if value == REST:  # it may have been of more value when it was dropped before
                self._waiting.remove(place)
            else:
                self._waiting.add(place, value, estimate)
            return False
        known.attempts += 1
        known.was_dropped = False
        self._attempts[place[2]] += 1
        self._waiting.remove(place)
        return True

    def measured(self, place: Place, seconds: float, *, is_all: bool = True) -> None:
        """A check of this place took so long; not all of it where a worker has the rest."""
        self._checking += seconds
        known = self._places.get(place)
        if known is None or not is_all:
            return
        known.cost = _smooth(known.cost, seconds)
        func = place[2][0] if place[2] else None
        self._rates[func] = _smooth(self._rates.get(func), seconds / (known.numel + FEW_ELEMENTS))

    def beside(self, place: Place, seconds: float, *, waited: float) -> None:
        """A worker was busy with a check, and the step's thread waited for it.

        Charged in full, as if it had been done in the step: whether a core was idle is not known.

        Args:
            place: of the call.
            seconds: of the worker's own.
            waited: seconds, charged to whoever waited, and not twice.
        """
        self.waited += waited
        self._beside += seconds
        self.spend(seconds - waited)
        self.measured(place, seconds)

    def capped(self, signature: tuple[Hashable, ...]) -> None:
        """`max_checks` keeps its calls out from now on: its places wait for no time."""
        self._capped.add(signature)

    def op_ran(self, place: Place | None, seconds: float) -> None:
        """An op took so long by itself; `place` where its check was dropped."""
        with self._lock:
            self._op_seconds += seconds
        known = None if place is None else self._places.get(place)
        if known is not None:
            known.op_seconds = _smooth(known.op_seconds, seconds)

    def failed(self, op: str) -> None:
        """A call of it failed: its other places come first."""
        self._failed.add(op)

    def end_step(self) -> None:
        """Who was waited for and did not come is waited for no more."""
        since = self._step - TURNS
        seen = [known for known in self._places.values() if known.last_step > since]
        self._level = min((known.attempts for known in seen), default=self._level)
        self._waiting.keep(lambda place: self._places[place].last_step > since)
        self._step += 1
        elapsed, clocked, hidden, counting = self._since_last_step()
        self._times.observed(seconds=elapsed - clocked, hidden=hidden, counting=counting)
        self._rhythm.looked()

    def end_rest(self) -> None:
        """A step ended that nobody looked at: who was waited for is still waited for."""
        self._num_rests += 1
        elapsed, clocked, *_ = self._since_last_step()
        self._times.rested(elapsed - clocked)
        self._rhythm.rested()

    def _since_last_step(self) -> list[float]:
        now = (self._elapsed_seconds, self._clocked, self._hidden, self._spent - self._checking)
        before, self._at_step = self._at_step, now
        return [later - earlier for later, earlier in zip(now, before, strict=True)]

    def _income(self) -> float:
        """Seconds that an average step brings for checks; looking at it is paid."""
        counting = self._times.counting
        if counting is None:
            return self.ratio * self.own_seconds / max(1, self._step)
        income = self.ratio * self._times.own
        return max(income - counting, income / 2 if self.may_rest else 0.0)

    @property
    def wants_rest(self) -> bool:
        """The step that begins now had better be left alone, for the sake of later ones."""
        counting = self._times.counting
        income = self.ratio * self._times.own
        if not self.may_rest or counting is None or income >= 2 * counting:
            return False
        if self._rhythm.rests_on:
            return True
        best = min((value for value, _ in self._waiting.values()), default=REST)
        wanted = min((cost for value, cost in self._waiting.values() if value == best), default=0.0)
        return self.balance + income < counting + max(counting, wanted)

    # ---- value and cost ----

    def _value(self, place: Place, known: _Known, op: str) -> int:
        checked = self._attempts[place[2]]
        if not checked or (not known.attempts and op in self._failed):
            return FIRST
        if checked < RARELY:
            return RARE
        return LEAST if known.attempts <= self._level else REST

    def _estimate(self, place: Place, known: _Known) -> float:
        if known.cost is not None:
            return known.cost
        rate = self._rates.get(place[2][0] if place[2] else None)
        if rate is not None:
            return rate * (known.numel + FEW_ELEMENTS)
        if known.op_seconds is not None:
            return BASE_SECONDS + TIMES_OP * known.op_seconds
        return BASE_SECONDS + SECONDS_PER_ELEMENT * known.numel

    def _reserve(self, value: int) -> float:
        """Seconds that a call of this value leaves for those of more value that wait."""
        reserve = self._waiting.reserve(value)
        if not reserve:
            return 0.0
        # who waits may come at the end of the step, after all that looking at it takes
        return reserve + max(0.0, (self._times.counting or 0.0) - self.ratio * self._times.own)

    # ---- the sum ----

    def summary(self) -> Overhead:
        """What was spent, and what is left to do."""
        own = self.own_seconds
        left = [
            (place, known)
            for place, known in self._places.items()
            if not known.attempts and known.was_dropped and place[2] not in self._capped
        ]
        cost = sum(self._estimate(place, known) for place, known in left)
        income = self._income()
        steps = None
        if not left:
            steps = 0
        elif income > 0:
            steps = max(1, math.ceil(max(0.0, cost - self.balance) / income))
        return Overhead(
            own_seconds=own,
            allowed_seconds=self.ratio * own,
            spent_seconds=self._spent,
            num_places=len(self._places),
            num_left=len(left),
            steps_left=steps,
            counting_seconds=self._spent - self._checking,
            setup_seconds=self._setup or 0.0,
            num_steps=self._step,
            num_rests=self._num_rests,
        )


def _smooth(before: float | None, now: float) -> float:
    return now if before is None else (1 - SMOOTHING) * before + SMOOTHING * now
