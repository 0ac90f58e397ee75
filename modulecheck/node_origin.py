"""Where a node of a compiler's graph comes from: op, module and line of the user."""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import fx, nn

from opcheck import source_lines

__all__ = ["Origin", "input_name", "is_computing", "op_name", "origin_of"]

_FRAME = re.compile(r'^\s*File "(?P<path>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')
_CARETS = re.compile(r"^[\s^~]+$")


@dataclass(frozen=True)
class Origin:
    """Of one node."""

    op: str
    module: str
    """FQN inside the compiled module, "" for itself."""
    source: str
    """`model.py:41 in forward: <code>`, "" if unknown."""
    decomposed_from: str
    """The op that the user called, where that is another one."""


def op_name(target: Any) -> str:
    """`aten.erf.default`."""
    name = str(target)
    if isinstance(target, str) or (name.count(".") >= 2 and not name.startswith("<")):
        return name
    return getattr(target, "__name__", name)


def is_computing(node: fx.Node) -> bool:
    """False for views and for taking one of several results."""
    if node.op == "placeholder" or node.target is operator.getitem:
        return False
    if getattr(node.target, "is_view", False):
        return False
    packet = str(getattr(node.target, "overloadpacket", node.target))
    return packet not in ("aten.reshape", "aten._unsafe_view", "aten.sym_size", "aten.view")


def of_results(node: fx.Node) -> fx.Node:
    """The op, of a node that only takes one of its results."""
    while node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def origin_of(node: fx.Node, modules: dict[int, str]) -> Origin:
    """What the graph knows of a node; of its neighbours, where a pass of the compiler made it.

    Args:
        node: of any graph that Dynamo's capture led to.
        modules: id of each submodule -> its name.
    """
    node = of_results(node)
    informed = _informed(node)
    original = informed.meta.get("original_aten")
    name = op_name(node.target)
    return Origin(
        op=name,
        module=_module_of(informed, modules),
        source=_line_of(informed),
        decomposed_from=str(original) if original is not None and str(original) != name else "",
    )


_PART = re.compile(r"\._(?P<kind>modules|parameters|buffers)\['(?P<name>[^']+)'\]")
_ARGUMENT = re.compile(r"^L\['(?P<name>\w+)'\](\[(?P<place>\w+|'\w+')\])?$")


def input_name(source: str) -> str:
    """`parameter up.weight`, `buffer mean`, `argument x`, of where Dynamo took an input from.

    "" where that is something else: a global, an attribute, an item of an argument.
    """
    if source.startswith("L['self']"):
        parts = list(_PART.finditer(source))
        if not parts or "L['self']" + "".join(part[0] for part in parts) != source:
            return ""
        kind = parts[-1]["kind"].removesuffix("s")
        return f"{kind} {'.'.join(part['name'] for part in parts)}" if kind != "module" else ""
    found = _ARGUMENT.match(source)
    if found is None:
        return ""
    if found["place"] is not None:
        in_star = found["name"] in ("args", "kwargs")
        return f"argument {found['place'].strip(chr(39))}" if in_star else ""
    return f"argument {found['name']}"


def names_of(module: nn.Module) -> dict[int, str]:
    """For `origin_of`."""
    return {id(item): name for name, item in module.named_modules(remove_duplicate=False)}


def _informed(node: fx.Node) -> fx.Node:
    """The node, or the nearest one that it was made of or for."""
    waiting, seen = [node], {node}
    while waiting:
        current = waiting.pop(0)
        if _frames(current):
            return current
        for other in (*current.all_input_nodes, *current.users):
            if other not in seen and other.op == "call_function":
                seen.add(other)
                waiting.append(other)
    return node


def _module_of(node: fx.Node, modules: dict[int, str]) -> str:
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    for key in reversed(list(stack)):
        number = str(key).partition("@")[0]
        if number.isdigit() and int(number) in modules:
            return modules[int(number)]
    return ""


def _frames(node: fx.Node) -> list[tuple[str, str, str, str]]:
    lines = (node.meta.get("stack_trace") or "").splitlines()
    found = []
    for place, line in enumerate(lines):
        match = _FRAME.match(line)
        if match is None:
            continue
        code = ""
        for other in lines[place + 1 : place + 2]:
            if not _FRAME.match(other) and not _CARETS.match(other):
                code = other.strip()
        found.append((match["path"], match["line"], match["function"], code))
    return found


def _line_of(node: fx.Node) -> str:
    """The innermost frame that is not torch's own."""
    frames = _frames(node)
    users = [
        frame for frame in frames if not frame[0].startswith(source_lines.TORCH_FOLDER)
    ] or frames
    if not users:
        return ""
    path, line, function, code = users[-1]
    where = f"{Path(path).name}:{line} in {function}"
    return f"{where}: {code}" if code else where
