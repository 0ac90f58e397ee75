"""May a session stop looking? Decided at the end of a step, from what the step brought.

A mode costs something for every call, also where nothing is left that it would check. A budget is
used up when a whole step passed in which calls were kept out by `max_checks` and none was checked,
and when no signature with budget left keeps coming back (steps of two kinds may take turns). What
comes later is then not seen: the coverage says where counting stopped.

With `max_overhead` a session may also rest for a step, and come back.
"""

from __future__ import annotations

from opcheck.ledger import Ledger
from opcheck.records import SkipReason
from opcheck.settings import Settings
from opcheck.switch import SWITCH

__all__ = ["Exhaustion"]

TURNS = 10
"""Steps for which a signature with budget left is waited for, once it came in two steps."""


class Exhaustion:
    """Of one session; told of every step that ends."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._sees_all = (
            settings.max_checks == 0  # it is there to count
            or settings.blame
            or settings.repeat
            or settings.selftest
            or settings.record == "all"
        )
        self._used_up = False
        self._outcomes = 0
        self._kept_out = 0
        self._dropped = 0

    @property
    def may_rest(self) -> bool:
        """May whole steps go by unseen, where looking at them takes too much of the time?

        Not where the steps to be checked were named, and not where every call has to be seen.
        """
        return not self._sees_all and self._settings.num_steps is None and not SWITCH.has_kernels

    def step_ended(self, ledger: Ledger) -> None:
        """Take stock of it."""
        outcomes = ledger.checked + ledger.errors
        kept_out = ledger.skipped[SkipReason.BUDGET_USED_UP]
        dropped = ledger.skipped[SkipReason.OUT_OF_TIME]
        self._used_up = (
            outcomes == self._outcomes
            and dropped == self._dropped
            and kept_out > self._kept_out
            and not ledger.comes_back(self._settings.max_checks, within=TURNS)
        )
        self._outcomes, self._kept_out, self._dropped = outcomes, kept_out, dropped

    def is_over(self, step: int) -> bool:
        """True when nothing of this step, the next one, would be checked."""
        settings = self._settings
        if self._sees_all or SWITCH.has_kernels:
            return False
        if settings.num_steps is not None and step >= settings.start_step + settings.num_steps:
            return True
        return self._used_up and step > settings.start_step
