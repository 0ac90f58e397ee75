"""Are two graphs that Dynamo captured the same program, and how is the code of one run for another?

A graph of dynamic shapes takes sizes as inputs and computes with them. With the sizes of a call put
in it can be held against a graph of that call with fixed shapes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from modulecheck import _inductor

__all__ = ["Inputs", "inputs_for"]


@dataclass(frozen=True)
class Inputs:
    """For each input of a compiled graph, where it comes from."""

    places: list[int | None]
    """Among the inputs that are given; None: a size, in `sizes`."""
    sizes: list[int]

    def of(self, given: tuple[Any, ...]) -> list[Any]:
        """The inputs in order."""
        sizes = iter(self.sizes)
        return [next(sizes) if place is None else given[place] for place in self.places]


def inputs_for(kept: fx.Graph, given: fx.Graph) -> Inputs | None:
    """How the code of `kept` runs on the inputs of `given`; None: they are not the same program.

    Args:
        kept: as Dynamo captured it.
        given: likewise; a graph with fixed shapes, or one that is equal in its sizes, too.
    """
    sizes = _sizes_in(kept, given)
    if sizes is None:
        return None
    program = _program(kept, sizes)
    if program is None or program != _program(given, {}):
        return None
    by_name = {node.target: place for place, node in enumerate(_placeholders(given))}
    places: list[int | None] = []
    values: list[int] = []
    for node in _placeholders(kept):
        place = by_name.get(node.target)
        if place is None:
            value = _inductor.concrete(node.meta["example_value"], sizes)
            if not isinstance(value, int):
                return None
            values.append(value)
        places.append(place)
    return Inputs(places, values)


def _placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def _sizes_in(kept: fx.Graph, given: fx.Graph) -> dict[Any, Any] | None:
    """What the symbols of `kept` stand for in `given`."""
    values = {node.target: node.meta.get("example_value") for node in _placeholders(given)}
    sizes: dict[Any, Any] = {}
    for node in _placeholders(kept):
        mine, theirs = node.meta.get("example_value"), values.get(node.target)
        if not isinstance(mine, Tensor):
            continue
        if not isinstance(theirs, Tensor) or mine.dim() != theirs.dim():
            return None
        for size, other in zip(mine.shape, theirs.shape, strict=True):
            sizes.update(_inductor.symbol_is(size, other))
    return sizes


def _program(graph: fx.Graph, sizes: dict[Any, Any]) -> list[str] | None:
    """One line for each node that is no size; None: it holds tensors or modules of its own."""
    shown: dict[fx.Node, Any] = {}
    lines: list[str] = []
    for node in graph.nodes:
        if node.op in ("call_module", "get_attr"):
            return None
        value = node.meta.get("example_value")
        if _is_size(value):
            shown[node] = _inductor.concrete(value, sizes)
            continue
        shown[node] = _Name(len(lines))
        args = fx.map_arg((node.args, node.kwargs), shown.__getitem__)
        about = _about(value, sizes) if node.op == "placeholder" else ""
        lines.append(f"{node.op} {node.target} {args} {about}")
    return lines


@dataclass(frozen=True)
class _Name:
    """Of a value, by its place: graphs number their nodes in their own way."""

    place: int


def _is_size(value: Any) -> bool:
    if isinstance(value, torch.Size):
        return True
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def _about(value: Any, sizes: dict[Any, Any]) -> str:
    if not isinstance(value, Tensor):
        return f"{type(value).__name__} {value}"
    strides = value.stride() if value.layout is torch.strided else ()
    shape, steps = (_inductor.concrete(torch.Size(item), sizes) for item in (value.shape, strides))
    return f"{value.dtype} {shape} {steps} {value.layout} {value.device} {value.requires_grad}"
