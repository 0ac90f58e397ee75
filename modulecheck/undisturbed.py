"""A module run again without anybody noticing."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

from modulecheck import _torch
from modulecheck.distributed import is_fsdp2
from opcheck.exits import uncut

__all__ = ["undisturbed", "user_hooks"]

_REPARAMETRIZING = "torch.nn.utils"
_DISTRIBUTING = "torch.distributed.tensor"


def _is_part_of_forward(hook: Any) -> bool:
    """Weight norm, spectral norm and pruning of torch.nn.utils compute weights in hooks.

    `parallelize_module` turns inputs and outputs into DTensors and back in hooks.
    """
    home = hook.__module__ if isinstance(hook, types.FunctionType) else type(hook).__module__
    return str(home).startswith((_REPARAMETRIZING, _DISTRIBUTING))


def user_hooks(root: nn.Module) -> int:
    """Hooks that a replay leaves out although they may change what the module computes.

    Those of a module of FSDP2 itself run outside of what is compared.
    """
    return sum(
        not _is_part_of_forward(hook)
        for item in root.modules()
        if item is not root or not is_fsdp2(root)
        for table in _torch.forward_tables
        for hook in table(item).values()
    )


def _held(value: Any) -> Any:
    """A shallow copy of what a forward may change in place without assigning it."""
    return type(value)(value) if type(value) in (list, dict, set) else None


@contextlib.contextmanager
def undisturbed(root: nn.Module) -> Iterator[None]:
    """Run `root` in eager without anybody noticing: hooks off, attributes as before afterwards."""
    kept: list[tuple[nn.Module, dict[str, Any], dict[str, Any]]] = []
    kept_global = [dict(table) for table in _torch.global_forward_tables]

    def put_back() -> None:
        for item, attributes, contents in kept:
            item.__dict__.clear()
            item.__dict__.update(attributes)
            for key, copy in contents.items():
                if copy is not None:
                    _restore(attributes[key], copy)
        for table, entries in zip(_torch.global_forward_tables, kept_global, strict=True):
            table.update(entries)

    try:
        for table in _torch.global_forward_tables:
            table.clear()
        for item in root.modules():
            attributes = dict(item.__dict__)
            contents = {key: _held(value) for key, value in attributes.items()}
            kept.append((item, attributes, contents))
            part_of_forward = {
                key
                for hooks in _torch.forward_tables
                for key, hook in hooks(item).items()
                if _is_part_of_forward(hook)
            }
            for name in _torch.HOOK_TABLES:
                entries = attributes[name]
                item.__dict__[name] = type(entries)(
                    (key, hook) for key, hook in entries.items() if key in part_of_forward
                )
            item.__dict__[_torch.COMPILED_CALL] = None
        yield
    finally:
        uncut(put_back)


def _restore(value: Any, copy: Any) -> None:
    if isinstance(value, list):
        value[:] = copy
    else:
        value.clear()
        value.update(copy)
