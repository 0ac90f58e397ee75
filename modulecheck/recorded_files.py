"""Recordings as JSON and tensors, so that they can be run again in another process.

Arguments may be nested in lists, tuples, dicts, dataclasses and plain objects such as a KV cache.
An object of a class is written as the name of its class and its attributes; reading gives a
`Foreign` in its place, and only a class that the reader has named itself is ever made from it.
"""

from __future__ import annotations

import dataclasses
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from modulecheck.foreign import Foreign
from modulecheck.plain import dtype_named, from_plain, to_plain
from modulecheck.recording import RecordedCall
from modulecheck.snapshot import Autocast, RandomState, Snapshot
from modulecheck.tensor_container import NotSavedError, TensorReader, TensorTable

__all__ = ["UnknownBackend", "calls_from_file", "calls_to_file"]

Made = TypeVar("Made")

_NO_NAMES = (bool, int, float, complex, str, type(None), torch.dtype)
_MAX_DEPTH = 64


@dataclasses.dataclass(frozen=True, slots=True)
class UnknownBackend:
    """A backend that was a function in the process that recorded the call."""

    name: str

    def __call__(self, graph: Any, inputs: Any) -> Any:
        """Cannot be run.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(f"the backend {self.name} is not in the file")


# ---- writing ------------------------------------------------------------------------------------


def calls_to_file(
    calls: Iterable[RecordedCall], table: TensorTable
) -> tuple[list[dict[str, Any]], list[str]]:
    """Recordings as rows, and why some have none."""
    rows, left_out = [], []
    for call in calls:
        # nothing of a call is in the file if it cannot be there whole
        _, reason = _tried(call_to_file, call.name, call, TensorTable())
        if reason:
            left_out.append(reason)
        else:
            rows.append(call_to_file(call, table))
    return rows, left_out


def calls_from_file(
    rows: Iterable[Mapping[str, Any]], reader: TensorReader
) -> tuple[list[RecordedCall], list[str]]:
    """Recordings of a file, and why some cannot be had here.

    Raises:
        ValueError, TypeError, LookupError, RuntimeError: a row is damaged.
    """
    tried = [_tried(call_from_file, _text(row["name"]), row, reader) for row in rows]
    return [call for call, _ in tried if call is not None], [why for _, why in tried if why]


def _tried(convert: Callable[..., Made], name: str, *args: Any) -> tuple[Made | None, str]:
    try:
        return convert(*args), ""
    except NotSavedError as error:
        return None, f"the recorded call of {name or '<root>'} was left out: {error}"


def call_to_file(call: RecordedCall, table: TensorTable) -> dict[str, Any]:
    """A recording as JSON that refers to tensors of the table.

    Raises:
        NotSavedError: something in it has no form in a file.
    """
    snapshot = call.snapshot
    is_name = isinstance(call.backend, str)
    writer = _Writer(table, snapshot.wants_grad)
    return {
        "name": call.name,
        "fqn": call.fqn,
        "kind": call.kind,
        "index": call.index,
        "args": writer.tree(snapshot.args),
        "kwargs": writer.tree(snapshot.kwargs),
        "buffers": _tensors(snapshot.buffers, table),
        "unset_buffers": None if snapshot.unset is None else sorted(snapshot.unset),
        "parameters": _tensors(call.parameters, table),
        "training": call.training,
        "random": _random_to_file(snapshot.random, table),
        "autocast": [[item.device, item.enabled, _name(item.dtype)] for item in snapshot.autocast],
        "grad_enabled": snapshot.grad_enabled,
        "inference": snapshot.inference,
        "cast_dtype": _name(call.cast_dtype),
        "sources": [list(key) for key in call.sources],
        "grads": [table.add(grad) for grad in call.grads],
        "actual": [
            [*key, table.add(torch.from_numpy(array.copy()))] for key, array in call.actual.items()
        ],
        "failed": [list(key) for key in call.failed],
        "backend": call.backend if is_name else _backend_name(call.backend),
        "backend_is_name": is_name,
    }


def _name(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _backend_name(backend: Any) -> str:
    if isinstance(backend, UnknownBackend):
        return backend.name
    home = getattr(backend, "__module__", type(backend).__module__)
    return f"{home}.{getattr(backend, '__qualname__', type(backend).__qualname__)}"


def _tensors(named: Mapping[str, Tensor], table: TensorTable) -> dict[str, int]:
    return {name: table.add(tensor) for name, tensor in named.items()}


def _random_to_file(state: RandomState, table: TensorTable) -> dict[str, Any]:
    version, numbers, gauss = state.python
    kind, keys, *rest = state.numpy
    return {
        "torch_cpu": table.add(state.torch_cpu),
        "devices": [table.add(item) for item in state.devices],
        "python": [version, list(numbers), to_plain(gauss)],
        "numpy": [kind, [int(key) for key in keys], *to_plain(rest)],
    }


class _Writer:
    """Nested arguments as JSON."""

    def __init__(self, table: TensorTable, wants_grad: Mapping[int, bool]) -> None:
        self._table, self._wants_grad = table, wants_grad
        self._inside: set[int] = set()
        self._numbers: dict[int, tuple[int, Any]] = {}
        """By id, with the object: an attribute may make its value anew each time."""

    def tree(self, value: Any) -> Any:
        """A scalar as it is, everything else as `{what: ...}`."""
        if isinstance(value, Tensor):
            return {"tensor": self._table.add(value), "wants_grad": self._wants_grad[id(value)]}
        if type(value) in _NO_NAMES:
            found = to_plain(value)
            return found if not isinstance(found, dict) else {"plain": found}
        if isinstance(value, bytes):
            return {"bytes": value.hex()}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        if type(value) is slice:
            return {"slice": [self.tree(part) for part in (value.start, value.stop, value.step)]}
        if id(value) in self._inside:
            raise NotSavedError(f"an argument of class {type(value).__name__} holds itself")
        self._inside.add(id(value))
        try:
            return self._container(value)
        finally:
            self._inside.discard(id(value))

    def _container(self, value: Any) -> Any:
        for name, kind in _SEQUENCES.items():
            if type(value) is kind:
                return {name: [self.tree(item) for item in value]}
        if type(value) in (dict, OrderedDict):
            name = "dict" if type(value) is dict else "ordered"
            return {name: [[self.tree(key), self.tree(item)] for key, item in value.items()]}
        return self._object(value)

    def _object(self, value: Any) -> Any:
        if isinstance(value, type):
            return {"class": _class_name(value)}
        if id(value) in self._numbers:
            return {"again": self._numbers[id(value)][0]}
        number = len(self._numbers)
        self._numbers[id(value)] = number, value
        return {
            "object": _class_name(type(value)),
            "number": number,
            "attributes": {name: self.tree(item) for name, item in _attributes(value).items()},
            "keys": [str(key) for key in value] if isinstance(value, dict) else [],
        }


def _class_name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _attributes(value: Any) -> dict[str, Any]:
    kind = type(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    if dataclasses.is_dataclass(value):
        return {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
    is_container = isinstance(value, (list, tuple, set, Mapping, Enum))
    if is_container or callable(value) or not hasattr(value, "__dict__"):
        raise NotSavedError(f"an argument of class {kind.__name__} has no form in a file")
    return {str(name): item for name, item in vars(value).items()}


_SEQUENCES: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "size": torch.Size}


# ---- reading ------------------------------------------------------------------------------------


def call_from_file(row: Mapping[str, Any], reader: TensorReader) -> RecordedCall:
    """The recording that a row describes; its module is yet to be found.

    Raises:
        NotSavedError: it needs a device that is not there.
        ValueError, TypeError, LookupError, RuntimeError: the row is damaged.
    """
    trees_of = _Reader(reader)
    args, kwargs = trees_of.tree(row["args"]), trees_of.tree(row["kwargs"])
    if type(args) is not tuple or type(kwargs) is not dict:
        raise ValueError("the arguments of a recorded call are a tuple and a dict")
    parameters = {_text(name): reader.tensor(item) for name, item in row["parameters"].items()}
    cast_dtype = _dtype(row["cast_dtype"])
    snapshot = Snapshot(
        args=args,
        kwargs=kwargs,
        wants_grad=trees_of.wants_grad,
        buffers={_text(name): reader.tensor(item) for name, item in row["buffers"].items()},
        parameter_versions={},
        random=_random_from_file(row["random"], reader),
        autocast=[
            Autocast(_text(device), bool(enabled), dtype_named(dtype, "autocast"))
            for device, enabled, dtype in row["autocast"]
        ],
        grad_enabled=bool(row["grad_enabled"]),
        inference=bool(row["inference"]),
        cast_dtype=cast_dtype,
        unset=_unset(row.get("unset_buffers")),  # files of earlier versions do not tell
    )
    backend = _text(row["backend"])
    return RecordedCall(
        name=_text(row["name"]),
        fqn=_text(row["fqn"]),
        kind=_text(row["kind"]),
        module=None,
        index=int(row["index"]),
        snapshot=snapshot,
        parameters=parameters,
        training={_text(name): bool(mode) for name, mode in row["training"].items()},
        sources=tuple(_key(key) for key in row["sources"]),
        grads=tuple(reader.tensor(item) for item in row["grads"]),
        actual={_key(key): reader.tensor(item).detach().numpy() for *key, item in row["actual"]},
        failed=tuple(_key(key) for key in row["failed"]),
        backend=backend if row["backend_is_name"] is True else UnknownBackend(backend),
        cast_dtype=cast_dtype,
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a text, got {value!r:.60}")
    return value


def _unset(names: Any) -> frozenset[str] | None:
    return None if names is None else frozenset(_text(name) for name in _list(names))


def _key(value: Any) -> tuple[str, int | str]:
    kind, place = value
    if type(place) not in (int, str):
        raise TypeError(f"expected a number or a name, got {place!r:.60}")
    return _text(kind), place


def _dtype(name: Any) -> torch.dtype | None:
    return None if name is None else dtype_named(name, "cast_dtype")


def _random_from_file(row: Mapping[str, Any], reader: TensorReader) -> RandomState:
    """The states, each tried on a generator of its own, so that a bad one is noticed here."""
    version, numbers, gauss = row["python"]
    python = (int(version), tuple(int(number) for number in numbers), gauss)
    random.Random().setstate(python)
    kind, keys, position, has_gauss, cached = row["numpy"]
    state = (_text(kind), np.array(keys, dtype=np.uint32), position, has_gauss, cached)
    np.random.RandomState().set_state(state)
    torch_cpu = reader.tensor(row["torch_cpu"])
    torch.Generator().set_state(torch_cpu)
    devices = [reader.tensor(item) for item in row["devices"]]
    return RandomState(torch_cpu, devices, python, state)


class _Reader:
    """Nested arguments from JSON."""

    def __init__(self, reader: TensorReader) -> None:
        self._reader = reader
        self._depth = 0
        self._objects: dict[int, Foreign] = {}
        self.wants_grad: dict[int, bool] = {}

    def tree(self, data: Any) -> Any:
        if not isinstance(data, dict):
            if isinstance(data, list):
                raise TypeError("a list where an argument is expected")
            return data
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise ValueError("arguments are nested too deeply")
        found = self._tagged(data)
        self._depth -= 1
        return found

    def _tagged(self, data: dict[str, Any]) -> Any:
        what = next(iter(data), "")
        content = data.get(what)
        if what == "tensor":
            tensor = self._reader.tensor(content)
            self.wants_grad[id(tensor)] = data["wants_grad"] is True
            return tensor
        if what in _SEQUENCES:
            return _SEQUENCES[what](self.tree(item) for item in _list(content))
        if what in ("dict", "ordered"):
            made = {self.tree(key): self.tree(item) for key, item in _list(content)}
            return made if what == "dict" else OrderedDict(made)
        if what == "object":
            attributes = {_text(name): self.tree(item) for name, item in data["attributes"].items()}
            keys = [_text(key) for key in data["keys"]]
            self._objects[data["number"]] = found = Foreign(_text(content), attributes, keys)
            return found
        return self._leaf(what, content)

    def _leaf(self, what: str, content: Any) -> Any:
        if what == "plain":
            return from_plain(Any, content, "an argument")
        if what == "class":
            return Foreign(_text(content), {}, [], is_class=True)
        if what == "again":
            return self._objects[content]
        if what == "bytes":
            return bytes.fromhex(_text(content))
        if what == "device":
            return torch.device(_text(content))
        if what == "slice":
            return slice(*(self.tree(part) for part in _list(content)))
        raise ValueError(f"unknown kind of argument {what!r:.60}")


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"expected a list, got {value!r:.60}")
    return value
