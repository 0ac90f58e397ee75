"""What the code of a module keeps outside of it: globals, class attributes, closures.

A forward may count its calls in a global, or put a loss into a list of its file which the step
later adds up. Run again, it must begin with what the call began with, and leave no second entry.

Which names those are is read from the code: of the classes, and of what they call; none of it runs
for that. Torch, NumPy and the standard library are not looked into. Tensors and arrays there are
not written to by a run again: it gets copies in their places. What is not reached shows in
`ModuleCall`: a module that gives something else each time it runs has no verdict.
"""

from __future__ import annotations

import contextlib
import functools
import random
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from modulecheck import _torch
from modulecheck.outer_places import MISSING, NOT_LOOKED_INTO, PLAIN, Place, places_of
from opcheck.exits import uncut
from opcheck.golden import Contents, attributes_of, slots_of

__all__ = ["MAX_VALUES", "OuterState", "outer_tensors", "parts"]

CopyAll = Callable[[list[Tensor]], list[Tensor]]
_Buffers: TypeAlias = tuple[str, "dict[str, Tensor | None]"]
"""Of one module, with a name for it."""
_Values: TypeAlias = "tuple[tuple[Place, str, Any], ...]"

MAX_VALUES = 1000
"""An object from which more values are reached is a vocabulary, or the program around the module,
and no state of its forward."""
MAX_BYTES = 1 << 26
"""A larger tensor or array, and a parameter, is a table that forwards read."""


@dataclass(frozen=True, slots=True)
class OuterState:
    """Values as they were, and how to put them back."""

    places: tuple[Place, ...] = ()
    values: _Values = ()
    contents: tuple[Contents, ...] = ()
    streams: tuple[Callable[[], object], ...] = ()
    """Each puts a generator of random numbers back."""
    data: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    """Tensors and arrays by id, each with a copy."""
    buffers: tuple[_Buffers, ...] = ()
    """Of modules that are called without being submodules: globals, members of a list."""

    @classmethod
    def of(cls, modules: Iterable[nn.Module], copies: CopyAll) -> OuterState:
        """As it is now, of the code of these modules.

        Args:
            modules: whose classes are looked at.
            copies: copies tensors, which may be written to in place.
        """
        found = cls._at(*_looked_at(modules))
        return replace(found, data=_copied(found._data(), copies))

    @classmethod
    def _at(cls, places: tuple[Place, ...], buffers: tuple[_Buffers, ...]) -> OuterState:
        values = _read(places)
        held = [value for _, _, value in values]
        holding = (*held, *(own for _, own in buffers))
        streams = (_stream(value) for value in held)
        return cls(
            places,
            values,
            tuple(Contents([value]) for value in holding if _is_small_state(value)),
            tuple(put_back for put_back in streams if put_back is not None),
            buffers=buffers,
        )

    def _data(self) -> list[Any]:
        """Tensors and arrays that a forward may write to, each once."""
        held = [value for _, _, value in self.values]
        held += [item for contents in self.contents for item in contents.members()]
        return list({id(item): item for item in held if _is_data(item)}.values())

    def tensors(self) -> dict[str, Tensor]:
        """Copies of tensors, where there are any, by a name that says where those are."""
        return {
            name: self.data[id(tensor)][1] if id(tensor) in self.data else tensor
            for name, tensor in _tensors_among(self.values, self.buffers)
        }

    def written(self) -> tuple[list[Tensor], list[tuple[Any, Any]]]:
        """What may be written to in place: tensors, and arrays each with a copy."""
        data = self.data.values()
        return (
            [item for item, _ in data if isinstance(item, Tensor)],
            [pair for pair in data if not isinstance(pair[0], Tensor)],
        )

    def put_back(self) -> None:
        """As it was."""
        for place, name, value in self.values:
            if place.read(name) is value:
                continue
            if value is MISSING:
                place.delete(name)
            else:
                place.write(name, value)
        for contents in self.contents:
            contents.put_back()
        for stream in self.streams:
            stream()

    def forgotten(self) -> OuterState:
        """The same places, without holding on to what was there."""
        return OuterState(self.places, buffers=self.buffers)

    @contextlib.contextmanager
    def again(self, copies: CopyAll) -> Iterator[None]:
        """Begin with copies of these values; afterwards there are those of before the context.

        Args:
            copies: copies tensors; in place, because a graph of the user's may need their values.
        """
        now = self._at(self.places, self.buffers)
        begun = self
        if not self.values:  # forgotten
            begun = replace(now, data={id(item): (item, item) for item in now._data()})
        try:
            begun.put_back()
            new = _copied([copy for _, copy in begun.data.values()], copies)
            begun._exchange({key: new[id(copy)][1] for key, (_, copy) in begun.data.items()})
            yield
        finally:
            uncut(now.put_back)

    def _exchange(self, twins: dict[int, Any]) -> None:
        for place, name, value in self.values:
            if id(value) in twins:
                place.write(name, twins[id(value)])
        for contents in self.contents:
            contents.exchange(twins)


