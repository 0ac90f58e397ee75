"""A script for the culprits of a failing call: the graph of the call in which the fault shows.

The graph is what Dynamo captured, with what it got and the gradients that came in. Each file is run
here, and only one that shows the fault stays.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from modulecheck import _torch, dynamo
from modulecheck.backends import random_as_eager
from modulecheck.budget import Budget
from modulecheck.call_graphs import CapturedGraph, graphs_of, state_of
from modulecheck.culprit import Culprit
from modulecheck.drilldown import NoReproducer
from modulecheck.graph_repro import write_graph_repro
from modulecheck.recording import RecordedCall
from modulecheck.rerun import Rerun
from modulecheck.snapshot import RandomState
from opcheck.errors import ReproError
from opcheck.exits import uncut

__all__ = ["write_call_repro", "write_repros"]


def write_repros(
    folder: Path, calls: Sequence[RecordedCall], budget: Budget
) -> tuple[list[str], list[str]]:
    """A file for each recorded call, without looking for where its fault is born.

    Args:
        folder: is made.
        calls: failing ones.
        budget: of all.

    Returns:
        The paths, and a sentence for each call that has none.
    """
    paths, notes = [], []
    before = RandomState.now()
    try:
        with _torch.no_modes():
            for call in calls:
                path, reason = _written(folder, call, budget)
                if path:
                    paths.append(path)
                else:
                    notes.append(f"no reproducer of {call.fqn or '<root>'}: {reason}")
    finally:
        uncut(before.restore)
    return paths, notes


def _written(folder: Path, call: RecordedCall, budget: Budget) -> tuple[str, str]:
    stage = call.backend if isinstance(call.backend, str) else ""
    found = [Culprit(module=call.fqn, phase=phase, stage=stage) for phase in call.phases]
    try:
        return str(write_call_repro(folder, call, found, budget)), ""
    except NoReproducer as reason:
        return "", str(reason)
    except Exception as error:  # noqa: BLE001 - our failure must not cost the result
        return "", f"writing it failed: {type(error).__name__}: {error}"


def write_call_repro(
    folder: Path, call: RecordedCall, culprits: Sequence[Culprit], budget: Budget
) -> Path:
    """Write the first graph of the call that shows the fault by itself.

    Args:
        folder: is made.
        call: with its module.
        culprits: for the head of the file.
        budget: of compiles.

    Raises:
        NoReproducer: there is none, and why.
    """
    reasons = []
    with dynamo.isolated():
        for entry in _captured(call, budget):
            path, reason = _tried(folder, entry, call, culprits, budget)
            if path is not None:
                return path
            reasons.append(reason)
    raise NoReproducer("; ".join(dict.fromkeys(reasons)) or "Dynamo captured no graph")


def _captured(call: RecordedCall, budget: Budget) -> list[CapturedGraph]:
    if not budget.allows_compile("the graph for a reproducer"):
        raise NoReproducer("the budget was used up")
    try:
        return graphs_of(Rerun(call))
    except ReproError as reason:
        raise NoReproducer(str(reason)) from reason


def _tried(
    folder: Path,
    entry: CapturedGraph,
    call: RecordedCall,
    culprits: Sequence[Culprit],
    budget: Budget,
) -> tuple[Path | None, str]:
    in_eager = all(item.stage == "eager" for item in culprits)
    backend = "eager" if in_eager else call.backend
    for dynamic in (None,) if in_eager else (None, True):
        if not budget.allows_compile("a reproducer, compiled to see whether it shows the fault"):
            return None, "the budget was used up"
        try:
            path = _write(folder, entry, call, culprits, backend, dynamic=dynamic)
        except ReproError as error:
            return None, str(error)
        is_shown = False
        try:
            is_shown = _shows(path, backend, dynamic=dynamic)
        finally:  # neither an error nor Ctrl-C leaves a file that nobody has seen work
            if not is_shown:
                for written in (path, path.with_suffix(".pt")):
                    written.unlink(missing_ok=True)
        if is_shown:
            return path, ""
    return None, "its graph, compiled alone, gives right results"


def _write(
    folder: Path,
    entry: CapturedGraph,
    call: RecordedCall,
    culprits: Sequence[Culprit],
    backend: Any,
    *,
    dynamic: bool | None,
) -> Path:
    first = culprits[0]
    facts = {
        "module": f"{call.fqn or '<root>'} ({call.kind})",
        "phase": ", ".join(dict.fromkeys(item.phase for item in culprits)),
        "kernel": first.kernel,
        "op": first.op,
        "source": first.source,
        "why": first.explanation,
    }
    return write_graph_repro(
        folder,
        entry.graph,
        entry.inputs,
        name="_".join(filter(None, [call.fqn or "root", first.phase, first.stage, first.op])),
        backend=backend,
        stage=first.stage,
        grads=entry.grads,
        facts=facts,
        dynamic=dynamic,
        state=state_of(call),
        random_state=entry.random_state,
    )


def _shows(path: Path, backend: Any, *, dynamic: bool | None) -> bool:
    """The file, run here without the settings of its `main`, finds the fault."""
    spec = importlib.util.spec_from_file_location("call_repro_written", path)
    if spec is None or spec.loader is None:
        return False
    file: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(file)
    expected, beside = file.in_float64(), file.in_eager()
    graph = file.Graph(file.DEVICE, wide=False)
    if backend == "eager":
        beside, model = [None] * len(expected), graph
    else:
        model = dynamo.compiled_alone(graph, backend, dynamic=dynamic)
    with random_as_eager(backend), contextlib.redirect_stdout(io.StringIO()):
        actual = file.compute(model, wide=False)
        return bool(file.verdict(file.limits(), actual, expected, beside))
