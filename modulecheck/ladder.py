"""The ladder of stages: at which one does a failing call go wrong?

Walked from the top: the user's own backend first, which also says whether a run again shows the
fault at all, then the stages below it, until one is right. The error is born one above that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from modulecheck import _inductor
from modulecheck.artifacts import Reused
from modulecheck.backends import load_backend, random_as_eager
from modulecheck.budget import Budget, Progress
from modulecheck.compared import Compared
from modulecheck.goldens import Key
from modulecheck.graph_capture import Capture
from modulecheck.rerun import Outcome, Rerun

__all__ = ["Ladder", "climb", "name_of"]

DYNAMO = "dynamo"
"""The graph that Dynamo captured, run op by op: its backend "eager"."""


@dataclass
class Ladder:
    """Where the error is born."""

    top: str
    born: str = ""
    """A stage of `culprit.STAGES`, "dynamo", or the name of another backend; "": it does not
    show."""
    failed: dict[Key, Compared] | None = None
    """At the stage where it is born."""
    capture: Capture | None = None
    """Of the run with the user's backend."""
    dynamic: bool | None = None
    """With which shapes it showed: True, where only a graph of dynamic shapes does."""
    problem: str = ""
    """What the run again raised."""
    of_step: bool = False
    """It was reproduced with what the step itself had compiled."""
    step_code: str = "what the step had compiled is not there"
    """What became of running that once more, for people."""


def name_of(backend: Any) -> str:
    """For people, and to compare with the stages."""
    if isinstance(backend, str):
        return backend
    return str(getattr(backend, "__name__", type(backend).__name__))


def climb(rerun: Rerun, budget: Budget, on_progress: Progress) -> Ladder:
    """Run the stages that are needed; call it inside `dynamo.isolated()`.

    What the step itself had compiled runs first: a fault may be in that code alone.
    """
    found = Ladder(name_of(rerun.call.backend))
    if rerun.call.artifacts and found.top == "inductor":
        on_progress("running what the step had compiled")
        _run_step_code(rerun, found)
    if not found.born:
        _compile_again(rerun, found, budget, on_progress)
    if found.born:
        _descend(rerun, found, budget, on_progress)
    return found


def _run_step_code(rerun: Rerun, found: Ladder) -> None:
    for dynamic in (None, True):
        reused, capture = Reused(rerun.call.artifacts), Capture()
        with reused.watched():
            outcome = _run(rerun, reused, capture, dynamic=dynamic)
        if outcome.problem or not capture.num_runs:
            found.step_code = "what the step had compiled could not be run again"
            continue
        failed = rerun.failed(outcome)
        found.step_code = "what the step had compiled was run again and is right"
        if failed and not reused.is_whole:
            found.step_code = (
                "the code that the step ran was read from a cache of inductor on disk, where no"
                " kernel of it can be told; it is wrong when it is run again, too"
            )
        elif failed:
            capture.graphs = reused.graphs
            found.capture, found.of_step = capture, True
            found.born, found.failed = found.top, failed
            found.dynamic = True if reused.is_dynamic else dynamic
        return


def _compile_again(rerun: Rerun, found: Ladder, budget: Budget, on_progress: Progress) -> None:
    for dynamic in (None, True):
        if not budget.allows_compile(f"the call compiled by {found.top} with other shapes"):
            return
        on_progress(f"compiling with {found.top}" + (" for dynamic shapes" if dynamic else ""))
        capture = Capture()
        backend = rerun.call.backend
        own = capture.inductor if found.top == "inductor" else load_backend(backend)
        outcome = _run(rerun, own, capture, dynamic=dynamic)
        found.capture = capture
        if outcome.problem or not capture.num_runs:
            found.problem = outcome.problem or "Dynamo compiled nothing of it"
            return
        failed = rerun.failed(outcome)
        if failed:
            found.born, found.failed, found.dynamic = found.top, failed, dynamic
            return


def _run(rerun: Rerun, own: Any, capture: Capture, *, dynamic: bool | None) -> Outcome:
    with random_as_eager(rerun.call.backend):
        return rerun.compiled(capture.around(own), dynamic=dynamic)


def _descend(rerun: Rerun, found: Ladder, budget: Budget, on_progress: Progress) -> None:
    for stage, backend in _below(found.top):
        if not budget.allows_compile(f"stage {stage}"):
            return
        on_progress(f"compiling with {stage}")
        outcome = rerun.compiled(load_backend(backend), dynamic=found.dynamic)
        failed = rerun.failed(outcome, found.failed)
        if not failed:
            return
        found.born, found.failed = stage, failed


def _below(top: str) -> list[tuple[str, str]]:
    """(stage, backend), from the top down."""
    known = [stage for stage in _inductor.AOT_STAGES if stage != "eager"]
    below = known[: known.index(top)] if top in known else ["aot_eager"]
    stages = [(stage, stage) for stage in reversed(below)] if top != "eager" else []
    return [*stages, (DYNAMO, "eager")] if top != "eager" else []
