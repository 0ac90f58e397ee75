"""What the code of a module keeps outside of it: globals, class attributes, closures.

A forward may count its calls in a global, or put a loss into a list of its file which the step
later adds up. Run again, it must begin with what the call began with, and leave no second entry.

Which names those are is read from the code: of the classes, and of what they call. Torch, NumPy and
the standard library are not looked into. What is not reached shows in `ModuleCall`: a module that
gives something else each time it runs has no verdict.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import random
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from modulecheck import trees
from opcheck.exits import uncut
from opcheck.golden import Contents

__all__ = ["MAX_VALUES", "OuterState", "parts"]

Holder: TypeAlias = "dict[str, Any] | type | types.CellType"

MAX_VALUES = 1000
"""An object from which more values are reached is a vocabulary, or the program around the module,
and no state of its forward."""
_MAX_CODE = 500
"""Functions and classes that are looked through for one class of modules."""
_NOT_LOOKED_INTO = {"torch", "numpy", "modulecheck", "opcheck", *sys.stdlib_module_names}
_FIXED = (
    types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type, property, staticmethod,
    classmethod, functools.cached_property, str, bytes, nn.Module, torch.dtype, torch.device,
)  # fmt: skip
"""Values that hold nothing a forward could change."""
_PLAIN = (int, float, complex, bool, Tensor, *_FIXED)
_MISSING = object()


@dataclass(frozen=True, slots=True)
class _Place:
    """Names in a dict of globals, in a class, or the one value of a cell."""

    holder: Holder
    names: tuple[str, ...]
    label: str
    """In front of a name it says where that is."""

    def read(self, name: str) -> Any:
        if isinstance(self.holder, dict):
            return self.holder.get(name, _MISSING)
        if isinstance(self.holder, type):
            return vars(self.holder).get(name, _MISSING)
        try:
            return self.holder.cell_contents
        except ValueError:  # the cell is empty yet
            return _MISSING

    def write(self, name: str, value: Any) -> None:
        if isinstance(self.holder, dict):
            self.holder[name] = value
        elif isinstance(self.holder, type):
            type.__setattr__(self.holder, name, value)
        else:
            self.holder.cell_contents = value

    def delete(self, name: str) -> None:
        if isinstance(self.holder, dict):
            del self.holder[name]
        elif isinstance(self.holder, type):
            type.__delattr__(self.holder, name)
        else:
            del self.holder.cell_contents


@dataclass(frozen=True, slots=True)
class OuterState:
    """Values as they were, and how to put them back."""

    places: tuple[_Place, ...] = ()
    values: tuple[tuple[_Place, str, Any], ...] = ()
    contents: tuple[Contents, ...] = ()
    streams: tuple[Callable[[], None], ...] = field(default=())
    """Each puts a generator of random numbers back."""

    @classmethod
    def of(cls, modules: Iterable[nn.Module]) -> OuterState:
        """As it is now, of the code of these modules."""
        kinds = dict.fromkeys(map(type, modules))
        places = {id(place): place for kind in kinds for place in _places_of(kind)}
        return cls._at(tuple(places.values()))

    @classmethod
    def _at(cls, places: tuple[_Place, ...]) -> OuterState:
        values = tuple((place, name, place.read(name)) for place in places for name in place.names)
        held = [value for _, _, value in values]
        streams = (_stream(value) for value in held)
        return cls(
            places,
            values,
            tuple(Contents([value]) for value in held if _is_small_state(value)),
            tuple(put_back for put_back in streams if put_back is not None),
        )

    @property
    def num_places(self) -> int:
        """How many names are kept."""
        return len(self.values)

    def tensors(self) -> dict[str, Tensor]:
        """Tensors by a name that says where they are."""
        return dict(
            found
            for place, name, value in self.values
            if isinstance(value, Tensor) or _is_small_state(value)
            for found in trees.named_tensors(value, f"{place.label}{name}")
        )

    def put_back(self) -> None:
        """As it was."""
        for place, name, value in self.values:
            if place.read(name) is value:
                continue
            if value is _MISSING:
                place.delete(name)
            else:
                place.write(name, value)
        for contents in self.contents:
            contents.put_back()
        for stream in self.streams:
            stream()

    def forgotten(self) -> OuterState:
        """The same places, without holding on to what was there."""
        return OuterState(self.places)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Begin with these values; afterwards there are those of before the context."""
        now = self._at(self.places)
        try:
            self.put_back()
            yield
        finally:
            uncut(now.put_back)


def parts(value: Any) -> Iterator[Any]:
    """What a container or an object holds."""
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        yield from value
    yield from getattr(value, "__dict__", {}).values()


