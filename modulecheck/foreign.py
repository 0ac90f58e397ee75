"""Objects of the user's classes in a recording: only what the reader allows is ever made."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

from opcheck.errors import ArgumentError

__all__ = ["Foreign", "without_foreign"]


@dataclasses.dataclass(slots=True, eq=False)
class Foreign:
    """An object of a class of somebody else, as it was read from a file."""

    kind: str
    """`package.module:Class`."""
    attributes: dict[str, Any]
    keys: list[str]
    """Where the class is a dict: which attributes are its items too."""
    is_class: bool = False
    """It is the class itself."""


def without_foreign(value: Any, classes: Mapping[str, type]) -> Any:
    """The same arguments, with objects of these classes in place of what the file says of them.

    No `__init__` runs: an object gets its attributes one by one. Tensors are the same objects.

    Args:
        value: of `call_from_file`.
        classes: by `package.module:Class`.

    Raises:
        ArgumentError: a class is not among them.
    """
    missing = [kind for kind in dict.fromkeys(_kinds_in(value)) if kind not in classes]
    if missing:
        raise ArgumentError(
            f"the recorded call got objects, which are made only where you allow"
            f" it: {' '.join(f'--allow-class {kind}' for kind in missing)}, or"
            " drilldown(..., classes=[...])"
        )
    return _Resolver(classes).resolved(value)


def _kinds_in(value: Any) -> Iterator[str]:
    """Names of the classes of all objects inside, those of their attributes too."""
    if isinstance(value, Foreign):
        yield value.kind
        value = value.attributes
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple, set)):
        for item in value:
            yield from _kinds_in(item)


class _Resolver:
    def __init__(self, classes: Mapping[str, type]) -> None:
        self._classes = classes
        self._made: dict[int, Any] = {}

    def resolved(self, value: Any) -> Any:
        if isinstance(value, Foreign):
            if id(value) not in self._made:
                self._made[id(value)] = self._object(value)
            return self._made[id(value)]
        if type(value) in (list, tuple, set):
            return type(value)(self.resolved(item) for item in value)
        if type(value) in (dict, OrderedDict):
            return type(value)(
                (self.resolved(key), self.resolved(item)) for key, item in value.items()
            )
        return value

    def _object(self, foreign: Foreign) -> Any:
        kind: Any = self._classes[foreign.kind]
        if foreign.is_class:
            return kind
        attributes = {name: self.resolved(item) for name, item in foreign.attributes.items()}
        if issubclass(kind, tuple):
            return kind(*attributes.values())
        made = kind.__new__(kind)
        for name, item in attributes.items():
            object.__setattr__(made, name, item)
        put: Any = OrderedDict.__setitem__ if isinstance(made, OrderedDict) else dict.__setitem__
        for key in foreign.keys:
            put(made, key, attributes[key])
        return made
