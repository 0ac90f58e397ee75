"""From the failing modules of a result to stage, kernel, op and line, one recorded call at a time.

What could not be followed is in the list too, with the reason: an empty list means that no module
was suspect, never that nobody looked.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
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
from opcheck.exits import uncut

__all__ = ["CRASHED", "NOT_REACHED", "NOT_RECORDED", "Locate", "NoReproducer", "drill", "status_of"]

NOT_RECORDED = "not recorded"
NOT_REACHED = "not reached"
CRASHED = "drill-down crashed"

Locate = Callable[..., Sequence[Culprit]]
"""`locate(call, budget=..., on_progress=...)`."""
Reproduce = Callable[[RecordedCall, Sequence[Culprit], Budget], Path]
"""Writes a script; raises `NoReproducer`."""
Suspect = tuple[str, str]


class NoReproducer(Exception):  # noqa: N818 - it is an answer
    """There is none for this call; the message says why."""


def drill(
    result: CompareResult,
    locate: Locate,
    *,
    budget: Budget,
    progress: Callable[[str], object] | Literal[False] | None = None,
    reproduce: Reproduce | None = None,
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
        reproduce: writes a script that shows the culprits of one call; None: nobody does.
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
            found = _Run(ready, locate, reproduce, budget, tell).all()
    finally:
        uncut(state.restore)
    result.culprits = list(_in_order(suspects, calls, found))
    return list(result.culprits)


class _Run:
    """One call after the other, until time is up or somebody presses Ctrl-C."""

    def __init__(
        self,
        ready: dict[RecordedCall, RecordedCall],
        locate: Locate,
        reproduce: Reproduce | None,
        budget: Budget,
        tell: Tell,
    ) -> None:
        self._ready, self._locate, self._reproduce = ready, locate, reproduce
        self._budget, self._tell = budget, tell
        self._stopped = ""

    def all(self) -> dict[RecordedCall, Sequence[Culprit]]:
        """Culprits by call."""
        found: dict[RecordedCall, Sequence[Culprit]] = {}
        first, equals = _kinds(list(self._ready))
        for call in [*first, *equals]:
            self._budget.refused.clear()  # what was refused is of one call
            if not self._stopped and not self._budget.allows(_named(call)):
                self._stopped = "its time is used up"
            found[call] = self._one(call, len(found))
            if call in first and any(item.reproduced for item in found[call]):
                found[call] = self._with_repro(call, found[call], len(found))
        return found

    def _one(self, call: RecordedCall, done: int) -> Sequence[Culprit]:
        if self._stopped:
            reason = f"the drill-down did not get to it: {self._stopped}"
            return _unfollowed(call, NOT_REACHED, reason)
        on_progress = self._teller(call, done)
        try:
            on_progress("running it again")
            return self._locate(self._ready[call], budget=self._budget, on_progress=on_progress)
        except KeyboardInterrupt:
            self._stopped = "it was interrupted"
            return _unfollowed(call, NOT_REACHED, "the drill-down was interrupted here")
        except Exception as error:  # noqa: BLE001 - our failure is a finding, and others follow
            reason = f"the drill-down itself failed: {type(error).__name__}: {error}"
            return _unfollowed(call, CRASHED, reason, not_reached=traceback.format_exc())

    def _teller(self, call: RecordedCall, done: int) -> Callable[[str], None]:
        return lambda what: self._tell(done, len(self._ready), f"{_named(call)}: {what}")

    def _with_repro(
        self, call: RecordedCall, culprits: Sequence[Culprit], done: int
    ) -> Sequence[Culprit]:
        """The culprits with the path of a script, or with the reason why there is none."""
        if self._reproduce is None or self._stopped:
            return culprits
        shown = [item for item in culprits if item.reproduced]
        self._teller(call, done - 1)("writing a reproducer")
        path, reason = "", ""
        try:
            path = str(self._reproduce(self._ready[call], shown, self._budget))
        except NoReproducer as error:
            reason = f"no reproducer: {error}"
        except KeyboardInterrupt:
            self._stopped = "it was interrupted"
            reason = "no reproducer: it was interrupted"
        except Exception as error:  # noqa: BLE001 - our failure must not cost the culprits
            reason = f"no reproducer: writing it failed: {type(error).__name__}: {error}"
        return [
            dataclasses.replace(
                item, repro=path, not_reached="; ".join(filter(None, [item.not_reached, reason]))
            )
            if item.reproduced
            else item
            for item in culprits
        ]


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


def _kinds(calls: list[RecordedCall]) -> tuple[list[RecordedCall], list[RecordedCall]]:
    """One call of each kind, in order, and the others: equal blocks compile to equal code."""
    seen: set[Any] = set()
    first: list[RecordedCall] = []
    equals: list[RecordedCall] = []
    for call in calls:
        shapes = tuple((name, tuple(item.shape)) for name, item in call.parameters.items())
        kind = (call.kind, call.phases, shapes)
        (equals if kind in seen else first).append(call)
        seen.add(kind)
    return first, equals


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
