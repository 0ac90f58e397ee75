"""From a recorded failing call to where its error is born: stage, kernel, op, line."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from torch import nn

from modulecheck import dynamo
from modulecheck.advice import with_advice
from modulecheck.budget import Budget, Progress
from modulecheck.culprit import NOT_REPRODUCED, Culprit
from modulecheck.findings import Place, not_reproduced
from modulecheck.in_eager import eager_is_wrong, in_eager
from modulecheck.in_graphs import in_backend, in_decompositions, in_dynamo, in_inductor
from modulecheck.ladder import DYNAMO, Ladder, climb
from modulecheck.recording import RecordedCall
from modulecheck.rerun import Rerun

__all__ = ["locate"]

Search = Callable[[Place, Ladder, Budget, Progress], list[Culprit]]


def locate(
    call: RecordedCall,
    *,
    module: nn.Module | None = None,
    budget: Budget | None = None,
    on_progress: Progress | None = None,
) -> list[Culprit]:
    """Find where the error of a failing call is born.

    The user's module, Dynamo's and inductor's caches and their configuration are as before
    afterwards, also after Ctrl-C.

    Args:
        call: a failing call, as recorded in its step.
        module: in place of `call.module` where the recording comes from a file.
        budget: of time and compiles; None: the default one.
        on_progress: told what is being done.

    Returns:
        At least one culprit, those of the forward first. One with `stage` "not reproduced" says
        that the call run again was right: no clean bill.

    Raises:
        ValueError: there is no module to run.
    """
    budget = budget or Budget()
    before = len(budget.refused)
    progress = on_progress or _silent
    progress("running the call again in eager")
    place = Place(Rerun(call, module))
    if place.rerun.eager.problem:
        return [not_reproduced(place, f"eager raised {place.rerun.eager.problem}", budget)]
    with dynamo.isolated():
        found = _search(place, budget, progress)
    refused = "; ".join(budget.refused[before:])
    return [_with(item, refused) for item in found]


def _search(place: Place, budget: Budget, progress: Progress) -> list[Culprit]:
    wrong_eager = eager_is_wrong(place.rerun)
    if wrong_eager.alone:
        return in_eager(place, wrong_eager, progress)
    ladder = climb(place.rerun, budget, progress)
    if not ladder.born:
        reason = ladder.problem or "the call run again agrees with eager and float64"
        return [not_reproduced(place, reason, budget, ladder)]
    place.learn(ladder.capture.graphs if ladder.capture else [])
    found = _SEARCHES.get(ladder.born, in_backend)(place, ladder, budget, progress)
    found = with_advice(found, place, ladder, budget, progress)
    if wrong_eager.keys:
        found = [*in_eager(place, wrong_eager, progress), *found]
    return found


_SEARCHES: dict[str, Search] = {
    DYNAMO: in_dynamo,
    "aot_eager_decomp_partition": in_decompositions,
    "inductor": in_inductor,
}


def _silent(text: str) -> None:
    pass


def _with(culprit: Culprit, not_reached: str) -> Culprit:
    if not not_reached or culprit.stage == NOT_REPRODUCED:
        return culprit
    parts = [item for item in (culprit.not_reached, not_reached) if item]
    return dataclasses.replace(culprit, not_reached="; ".join(parts))
