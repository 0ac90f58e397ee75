"""The state of registered kernels, in one object: who is told of their calls, which are known.

Enabling, disabling and sessions set it, wrapped kernels read it, and the mode says here which call
it is dispatching, so that a kernel that it reaches does not report the same call again.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any, Protocol

from opcheck.calls import Call

__all__ = ["SWITCH", "KernelSwitch", "Observer"]


class Observer(Protocol):
    """Who is told of calls. None of these may raise."""

    def before(
        self, func: Any, types: tuple[type, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Call | bool:
        """About to run: a Call to be checked, True to count its result only, False for neither."""

    def after(self, call: Call | bool, out: Any) -> None:  # noqa: FBT001 - see `before`
        """The op gave `out`."""

    def raised(self, call: Call | bool) -> None:  # noqa: FBT001 - see `before`
        """The op raised, and the exception goes on to the caller."""


class _Local(threading.local):
    announced: tuple[Any, tuple[Call | bool, ...]] | None = None
    """Overload that is being dispatched in this thread, and what its observers made of it."""
    silenced = False
    """Kernels of this thread run for our own purposes and report to nobody."""


class KernelSwitch:
    """Read by every wrapped kernel at every call."""

    __slots__ = ("_enabled", "_local", "_lock", "_sessions", "has_kernels", "is_on")

    def __init__(self) -> None:
        self.is_on = False
        """Somebody wants to be told: the only thing a wrapped kernel looks at when it is off."""
        self.has_kernels = False
        """Some kernel was wrapped: until then the mode need not announce anything."""
        self._enabled: Observer | None = None
        self._sessions: list[Observer] = []
        self._local = _Local()
        self._lock = threading.Lock()

    # ---- who is told ----

    @property
    def observer(self) -> Observer | None:
        """The innermost session, else what `enable_precision_check` set."""
        sessions = self._sessions
        try:
            return sessions[-1]
        except IndexError:
            return self._enabled

    def enable(self, observer: Observer | None) -> None:
        """Set, or with None take off, who is told outside of sessions."""
        with self._lock:
            self._enabled = observer
            self._refresh()

    def enter(self, observer: Observer) -> None:
        """Tell `observer`, a session, until it leaves."""
        with self._lock:
            self._sessions.append(observer)
            self._refresh()

    def leave(self, observer: Observer) -> None:
        """Tell it no more; does nothing where it was not told."""
        with self._lock:
            if observer in self._sessions:
                self._sessions.remove(observer)
            self._refresh()

    def _refresh(self) -> None:
        self.is_on = self._enabled is not None or bool(self._sessions)

    def after_fork(self) -> None:
        """A forked process starts with checking off: its parent's files are not its own."""
        self._lock = threading.Lock()
        self._local = _Local()
        self._enabled = None
        self._sessions = []
        self.is_on = False

    # ---- calls that are known already ----

    @contextlib.contextmanager
    def announced(self, func: Any, call: Call | bool) -> Iterator[None]:  # noqa: FBT001
        """The call of `func` that runs in here has an observer."""
        local = self._local
        before = local.announced
        earlier = before[1] if before is not None and before[0] is func else ()
        local.announced = (func, (call, *earlier))
        try:
            yield
        finally:
            local.announced = before

    @contextlib.contextmanager
    def silenced(self) -> Iterator[None]:
        """Kernels that this thread runs in here are not checked, counted or logged."""
        local = self._local
        before, local.silenced = local.silenced, True
        try:
            yield
        finally:
            local.silenced = before

    @property
    def is_silenced(self) -> bool:
        """In this thread."""
        return self._local.silenced

    def take_announced(self, func: Any) -> tuple[Call | bool, ...] | None:
        """What observers made of the running call of `func`, once; None when nobody saw it."""
        local = self._local
        found = local.announced
        if found is None or found[0] is not func:
            return None
        local.announced = None
        return found[1]


SWITCH = KernelSwitch()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=SWITCH.after_fork)
