"""The dispatch modes of this thread."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from opcheck import _torch
from opcheck.lazy_bits import lazy_bits

__all__ = ["Mode", "PassingMode", "active_modes", "is_innermost", "take_off", "without_modes"]


class Mode(_torch.TorchDispatchMode):
    """Passes every call on, or what `_handle` makes of it; conjugate bits are as without a mode."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with lazy_bits():
            return self._handle(func, types, args, kwargs or {})

    def _handle(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What `__torch_dispatch__` returns."""
        del types
        return func(*args, **kwargs)


class PassingMode(Mode):
    """One under which compiled code stays compiled, which a mode by default turns off."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """What torch asks of a mode before it compiles."""
        return True


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


def take_off(mode: _torch.TorchDispatchMode) -> None:
    """Take a mode off the stack, also from below modes that were entered after it.

    A mode's own exit pops whatever is on top, and Ctrl-C in the middle of it leaves what torch
    notes of the modes as it was. Does no harm where the mode is not on the stack.
    """
    stack = list(_torch.mode_stack())
    above = stack[stack.index(mode) + 1 :] if mode in stack else []
    try:
        while mode in _torch.mode_stack():
            _torch.pop_mode()
    finally:
        present = _torch.mode_stack()
        for item in above:
            if item not in present:
                _torch.push_mode(item)
        _note_modes()


def _note_modes() -> None:
    stack = _torch.mode_stack()
    no_compile = any(not item.ignore_compile_internals() for item in stack)
    notes = bool(stack), any(not item.is_infra_mode() for item in stack), no_compile
    for write, value in zip(_torch.mode_notes, notes, strict=True):
        write(_torch.python_dispatch, value)
    _torch.set_no_compile(no_compile)
