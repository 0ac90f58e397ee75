"""What whole steps took, looked at and not: how much of that the checker's clocks did not see.

A clock in the checker begins after torch has called it, and sees nothing of what the step's own
ops pay afterwards for caches that it has emptied. Those costs are estimated call by call. Where
the session rests, steps are there that nobody looked at, and what they took tells how wrong these
estimates are. No torch and no clock of its own.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import fmean, median

__all__ = ["StepTimes"]

KEPT = 15
"""Steps of a kind that are remembered, the latest."""
ENOUGH = 3
"""Steps of each kind without which nothing is concluded."""
DOUBT = 0.4
"""Standard deviation of the estimates' relative error, as far as is known beforehand (on training
steps of GPT-2 and ResNet they were wrong by -30% to +40%)."""
LIMITS = 0.25, 4.0
"""Of the correction."""


class StepTimes:
    """The latest steps of one session, in seconds."""

    def __init__(self) -> None:
        self._observed: deque[float] = deque(maxlen=KEPT)
        """Beyond what the clocks saw of the checker."""
        self._hidden: deque[float] = deque(maxlen=KEPT)
        self._counting: deque[float] = deque(maxlen=KEPT)
        self._rested: deque[float] = deque(maxlen=KEPT)
        self._is_first = True
        self.scale = 1.0
        """What the estimates of hidden costs are to be multiplied with."""

    def observed(self, *, seconds: float, hidden: float, counting: float) -> None:
        """A step ended whose calls were looked at.

        Args:
            seconds: its time beyond what clocks saw of the checker.
            hidden: estimated costs that no clock saw, part of `seconds`.
            counting: what looking at its calls took, without checks.
        """
        if self._is_first:  # it also pays for what happens once
            self._is_first = False
            return
        self._observed.append(seconds)
        self._hidden.append(hidden)
        self._counting.append(counting)
        self._correct()

    def rested(self, seconds: float) -> None:
        """A step ended that nobody looked at."""
        self._rested.append(seconds)
        self._correct()

    @property
    def counting(self) -> float | None:
        """What looking at the calls of a step takes; None before the second step."""
        return fmean(self._counting) if self._counting else None

    @property
    def own(self) -> float:
        """What a step takes by itself."""
        pairs = zip(self._observed, self._hidden, strict=True)
        steps = [max(0.0, seconds - self.scale * hidden) for seconds, hidden in pairs]
        return fmean([*steps, *self._rested]) if steps or self._rested else 0.0

    def _correct(self) -> None:
        """Believe the difference of the two kinds of steps as far as their scatter lets it."""
        hidden = median(self._hidden) if self._hidden else 0.0
        if min(len(self._observed), len(self._rested)) < ENOUGH or hidden <= 0:
            return
        seen = (median(self._observed) - median(self._rested)) / hidden
        error = math.hypot(_error(self._observed), _error(self._rested)) / hidden
        weight = 1 / (1 + (error / DOUBT) ** 2)
        self.scale = min(max(1 + weight * (seen - 1), LIMITS[0]), LIMITS[1])


def _error(values: Sequence[float]) -> float:
    """Standard error of their median, from the median deviation: single steps may be far off."""
    middle = median(values)
    return 1.86 * median(abs(value - middle) for value in values) / math.sqrt(len(values))