def _is_small_state(value: Any) -> bool:
    """A container or an object of the user's, and not a vocabulary or a whole program."""
    if isinstance(value, _PLAIN) or value is None or value is _MISSING or _is_torchs(type(value)):
        return False
    todo, seen = [value], set[int]()
    while todo:
        item = todo.pop()
        if isinstance(item, types.ModuleType) or len(seen) + len(todo) > MAX_VALUES:
            return False
        if isinstance(item, _PLAIN) or item is None or id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, (Mapping, list, tuple, set)) and len(item) > MAX_VALUES:
            return False
        if not callable(item):
            todo += parts(item)
    return True


def _is_torchs(kind: type) -> bool:
    """Of a library that is not looked into, and no container of the standard library."""
    home = kind.__module__.partition(".")[0]
    return home in _NOT_LOOKED_INTO and home not in ("builtins", "collections", "types")


def _stream(value: Any) -> Callable[[], None] | None:
    """Puts a generator of random numbers back to where it is now; None: it is none."""
    if isinstance(value, torch.Generator):
        now = value.get_state()
        return lambda: _set_state(value, now)
    if isinstance(value, random.Random):
        return functools.partial(value.setstate, value.getstate())
    if isinstance(value, np.random.Generator):
        state = value.bit_generator.state
        return lambda: setattr(value.bit_generator, "state", state)
    return None


def _set_state(generator: torch.Generator, state: Tensor) -> None:
    generator.set_state(state)


# ---- which places -------------------------------------------------------------------------------

_known: weakref.WeakKeyDictionary[type, tuple[_Place, ...]] = weakref.WeakKeyDictionary()
"""By class; the code of a class does not change."""


def _places_of(kind: type) -> tuple[_Place, ...]:
    if kind not in _known:
        _known[kind] = _Search(kind).places()
    return _known[kind]


class _Search:
    """From a class to the code it runs, and to the names that this code may write to."""

    def __init__(self, kind: type) -> None:
        self._todo: list[Any] = [kind]
        self._seen: set[int] = set()
        self._globals: dict[int, tuple[dict[str, Any], dict[str, None]]] = {}
        self._places: list[_Place] = []

    def places(self) -> tuple[_Place, ...]:
        while self._todo and len(self._seen) < _MAX_CODE:
            item = self._todo.pop()
            if id(item) in self._seen or not _is_users(item):
                continue
            self._seen.add(id(item))
            if isinstance(item, type):
                self._look_at_class(item)
            else:
                self._look_at_function(item)
        found = [
            _Place(owner, tuple(names), f"{owner.get('__name__', '')}.")
            for owner, names in self._globals.values()
            if names
        ]
        return (*found, *self._places)

    def _look_at_class(self, kind: type) -> None:
        names = []
        for name, value in vars(kind).items():
            if name.startswith("__"):
                continue
            if not isinstance(value, _FIXED):
                names.append(name)
            self._follow(value)
        if names:
            self._places.append(_Place(kind, tuple(names), f"{kind.__qualname__}."))
        self._todo += kind.__mro__[1:]

    def _look_at_function(self, function: types.FunctionType) -> None:
        used, stored = _names_in(function.__code__)
        self._look_at_names(function.__globals__, used, stored)
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            place = _Place(cell, (name,), f"{function.__qualname__}.")
            value = place.read(name)
            if not isinstance(value, _FIXED):
                self._places.append(place)
            self._follow(value)

    def _look_at_names(self, owner: dict[str, Any], used: set[str], stored: set[str]) -> None:
        _, names = self._globals.setdefault(id(owner), (owner, {}))
        for name in used:
            value = owner.get(name, _MISSING)
            if name in stored or not (isinstance(value, _PLAIN) or value is _MISSING):
                names[name] = None
            if isinstance(value, types.ModuleType) and _is_users(value):
                if id(value) not in self._seen:
                    self._seen.add(id(value))
                    self._look_at_names(vars(value), used, stored)
                    self._seen.discard(id(value))
            else:
                self._follow(value)

    def _follow(self, value: Any) -> None:
        """Code that is reached through a value."""
        inner = getattr(value, "__func__", None) or getattr(value, "fget", None)
        wrapped = getattr(value, "__wrapped__", None)
        for item in (value, inner, wrapped, type(value)):
            if isinstance(item, (type, types.FunctionType)):
                self._todo.append(item)


def _is_users(item: Any) -> bool:
    home = item.__name__ if isinstance(item, types.ModuleType) else item.__module__
    return str(home).partition(".")[0] not in _NOT_LOOKED_INTO


def _names_in(code: types.CodeType) -> tuple[set[str], set[str]]:
    """Names of globals and attributes that are used, and those that are written to."""
    used, stored = set(code.co_names), set[str]()
    for step in dis.get_instructions(code):
        if step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR", "DELETE_ATTR"):
            stored.add(str(step.argval))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = _names_in(constant)
            used |= inner[0]
            stored |= inner[1]
    return used, stored
