"""A reproducer on disk: a Python file and, where it needs one, a file of tensors; both or none."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opcheck.errors import ReproError
from opcheck.whole_files import write_atomically

__all__ = ["MIB", "free_stem", "save_atomically", "write_repro"]

MIB = 1 << 20
MAX_STEM = 120
"""Characters of a file name, its suffix aside."""
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")
"""Letters of other scripts take several bytes, and a name has 255 of them."""


def free_stem(folder: Path, *parts: str) -> str:
    """A name for a new file, made of safe characters, that no file in the folder has."""
    text = "_".join(_UNSAFE.sub("_", part).strip(".") for part in parts if part)
    stem = text[:MAX_STEM] or "repro"
    name, number = stem, 1
    while any((folder / f"{name}{suffix}").exists() for suffix in (".py", ".pt")):
        number += 1
        name = f"{stem}-{number}"
    return name


def write_repro(
    folder: Path, stem: str, text: str, tensors: Mapping[str, Tensor], *, max_bytes: int
) -> Path:
    """Write both files; the Python file appears last, so that one that is there is complete.

    Args:
        folder: made when missing.
        stem: of both names.
        text: of the Python file.
        tensors: of the other one; none: there is no other one.
        max_bytes: of the tensors.

    Raises:
        ReproError: too large, or it cannot be written; nothing is left behind.
    """
    size = sum(item.numel() * item.element_size() for item in tensors.values())
    if size > max_bytes:
        raise ReproError(
            f"{stem}: its tensors take {size / MIB:.1f} MiB, and a reproducer may have"
            f" {max_bytes / MIB:.1f} MiB ({max_bytes} bytes)"
        )
    script = folder / f"{stem}.py"
    beside = folder / f"{stem}.pt"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if tensors:
            save_atomically(beside, dict(tensors))
        try:
            write_atomically(script, lambda file: file.write(text.encode()))
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
        if not tensors:  # of a larger one with this name, which is replaced
            beside.unlink(missing_ok=True)
    except (OSError, RuntimeError) as error:  # torch.save says RuntimeError, also of memory
        raise ReproError(f"{script}: cannot be written: {error}") from error
    return script


def save_atomically(path: Path, data: Any) -> None:
    """`torch.save`, whole or not at all.

    It is made in memory first: where Ctrl-C or a full disk stops the file that torch writes into,
    the writer that it left open throws when it is freed, and the process aborts (torch 2.13).

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    made = io.BytesIO()
    torch.save(data, made)
    write_atomically(path, lambda file: file.write(made.getbuffer()))
