"""Nested inputs and outputs: which tensors they hold, what shape they have, and copies of them.

Tensors are found in lists, tuples, dicts, dataclasses (a `ModelOutput` is both), and in the
attributes of other objects (a KV cache), at any depth.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["differing_structure", "holds_iterator", "named_tensors", "rebuilt", "tensors"]

Named = tuple[str, Tensor]

_PLAIN = (int, float, complex, bool, str, bytes, type(None), type, torch.dtype, torch.device)
_MAX_DEPTH = 12


def _children(value: Any) -> Iterator[tuple[str, Any]] | None:
    """Names and values of a container; None: it is none."""
    if isinstance(value, Mapping):
        return ((str(key), item) for key, item in value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return zip(value._fields, value, strict=True)
    if isinstance(value, (list, tuple, deque)):
        return ((str(place), item) for place, item in enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
    return None


def _attributes(value: Any) -> Iterator[tuple[str, Any]] | None:
    """Attributes of an object that may hold tensors; None: it is looked at as a whole."""
    if isinstance(value, (_PLAIN, nn.Module)) or callable(value):
        return None
    held = getattr(value, "__dict__", None)
    return None if held is None else ((str(key), item) for key, item in held.items())


def holds_iterator(value: Any, depth: int = 0) -> bool:
    """True for a generator, a `map`, an open file and the like, and for containers of them."""
    if isinstance(value, Iterator):
        return True
    children = None if isinstance(value, (Tensor, _PLAIN)) else _children(value)
    if children is None or depth > _MAX_DEPTH:
        return False
    return any(holds_iterator(item, depth + 1) for _, item in children)


def named_tensors(
    value: Any, path: str = "", *, _seen: frozenset[int] = frozenset()
) -> Iterator[Named]:
    """Every tensor with its place, `0.hidden`, in order; one that is there twice comes twice."""
    if isinstance(value, Tensor):
        yield path, value
        return
    if isinstance(value, _PLAIN) or id(value) in _seen or len(_seen) > _MAX_DEPTH:
        return
    children = _children(value)
    if children is None:
        children = _attributes(value)
    if children is None:
        return
    seen = _seen | {id(value)}
    for name, item in children:
        yield from named_tensors(item, f"{path}.{name}" if path else name, _seen=seen)


def tensors(value: Any) -> list[Tensor]:
    """Every tensor, each once, in order."""
    found: dict[int, Tensor] = {}
    for _, tensor in named_tensors(value):
        found.setdefault(id(tensor), tensor)
    return list(found.values())


def rebuilt(value: Any, convert: Callable[[Tensor], Tensor], *, fresh: bool = False) -> Any:
    """The same structure with every tensor converted; a tensor that is there twice, once.

    Args:
        value: a container, or an object with tensors among its attributes.
        convert: applied to each tensor.
        fresh: objects that hold no tensor, such as a cache that is empty yet, are copied too if
            they can be; else they are handed on.

    Raises:
        Whatever `copy.deepcopy` raises on an object that holds tensors and cannot be copied.
    """
    originals = tensors(value)  # held until the end: a container may have made them just now
    memo: dict[int, Any] = {id(tensor): convert(tensor) for tensor in originals}
    return _Rebuild(memo, fresh=fresh).of(value)


class _Rebuild:
    """One pass over a structure."""

    def __init__(self, memo: dict[int, Any], *, fresh: bool) -> None:
        self._memo, self._fresh = memo, fresh

    def of(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._memo[id(value)]
        if isinstance(value, _PLAIN):
            return value
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self._of_fields(value)
        if type(value) in (list, tuple):
            return type(value)(self.of(item) for item in value)
        if isinstance(value, tuple):
            items = (self.of(item) for item in value)
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if isinstance(value, dict):
            twin = copy.copy(value)
            for key, item in value.items():
                twin[key] = self.of(item)
            return twin
        if any(True for _ in named_tensors(value)):
            return copy.deepcopy(value, self._memo)
        return self._of_object(value)

    def _of_fields(self, value: Any) -> Any:
        twin = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(twin, field.name, self.of(getattr(value, field.name)))
        if isinstance(twin, dict):  # a ModelOutput keeps its values twice
            for key in list(twin):
                dict.__setitem__(twin, key, getattr(twin, str(key)))
        return twin

    def _of_object(self, value: Any) -> Any:
        """An object without tensors, which the call may fill or count in."""
        if not self._fresh or _attributes(value) is None:
            return value
        try:
            return copy.deepcopy(value, self._memo)
        except Exception:  # noqa: BLE001 - what refuses to be copied in any way is handed on
            return value


def differing_structure(actual: Any, expected: Any, path: str = "") -> str:
    """Where two results are not built alike, in one sentence; "" if they are.

    Types of containers do not matter where their contents have the same names.
    """
    where = f"output {path!r}" if path else "the output"
    if isinstance(actual, Tensor) or isinstance(expected, Tensor):
        if isinstance(actual, Tensor) and isinstance(expected, Tensor):
            return ""
        return f"{where} is {_kind(actual)}, eager gives {_kind(expected)}"
    mine, theirs = _children(actual), _children(expected)
    if mine is None or theirs is None:
        return _differing_leaf(actual, expected, where)
    ours, others = dict(mine), dict(theirs)
    if list(ours) != list(others):
        return f"{where} has {_names(ours)}, eager gives {_names(others)}"
    for name, item in ours.items():
        found = differing_structure(item, others[name], f"{path}.{name}" if path else name)
        if found:
            return found
    return ""


def _differing_leaf(actual: Any, expected: Any, where: str) -> str:
    same = type(actual) is type(expected)
    if same and isinstance(actual, (int, str, bytes, bool)):
        same = actual == expected
    if same and isinstance(actual, float):
        same = actual == expected or (actual != actual and expected != expected)
    return "" if same else f"{where} is {_kind(actual)}, eager gives {_kind(expected)}"


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return "a tensor"
    if isinstance(value, (int, float, str, type(None))):
        return repr(value)
    return f"a {type(value).__name__}"


def _names(children: dict[str, Any]) -> str:
    return f"{len(children)} parts ({', '.join(children)})" if children else "no parts"
