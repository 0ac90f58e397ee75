"""Globs over op names and module names, the same for choosing what to check and what to review."""

from __future__ import annotations

import fnmatch

__all__ = ["module_matches", "op_matches"]


def op_matches(op: str, pattern: str) -> bool:
    """Glob over an op name: `aten.add.*`, `add`, `add.Tensor` all match `aten.add.Tensor`."""
    parts = op.split(".")
    names = {op, ".".join(parts[1:]), ".".join(parts[:2]), parts[1] if len(parts) > 1 else op}
    return any(fnmatch.fnmatchcase(name, pattern) for name in names)


def module_matches(module: str, pattern: str) -> bool:
    """Glob over a module name; the children of a module that matches match too."""
    if pattern in ("<root>", ""):
        return not module
    parts = module.split(".")
    return any(
        fnmatch.fnmatchcase(".".join(parts[:end]), pattern) for end in range(1, len(parts) + 1)
    )
