"""Compared tensors as flat `.npy` files, with an index that says what each file is."""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy
from torch import Tensor

from modulecheck.tensor_groups import Group
from modulecheck.tensor_store import TensorFileError
from modulecheck.tensor_values import bits_of, dtype_name, tensor_of_bits
from modulecheck.untrusted_files import DAMAGED, read_array, require_file
from opcheck.records import Verdict
from opcheck.validation import a_path
from opcheck.whole_files import write_atomically

__all__ = ["DumpMode", "Dumper", "load_dump"]

SCHEMA = "modulecheck.dump"
VERSION = 1
_INDEX = "index.json"
_MAX_NAME = 120
"""Characters of a tag in a file name; file systems take 255 bytes in all."""
_UNSAFE = re.compile(r"[^A-Za-z0-9._#+=-]")
_OUR_FILE = re.compile(r"[A-Za-z0-9_#+=-][A-Za-z0-9._#+=-]*\.\d+\.npy(\.json)?")
_RESERVED = frozenset(
    ["con", "prn", "aux", "nul", *(f"{name}{n}" for name in ("com", "lpt") for n in range(10))]
)


class DumpMode(Enum):
    """Which groups of tensors `check_*` writes to `dump_path`."""

    NOT = "not"
    """None, the default."""
    ALL = "all"
    NOT_EQUAL = "not_equal"
    """Those that differ under the criterion."""
    FIRST_NOT_EQUAL = "first_not_equal"
    """The first one in the order of execution that differs, and no other."""


@dataclass(slots=True)
class Dumper:
    """Writes the groups that a mode asks for."""

    mode: DumpMode
    folder: Path
    _files: list[dict[str, Any]] = field(default_factory=list)
    _taken: set[str] = field(default_factory=set)
    _found_first: bool = False

    def start(self) -> None:
        """Make the folder, and take away what an earlier dump has left in it.

        Raises:
            OSError: it cannot be written.
        """
        if self.mode is not DumpMode.NOT:
            self.folder.mkdir(parents=True, exist_ok=True)
            earlier = [*_files_of_index(self.folder)]
            (self.folder / _INDEX).unlink(missing_ok=True)  # it is of nothing from now on
            for name in earlier:
                (self.folder / name).unlink(missing_ok=True)

    def add(self, group: Group, verdict: Verdict) -> None:
        """Write a group if the mode says so.

        Raises:
            OSError: it cannot be written.
        """
        differs = verdict is Verdict.FAIL
        wanted = {
            DumpMode.NOT: False,
            DumpMode.ALL: True,
            DumpMode.NOT_EQUAL: differs,
            DumpMode.FIRST_NOT_EQUAL: differs and not self._found_first,
        }
        self._found_first |= differs
        if wanted[self.mode]:
            stem = self._stem(group.tag)
            for position, entry in enumerate(group.entries):
                tensor = entry.stored.load().tensor
                head = {
                    "tag": group.tag,
                    "position": position,
                    "side": group.names[position],
                    "verdict": str(verdict),
                }
                self._write(f"{stem}.{position}.npy", tensor, head)

    def _write(self, name: str, tensor: Tensor, head: dict[str, Any]) -> None:
        bits = bits_of(tensor)
        write_atomically(self.folder / name, partial(_write_array, bits))
        dtype, shape = dtype_name(tensor.dtype), list(tensor.shape)
        if bits.dtype.name != dtype:  # NumPy lacks it
            beside = {"dtype": dtype, "shape": shape, "stored_as": bits.dtype.name}
            _write_json(self.folder / f"{name}.json", beside)
        about = {"dtype": dtype, "shape": shape, "crc32": _checksum(bits)}
        self._files.append({"file": name, **head, **about})

    def finish(self) -> None:
        """Write the index.

        Raises:
            OSError: it cannot be written.
        """
        if self.mode is not DumpMode.NOT:
            head = {"schema": SCHEMA, "version": VERSION, "mode": self.mode.name}
            _write_json(self.folder / _INDEX, {**head, "files": self._files})

    def _stem(self, tag: str) -> str:
        """A file name for a tag: the tag where it is safe, else what is safe of it and a hash."""
        stem = _UNSAFE.sub("_", tag)[:_MAX_NAME]
        digest = hashlib.sha256(tag.encode("utf-8", "surrogatepass")).hexdigest()
        is_plain = stem == tag and tag[:1] not in ("", ".", "-")
        if not is_plain or tag.split(".")[0].lower() in _RESERVED or tag.lower() in self._taken:
            # file systems that ignore case must not mix up `A` and `a`
            stem = f"{stem.lstrip('.-') or 'tag'}-{digest[:16]}"
        while stem.lower() in self._taken:
            stem += "+"
        self._taken.add(stem.lower())
        return stem


def _write_array(bits: np.ndarray[Any, Any], file: BinaryIO) -> None:
    # of a real file NumPy fills a buffer of C's, and drops the error when that cannot be written
    npy.write_array(SimpleNamespace(write=file.write), bits, allow_pickle=False)


def _checksum(bits: np.ndarray[Any, Any]) -> int:
    """CRC-32 of the values in C order."""
    return zlib.crc32(np.ascontiguousarray(bits).reshape(-1).view(np.uint8).data)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    text = json.dumps(value, indent=1, allow_nan=False) + "\n"
    write_atomically(path, lambda file: file.write(text.encode("ascii")))


def _read_index(folder: Path) -> list[dict[str, Any]]:
    path = folder / _INDEX
    try:
        require_file(path)
        index = json.loads(path.read_text(encoding="utf-8"))
        if index["schema"] != SCHEMA or index["version"] > VERSION:
            raise ValueError("its index says something else")
        files = [dict(item) for item in index["files"]]
        if not all(_OUR_FILE.fullmatch(item["file"]) for item in files):
            raise ValueError("its index names files that a dump does not write")
    except DAMAGED as error:
        raise TensorFileError(f"{path}: no index of a dump: {error}") from error
    return files


def _files_of_index(folder: Path) -> Iterable[str]:
    try:
        files = _read_index(folder)
    except TensorFileError:
        return []
    return [name for item in files for name in (item["file"], f"{item['file']}.json")]


def _read(path: Path, item: dict[str, Any]) -> Tensor:
    require_file(path)
    with path.open("rb") as file:
        bits = read_array(file, path.stat().st_size)
    if "crc32" in item and _checksum(bits) != item["crc32"]:
        raise ValueError("its values are not those that were written")
    tensor = tensor_of_bits(bits, item["dtype"])
    if list(tensor.shape) != item["shape"]:
        raise ValueError(f"it has the shape {tuple(tensor.shape)}, its index says another")
    return tensor


def load_dump(path: str | Path) -> dict[str, list[Tensor]]:
    """The dumped tensors by tag, in the order of their positions, with their dtypes.

    Raises:
        TensorFileError: there is no dump, or it is not what its index says.
    """
    folder = a_path("path", path)
    found: dict[str, list[Tensor]] = {}
    for item in _read_index(folder):
        try:
            tensor, tag = _read(folder / item["file"], item), str(item["tag"])
        except DAMAGED as error:
            raise TensorFileError(f"{folder / item['file']}: cannot be read: {error}") from error
        found.setdefault(tag, []).append(tensor)
    return found
