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
from opcheck.global_hooks import modules_undisturbed

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


def _in_a_replay(item: nn.Module) -> dict[str, Any]:
    """Attributes of a module while it runs again: its own code, hooks that are part of it."""
    part_of_forward = {
        key
        for hooks in _torch.forward_tables
        for key, hook in hooks(item).items()
        if _is_part_of_forward(hook)
    }
    found: dict[str, Any] = {_torch.COMPILED_CALL: None}
    for name in _torch.HOOK_TABLES:
        entries = vars(item)[name]
        found[name] = type(entries)(
            (key, hook) for key, hook in entries.items() if key in part_of_forward
        )
    return found


@contextlib.contextmanager
def undisturbed(root: nn.Module) -> Iterator[None]:
    """Run `root` in eager without anybody noticing: hooks off, attributes as before afterwards."""
    attributes = [(item, _in_a_replay(item)) for item in root.modules()]
    values = (value for item, _ in attributes for value in vars(item).values())
    held = [(value, copy) for value in values if (copy := _held(value)) is not None]

    def put_back() -> None:
        for value, copy in held:
            _restore(value, copy)

    try:
        with modules_undisturbed(root):
            for item, inside in attributes:
                vars(item).update(inside)
            yield
    finally:
        uncut(put_back)


def _restore(value: Any, copy: Any) -> None:
    if isinstance(value, list):
        value[:] = copy
    else:
        value.clear()
        value.update(copy)
