"""Reading files that may be damaged or lie: nothing is allocated before their sizes agree."""

from __future__ import annotations

import math
import os
import stat
import tokenize
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy

__all__ = ["DAMAGED", "checked_size", "read_array", "require_file"]

DAMAGED = (
    OSError,
    zipfile.BadZipFile,
    zlib.error,
    tokenize.TokenError,  # NumPy has a second look at a header that is no literal
    SyntaxError,
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What reading a damaged file may raise, in the standard library, in NumPy and in torch."""

_MAX_DEFLATE = 1032
"""Bytes that one byte of deflate can stand for at most: https://zlib.net/zlib_tech.html."""
_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


def require_file(path: Path) -> None:
    """Refuse what is no regular file; opening a pipe would wait for ever.

    Raises:
        OSError: it is not there, or something else.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(f"{path.name} is a folder, a pipe or a device, not a file")


def checked_size(archive: zipfile.ZipFile, name: str) -> int:
    """The size in bytes of a member, where the bytes of the archive can be that many.

    Raises:
        KeyError: there is no such member.
        ValueError: they cannot, or are compressed in a way that has no limit.
    """
    info = archive.getinfo(name)
    most = info.compress_size
    if info.compress_type == zipfile.ZIP_DEFLATED:
        most *= _MAX_DEFLATE
    elif info.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{name} is compressed by method {info.compress_type}")
    there = archive.fp.seek(0, os.SEEK_END) if archive.fp else 0
    if info.file_size > most or info.compress_size > there:
        raise ValueError(f"{name} says that it has {info.file_size} bytes, which are not there")
    return info.file_size


def read_array(file: IO[bytes], num_bytes: int) -> npt.NDArray[Any]:
    """An array in NumPy's format, which fills `num_bytes` of a file to the last one; no pickle.

    Raises:
        ValueError: it is none, or its shape says another size.
        Others of `DAMAGED`: its header is damaged.
    """
    version = npy.read_magic(file)
    if version not in _HEADERS:
        raise ValueError(f"its format {version} is not one of plain arrays")
    shape, is_fortran, dtype = _HEADERS[version](file)
    if dtype.hasobject:
        raise ValueError("it holds Python objects, which are not read")
    if any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"it has no shape {shape}")
    left = num_bytes - file.tell()
    if math.prod(shape) * dtype.itemsize != left:
        raise ValueError(f"an array of shape {shape} and {dtype} has not the {left} bytes it has")
    data = file.read()  # to the end, where zipfile compares the checksum
    return np.frombuffer(data, dtype=dtype).reshape(shape, order="F" if is_fortran else "C")
