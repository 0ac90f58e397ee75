"""How far a long piece of work is: one line on a terminal's stderr, and nothing in a log."""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from typing import Literal, TextIO

from opcheck.errors import ArgumentTypeError
from opcheck.printing import style_for

__all__ = ["Tell", "telling"]

Tell = Callable[[int, int, str], None]
"""Told (parts done, parts in all, what is being done)."""
_CELLS = 20


@contextlib.contextmanager
def telling(
    progress: Callable[[str], object] | Literal[False] | None, stream: TextIO | None = None
) -> Iterator[Tell]:
    """What tells how far the work is.

    Args:
        progress: a function is told every step in words; False: nobody is; None: a line in the
            terminal, where there is one.
        stream: in place of stderr.

    Raises:
        ArgumentTypeError: progress is none of these.
    """
    stream = sys.stderr if stream is None else stream
    if callable(progress):
        say = progress

        def tell(done: int, total: int, what: str) -> None:
            say(what)

        yield tell
    elif progress is not None and progress is not False:
        raise ArgumentTypeError(f"progress: expected a function, False or None, got {progress!r}")
    elif progress is False or not stream.isatty():
        yield lambda done, total, what: None
    else:
        line = _Line(stream)
        try:
            yield line.show
        finally:
            line.clear()


class _Line:
    """Drawn over itself."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._began = stream, time.monotonic()
        self._shown = 0

    def show(self, done: int, total: int, what: str) -> None:
        """Draw it."""
        full = _CELLS * done // max(total, 1)
        bar = "#" * full + "-" * (_CELLS - full)
        elapsed = time.monotonic() - self._began
        style = style_for(self._stream)
        text = style.text(f"[{bar}] {done}/{total}  {elapsed:.0f} s  {what}")
        text = text[: max(shutil.get_terminal_size((100, 24)).columns - 1, 20)]
        self._stream.write("\r" + text.ljust(self._shown))
        self._stream.flush()
        self._shown = len(text)

    def clear(self) -> None:
        """Leave the line empty."""
        self._stream.write("\r" + " " * self._shown + "\r")
        self._stream.flush()
