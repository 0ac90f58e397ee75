"""Kernels of the real compiled artifact that are wrong by themselves.

The generated code runs on the inputs of the failing call. After each kernel its buffers are held
against the lowered graph run op by op, and then overwritten with that reference. So every kernel
starts from right values, and only one that is wrong by itself shows. Nothing is compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from modulecheck import _inductor, _torch, kernel_probe
from modulecheck.compared import Compared
from modulecheck.graph_capture import Captured, GraphRun
from modulecheck.graph_values import (
    Values,
    between,
    compute,
    draws_random_numbers,
    judge,
    recomputed,
    same_bits,
    zeros_differ,
)
from modulecheck.node_origin import is_computing, op_name
from modulecheck.snapshot import RandomState
from opcheck.exits import uncut
from opcheck.records import Verdict

__all__ = ["Probed", "WrongKernel", "as_drawn", "probe", "readers_of_zeros"]


@dataclass
class WrongKernel:
    """A kernel that got right inputs and gave a wrong buffer."""

    name: str
    node: fx.Node
    """Whose value the first wrong buffer should hold."""
    compared: Compared
    nodes: list[fx.Node]
    """The ops that the kernel runs up to its wrong buffers, in order."""
    targets: list[fx.Node]
    """Whose values its wrong buffers should hold."""
    late_read: str = ""
    """The input that it read after a write that should have come later."""
    unsettled: fx.Node | None = None
    """Whose buffer it goes on from although that does not hold the node's value yet."""
    only_zeros: bool = False
    """It is wrong in the sign of zeros alone."""
    actual: Tensor | None = None
    """What it gave for `node`."""


@dataclass
class Probed:
    """One run of one graph, kernel by kernel."""

    captured: Captured
    values: Values
    wrong: list[WrongKernel] = field(default_factory=list)
    wrong_outputs: dict[int, Compared] = field(default_factory=dict)
    """By place: wrong although every kernel is right."""
    wrong_inputs: dict[str, Compared] = field(default_factory=dict)
    """By placeholder: inputs that ended wrong although every kernel is right."""
    other_zeros: list[WrongKernel] = field(default_factory=list)
    """Kernels that are wrong in the sign of zeros alone: most often nobody reads it."""
    num_kernels: int = 0
    num_compared: int = 0
    not_reached: str = ""


@dataclass
class _Bad:
    node: fx.Node
    compared: Compared
    actual: Tensor


