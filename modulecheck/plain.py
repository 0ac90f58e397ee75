"""Dataclasses to JSON and back, by their type hints: no code of a file is ever run.

NaN and the infinities, complex numbers and dtypes are objects of one member: `{"float": "nan"}`,
`{"complex": [0.0, 1.0]}`, `{"dtype": "bfloat16"}`. A field whose metadata say `{"plain": False}` is
left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import types
import typing
from enum import Enum
from typing import Any

import numpy as np
import torch

__all__ = ["dtype_named", "from_plain", "to_plain"]

_SCALARS = (bool, int, float, complex, str)


def to_plain(value: Any) -> Any:
    """What `json` can write.

    Raises:
        TypeError: there is no form for this type.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, complex):
        return {"complex": [to_plain(value.real), to_plain(value.imag)]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    if isinstance(value, dict):
        return [[to_plain(key), to_plain(item)] for key, item in value.items()]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in _fields(type(value))}
    raise TypeError(f"{type(value).__name__} has no form in a file")


def _fields(kind: Any) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(kind) if field.metadata.get("plain", True)]


def from_plain(hint: Any, data: Any, where: str = "") -> Any:
    """The value of this type that `to_plain` gave the data of.

    Raises:
        ValueError: the data are of another type; the message says where.
    """
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _dataclass(hint, data, where)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _first_that_fits(arguments, data, where)
    if origin in (list, tuple):
        return _sequence(origin, arguments, data, where)
    if origin is dict:
        pairs = _items(data, where)
        return dict(_sequence(tuple, arguments, pair, where) for pair in pairs)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint(data)  # a ValueError that names the class
    return _scalar(hint, data, where)


def _dataclass(kind: Any, data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise _wrong(kind.__name__, data, where)
    hints = typing.get_type_hints(kind)
    names = {field.name for field in _fields(kind)}
    unknown = [name for name in data if name not in names]
    if unknown:
        raise ValueError(f"{where}: {kind.__name__} has no field {unknown[0]!r}")
    values = {name: from_plain(hints[name], item, f"{where}.{name}") for name, item in data.items()}
    try:
        return kind(**values)
    except TypeError as error:
        raise ValueError(f"{where}: {error}") from error


def _first_that_fits(hints: tuple[Any, ...], data: Any, where: str) -> Any:
    *others, last = hints
    for hint in others:
        with contextlib.suppress(ValueError):
            return from_plain(hint, data, where)
    return from_plain(last, data, where)


def _sequence(kind: Any, hints: tuple[Any, ...], data: Any, where: str) -> Any:
    items = _items(data, where)
    if kind is list or (len(hints) == 2 and hints[1] is Ellipsis):
        return kind(from_plain(hints[0], item, f"{where}[{n}]") for n, item in enumerate(items))
    if len(items) != len(hints):
        raise ValueError(f"{where}: expected {len(hints)} items, got {len(items)}")
    pairs = zip(hints, items, strict=True)
    return tuple(from_plain(hint, item, f"{where}[{n}]") for n, (hint, item) in enumerate(pairs))


def _items(data: Any, where: str) -> list[Any]:
    if not isinstance(data, list):
        raise _wrong("a list", data, where)
    return data


def _scalar(hint: Any, data: Any, where: str) -> Any:
    value = _special(data, where) if isinstance(data, dict) else data
    if hint is Any:
        if value is None or isinstance(value, (*_SCALARS, torch.dtype)):
            return value
    elif hint in (None, type(None)):
        if value is None:
            return None
    elif hint is float:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return value
    elif hint in _SCALARS and type(value) is hint:
        return value
    raise _wrong(getattr(hint, "__name__", str(hint)), data, where)


def _special(data: dict[str, Any], where: str) -> Any:
    if len(data) == 1:
        ((kind, value),) = data.items()
        if kind == "float" and value in ("nan", "inf", "-inf"):
            return float(value)
        if kind == "complex":
            real, imag = _sequence(tuple, (float, float), value, where)
            return complex(real, imag)
        if kind == "dtype":
            return dtype_named(value, where)
    raise _wrong("a number, a text or a dtype", data, where)


def dtype_named(name: Any, where: str) -> torch.dtype:
    """`torch.bfloat16` of "bfloat16".

    Raises:
        ValueError: there is no such dtype.
    """
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        raise _wrong("the name of a dtype", name, where)
    return found


def _wrong(expected: str, data: Any, where: str) -> ValueError:
    shown = repr(data)[:60]
    return ValueError(f"{where or 'the result'}: expected {expected}, got {shown}")
