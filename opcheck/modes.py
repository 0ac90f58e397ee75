"""The dispatch modes of this thread."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from opcheck import _torch

__all__ = ["active_modes", "is_innermost", "without_modes", "without_modes_above"]


def active_modes() -> list[Any]:
    """The dispatch modes that a call of this thread goes through, innermost last."""
    return list(_torch.mode_stack())


def is_innermost(mode: _torch.TorchDispatchMode) -> bool:
    """True for the mode that a call of this thread reaches first; False inside of its handler."""
    stack = _torch.mode_stack()
    return bool(stack) and stack[-1] is mode


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Nobody's dispatch mode sees what runs in here; kernels are those that are registered."""
    if not _torch.mode_stack_length():
        yield
        return
    with _torch.disable_current_modes():
        yield


@contextlib.contextmanager
def without_modes_above(mode: _torch.TorchDispatchMode) -> Iterator[Callable[[], None]]:
    """Take the modes that were entered after `mode` off the stack for a moment.

    A mode's own exit pops whatever is on top. Gives a function that takes off `mode` itself where
    it is still there.
    """
    stack = _torch.mode_stack()
    above = stack[stack.index(mode) + 1 :] if mode in stack else []
    for _ in above:
        _torch.pop_mode()

    def take_off() -> None:
        if mode in _torch.mode_stack():
            _torch.pop_mode()

    try:
        yield take_off
    finally:
        for item in above:
            _torch.push_mode(item)
