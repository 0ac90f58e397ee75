"""What inductor made of a graph in the real step, kept so that a drill-down can look into it.

Nothing about compiling changes: inductor's own compiler of one graph runs, and what it returns is
handed on as it is. The code of a graph lives as long as Dynamo's, or a recorded call that ran it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from modulecheck import _inductor
from modulecheck.backends import load_backend
from modulecheck.graph_capture import Captured, copied, noted
from modulecheck.same_program import Inputs, inputs_for

__all__ = ["Artifact", "OtherGraphError", "Reused", "compiled_and_kept"]


class OtherGraphError(RuntimeError):
    """Dynamo captured a graph that the step had not compiled."""


@dataclass(eq=False, repr=False)
class Artifact:
    """The compiled code of one graph that Dynamo captured."""

    captured: fx.Graph
    """A copy of what Dynamo captured."""
    names: dict[int, str]
    """Submodules of the module that was compiled, by id, which the graphs know them by."""
    graphs: list[Captured] = field(default_factory=list)
    """Forward and backward, as far as inductor generated code for them."""
    num_cached: int = 0
    """Graphs whose code was read from a cache, so that nothing is known of it."""
    compiled: Any = None

    @property
    def is_whole(self) -> bool:
        """Its code can be looked into; AOT autograd's cache gives a forward and a backward."""
        return bool(self.graphs) and not self.num_cached


def compiled_and_kept(
    graph: fx.GraphModule, inputs: Any, names: dict[int, str], **options: Any
) -> Artifact:
    """Compile with inductor as Dynamo would, and keep what came of it.

    Args:
        graph: as Dynamo hands it over; belongs to inductor afterwards.
        inputs: fake ones.
        names: of the submodules of the module that is compiled.
        options: of the backend.
    """
    artifact = Artifact(copied(graph).graph, names)
    sources = _inductor.sources_of(graph)

    def inner(lowered_graph: fx.GraphModule, examples: Any, **rest: Any) -> Any:
        with _inductor.lowerings() as lowered:
            compiled = _inductor.compile_inner(lowered_graph, examples, **rest)
        if not lowered or not hasattr(compiled, "current_callable"):
            artifact.num_cached += 1
        else:
            artifact.graphs.append(
                Captured(
                    traced=lowered_graph, lowered_graph=lowered_graph, lowered=lowered[-1],
                    compiled=compiled, is_backward=bool(rest.get("is_backward", False)),
                    names=names, sources=sources,
                )
            )  # fmt: skip
        return compiled

    artifact.compiled = load_backend("inductor")(graph, inputs, inner_compile=inner, **options)
    return artifact


class Reused:
    """A backend that compiles nothing: it hands out what the step had compiled.

    Attributes:
        graphs: those that were handed out, with their runs.
        is_whole: all code that was handed out can be looked into.
        is_dynamic: some of it takes sizes that are fixed now.
    """

    def __init__(self, artifacts: Sequence[Artifact]) -> None:
        self._left = list(artifacts)
        self._stack = contextlib.ExitStack()
        self.graphs: list[Captured] = []
        self.is_whole, self.is_dynamic = True, False

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """What the graphs get is copied in their runs inside."""
        with self._stack:
            yield

    def __call__(self, graph: fx.GraphModule, inputs: Any, **_: Any) -> Callable[..., Any]:
        """The code of an equal graph.

        Raises:
            OtherGraphError: there is none.
        """
        artifact, places = self._equal(graph.graph)
        self._left.remove(artifact)
        self.is_whole &= artifact.is_whole
        self.is_dynamic |= bool(places.sizes)
        for captured in artifact.graphs:
            mine = dataclasses.replace(captured, runs=[])
            self.graphs.append(mine)
            self._stack.enter_context(_noting(mine))
        return lambda *args: artifact.compiled(*places.of(args))

    def _equal(self, graph: fx.Graph) -> tuple[Artifact, Inputs]:
        for artifact in self._left:
            places = inputs_for(artifact.captured, graph)
            if places is not None:
                return artifact, places
        raise OtherGraphError("the graph is not one that the step compiled")


@contextlib.contextmanager
def _noting(captured: Captured) -> Iterator[None]:
    code = captured.compiled
    before = code.current_callable
    code.current_callable = noted(captured, before)
    try:
        yield
    finally:
        code.current_callable = before
