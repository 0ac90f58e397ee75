"""What is to be undone when a context ends, in a form that Ctrl-C cannot cut short.

`contextlib.ExitStack` loses the function that Ctrl-C comes in front of, and what it runs at that
moment. Here each function stays in the list until it has returned.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from opcheck.own_thread import OwnThread

__all__ = ["Exits", "uncut"]

_ATTEMPTS = 3
"""Of one function, when Ctrl-C comes each time."""


class Exits:
    """Functions that undo, last first. Each must do no harm when it runs twice, or for nothing.

    `add` one before doing what it undoes: Ctrl-C between the two then leaves nothing behind.
    """

    def __init__(self) -> None:
        self._functions: list[Callable[[], object]] = []
        self._process, self._thread = os.getpid(), OwnThread()
        self._thread.claim()

    @property
    def is_pending(self) -> bool:
        """Something is still to be undone."""
        return bool(self._functions)

    @property
    def is_fork(self) -> bool:
        """This process is not the one that entered."""
        return self._process != os.getpid()

    @property
    def is_elsewhere(self) -> bool:
        """This thread is not the one that entered; what it would undo is of the other one."""
        return not self.is_fork and not self._thread.is_current

    def add(self, function: Callable[[], object]) -> None:
        """Run it on leaving, before those that were added earlier."""
        self._functions.append(function)

    def run(self) -> None:
        """Undo everything; in another thread nothing.

        Raises:
            BaseException: the first that one of them raised, after all have run.
        """
        if self.is_elsewhere:
            return
        first: BaseException | None = None
        cut = 0
        while self._functions:
            error = self._run_until_raised()
            first = first or error
            is_cut = error is not None and not isinstance(error, Exception)
            cut = cut + 1 if is_cut else 0
            if error is not None and (not is_cut or cut == _ATTEMPTS):
                self._functions.pop()
                cut = 0
        if first is not None:
            raise first

    def _run_until_raised(self) -> BaseException | None:
        try:
            while self._functions:
                self._functions[-1]()
                self._functions.pop()
        except BaseException as error:  # noqa: BLE001 - raised when the others have run
            return error
        return None


def uncut(function: Callable[[], object]) -> None:
    """Run a function to its end, also when Ctrl-C comes in the middle; it is raised then.

    Args:
        function: does no harm when it runs a second time from the beginning.
    """
    try:
        function()
    except KeyboardInterrupt:
        function()
        raise
