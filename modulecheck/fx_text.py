"""A captured graph as a Python class that another process can run."""

from __future__ import annotations

import importlib
import re
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx, nn

from opcheck.errors import ReproError

__all__ = ["GraphText", "spell_graph"]

_BUILT_IN = frozenset({"torch", "inf", "nan", "math", "sys", "os"})
"""Names that every reproducer has imported."""
CONTAINER = "torch.nn.Module()"


@dataclass(slots=True)
class GraphText:
    """Source of the classes of a graph, the outermost last."""

    name: str
    """Of the class."""
    classes: list[str] = field(default_factory=list)
    imports: list[str] = field(default_factory=list)
    """Import statements."""
    constants: dict[str, Tensor] = field(default_factory=dict)
    """By the names under which the class asks for them."""


def spell_graph(
    graph: fx.GraphModule, name: str = "Graph", *, constant: Callable[[Tensor], str]
) -> GraphText:
    """The class of a graph, and of every graph inside it.

    Args:
        graph: as Dynamo, AOT autograd or inductor made it.
        name: of the class.
        constant: gives the expression that makes a tensor which the graph holds.

    Raises:
        ReproError: it calls something that cannot be imported elsewhere.
    """
    text = GraphText(name)
    _add_class(text, graph, name, constant)
    text.imports = list(dict.fromkeys(text.imports))
    return text


def _add_class(
    text: GraphText, graph: fx.GraphModule, name: str, constant: Callable[[Tensor], str]
) -> None:
    made: dict[str, str] = {}
    for node in graph.graph.nodes:
        if node.op in ("get_attr", "call_module"):
            made.setdefault(node.target, "")
    lines = []
    for target in made:
        lines += _attribute(text, graph, target, name, constant, made)
    source = _named_plainly(graph).python_code("self")
    body = [_without_deletions(line) for line in source.src.strip().splitlines()]
    for alias, item in source.globals.items():
        if any(re.search(rf"\b{re.escape(alias)}\b", line) for line in body):
            text.imports += _import_of(alias, item)
    head = [f"class {name}(torch.nn.Module):", "    def __init__(self, device, wide):"]
    if any("held[" in line for line in lines):
        lines.insert(0, "held = constants(device, wide)")
    init = ["        super().__init__()", *(f"        {line}" for line in lines)]
    text.classes.append("\n".join([*head, *init, "", *(f"    {line}".rstrip() for line in body)]))


def _named_plainly(graph: fx.GraphModule) -> fx.Graph:
    """The same graph; arguments have the names of their nodes, and no types."""
    twin = fx.Graph()
    twin.output(twin.graph_copy(graph.graph, {}))
    for node in twin.nodes:
        if node.op == "placeholder":
            node.type, node.target = None, node.name
    return twin


_DELETION = re.compile(r";  (\w+ = )+None(?=\s*(#.*)?$)")
_DEVICE = re.compile(r"(?:torch\.)?device\(type='\w+'(?:, index=\d+)?\)")


def _without_deletions(line: str) -> str:
    """`t = f(x);  x = None` without its end; devices are those that the file is run for."""
    return _DEVICE.sub("torch.device(DEVICE)", _DELETION.sub("", line))


def _attribute(
    text: GraphText,
    graph: fx.GraphModule,
    target: str,
    name: str,
    constant: Callable[[Tensor], str],
    made: dict[str, str],
) -> list[str]:
    """Statements that put one attribute where the graph looks for it."""
    lines = []
    *parents, last = target.split(".")
    owner: Any = graph
    path = "self"
    for parent in parents:
        owner = getattr(owner, parent)
        path += f".{parent}"
        if path not in made:
            made[path] = CONTAINER
            lines.append(f"{path} = {CONTAINER}")
    value = getattr(owner, last)
    if isinstance(value, Tensor):
        lines.append(f"{path}.{last} = {constant(value)}")
    elif isinstance(value, fx.GraphModule):
        inner = f"{name}_{target.replace('.', '_')}"
        _add_class(text, value, inner, constant)
        lines.append(f"{path}.{last} = {inner}(device, wide)")
    elif isinstance(value, nn.Module):
        lines += _module(value, f"{path}.{last}", constant)
    else:
        raise ReproError(f"the graph holds {target!r}, a {type(value).__name__}, not a tensor")
    return lines


def _module(module: nn.Module, path: str, constant: Callable[[Tensor], str]) -> list[str]:
    """One of torch's own modules, made anew with its parameters and buffers."""
    kind = type(module)
    if not kind.__module__.startswith("torch.nn.") or any(module.children()):
        raise ReproError(f"the graph calls a {kind.__qualname__}, which is no module of torch")
    lines = [f"{path} = torch.nn.{kind.__name__}({module.extra_repr()})"]
    for name, parameter in module.named_parameters():
        wants = f", requires_grad={parameter.requires_grad}"
        lines.append(f"{path}.{name} = torch.nn.Parameter({constant(parameter)}{wants})")
    lines += [f"{path}.{name} = {constant(buffer)}" for name, buffer in module.named_buffers()]
    if not module.training:
        lines.append(f"{path}.eval()")
    return lines


def _import_of(alias: str, item: Any) -> list[str]:
    if alias in _BUILT_IN:
        return []
    if isinstance(item, types.ModuleType):
        return [f"import {item.__name__} as {alias}"]
    home, name = getattr(item, "__module__", None), getattr(item, "__qualname__", None)
    if item is type(None):
        return [f"{alias} = type(None)"]
    if home and name and "." not in name and _is_there(home, name, item):
        return [f"from {home} import {name} as {alias}"]
    raise ReproError(f"the graph calls {alias}, which no other process can import")


def _is_there(home: str, name: str, item: Any) -> bool:
    if home == "__main__":
        return False
    try:
        return getattr(importlib.import_module(home), name, None) is item
    except ImportError:
        return False
