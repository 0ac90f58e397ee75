"""The thread that something belongs to."""

from __future__ import annotations

import threading

__all__ = ["OwnThread"]


class OwnThread:
    """The thread that claimed it last; nobody's at first.

    Not known by `threading.get_ident()`: the number of a thread that has ended is given to the
    next one that begins.
    """

    def __init__(self) -> None:
        self._local = threading.local()

    def claim(self) -> None:
        """It is this thread's from now on, and no other's."""
        if not self.is_current:
            self._local = threading.local()
            self._local.is_own = True

    @property
    def is_current(self) -> bool:
        """True in the thread that claimed it."""
        return getattr(self._local, "is_own", False)
