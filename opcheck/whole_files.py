"""Files that are there whole or not at all, whatever stops the writing."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

__all__ = ["write_atomically", "write_new"]

_MAX_NAME = 100
"""Characters of the name in that of the file beside it; file systems take 255 bytes in all."""


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write beside the path, then rename: the path has all of it or is as it was.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    scratch = path.with_name(f".{path.name[:_MAX_NAME]}.{os.getpid()}.tmp")
    try:
        with scratch.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            scratch.unlink()
        raise


def write_new(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """As `write_atomically`, and never over a file that is there.

    Raises:
        FileExistsError: it is there already.
        OSError: it cannot be written; nothing is left behind.
    """
    if path.exists() or path.is_symlink():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    write_atomically(path, write)