class _Watch:
    """The observer: judges, then overwrites."""

    def __init__(
        self,
        captured: Captured,
        lowered: _inductor.Lowered,
        values: Values,
        inputs_after: list[Any],
    ) -> None:
        graph = captured.lowered_graph.graph
        self._lowered, self._values = lowered, values
        placeholders = [node.name for node in graph.nodes if node.op == "placeholder"]
        self._after = dict(zip(placeholders, inputs_after, strict=True))
        self._by_name = {node.name: node for node in graph.nodes}
        self._known = {node.name for node in graph.nodes if node.op == "placeholder"}
        self._unsettled: dict[str, str] = {}
        """Node of a buffer that is written more than once -> the kernel that wrote it last."""
        self.found = Probed(captured, values)

    def __call__(self, kernel: str, tensors: dict[str, Any]) -> None:
        self.found.num_kernels += kernel != "output"
        bad: list[_Bad] = []
        zeros: list[_Bad] = []
        right: set[str] = set()
        for name, tensor in tensors.items():
            node, compared = (
                self._look(name, tensor) if isinstance(tensor, Tensor) else (None, None)
            )
            if node is None:
                continue
            self.found.num_compared += 1
            fails = compared is not None and compared.verdict == Verdict.FAIL
            if fails and name in self._lowered.mutated:
                # maybe not written to the end yet; whoever reads it will show
                self._unsettled[node.name] = kernel
                continue
            self._unsettled.pop(node.name, None)
            right.add(node.name)
            if compared is None:
                continue
            if fails:
                bad.append(_Bad(node, compared, tensor.detach().clone()))
            elif zeros_differ(tensor, self._values[node.name]):
                zeros.append(_Bad(node, compared, tensor.detach().clone()))
            if not _is_alias(node):
                tensor.copy_(self._values[node.name])
        if bad:
            self.found.wrong.append(self._wrong(kernel, bad))
        if zeros:
            self.found.other_zeros.append(self._wrong(kernel, zeros))
            self.found.other_zeros[-1].only_zeros = True
        self._known |= right

    def _wrong(self, kernel: str, bad: list[_Bad]) -> WrongKernel:
        nodes = between([item.node for item in bad], self._known)
        order = {node: place for place, node in enumerate(nodes)}
        bad.sort(key=lambda item: order.get(item.node, len(order)))
        first = bad[0]
        unsettled = next((node for node in nodes if node.name in self._unsettled), None)
        if unsettled is not None:
            kernel = self._unsettled[unsettled.name]
        return WrongKernel(
            kernel, first.node, first.compared, nodes, [item.node for item in bad],
            self._late_read(nodes, first), unsettled, actual=first.actual,
        )  # fmt: skip

    def _look(self, name: str, tensor: Tensor) -> tuple[fx.Node | None, Compared | None]:
        """The node whose value this should be, and None where it is that, bit for bit."""
        judged: list[tuple[float, fx.Node, Compared]] = []
        for node in self._candidates(name, tensor):
            expected = self._values[node.name]
            if same_bits(tensor, expected):
                return node, None
            nodes = between([node], self._known - {node.name})
            if node.op == "placeholder" or draws_random_numbers(nodes):
                continue
            compared = judge(tensor, expected, nodes=nodes, name=node.name, values=self._values)
            judged.append((compared.metrics.q, node, compared))
            if compared.verdict != Verdict.FAIL:
                return node, compared
        if not judged:
            return None, None
        _, node, compared = min(judged, key=lambda item: item[0])
        earlier = None if name in self._lowered.mutated else self._earlier(node, tensor)
        return (earlier, None) if earlier is not None else (node, compared)

    def _earlier(self, node: fx.Node, tensor: Tensor) -> fx.Node | None:
        """The op before `node` whose value the buffer holds, where that is the case.

        Inductor sometimes names a buffer after an op that it fuses into whoever reads the buffer:
        after the logarithm, of a sum of exponentials. If instead the op was lost, the reader is
        wrong, or an output at the end.
        """
        nodes = between([node], self._known - {node.name})
        for place in reversed(range(len(nodes) - 1)):
            other = nodes[place]
            value = self._values[other.name]
            if not is_computing(other) or not isinstance(value, Tensor):
                continue
            if value.shape != tensor.shape or value.dtype != tensor.dtype:
                continue
            leading = between([other], self._known)
            compared = judge(tensor, value, nodes=leading, name=other.name, values=self._values)
            if compared.verdict != Verdict.FAIL:
                return other
        return None

    def _candidates(self, name: str, tensor: Tensor) -> list[fx.Node]:
        """Nodes whose value the buffer may hold by now: its own, or of a later write into it."""
        names = [self._lowered.nodes.get(name, name)]
        names += [self._lowered.nodes.get(item, "") for item in self._lowered.mutated.get(name, ())]
        found = []
        for item in dict.fromkeys(names):
            value = self._values.get(item)
            if isinstance(value, Tensor) and value.shape == tensor.shape:
                found.append(self._by_name[item])
        return found

    def _late_read(self, nodes: list[fx.Node], bad: _Bad) -> str:
        """The input whose later value explains what the kernel gave, "" if none does."""
        read = {item for node in nodes for item in node.all_input_nodes if item not in nodes}
        for source in read:
            later = self._after.get(source.name)
            if later is None or same_bits(later, self._values[source.name]):
                continue
            swapped = {**self._values, source.name: later}
            again = recomputed(nodes, swapped, wide=False)
            if again is not None and same_bits(bad.actual, again[bad.node.name]):
                return source.name
        return ""


