"""Hooks on all modules and optimizers, and a module run again without any."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, cast

from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from opcheck import _torch

__all__ = ["modules_undisturbed", "register_module_hooks", "register_optimizer_hooks"]


def register_module_hooks(
    before: Callable[..., None], after: Callable[..., None]
) -> list[Callable[[], None]]:
    """Global hooks around every module call; `after` runs also when the forward raises.

    Returns:
        Functions that take the hooks off again.
    """
    filters_before = list(warnings.filters)
    # an OptimizedModule warns that it calls global hooks twice, which ours do not mind
    warnings.filterwarnings("ignore", message=r"Using `torch\.compile\(module\)` when there are")
    ours = [item for item in warnings.filters if item not in filters_before]
    before_handle = register_module_forward_pre_hook(before)
    after_handle = register_module_forward_hook(after, with_kwargs=True, always_call=True)

    def remove_after() -> None:
        after_handle.remove()
        # on 2.13 the handle forgets this entry, which keeps every later module call off the fast
        # path for the rest of the process
        _torch.forward_hooks_with_kwargs.pop(after_handle.id, None)

    def remove_filter() -> None:
        for item in ours:
            with contextlib.suppress(ValueError):  # the user has reset the filters
                cast("list[Any]", warnings.filters).remove(item)

    return [before_handle.remove, remove_after, remove_filter]


def register_optimizer_hooks(
    before: Callable[..., None], after: Callable[..., None]
) -> list[Callable[[], None]]:
    """Global hooks around every optimizer step; `after` does not run when the step raises."""
    handles = [
        register_optimizer_step_pre_hook(before),
        register_optimizer_step_post_hook(after),
    ]
    return [handle.remove for handle in handles]


@contextlib.contextmanager
def modules_undisturbed(root: nn.Module) -> Iterator[None]:
    """Run `root` again without anybody noticing: hooks off, attributes as before afterwards."""
    kept: list[tuple[nn.Module, dict[str, Any]]] = []
    kept_global = [dict(table) for table in _torch.global_forward_tables]
    try:
        for table in _torch.global_forward_tables:
            table.clear()
        for item in root.modules():
            kept.append((item, dict(item.__dict__)))
            for name in _torch.HOOK_TABLES:
                item.__dict__[name] = type(item.__dict__[name])()
        yield
    finally:
        for item, attributes in kept:
            item.__dict__.clear()
            item.__dict__.update(attributes)
        for table, entries in zip(_torch.global_forward_tables, kept_global, strict=True):
            table.update(entries)