def outer_tensors(modules: Iterable[nn.Module]) -> dict[str, Tensor]:
    """The tensors themselves, as they are now, named as in `OuterState.tensors`."""
    places, buffers = _looked_at(modules)
    return dict(_tensors_among(_read(places), buffers))


def _looked_at(modules: Iterable[nn.Module]) -> tuple[tuple[Place, ...], tuple[_Buffers, ...]]:
    modules = list(modules)
    places = places_of(modules)
    return places, tuple(_hidden_buffers(modules, places))


def _read(places: Iterable[Place]) -> _Values:
    return tuple((place, name, place.read(name)) for place in places for name in place.names)


def _tensors_among(values: _Values, buffers: Iterable[_Buffers]) -> Iterator[tuple[str, Tensor]]:
    named = ((f"{place.label}{name}", value) for place, name, value in values)
    for path, value in (*named, *buffers):
        if isinstance(value, Tensor) or _is_small_state(value):
            yield from _named(value, path)


def _hidden_buffers(modules: list[nn.Module], places: tuple[Place, ...]) -> Iterator[_Buffers]:
    """Of modules that these reach by a global, a closure or a container, and not as submodules.

    A module that has one of these within it is the program around them.
    """
    own = set(map(id, modules))
    reached = [(name, place.read(name)) for place in places for name in place.names]
    reached += [pair for module in modules for pair in vars(module).items()]
    number = 0
    for name, value in reached:
        members = value if isinstance(value, (list, tuple)) else (value,)
        for item in members if len(members) <= MAX_VALUES else ():
            if not isinstance(item, nn.Module) or id(item) in own:
                continue
            inner = list(item.modules())
            if own.isdisjoint(map(id, inner)):
                for part in inner:
                    yield f"{name}.{number}", _torch.own_buffers(part)
                    number += 1
            own.update(map(id, inner))


def parts(value: Any) -> Iterator[Any]:
    """What a container or an object holds."""
    return (item for _, item in _named_parts(value))


def _named_parts(value: Any) -> Iterator[tuple[Any, Any]]:
    """With its key, place or name; runs no code of the object, which may load what it gives."""
    if isinstance(value, dict):
        yield from dict.items(value)
    elif isinstance(value, types.MappingProxyType):
        yield from value.items()
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        yield from enumerate(value)
    yield from (attributes_of(value) or {}).items()
    for name, slot in slots_of(value).items():
        with contextlib.suppress(AttributeError):  # nothing is in it
            yield name, slot.__get__(value)


def _named(value: Any, path: str, seen: set[int] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Every tensor, by the first path to what holds it."""
    seen = set() if seen is None else seen
    if isinstance(value, Tensor):
        yield path, value
    elif not isinstance(value, PLAIN) and value is not None and id(value) not in seen:
        seen.add(id(value))
        if not callable(value):
            for name, item in _named_parts(value):
                yield from _named(item, f"{path}.{name}", seen)


def _is_data(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not isinstance(value, nn.Parameter) and value.nbytes <= MAX_BYTES
    return isinstance(value, np.ndarray) and value.nbytes <= MAX_BYTES


def _copied(data: list[Any], copies: CopyAll) -> dict[int, tuple[Any, Any]]:
    """By id, each with a copy."""
    tensors = [item for item in data if isinstance(item, Tensor)]
    found = {id(item): (item, copy) for item, copy in zip(tensors, copies(tensors), strict=True)}
    arrays = (item for item in data if isinstance(item, np.ndarray))
    return {**found, **{id(item): (item, item.copy()) for item in arrays}}


def _is_small_state(value: Any) -> bool:
    """A container or an object of the user's, and not a vocabulary or a whole program."""
    if isinstance(value, (Tensor, PLAIN)) or value is None or value is MISSING:
        return False
    if _is_torchs(type(value)):
        return False
    todo, seen = [value], set[int]()
    while todo:
        item = todo.pop()
        if isinstance(item, types.ModuleType) or len(seen) + len(todo) > MAX_VALUES:
            return False
        if isinstance(item, (Tensor, PLAIN)) or item is None or id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, (dict, list, tuple, set)) and len(item) > MAX_VALUES:
            return False
        if not callable(item):
            todo += parts(item)
    return True


def _is_torchs(kind: type) -> bool:
    """Of a library that is not looked into, and no container of the standard library."""
    home = str(kind.__module__).partition(".")[0]
    return home in NOT_LOOKED_INTO and home not in ("builtins", "collections", "types")


def _stream(value: Any) -> Callable[[], object] | None:
    """Puts a generator of random numbers back to where it is now; None: it is none."""
    if isinstance(value, torch.Generator):
        return functools.partial(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return functools.partial(value.setstate, value.getstate())
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        return functools.partial(setattr, bits, "state", bits.state)
    return None