def _is_alias(node: fx.Node) -> bool:
    """It looks into the memory of another node: to overwrite it would overwrite that one."""
    return bool(getattr(node.target, "is_view", False))


@contextmanager
def as_drawn(run: GraphRun) -> Iterator[None]:
    """The random numbers of a run again; the generators are as before afterwards."""
    before = RandomState.now()
    run.random.restore()
    try:
        yield
    finally:
        uncut(before.restore)


def probe(captured: Captured, run: GraphRun) -> Probed:
    """Run the generated code of one graph on one of its recorded runs, kernel by kernel."""
    with as_drawn(run):
        values, expected, inputs_after = compute(captured.lowered_graph, run.inputs)
    lowered = captured.lowered
    if lowered is None:
        return Probed(captured, values, not_reached=_inductor.CAPTURE_FAILED)
    watch = _Watch(captured, lowered, values, inputs_after)
    call = kernel_probe.instrumented(lowered.source, vars(lowered.module), watch)
    if call is None:
        why = lowered.problem or _inductor.CAPTURE_FAILED
        return Probed(captured, values, not_reached=why)
    given = [_inductor.strided_copy(item) for item in run.inputs]
    kept = list(given)
    with as_drawn(run), torch.no_grad(), _torch.no_modes():
        outputs = call(given)
    found = watch.found
    known = {node.name for node in captured.lowered_graph.graph.nodes if node.op == "placeholder"}
    _look_at_outputs(found, list(outputs), expected, known)
    _look_at_inputs(found, kept, inputs_after)
    return found


def _look_at_outputs(
    found: Probed, actual: list[Any], expected: list[Any], known: set[str]
) -> None:
    graph = found.captured.lowered_graph.graph
    (results,) = graph.find_nodes(op="output")[0].args
    for place, (node, mine, theirs) in enumerate(zip(results, actual, expected, strict=True)):
        if not isinstance(theirs, Tensor) or same_bits(mine, theirs):
            continue
        nodes = between([node], known)
        if draws_random_numbers(nodes):
            continue
        compared = judge(mine, theirs, nodes=nodes, name=node.name, values=found.values)
        if compared.verdict == Verdict.FAIL:
            found.wrong_outputs[place] = compared


def _look_at_inputs(found: Probed, actual: list[Any], expected: list[Any]) -> None:
    """Inputs that the graph writes, after the run. Others may be reused as memory (donated)."""
    graph = found.captured.lowered_graph.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for node, mine, theirs in zip(placeholders, actual, expected, strict=True):
        if not isinstance(theirs, Tensor) or same_bits(mine, theirs):
            continue
        if same_bits(theirs, found.values[node.name]):
            continue
        compared = judge(mine, theirs, nodes=[], name=node.name, values={})
        if compared.verdict == Verdict.FAIL:
            found.wrong_inputs[node.name] = compared


def readers_of_zeros(captured: Captured, wrong: WrongKernel, values: Values) -> list[str]:
    """The ops that give another value for what a kernel lost of the sign of zeros, the first one.

    By the name of the op that the user called.
    """
    later = False
    after = []
    for node in captured.lowered_graph.graph.nodes:
        if later and node.op == "call_function":
            after.append(node)
        later |= node is wrong.node
    swapped = {**values, wrong.node.name: wrong.actual}
    again = recomputed(after, swapped, wide=False)
    for node in after if again is not None else ():
        mine, theirs = (again or {})[node.name], values[node.name]
        if isinstance(theirs, Tensor) and is_computing(node) and not _alike(mine, theirs):
            return [str(node.meta.get("original_aten") or op_name(node.target))]
    return []


def _alike(actual: Tensor, expected: Tensor) -> bool:
    return same_bits(actual, expected) or zeros_differ(actual, expected)
