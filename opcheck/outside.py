"""Reference work: outside of autograd, autocast, modes and overrides, and known as such."""

from __future__ import annotations

import functools
import threading
from typing import Any

from opcheck import _torch
from opcheck.kernel_table import Originals, kernels
from opcheck.lazy_bits import lazy_bits

__all__ = [
    "as_in_the_step",
    "is_ours",
    "leave_references",
    "outside_everything",
    "reference_depth",
    "running_reference",
]

_AUTOCAST_KEYS = functools.reduce(
    lambda keys, name: keys | _torch.DispatchKeySet(getattr(_torch.DispatchKey, name)),
    [name for name in dir(_torch.DispatchKey) if name.startswith("Autocast")],
    _torch.DispatchKeySet(_torch.DispatchKey.Undefined),
)


class _Reference(threading.local):
    def __init__(self) -> None:
        self.open: list[outside_everything] = []


_reference = _Reference()


def running_reference() -> bool:
    """True while this thread does reference work: kernels under test stand aside then."""
    return bool(_reference.open) and _reference.open[-1].stands_aside


def reference_depth() -> int:
    """How many contexts of reference work are open in this thread."""
    return len(_reference.open)


def leave_references(depth: int) -> None:
    """Close contexts of reference work that an exception left open.

    Ctrl-C may come at the first instruction of an `__exit__`, which then does nothing: autograd
    would stay off for the rest of the process (1 of 70 interrupts, measured).
    """
    while len(_reference.open) > depth:
        _reference.open[-1].__exit__()


def is_ours(error: BaseException, depth: int) -> bool:
    """True for a crash, which becomes a record; False for Ctrl-C, which is to be raised on.

    Args:
        error: what code of ours raised.
        depth: `reference_depth()` from before it ran; references begun since then are left.
    """
    leave_references(depth)
    return isinstance(error, Exception)


class outside_everything:  # noqa: N801 - used as a context manager, spelled like one
    """Reference work: no autograd, no autocast, no mode, no `__torch_function__`, no override.

    A class and not a generator, because it is entered for every checked call: 2 us against 8.
    """

    __slots__ = ("_guards",)
    _guards: list[Any]
    stands_aside = True
    """Kernels under test do, for torch's own."""

    def __enter__(self) -> None:
        guards = self._guards = []
        _reference.open.append(self)
        try:
            for make in (_torch.DisableTorchFunction, _torch.BelowAutograd, lazy_bits):
                guards.append(make())
                guards[-1].__enter__()
            guards.append(_torch.ExcludeKeys(_AUTOCAST_KEYS))
            guards[-1].__enter__()
            if _torch.mode_stack_length():
                self._push(_torch.disable_current_modes())
            if self.stands_aside and kernels().overridden:
                self._push(Originals())  # type: ignore[no-untyped-call]
        except BaseException:  # Ctrl-C must not leave autograd off
            self.__exit__()
            raise

    def _push(self, guard: Any) -> None:
        guard.__enter__()
        self._guards.append(guard)

    def __exit__(self, *exc: object) -> None:
        while self._guards:
            self._guards.pop().__exit__(None, None, None)
        if _reference.open and _reference.open[-1] is self:
            _reference.open.pop()


class as_in_the_step(outside_everything):  # noqa: N801 - as above
    """As outside of everything, but whatever kernel the step ran runs again."""

    __slots__ = ()
    stands_aside = False
