"""What of private torch the packages name: read from their source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import nn

NO_TORCH = {"_getframe", "_SubParsersAction", "_replace", "_fields", "_asdict"}
"""Of Python itself."""


def attributes_of(*owners: object) -> frozenset[str]:
    """Names that begin with one underscore."""
    return frozenset(
        name
        for owner in owners
        for name in dir(owner)
        if name.startswith("_") and not name.startswith("__")
    )


OF_TORCH = attributes_of(
    torch.Tensor,
    torch.UntypedStorage,
    torch.autograd.graph.Node,
    torch.library.Library,
    torch.ops.aten.add.Tensor,
    torch.optim.SGD,
    nn.Module(),
    nn.modules.module,
)
OF_MODULES = attributes_of(nn.Module(), nn.modules.module) - {"_version"}
"""No op of ATen is called like one of these."""
BY_NAME = {"getattr", "hasattr", "setattr", "delattr"}


def is_for_type_checkers(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
    )


def is_private(path: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in path.split("."))


def running(node: ast.AST, parent: ast.AST | None = None) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Every node with its parent, but for what only type checkers read, and docstrings."""
    for child in ast.iter_child_nodes(node):
        if is_for_type_checkers(child):
            continue
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
            continue
        yield child, node
        yield from running(child, node)


def own_names(files: Iterable[Path]) -> set[str]:
    """Names that the files of a package themselves define."""
    found = set()
    for path in files:
        for node, _ in running(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls"):
                found.add(node.attr)
    return found


def imported_names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def private_uses(tree: ast.AST, own: set[str], *, is_door: bool = False) -> Iterator[str]:
    """What of private torch a file names otherwise than by asking the door for it."""
    for node, parent in running(tree):
        for name in imported_names(node):
            if name.startswith("torch.") and is_private(name):
                yield f"line {node.lineno}: import of {name}"
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            text = ast.unparse(node)
            is_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if text.startswith("torch.ops.") or is_self or node.attr in NO_TORCH:
                continue
            is_own = node.attr in own - OF_TORCH and not text.startswith("torch.")
            if not is_own:
                yield f"line {node.lineno}: {text}"
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and not is_door:
            is_path = re.fullmatch(r"torch(\.\w+)+", node.value) and is_private(node.value)
            is_read = isinstance(parent, ast.Call) and ast.unparse(parent.func) in BY_NAME
            is_path = is_path and isinstance(parent, (ast.Call, ast.Subscript, ast.Compare))
            if is_path or node.value in OF_MODULES or (is_read and node.value in OF_TORCH):
                yield f"line {node.lineno}: {node.value!r}"
