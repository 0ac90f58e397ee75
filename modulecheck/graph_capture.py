"""The graphs of one compiled call: traced, lowered, and what each run of them got and gave."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from modulecheck import _inductor, _torch
from modulecheck.snapshot import RandomState

__all__ = ["Capture", "Captured", "Given", "GraphRun", "copied", "noted"]

MOST_RUNS = 8
"""Runs of one graph whose inputs are kept; equal code in a loop shares a graph."""


@dataclass
class GraphRun:
    """What one run of a graph got, copied before it."""

    inputs: list[Any]
    random: RandomState


@dataclass
class Captured:
    """One graph that inductor compiled, and its runs."""

    traced: fx.GraphModule
    """After AOT autograd, before inductor's passes."""
    lowered_graph: fx.GraphModule
    """After inductor's passes: what was lowered."""
    lowered: _inductor.Lowered | None
    """None: the generated code cannot be reached."""
    compiled: Any
    is_backward: bool
    runs: list[GraphRun] = field(default_factory=list)
    names: dict[int, str] | None = None
    """By id, the submodules that its nodes are of; None: those of the run again."""
    sources: list[str] = field(default_factory=list)
    """Where Dynamo took the inputs of its graph from."""

    @property
    def phase(self) -> str:
        """Of the step: "forward" or "backward"."""
        return "backward" if self.is_backward else "forward"


@dataclass
class Given:
    """A graph as Dynamo hands it to a backend, with the inputs of its first run."""

    graph: fx.GraphModule
    inputs: list[Any]
    requires_grad: list[bool]


class Capture:
    """Backends that note what passes through them."""

    def __init__(self) -> None:
        self.graphs: list[Captured] = []
        self.given: list[Given] = []
        self.num_runs = 0

    def inductor(self, graph: fx.GraphModule, inputs: Any, **_: Any) -> Any:
        """Inductor, each of its graphs kept."""
        compile_graph = functools.partial(self._compile, _inductor.sources_of(graph))
        return _inductor.compile_fx(graph, inputs, compile_graph)

    def around(self, backend: Callable[..., Any]) -> Callable[..., Any]:
        """A backend, each graph that it is given kept."""

        def compile_graph(graph: fx.GraphModule, inputs: Any, **options: Any) -> Any:
            mine = copied(graph)
            compiled = backend(graph, inputs, **options)
            given = Given(mine, [], [])
            self.given.append(given)

            def run(*args: Any) -> Any:
                self.num_runs += 1
                if not given.inputs:
                    given.inputs = [_inductor.strided_copy(item) for item in args]
                    given.requires_grad = [bool(getattr(i, "requires_grad", False)) for i in args]
                return compiled(*args)

            return run

        return compile_graph

    def undecomposed(self, graph: fx.GraphModule, inputs: Any, **_: Any) -> Any:
        """AOT autograd without decompositions, each of its graphs kept and run op by op."""
        return _inductor.aot_backend(self._keep(is_backward=False), self._keep(is_backward=True))(
            graph, inputs
        )

    def _keep(self, *, is_backward: bool) -> Callable[[fx.GraphModule, Any], Any]:
        def compile_graph(graph: fx.GraphModule, inputs: Any) -> Any:
            captured = Captured(graph, graph, None, graph, is_backward)
            self.graphs.append(captured)

            return noted(captured, fx.Interpreter(graph).boxed_run)

        return compile_graph

    def _compile(
        self, sources: list[str], graph: fx.GraphModule, inputs: Any, **options: Any
    ) -> Any:
        traced = copied(graph)
        with _inductor.lowerings() as lowered:
            compiled = _inductor.compile_inner(graph, inputs, **options)
        captured = Captured(
            traced=traced,
            lowered_graph=graph,
            lowered=lowered[-1] if lowered else None,
            compiled=compiled,
            is_backward=bool(options.get("is_backward", False)),
            sources=sources,
        )
        self.graphs.append(captured)

        return noted(captured, compiled)


def noted(captured: Captured, run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """A function that takes its inputs in one list, with copies of them kept in `captured.runs`."""

    def noting(args: list[Any]) -> Any:
        if len(captured.runs) < MOST_RUNS:
            copies = [_inductor.strided_copy(item) for item in args]
            captured.runs.append(GraphRun(copies, RandomState.now()))
        return run(args)

    return _torch.boxed(noting)  # else AOT autograd passes *args


def copied(graph: fx.GraphModule) -> fx.GraphModule:
    """The same ops with their meta; parameters and constants are shared, nobody writes them.

    A deep copy would copy the fake tensors in `meta` too, which those of constants refuse.
    """
    twin = fx.Graph()
    output = twin.graph_copy(graph.graph, {})
    twin.output(output)
    return fx.GraphModule(graph, twin)
