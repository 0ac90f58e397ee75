"""Hooks on all modules and optimizers, and a module run again without any."""

from __future__ import annotations

import contextlib
import re
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
from opcheck.exits import uncut

__all__ = ["ModuleHooks", "OptimizerHooks", "modules_undisturbed"]


_WARNING = re.compile(r"Using `torch\.compile\(module\)` when there are", re.IGNORECASE)
"""An OptimizedModule warns that it calls global hooks twice, which ours do not mind."""


class ModuleHooks:
    """Hooks around every module call of the process.

    Args:
        before: a forward pre-hook; nobody else's.
        after: a forward hook; runs also when the forward raises.
    """

    def __init__(self, before: Callable[..., None], after: Callable[..., None]) -> None:
        self._before, self._after = before, after
        self._was_silent = False

    def put_on(self) -> None:
        """From now on they are called."""
        self._was_silent = any(item[1] == _WARNING for item in warnings.filters)
        warnings.filterwarnings("ignore", message=_WARNING.pattern)
        register_module_forward_pre_hook(self._before)
        register_module_forward_hook(self._after, with_kwargs=True, always_call=True)

    def take_off(self) -> None:
        """As before `put_on`; does no harm where they are not on."""
        # 2.13 forgets the options of a hook that its handle removes, which keeps every later
        # module call off the fast path for the rest of the process
        options = (_torch.forward_hooks_with_kwargs, _torch.forward_hooks_always_called)
        _drop((self._before, self._after), _torch.global_forward_tables, options)
        if not self._was_silent:
            filters = cast("list[Any]", warnings.filters)
            filters[:] = [item for item in filters if item[1] != _WARNING]


class OptimizerHooks:
    """Hooks around every optimizer step of the process.

    Args:
        before: a pre-hook; nobody else's.
        after: a post-hook; does not run when the step raises.
    """

    def __init__(self, before: Callable[..., None], after: Callable[..., None]) -> None:
        self._before, self._after = before, after

    def put_on(self) -> None:
        """From now on they are called."""
        register_optimizer_step_pre_hook(self._before)
        register_optimizer_step_post_hook(self._after)

    def take_off(self) -> None:
        """As before `put_on`; does no harm where they are not on."""
        _drop((self._before, self._after), _torch.optimizer_tables)


def _drop(
    hooks: tuple[Callable[..., None], ...],
    tables: tuple[dict[int, Any], ...],
    options: tuple[dict[int, Any], ...] = (),
) -> None:
    """Take hooks out of torch's own tables: Ctrl-C may have come before there was a handle."""
    ours = {number for table in tables for number, hook in table.items() if hook in hooks}
    for table in (*options, *tables):
        for number in ours:
            table.pop(number, None)


@contextlib.contextmanager
def modules_undisturbed(root: nn.Module) -> Iterator[None]:
    """Run `root` again without anybody noticing: hooks off, attributes as before afterwards."""
    kept: list[tuple[nn.Module, dict[str, Any]]] = []
    kept_global = [dict(table) for table in _torch.global_forward_tables]

    def put_back() -> None:
        for item, attributes in kept:
            item.__dict__.clear()
            item.__dict__.update(attributes)
        for table, entries in zip(_torch.global_forward_tables, kept_global, strict=True):
            table.update(entries)

    try:
        for table in _torch.global_forward_tables:
            table.clear()
        for item in root.modules():
            kept.append((item, dict(item.__dict__)))
            for name in _torch.HOOK_TABLES:
                item.__dict__[name] = type(item.__dict__[name])()
        yield
    finally:
        uncut(put_back)
