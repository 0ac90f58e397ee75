"""A file of JSON and tensors: a zip of an `index.json` and the bytes of each storage.

Tensors that share memory share it again after reading; strides, offsets and every strided dtype
are kept. Members are stored, not compressed, so that no small file grows large in memory, and what
the index says of a tensor is held against the bytes that are there.
"""

from __future__ import annotations

import json
import os
import sys
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from modulecheck.plain import dtype_named
from modulecheck.untrusted_files import DAMAGED, checked_size, require_file
from opcheck.errors import ArgumentError, LogWriteError

__all__ = ["NotSavedError", "TensorReader", "TensorTable", "read_container", "write_container"]

Built = TypeVar("Built")

_INDEX = "index.json"


class NotSavedError(Exception):
    """A value has no form in a file; the message says which and why."""


# ---- writing ------------------------------------------------------------------------------------


class TensorTable:
    """Collects tensors; each storage is written once."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.storages: list[Any] = []
        self._known: dict[int, int] = {}
        self._places: dict[tuple[int, int], int] = {}
        self._held: list[Tensor] = []

    def add(self, tensor: Tensor) -> int:
        """The place of a tensor in the table.

        Raises:
            NotSavedError: it is no plain strided tensor.
        """
        if id(tensor) in self._known:
            return self._known[id(tensor)]
        self._refuse(tensor)
        plain = tensor.detach().resolve_conj().resolve_neg()
        row = {
            "storage": self._storage(plain),
            "dtype": str(plain.dtype).removeprefix("torch."),
            "shape": list(plain.shape),
            "stride": list(plain.stride()),
            "offset": plain.storage_offset(),
            "requires_grad": tensor.requires_grad,
            "device": str(tensor.device),
        }
        self._held.append(tensor)  # so that its id is not given to another one
        self._known[id(tensor)] = len(self.rows)
        self.rows.append(row)
        return len(self.rows) - 1

    def _refuse(self, tensor: Tensor) -> None:
        kind = type(tensor)
        if kind not in (Tensor, nn.Parameter, nn.Buffer):
            raise NotSavedError(f"a tensor of class {kind.__name__} has no form in a file")
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            what = "meta" if tensor.is_meta else "quantized" if tensor.is_quantized else "sparse"
            raise NotSavedError(f"a {what} tensor has no form in a file")

    def _storage(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        key = (storage.data_ptr() or -id(tensor), storage.nbytes())
        if key not in self._places:
            self._held.append(tensor)
            self._places[key] = len(self.storages)
            self.storages.append(storage)
        return self._places[key]


def write_container(path: Path, index: Mapping[str, Any], table: TensorTable) -> None:
    """Write the file; it appears under its name when it is complete.

    Args:
        path: of the file; its folder is made, a file that is there is replaced.
        index: JSON; says `schema` and `version`.
        table: the tensors that the index refers to.

    Raises:
        LogWriteError: it cannot be written.
    """
    partial = path.with_name(f".{path.name[:100]}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(partial, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
            for place, storage in enumerate(table.storages):
                with archive.open(_member(place), "w", force_zip64=True) as member:
                    member.write(_bytes_of(storage))
            head = {**index, "byteorder": sys.byteorder, "tensors": table.rows}
            archive.writestr(_INDEX, json.dumps(head, allow_nan=False))
        partial.replace(path)
    except OSError as error:
        raise LogWriteError(f"the result cannot be written to {path}: {error}") from error
    finally:
        with suppress(OSError):  # a folder on the way may be a file
            partial.unlink(missing_ok=True)


def _member(place: int) -> str:
    return f"storages/{place:06d}"


def _bytes_of(storage: Any) -> memoryview:
    plain = torch.empty(0, dtype=torch.uint8).set_(storage.cpu())
    array: Any = plain.numpy()
    return memoryview(array)


# ---- reading ------------------------------------------------------------------------------------


def read_container(
    path: Path, schema: str, version: int, build: Callable[[dict[str, Any], TensorReader], Built]
) -> Built:
    """What `build` makes of the index of a file and its tensors.

    Raises:
        ArgumentError: it is no such file, is damaged, or of a newer version.
    """
    try:
        require_file(path)
        with zipfile.ZipFile(path) as archive:
            index = json.loads(_read(archive, _INDEX))
            _check_head(index, schema, version)
            rows = index.pop("tensors")
            places = sorted({_natural(row["storage"]) for row in rows})
            storages = {place: _storage(archive, _member(place)) for place in places}
        return build(index, TensorReader(rows, storages))
    except DAMAGED as error:
        what = str(error) or type(error).__name__
        raise ArgumentError(f"{path}: cannot be read as a saved result: {what}") from error


def _check_head(index: Any, schema: str, version: int) -> None:
    if not isinstance(index, dict) or index.get("schema") != schema:
        raise ValueError(f"its index is not one of {schema}")
    if type(index.get("version")) is not int or index["version"] > version:
        raise ValueError("it was written by a newer version of this package")
    if index["byteorder"] != sys.byteorder:
        raise ValueError("it was written on a machine of another byte order")


def _read(archive: zipfile.ZipFile, name: str) -> bytes:
    _stored(archive, name)
    return archive.read(name)


def _stored(archive: zipfile.ZipFile, name: str) -> None:
    """Refuse a member that takes more memory than it has bytes in the file."""
    info = archive.getinfo(name)
    if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
        raise ValueError(f"{name} is compressed")
    checked_size(archive, name)


def _storage(archive: zipfile.ZipFile, name: str) -> Any:
    data = _read(archive, name)
    held = torch.empty(len(data), dtype=torch.uint8)  # own memory, aligned as torch wants it
    held.numpy()[:] = np.frombuffer(data, dtype=np.uint8)
    return held.untyped_storage()


def _natural(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"expected a whole number of 0 or more, got {value!r}")
    return value


class TensorReader:
    """The tensors of a file, made when they are asked for, each once."""

    def __init__(self, rows: list[dict[str, Any]], storages: dict[int, Any]) -> None:
        self._rows, self._storages = rows, storages
        self._made: dict[int, Tensor] = {}
        self._moved: dict[tuple[int, str], Any] = {}

    def tensor(self, place: Any) -> Tensor:
        """The tensor at a place of the table, on the device on which it was.

        Raises:
            ValueError: there is none, or the index lies about it.
            NotSavedError: its device is not there.
        """
        place = _natural(place)
        if place not in self._made:
            if place >= len(self._rows):
                raise ValueError(f"it has no tensor {place}")
            self._made[place] = self._make(self._rows[place])
        return self._made[place]

    def _make(self, row: dict[str, Any]) -> Tensor:
        dtype = dtype_named(row["dtype"], "dtype")
        shape = [_natural(size) for size in row["shape"]]
        stride = [_natural(step) for step in row["stride"]]
        offset = _natural(row["offset"])
        storage = self._on(row["storage"], row["device"])
        last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        needed = (offset + last + 1) * dtype.itemsize if all(shape) else 0
        if needed > storage.nbytes():
            raise ValueError(f"a tensor of shape {shape} does not fit into its bytes")
        made = torch.empty(0, dtype=dtype, device=storage.device)
        made.set_(storage, offset, shape, stride)
        return made.requires_grad_() if row["requires_grad"] is True else made

    def _on(self, place: Any, device: Any) -> Any:
        target = torch.device(device)
        if target.type == "cpu":
            return self._storages[place]
        if not _is_there(target):
            raise NotSavedError(f"it was recorded on {device}, which this machine does not have")
        key = (place, str(target))
        if key not in self._moved:
            held = torch.empty(0, dtype=torch.uint8).set_(self._storages[place])
            self._moved[key] = held.to(target).untyped_storage()
        return self._moved[key]


def _is_there(device: torch.device) -> bool:
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != device.type:
        return False
    return (device.index or 0) < torch.accelerator.device_count()
