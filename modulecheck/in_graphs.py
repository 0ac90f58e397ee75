"""The searches inside what a compiler made: kernels, decompositions, graphs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import fx

from modulecheck import _inductor, _torch
from modulecheck.backends import load_backend, random_as_eager
from modulecheck.bisecting import FirstBad, first_bad_node
from modulecheck.budget import Budget, Progress
from modulecheck.compared import Compared
from modulecheck.culprit import Culprit
from modulecheck.decompositions import wrong_decompositions
from modulecheck.findings import Place, described, listed
from modulecheck.graph_capture import Capture, Captured, Given
from modulecheck.graph_values import aten_ops
from modulecheck.kernel_ops import Blamed, blamed_op
from modulecheck.kernels import Probed, WrongKernel, probe, readers_of_zeros
from modulecheck.ladder import DYNAMO, Ladder
from modulecheck.node_origin import input_name, is_computing, op_name
from modulecheck.replay import as_in
from opcheck.records import Metrics

__all__ = ["in_backend", "in_decompositions", "in_dynamo", "in_inductor"]

_NAMES = {"aot_eager": "Dynamo's graph is right, its functionalization by AOT autograd is not"}


# ---- inductor -----------------------------------------------------------------------------------


def in_inductor(
    place: Place, ladder: Ladder, budget: Budget, on_progress: Progress
) -> list[Culprit]:
    """Kernels that are wrong by themselves; without any, the first op with which it goes wrong."""
    probes: list[Probed] = []
    capture = ladder.capture or Capture()
    graphs = sorted(capture.graphs, key=lambda item: item.is_backward)
    for number, captured in enumerate(graphs, 1):
        on_progress(f"kernels of graph {number} of {len(graphs)}")
        if captured.is_backward and "backward" not in place.phases:
            continue
        for run in captured.runs:
            if budget.allows("the kernels of every graph"):
                probes.append(probe(captured, run))
                if probes[-1].wrong:
                    break  # other runs have the same code
    kernels = [(item, wrong) for item in probes for wrong in item.wrong]
    if not kernels:
        kernels = [(item, wrong) for item in probes for wrong in item.other_zeros]
    found = _kernel_culprits(place, kernels, budget, on_progress)
    if found:
        return found
    not_reached = next((item.not_reached for item in probes if item.not_reached), "")
    why = not_reached or "no generated kernel is wrong by itself: a pass over the graph is"
    if any(item.wrong_outputs or item.wrong_inputs for item in probes):
        why = "every generated kernel is right by itself, what calls them hands on another buffer"
    found = _bisected(place, ladder, "inductor", _with_inductor, why, budget, on_progress)
    return [dataclasses.replace(item, not_reached=not_reached) for item in found]


def _with_inductor(graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    backend = load_backend("inductor")
    compiled: Callable[..., Any] = backend(graph, inputs)
    return compiled


def _kernel_culprits(
    place: Place,
    kernels: list[tuple[Probed, WrongKernel]],
    budget: Budget,
    on_progress: Progress,
) -> list[Culprit]:
    blames: dict[str, tuple[int, str]] = {}
    """Name of a kernel -> which of its computing ops it is, and how that is known."""
    found: dict[tuple[str, str], Culprit] = {}
    others: dict[tuple[str, str], list[str]] = {}
    for number, (probed, wrong) in enumerate(kernels, 1):
        on_progress(f"wrong kernel {number} of {len(kernels)}")
        culprit = _kernel_culprit(place, probed, wrong, blames, budget)
        key = culprit.op, culprit.phase
        if key in found:
            others.setdefault(key, []).append(f"{culprit.module or '<root>'} ({culprit.kernel})")
        else:
            found[key] = culprit
    return [_with_others(item, others.get(key, [])) for key, item in found.items()]


def _with_others(culprit: Culprit, others: list[str]) -> Culprit:
    own = f"{culprit.module or '<root>'} ({culprit.kernel})"
    others = [item for item in dict.fromkeys(others) if item != own]
    if not others:
        return culprit
    more = f"; it is wrong in {listed(others)} too"
    text = f"{culprit.explanation.rstrip('.')}{more}."
    return dataclasses.replace(culprit, explanation=text, also_in=tuple(others))


def _kernel_culprit(
    place: Place,
    probed: Probed,
    wrong: WrongKernel,
    blames: dict[str, tuple[int, str]],
    budget: Budget,
) -> Culprit:
    blamed = _blamed(probed, wrong, blames, budget)
    captured = probed.captured
    origin = place.origin(blamed.node)
    part = f" (part of {origin.decomposed_from})" if origin.decomposed_from else ""
    text = (
        f"kernel {wrong.name}, given right inputs, gives a wrong value for {wrong.node.name}:"
        f" {wrong.compared.reason}; {origin.op}{part} {blamed.how}."
    )
    tensor = place.tensor
    rest = [op_name(item.target) for item in wrong.nodes
            if is_computing(item) and item is not blamed.node]  # fmt: skip
    if wrong.late_read:
        tensor, text = _reordered(place, captured, wrong, tensor, origin.op)
    elif wrong.unsettled is not None:
        text = (
            f"kernel {wrong.name} goes on from a buffer that does not hold the result of"
            f" {origin.op}{part} yet: that write is lost or comes too late, and"
            f" {wrong.node.name} is wrong: {wrong.compared.reason}."
        )
    elif wrong.only_zeros:
        readers = readers_of_zeros(captured, wrong, probed.values)
        rest = [*readers, *rest]
        text = (
            f"kernel {wrong.name} loses the sign of zeros in {wrong.node.name} ({origin.op}{part}),"
            f" which {listed(readers) or 'an op after it'} reads."
        )
    return place.culprit(
        blamed.node, "inductor", captured.phase, blamed.compared or wrong.compared,
        kernel=wrong.name, explanation=text, tensor=tensor, other_ops=tuple(rest),
    )  # fmt: skip


def _blamed(
    probed: Probed, wrong: WrongKernel, blames: dict[str, tuple[int, str]], budget: Budget
) -> Blamed:
    if wrong.only_zeros or wrong.late_read or wrong.unsettled is not None:
        return Blamed(wrong.unsettled or wrong.node, wrong.compared, "shows it first")
    computing = [item for item in wrong.nodes if is_computing(item)]
    known = blames.get(wrong.name)
    if known is not None and known[0] < len(computing):
        return Blamed(computing[known[0]], None, known[1])
    blamed = blamed_op(
        probed.captured.lowered_graph, wrong.nodes, wrong.node, probed.values, budget
    )
    if blamed.node in computing and blamed.compared is not None:
        blames[wrong.name] = computing.index(blamed.node), blamed.how
    return blamed


def _reordered(
    place: Place, captured: Captured, wrong: WrongKernel, tensor: str, op: str
) -> tuple[str, str]:
    nodes = {item.name: item for item in captured.lowered_graph.graph.nodes}
    source = nodes[wrong.late_read]
    writes = [
        item
        for item in nodes.values()
        if _torch.is_mutable(item.target) and _root(item.args[0]) is source
    ]
    name = tensor or _input(captured, source)
    by = ""
    if writes:
        origin = place.origin(writes[-1])
        by = f" of {op_name(writes[-1].target)}" + (f" ({origin.source})" if origin.source else "")
    return name, (
        f"{op} in kernel {wrong.name} reads {name} after the write{by}, which the program makes"
        f" later: read and write are reordered."
    )


def _input(captured: Captured, node: fx.Node) -> str:
    """As the user knows it, else the name of the placeholder."""
    place = _inductor.place_of_input(node)
    known = place is not None and place < len(captured.sources)
    return (input_name(captured.sources[place or 0]) if known else "") or f"input {node.name}"


def _root(node: Any) -> Any:
    while isinstance(node, fx.Node) and node.op != "placeholder" and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


# ---- decompositions -----------------------------------------------------------------------------


def in_decompositions(
    place: Place, ladder: Ladder, budget: Budget, on_progress: Progress
) -> list[Culprit]:
    """Ops whose entry of the decomposition table is wrong; without any, the partitioner."""
    stage = "aot_eager_decomp_partition"
    found: list[Culprit] = []
    if budget.allows_compile("the call traced without decompositions"):
        on_progress("comparing ops with their decompositions")
        capture = Capture()
        place.rerun.compiled(capture.undecomposed, dynamic=ladder.dynamic)
        table = _inductor.decompositions()
        seen: set[tuple[str, str]] = set()
        for captured in capture.graphs:
            for wrong in wrong_decompositions(captured, table):
                op = wrong.inner or op_name(wrong.node.target)
                if (op, captured.phase) in seen:
                    continue
                seen.add((op, captured.phase))
                text = (
                    f"the decomposition of {op} gives another result than the op itself:"
                    f" {wrong.compared.reason}."
                )
                found.append(
                    place.culprit(
                        wrong.node, "decomposition", captured.phase, wrong.compared, op=op,
                        explanation=text,
                    )
                )  # fmt: skip
    if found:
        return found
    why = "no decomposition differs from its op: the partitioning of forward and backward does"
    return _bisected(place, ladder, stage, load_backend(stage), why, budget, on_progress)


# ---- any backend --------------------------------------------------------------------------------


def in_backend(
    place: Place, ladder: Ladder, budget: Budget, on_progress: Progress
) -> list[Culprit]:
    """The op of the captured graph with which a backend first goes wrong."""
    own = ladder.born == ladder.top
    backend = load_backend(place.rerun.call.backend if own else ladder.born)
    why = _NAMES.get(ladder.born, f"backend {ladder.born} does not do what its graph says")
    return _bisected(place, ladder, ladder.born, backend, why, budget, on_progress)


def _bisected(
    place: Place,
    ladder: Ladder,
    stage: str,
    backend: Callable[..., Any],
    why: str,
    budget: Budget,
    on_progress: Progress,
) -> list[Culprit]:
    found = []
    for number, given in enumerate(ladder.capture.given if ladder.capture else [], 1):
        on_progress(f"halving graph {number} with {stage}")
        with random_as_eager(place.rerun.call.backend):
            bad = first_bad_node(
                given,
                backend,
                phases=place.phases,
                ambient=lambda: as_in(place.rerun.snapshot, autocast=True),
                budget=budget,
            )
        if bad is not None:
            found.append(_first_bad(place, given, bad, stage, why))
    return found or [_whole(place, ladder, stage, why)]


def _first_bad(place: Place, given: Given, bad: FirstBad, stage: str, why: str) -> Culprit:
    ops = aten_ops(given.graph, given.inputs, bad.node.name)
    computing = [str(item) for item in ops if not getattr(item, "is_view", False)]
    op = computing[-1] if computing else op_name(bad.node.target)
    phase = place.phases[0] if len(place.phases) == 1 else bad.phase
    tensor = place.tensor
    if bad.changed_input is not None and tensor:
        text = f"{tensor} ends wrong: the write of {op} is lost ({why}): {bad.compared.reason}."
    else:
        text = f"{why}; it first goes wrong with {op}: {bad.compared.reason}."
    return place.culprit(
        bad.node, stage, phase, bad.compared, op=op, explanation=text, tensor=tensor
    )  # fmt: skip


def in_dynamo(place: Place, ladder: Ladder, budget: Budget, on_progress: Progress) -> list[Culprit]:
    """The captured graph itself, run op by op, is wrong."""
    return [_whole(place, ladder, "aot_eager", "the graph that Dynamo captured is another program")]


def _whole(place: Place, ladder: Ladder, stage: str, why: str) -> Culprit:
    """No op can be named: the graph as a whole is wrong."""
    failed = ladder.failed or {}
    first: Compared | None = next(iter(failed.values()), None)
    tensors = listed(described(key) for key in failed)
    at = "Dynamo" if ladder.born == DYNAMO else stage
    return Culprit(
        module=place.rerun.call.fqn,
        phase=place.phases[0],
        stage=stage,
        metrics=first.metrics if first is not None else Metrics(),
        tensor=place.tensor,
        explanation=(
            f"the error is born in {at} ({tensors}): {why}, and no single op of it is wrong by"
            f" itself: {first.reason if first is not None else ''}"
        ),
    )
