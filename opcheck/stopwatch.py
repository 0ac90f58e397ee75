"""Between the mode and the pipeline: how long the checker took, and the step itself.

Only there with `max_overhead`.
"""

from __future__ import annotations

import functools
import threading
from time import perf_counter
from typing import Any

import torch

from opcheck.calls import Call, place_of
from opcheck.intercept import CheckMode
from opcheck.outside import outside_everything
from opcheck.overhead import OverheadBudget
from opcheck.switch import Observer
from opcheck.waiting import Place

__all__ = ["Stopwatch", "dispatch_seconds"]

_TRIALS = 5
_CALLS = 100
_IN_A_STEP = 6.0
"""A call of a training step beside one of these: it has more arguments and finds the caches cold
(14 to 19 us beside 2.7, measured on GPT-2 and ResNet)."""

_HOOK = 1 / 3
"""What torch does more around a call of a module that has hooks, beside such a call (5 us)."""

_AFTERMATH = 0.25
"""Share of a check that the step's own ops take longer after it: it has emptied the caches and
given pages back (10% to 30%, measured on training steps of GPT-2 and ResNet)."""


class _Local(threading.local):
    place: Place | None = None
    """Of the running call, when it was dropped for time."""
    began = 0.0
    ended = 0.0
    """When the look at the running call, before its op, began and ended."""


class Stopwatch:
    """An observer that charges another one's time to the budget."""

    def __init__(self, observer: Observer, budget: OverheadBudget) -> None:
        self._observer = observer
        self._budget = budget
        self._local = _Local()
        self._per_call = dispatch_seconds()

    def before(
        self, func: Any, types: tuple[type, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Call | bool:
        """A Call to be checked, True to count its result only, False for neither."""
        local = self._local
        local.began = perf_counter()
        self._budget.dropped = None
        try:
            return self._observer.before(func, types, args, kwargs)
        finally:
            local.place, self._budget.dropped = self._budget.dropped, None
            local.ended = perf_counter()
            self._budget.spend(local.ended - local.began, hidden=self._per_call)

    def after(self, call: Call | bool, out: Any) -> None:  # noqa: FBT001 - see Observer
        """The op gave `out`."""
        local = self._local
        start = perf_counter()
        self._budget.op_ran(local.place, start - local.ended)
        before, waited = local.ended - local.began, self._budget.waited
        try:
            self._observer.after(call, out)
        finally:
            seconds = perf_counter() - start
            if isinstance(call, Call) and call.skipped is None:
                cost = before + seconds - (self._budget.waited - waited)
                hidden = _AFTERMATH * cost
                spent = self._budget.spend(seconds, hidden=hidden)
                cost += spent - seconds
                self._budget.measured(place_of(call), cost, is_all=not call.in_worker)
            else:
                self._budget.spend(seconds)

    def hook_ran(self, seconds: float) -> None:
        """A hook of a module took so long."""
        self._budget.spend(seconds, hidden=_HOOK * self._per_call)

    def raised(self, call: Call | bool) -> None:  # noqa: FBT001 - see Observer
        """The op raised, and the exception goes on to the caller."""
        self._observer.raised(call)


class _Nobody:
    """Takes no notice of any call."""

    def before(
        self, func: Any, types: tuple[type, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Call | bool:
        """Nothing to be checked."""
        return False

    def after(self, call: Call | bool, out: Any) -> None:  # noqa: FBT001 - see Observer
        """Nothing to do."""

    def raised(self, call: Call | bool) -> None:  # noqa: FBT001 - see Observer
        """Nothing to do."""


@functools.cache
def dispatch_seconds() -> float:
    """What a call costs more under a mode that does nothing: torch's way to it and back.

    Measured once a process, in some milliseconds, on views of a tensor of its own.
    """

    def calls() -> float:
        start = perf_counter()
        for _ in range(_CALLS):
            torch.ops.aten.detach.default(tensor)
        return (perf_counter() - start) / _CALLS

    with outside_everything():
        tensor = torch.zeros(1, device="cpu")
        plain = min(calls() for _ in range(_TRIALS))
        with CheckMode(_Nobody()):
            under_mode = min(calls() for _ in range(_TRIALS))
    return _IN_A_STEP * max(0.0, under_mode - plain)
