"""Ctrl-C at the n-th place of our own code, where a real one can come.

CPython looks for signals where a Python function begins and after a call of a C function. The same
places have a profiler called, which may raise.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import modulecheck
import opcheck

OURS = tuple(f"{Path(package.__file__).parent}/" for package in (opcheck, modulecheck))


class Cut:
    """Raises KeyboardInterrupt once, at the `at`-th place; counts them.

    Python itself drops an exception that comes while a generator is closed that nobody holds any
    more, as that of `any(...)` is once the answer is known: then `was_dropped` is True.
    """

    def __init__(self, at: int) -> None:
        self.at, self.count, self.where = at, 0, ""
        self.was_dropped = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event not in ("call", "c_return") or not frame.f_code.co_filename.startswith(OURS):
            return
        self.count += 1
        if self.count == self.at:
            self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            raise KeyboardInterrupt

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Give what the function gives; the cut comes inside it."""
        hook, sys.unraisablehook = sys.unraisablehook, self._dropped
        sys.setprofile(self)
        try:
            return function(*args)
        finally:
            sys.setprofile(None)
            sys.unraisablehook = hook

    def _dropped(self, unraisable: Any) -> None:
        if unraisable.exc_type is KeyboardInterrupt:
            self.was_dropped = True
        else:
            sys.__unraisablehook__(unraisable)
