"""Which calls are checked within a share of the step's own time. No torch and no clock of its own.

An account is fed with `max_overhead` times the time that the step itself took, and charged with
every second spent in the checker. A call is checked when its estimated cost is on the account,
beyond a reserve that calls of less value leave for those of more. What it really cost is charged
afterwards, so a wrong estimate is a debt that later calls pay back.

By value: the first calls of a signature, and of an op that failed elsewhere, at a new place; then
signatures that were rarely checked; then the place (module, phase, op, argument types) that was
checked least, so that every module's ops come up over several steps; last the rest.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Hashable
from time import perf_counter

from opcheck.records import Overhead

__all__ = ["OverheadBudget", "Place"]

Place = tuple[str, str, tuple[Hashable, ...]]
"""Module FQN, phase, signature."""

FIRST, RARE, LEAST, REST = range(4)
"""Values, the highest first."""
RARELY = 3
"""Checks of a signature below which it counts as rare."""
BASE_SECONDS = 2e-4
SECONDS_PER_ELEMENT = 5e-8
"""Of a check, where nothing is known of the op. Only the first estimate hangs on these."""
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
        self._clock = clock
        self._lock = threading.Lock()
        self._elapsed = 0.0
        self._since: float | None = None
        self._spent = 0.0
        self._op_seconds = 0.0
        self._step = 0
        self._level = 0
        """Every place seen in the last step was checked so many times."""
        self._places: dict[Place, _Known] = {}
        self._attempts: Counter[tuple[Hashable, ...]] = Counter()
        self._rates: dict[Hashable, float] = {}
        """Overload -> seconds of a check for each element."""
        self._failed: set[str] = set()
        self._waiting: dict[Place, tuple[int, float]] = {}
        """Dropped in this step or the last: value and estimate."""
        self._reserves: list[float] | None = None

    # ---- time ----

    def entered(self) -> None:
        """The context begins: the step's time runs."""
        self._since = self._clock()

    def left(self) -> None:
        """The context ends."""
        if self._since is not None:
            self._elapsed += self._clock() - self._since
            self._since = None

    def spend(self, seconds: float) -> None:
        """So much of the time was the checker's."""
        with self._lock:
            self._spent += seconds

    @property
    def own_seconds(self) -> float:
        """The step's own, so far."""
        running = 0.0 if self._since is None else self._clock() - self._since
        # what is charged is in part an estimate: the ops' own time is the step's in any case
        return max(self._op_seconds, self._elapsed + running - self._spent)

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
            if value != REST:
                self._waiting[place] = (value, estimate)
                self._reserves = None
            return False
        known.attempts += 1
        known.was_dropped = False
        self._attempts[place[2]] += 1
        if self._waiting.pop(place, None) is not None:
            self._reserves = None
        return True

    def measured(self, place: Place, seconds: float) -> None:
        """A check of this place took so long."""
        known = self._places.get(place)
        if known is None:
            return
        known.cost = _smooth(known.cost, seconds)
        func = place[2][0] if place[2] else None
        self._rates[func] = _smooth(self._rates.get(func), seconds / (known.numel + 1000))

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
        seen = [known for known in self._places.values() if known.last_step == self._step]
        self._level = min((known.attempts for known in seen), default=self._level)
        self._waiting = {
            place: kept
            for place, kept in self._waiting.items()
            if self._places[place].last_step == self._step
        }
        self._reserves = None
        self._step += 1

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
            return rate * (known.numel + 1000)
        if known.op_seconds is not None:
            return BASE_SECONDS + TIMES_OP * known.op_seconds
        return BASE_SECONDS + SECONDS_PER_ELEMENT * known.numel

    def _reserve(self, value: int) -> float:
        """Seconds that a call of this value leaves for those of more value that wait."""
        if self._reserves is None:
            largest = [0.0] * (REST + 1)
            for kind, estimate in self._waiting.values():
                for lower in range(kind + 1, REST + 1):
                    largest[lower] = max(largest[lower], estimate)
            largest[REST] = sum(estimate for _, estimate in self._waiting.values())
            self._reserves = largest
        return self._reserves[value]

    # ---- the sum ----

    def summary(self) -> Overhead:
        """What was spent, and what is left to do."""
        own = self.own_seconds
        left = [
            (place, known)
            for place, known in self._places.items()
            if not known.attempts and known.was_dropped
        ]
        cost = sum(self._estimate(place, known) for place, known in left)
        income = self.ratio * own / max(1, self._step)
        steps = None
        if not left:
            steps = 0
        elif income > 0 and any(known.attempts for known in self._places.values()):
            steps = max(1, math.ceil(max(0.0, cost - self.balance) / income))
        return Overhead(
            own_seconds=own,
            allowed_seconds=self.ratio * own,
            spent_seconds=self._spent,
            num_places=len(self._places),
            num_left=len(left),
            steps_left=steps,
        )


def _smooth(before: float | None, now: float) -> float:
    return now if before is None else (1 - SMOOTHING) * before + SMOOTHING * now
