"""Arguments, looked at before anything is done.

Each error names the parameter, what was given, and what is allowed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar, overload

from opcheck.errors import ArgumentError, ArgumentTypeError

__all__ = [
    "a_count",
    "a_flag",
    "a_function",
    "a_number",
    "a_path",
    "a_string",
    "an_instance",
    "one_of",
    "several",
    "several_globs",
    "several_paths",
    "several_strings",
    "wrong_type",
]

Kind = TypeVar("Kind")


def wrong_type(field: str, allowed: str, value: object) -> ArgumentTypeError:
    """The error to raise where the type of an argument is not allowed."""
    return ArgumentTypeError(f"{field}: expected {allowed}, got {_shown(value)}")


def a_number(field: str, value: object, *, may_be_inf: bool = False) -> float:
    """A number of 0 or more."""
    allowed = "a number >= 0" if may_be_inf else "a finite number >= 0"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise wrong_type(field, allowed, value)
    if math.isnan(value) or value < 0 or (math.isinf(value) and not may_be_inf):
        raise ArgumentError(f"{field}: expected {allowed}, got {value!r}")
    return float(value)


def a_count(field: str, value: object, *, optional: bool = False, least: int = 0) -> Any:
    """A whole number of `least` or more."""
    if value is None and optional:
        return None
    allowed = f"an int >= {least}" + (" or None" if optional else "")
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong_type(field, allowed, value)
    if value < least:
        raise ArgumentError(f"{field}: expected {allowed}, got {value!r}")
    return value


def a_flag(field: str, value: object) -> bool:
    """True or False, and nothing that is merely true."""
    if not isinstance(value, bool):
        raise wrong_type(field, "True or False", value)
    return value


def a_string(field: str, value: object, *, optional: bool = False) -> str | None:
    """A string."""
    if value is None and optional:
        return None
    if not isinstance(value, str):
        raise wrong_type(field, "a string" + (" or None" if optional else ""), value)
    return value


def a_function(field: str, value: object) -> Callable[..., Any]:
    """Something that can be called."""
    if not callable(value):
        raise wrong_type(field, "a function", value)
    return value


def an_instance(field: str, value: object, kind: type[Kind], allowed: str) -> Kind:
    """An object of a class."""
    if not isinstance(value, kind):
        raise wrong_type(field, allowed, value)
    return value


@overload
def a_path(field: str, value: object) -> Path: ...
@overload
def a_path(field: str, value: object, *, optional: bool) -> Path | None: ...
def a_path(field: str, value: object, *, optional: bool = False) -> Path | None:
    """A path, as it was given."""
    if value is None and optional:
        return None
    if not isinstance(value, (str, os.PathLike)):
        raise wrong_type(field, "a path" + (" or None" if optional else ""), value)
    return Path(value)


def several(field: str, value: object, allowed: str) -> list[Any]:
    """Several objects; a string is one."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise wrong_type(field, allowed, value)
    return list(value)


def several_paths(field: str, value: object) -> list[Path]:
    """Paths; one alone has to be in a list, too."""
    return [a_path(field, item) for item in several(field, value, "a list of paths")]


def several_strings(field: str, value: object, allowed: str = "strings") -> tuple[str, ...]:
    """Strings, or one alone."""
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, Iterable):
        raise wrong_type(field, allowed, value)
    found = tuple(value)
    for item in found:
        if not isinstance(item, str):
            raise wrong_type(field, allowed, item)
    return found


def several_globs(field: str, value: object) -> tuple[str, ...]:
    """Globs, or one alone."""
    return several_strings(field, value, "globs (strings)")


def one_of(
    field: str, value: object, *, allowed: tuple[str, ...], optional: bool = False
) -> str | None:
    """One of a few strings."""
    if value is None and optional:
        return None
    wanted = f"one of {allowed}" + (" or None" if optional else "")
    if not isinstance(value, str):
        raise wrong_type(field, wanted, value)
    if value not in allowed:
        raise ArgumentError(f"{field}: expected {wanted}, got {value!r}")
    return value


def _shown(value: object) -> str:
    """As it is written, unless that is long: a model prints over many lines."""
    text = repr(value)
    if len(text) > 100 or "\n" in text:
        return f"an object of {type(value).__name__}"
    return f"{text} ({type(value).__name__})"
