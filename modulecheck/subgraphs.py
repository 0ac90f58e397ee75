"""Pieces of a graph as graphs of their own, fed with the values that the whole one had there."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, fx

__all__ = ["Piece", "alone", "piece"]


class Piece:
    """A graph, its inputs, and which node each of its outputs is."""

    def __init__(self, graph: fx.GraphModule, inputs: list[Any], outputs: list[Output]) -> None:
        self.graph, self.inputs, self.outputs = graph, inputs, outputs


Output = tuple[fx.Node, int | None]
"""A node, and which of several results; None: it has one."""


class _Builder:
    def __init__(self, owner: fx.GraphModule, values: Mapping[str, Any]) -> None:
        self._owner, self._values = owner, values
        self.graph = fx.Graph()
        self.inputs: list[Any] = []
        self._last: fx.Node | None = None
        self._fed: dict[fx.Node, Any] = {}

    def feed(self, node: fx.Node) -> Any:
        """A placeholder with the node's value; what is no tensor becomes a constant."""
        if node in self._fed:
            return self._fed[node]
        value = self._values[node.name]
        if isinstance(value, (list, tuple)):
            parts = [self._placeholder(f"{node.name}_{i}", item) for i, item in enumerate(value)]
            self._fed[node] = type(value)(parts)
        else:
            self._fed[node] = self._placeholder(node.name, value)
        return self._fed[node]

    def _placeholder(self, name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if self._last is None:
            with self.graph.inserting_before():
                made = self.graph.placeholder(f"given_{name}")
        else:
            with self.graph.inserting_after(self._last):
                made = self.graph.placeholder(f"given_{name}")
        made.meta["val"] = value
        self._last = made
        self.inputs.append(value)
        return made

    def add(self, node: fx.Node, read: Any) -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), read)
        if node.target is operator.getitem and isinstance(args[0], (list, tuple)):
            parts: Any = args[0]  # fed as a tuple
            return parts[args[1]]
        made = self.graph.create_node(node.op, node.target, args, kwargs, node.name)
        made.meta = {key: item for key, item in node.meta.items() if key != "val"}
        return made

    def done(self, outputs: list[tuple[Output, fx.Node]]) -> Piece:
        self.graph.output(tuple(made for _, made in outputs))
        self.graph.lint()
        return Piece(
            fx.GraphModule(self._owner, self.graph), self.inputs, [key for key, _ in outputs]
        )


def _outputs(builder: _Builder, node: fx.Node, made: fx.Node, value: Any) -> Any:
    if isinstance(value, Tensor):
        yield (node, None), made
        return
    for place, part in enumerate(value if isinstance(value, (list, tuple)) else ()):
        if isinstance(part, Tensor):
            yield (node, place), builder.graph.call_function(operator.getitem, (made, place))


def alone(owner: fx.GraphModule, nodes: Iterable[fx.Node], values: Mapping[str, Any]) -> Piece:
    """Each node by itself, fed from reference values: no error goes from one to the next."""
    builder = _Builder(owner, values)
    outputs: list[tuple[Output, fx.Node]] = []
    for node in nodes:
        made = builder.add(node, builder.feed)
        outputs += _outputs(builder, node, made, values[node.name])
    return builder.done(outputs)


def piece(
    owner: fx.GraphModule,
    nodes: list[fx.Node],
    targets: Iterable[fx.Node],
    values: Mapping[str, Any],
) -> Piece:
    """These nodes together, from the reference values of what they read to `targets`."""
    builder = _Builder(owner, values)
    made: dict[fx.Node, Any] = {}
    for node in nodes:
        made[node] = builder.add(node, lambda item: made.get(item) or builder.feed(item))
    outputs: list[tuple[Output, fx.Node]] = []
    for node in targets:
        outputs += _outputs(builder, node, made[node], values[node.name])
    return builder.done(outputs)
