"""Where snapshots are kept: in memory, in a scratch file, in a saved file.

A saved file is a zip of `.npy` arrays and an `index.json`; NumPy opens it as an `.npz`. Reading one
runs no code of it: no pickle, names and shapes are checked.
"""

from __future__ import annotations

import json
import os
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy

from modulecheck.tensor_values import Snapshot, bits_of, dtype_name, tensor_of_bits
from modulecheck.untrusted_files import DAMAGED, checked_size, read_array, require_file
from opcheck.errors import OpcheckError

__all__ = [
    "Held",
    "InFile",
    "Scratch",
    "Spooled",
    "Stored",
    "TensorFile",
    "TensorFileError",
    "describe",
    "holds",
    "write_file",
]

Array: TypeAlias = npt.NDArray[Any]

SCHEMA = "modulecheck.tensors"
VERSION = 1
_INDEX = "index.json"
_MAX_INDEX_BYTES = 1 << 30


class TensorFileError(OpcheckError, ValueError):
    """A file of saved or dumped tensors cannot be read; the message names it."""


class Stored(Protocol):
    """A snapshot that can be had again."""

    @property
    def description(self) -> str:
        """`(2, 3):float32`."""

    def load(self) -> Snapshot:
        """The snapshot."""


def describe(snapshot: Snapshot) -> str:
    """`(2, 3):float32`."""
    return f"{tuple(snapshot.tensor.shape)}:{dtype_name(snapshot.tensor.dtype)}"


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """In memory."""

    snapshot: Snapshot

    @property
    def description(self) -> str:
        """`(2, 3):float32`."""
        return describe(self.snapshot)

    def load(self) -> Snapshot:
        """The snapshot itself."""
        return self.snapshot


# ---- scratch ------------------------------------------------------------------------------------


class Scratch:
    """A temporary file that snapshots are written to one after the other."""

    def __init__(self) -> None:
        self._file: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        self.num_bytes = 0

    def add(self, snapshot: Snapshot) -> Spooled:
        """Write one."""
        bits = bits_of(snapshot.tensor)
        offset = self.num_bytes
        self._file.seek(offset)
        self._file.write(np.ascontiguousarray(bits).reshape(-1).view(np.uint8).data)
        self.num_bytes += bits.nbytes
        return Spooled(self, offset, bits.dtype, bits.shape, describe(snapshot), snapshot.is_number)

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Bytes of one snapshot."""
        self._file.seek(offset)
        return self._file.read(num_bytes)

    def close(self) -> None:
        """Delete the file."""
        self._file.close()


@dataclass(frozen=True, slots=True, eq=False)
class Spooled:
    """In the scratch file."""

    scratch: Scratch
    offset: int
    bits_dtype: np.dtype[Any]
    bits_shape: tuple[int, ...]
    description: str
    is_number: bool

    def load(self) -> Snapshot:
        """Read it."""
        count = int(np.prod(self.bits_shape, dtype=np.int64))
        data = self.scratch.read(self.offset, count * self.bits_dtype.itemsize)
        bits = np.frombuffer(data, dtype=self.bits_dtype).reshape(self.bits_shape)
        return Snapshot(tensor_of_bits(bits, self.description.rpartition(":")[2]), self.is_number)


def holds(stored: Stored, snapshot: Snapshot) -> bool:
    """The same bit for bit, shape and dtype included."""
    if stored.description != describe(snapshot):
        return False
    kept = stored.load()
    return kept.is_number == snapshot.is_number and (
        np.ascontiguousarray(bits_of(kept.tensor)).tobytes()
        == np.ascontiguousarray(bits_of(snapshot.tensor)).tobytes()
    )


# ---- saved files --------------------------------------------------------------------------------


def write_file(path: Path, index: Mapping[str, Any], stored: Iterable[tuple[str, Stored]]) -> None:
    """Write a file of saved tensors; it appears under its name when it is complete.

    Args:
        path: of the file; its folder is made.
        index: what the file says of itself, JSON.
        stored: (member name, snapshot), read one at a time.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name[:100]}.{os.getpid()}.partial")
    try:
        with zipfile.ZipFile(partial, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
            for name, value in stored:
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    npy.write_array(member, bits_of(value.load().tensor), allow_pickle=False)
            head = {"schema": SCHEMA, "version": VERSION, **index}
            archive.writestr(_INDEX, json.dumps(head, allow_nan=False))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


class TensorFile:
    """A saved file, open for reading.

    Attributes:
        path: of the file.
        index: what it says of itself; None: it is an `.npz` of somebody else.

    Raises:
        TensorFileError: it is no such file, or of a newer version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            require_file(path)
            self._archive = zipfile.ZipFile(path)
        except DAMAGED as error:
            raise TensorFileError(f"{path}: no file of saved tensors: {error}") from error
        self.index = self._read_index()

    def _read_index(self) -> dict[str, Any] | None:
        archive, path = self._archive, self.path
        try:
            names = archive.namelist()
            if _INDEX not in names:
                if not all(name.endswith(".npy") for name in names):  # our index under a bad name
                    raise ValueError("it has no index, and not only arrays")
                return None
            if checked_size(archive, _INDEX) > _MAX_INDEX_BYTES:
                raise ValueError("its index is too large")
            index = json.loads(archive.read(_INDEX))
        except DAMAGED as error:
            raise TensorFileError(f"{path}: no file of saved tensors: {error}") from error
        if not isinstance(index, dict) or index.get("schema") != SCHEMA:
            raise TensorFileError(f"{path}: no file of saved tensors: its index says other things")
        if not isinstance(index.get("version"), int) or index["version"] > VERSION:
            raise TensorFileError(f"{path}: written by a newer version of this package")
        return index

    @property
    def arrays(self) -> list[str]:
        """Member names, without `.npy`, of its arrays."""
        names = self._archive.namelist()
        return [name.removesuffix(".npy") for name in names if name.endswith(".npy")]

    def read(self, member: str) -> Array:
        """One array; no pickle is read.

        Raises:
            TensorFileError: it is damaged, or not there.
        """
        try:
            size = checked_size(self._archive, f"{member}.npy")
            with self._archive.open(f"{member}.npy") as file:
                return read_array(file, size)
        except DAMAGED as error:
            raise TensorFileError(f"{self.path}: cannot read {member!r}: {error}") from error


@dataclass(frozen=True, slots=True, eq=False)
class InFile:
    """In a saved file, read when it is asked for."""

    file: TensorFile
    member: str
    dtype: str
    """Of torch; "" where the array's own says it."""
    description: str
    is_number: bool = False

    def load(self) -> Snapshot:
        """Read it.

        Raises:
            TensorFileError: the file is not what its index says.
        """
        bits = self.file.read(self.member)
        try:
            tensor = tensor_of_bits(bits, self.dtype or bits.dtype.name)
        except DAMAGED as error:
            raise TensorFileError(
                f"{self.file.path}: cannot read {self.member!r}: {error}"
            ) from error
        found = Snapshot(tensor, self.is_number)
        if self.description and describe(found) != self.description:
            raise TensorFileError(
                f"{self.file.path}: {self.member!r} is {describe(found)}, its index says otherwise"
            )
        return found
