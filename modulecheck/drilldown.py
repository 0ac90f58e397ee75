"""From the failing modules of a result to stage, kernel, op and line, one recorded call at a time.

What could not be followed is in the list too, with the reason: an empty list means that no module
was suspect, never that nobody looked.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from torch import nn

from modulecheck import _torch
from modulecheck.binding import bound, model_of
from modulecheck.budget import Budget
from modulecheck.culprit import NOT_REPRODUCED, Culprit
from modulecheck.progress import Tell, telling
from modulecheck.recording import RecordedCall
from modulecheck.results import CompareResult
from modulecheck.snapshot import RandomState

__all__ = ["CRASHED", "NOT_REACHED", "NOT_RECORDED", "Locate", "drill", "status_of"]

NOT_RECORDED = "not recorded"
NOT_REACHED = "not reached"
CRASHED = "drill-down crashed"

Locate = Callable[..., Sequence[Culprit]]
"""`locate(call, budget=..., on_progress=...)`."""
Suspect = tuple[str, str]


def drill(
    result: CompareResult,
    locate: Locate,
    *,
    budget: Budget,
    progress: Callable[[str], object] | Literal[False] | None = None,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    backend: Any = None,
    classes: Iterable[type] = (),
) -> list[Culprit]:
    """Follow every suspect of a result; generators and the caller's modes are as before.

    Args:
        result: gets the culprits.
        locate: finds the culprits of one call.
        budget: for all suspects together.
        progress: see `telling`.
        model: of a result from a file, or a function that builds it.
        backend: in place of the recorded one.
        classes: of which objects may be made from a file.

    Raises:
        ArgumentError, ArgumentTypeError: what a result from a file needs is missing or another one.
    """
    suspects = result.suspects
    calls = {
        (call.name, phase): call for call in reversed(result.recordings) for phase in call.phases
    }
    chosen = list(dict.fromkeys(calls[item] for item in suspects if item in calls))
    built = None if model is None else model_of(model)
    ready = {call: bound(call, model=built, backend=backend, classes=classes) for call in chosen}
    state = RandomState.now()
    try:
        with _torch.no_modes(), telling(progress) as tell:
            found = _Run(ready, locate, budget, tell).all()
    finally:
        state.restore()
    result.culprits = list(_in_order(suspects, calls, found))
    return list(result.culprits)


class _Run:
    """One call after the other, until time is up or somebody presses Ctrl-C."""

    def __init__(
        self,
        ready: dict[RecordedCall, RecordedCall],
        locate: Locate,
        budget: Budget,
        tell: Tell,
    ) -> None:
        self._ready, self._locate, self._budget, self._tell = ready, locate, budget, tell
        self._stopped = ""

    def all(self) -> dict[RecordedCall, Sequence[Culprit]]:
        """Culprits by call."""
        found: dict[RecordedCall, Sequence[Culprit]] = {}
        for call in _new_kinds_first(list(self._ready)):
            if not self._stopped and not self._budget.allows(_named(call)):
                self._stopped = "its time is used up"
            found[call] = self._one(call, len(found))
        return found

    def _one(self, call: RecordedCall, done: int) -> Sequence[Culprit]:
        if self._stopped:
            return _unfollowed(
                call, NOT_REACHED, f"the drill-down did not get to it: {self._stopped}"
            )

        def on_progress(what: str) -> None:
            self._tell(done, len(self._ready), f"{_named(call)}: {what}")

        try:
            on_progress("running it again")
            return self._locate(self._ready[call], budget=self._budget, on_progress=on_progress)
        except KeyboardInterrupt:
            self._stopped = "it was interrupted"
            return _unfollowed(call, NOT_REACHED, "the drill-down was interrupted here")
        except Exception as error:  # noqa: BLE001 - our failure is a finding, and others follow
            reason = f"the drill-down itself failed: {type(error).__name__}: {error}"
            return _unfollowed(call, CRASHED, reason, not_reached=traceback.format_exc())


def _named(call: RecordedCall) -> str:
    return f"{call.name or '<root>'} ({', '.join(call.phases)})"


def _unfollowed(
    call: RecordedCall, stage: str, explanation: str, *, not_reached: str = ""
) -> list[Culprit]:
    return [
        _nothing(call.name, phase, stage, explanation, not_reached=not_reached)
        for phase in call.phases
    ]


def _nothing(
    name: str, phase: str, stage: str, explanation: str, *, not_reached: str = ""
) -> Culprit:
    return Culprit(
        module=name, phase=phase, stage=stage, explanation=explanation, reproduced=False,
        not_reached=not_reached,
    )  # fmt: skip


def _new_kinds_first(calls: list[RecordedCall]) -> list[RecordedCall]:
    """Equal blocks compile to equal code: one of each kind, in order, before the others."""
    seen: set[Any] = set()
    first: list[RecordedCall] = []
    others: list[RecordedCall] = []
    for call in calls:
        shapes = tuple((name, tuple(item.shape)) for name, item in call.parameters.items())
        kind = (call.kind, call.failed, shapes)
        (others if kind in seen else first).append(call)
        seen.add(kind)
    return first + others


def _in_order(
    suspects: list[Suspect],
    calls: dict[Suspect, RecordedCall],
    found: dict[RecordedCall, Sequence[Culprit]],
) -> Iterable[Culprit]:
    """First divergence first; every suspect has an entry of its own or of the call it shares."""
    given: set[RecordedCall] = set()
    for name, phase in suspects:
        call = calls.get((name, phase))
        if call is None:
            why = "its failing call was not recorded, so that it cannot be run again"
            yield _nothing(name, phase, NOT_RECORDED, why)
        elif call not in given:
            given.add(call)
            yield from found[call] or _unfollowed(call, NOT_REPRODUCED, "nothing was found in it")


def status_of(result: CompareResult) -> int:
    """Exit status: 0 nothing is wrong, 1 a culprit was found, 3 something is and none was."""
    if any(culprit.reproduced for culprit in result.culprits):
        return 1
    return 0 if result.all_pass else 3
