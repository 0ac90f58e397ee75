"""Which names the code of a module may write to: in globals, in classes, in closures.

They are read from byte code, of its class and of what that calls; none of it runs for that.
"""

from __future__ import annotations

import dis
import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from opcheck.golden import attributes_of

__all__ = ["MISSING", "NOT_LOOKED_INTO", "PLAIN", "Place", "places_of"]

Holder: TypeAlias = "dict[str, Any] | type | types.CellType"

_MAX_CODE = 500
"""Functions and classes that are looked through for one class of modules."""
NOT_LOOKED_INTO = {"torch", "numpy", "modulecheck", "opcheck", *sys.stdlib_module_names}
_FIXED = (
    types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type, property, staticmethod,
    classmethod, functools.cached_property, str, bytes, torch.dtype, torch.device,
)  # fmt: skip
"""Values that hold nothing a forward could change."""
PLAIN = (int, float, complex, bool, nn.Module, *_FIXED)
"""Values that hold no state themselves, or are looked at apart."""
MISSING = object()


@dataclass(frozen=True, slots=True)
class Place:
    """Names in a dict of globals, in a class, or the one value of a cell."""

    holder: Holder
    names: tuple[str, ...]
    label: str
    """In front of a name it says where that is."""

    def read(self, name: str) -> Any:
        """What is there now, `MISSING` where nothing is."""
        if isinstance(self.holder, dict):
            return self.holder.get(name, MISSING)
        if isinstance(self.holder, type):
            return vars(self.holder).get(name, MISSING)
        try:
            return self.holder.cell_contents
        except ValueError:  # the cell is empty yet
            return MISSING

    def write(self, name: str, value: Any) -> None:
        """Bind the name."""
        if isinstance(self.holder, dict):
            self.holder[name] = value
        elif isinstance(self.holder, type):
            type.__setattr__(self.holder, name, value)
        else:
            self.holder.cell_contents = value

    def delete(self, name: str) -> None:
        """Unbind the name."""
        if isinstance(self.holder, dict):
            del self.holder[name]
        elif isinstance(self.holder, type):
            type.__delattr__(self.holder, name)
        else:
            del self.holder.cell_contents


Code: TypeAlias = "type | types.FunctionType"


@dataclass(frozen=True, slots=True)
class _Lead:
    """To a place, without keeping classes and closures alive; None: it is gone."""

    holder: Callable[[], Holder | None]
    names: tuple[str, ...]
    label: str


_known: weakref.WeakKeyDictionary[Code, tuple[Any, list[_Lead]]] = weakref.WeakKeyDictionary()
"""By class, and by function where one module has a forward of its own; each with the forward that
was looked at, which a patch may replace."""


def places_of(modules: Iterable[nn.Module]) -> tuple[Place, ...]:
    """All places, each once, that the code of these modules may write to."""
    codes = dict.fromkeys(code for module in modules for code in _codes_of(module))
    names: dict[int, dict[str, None]] = {}
    found: dict[int, Place] = {}
    for lead in (lead for code in codes for lead in _leads_of(code)):
        holder = lead.holder()
        if holder is not None:
            own = names.setdefault(id(holder), {})
            own.update(dict.fromkeys(lead.names))
            found[id(holder)] = Place(holder, tuple(own), lead.label)
    return tuple(found.values())


def _codes_of(module: nn.Module) -> Iterator[Code]:
    yield type(module)
    own = _plain_function(vars(module).get("forward"))
    if own is not None:
        yield own


def _plain_function(value: Any) -> types.FunctionType | None:
    while isinstance(value, (types.MethodType, functools.partial)):
        value = value.func if isinstance(value, functools.partial) else value.__func__
    return value if isinstance(value, types.FunctionType) else None


def _leads_of(code: Code) -> list[_Lead]:
    forward = _forward_of(code)
    if code in _known:
        seen, leads = _known[code]
        if seen() is forward:
            return leads
    leads = _Search(code).leads()
    _known[code] = _nothing if forward is None else weakref.ref(forward), leads
    return leads


def _nothing() -> None:
    """Stand for a weak reference where there is nothing to refer to."""


def _forward_of(code: Code) -> types.FunctionType | None:
    above = code.__mro__ if isinstance(code, type) else ()
    return next(
        (_plain_function(vars(base)["forward"]) for base in above if "forward" in vars(base)), None
    )


def _cell(function: weakref.ref[types.FunctionType], place: int) -> types.CellType | None:
    alive = function()
    return None if alive is None or not alive.__closure__ else alive.__closure__[place]


def _itself(holder: dict[str, Any]) -> dict[str, Any]:
    return holder


class _Search:
    """From a class to the code it runs, and to the names that this code may write to."""

    def __init__(self, code: Code) -> None:
        self._todo: list[Any] = [code]
        self._seen: set[int] = set()
        self._globals: dict[int, tuple[dict[str, Any], dict[str, None]]] = {}
        self._leads: list[_Lead] = []

    def leads(self) -> list[_Lead]:
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
            _Lead(functools.partial(_itself, owner), tuple(names), f"{owner.get('__name__', '')}.")
            for owner, names in self._globals.values()
            if names
        ]
        return found + self._leads

    def _look_at_class(self, kind: type) -> None:
        names = _names_stored_by(kind)
        for name, value in vars(kind).items():
            if name.startswith("__"):
                continue
            if not isinstance(value, _FIXED):
                names[name] = None
            self._follow(value)
        if names:
            self._leads.append(_Lead(weakref.ref(kind), tuple(names), f"{kind.__qualname__}."))
        self._todo += kind.__mro__[1:]

    def _look_at_function(self, function: types.FunctionType) -> None:
        used, stored = _names_in(function.__code__)
        self._look_at_names(function.__globals__, used, stored)
        pairs = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for number, (name, cell) in enumerate(pairs):
            label = f"{function.__qualname__}."
            value = Place(cell, (name,), label).read(name)
            if not isinstance(value, _FIXED):
                holder = functools.partial(_cell, weakref.ref(function), number)
                self._leads.append(_Lead(holder, (name,), label))
            self._follow(value)

    def _look_at_names(self, owner: dict[str, Any], used: set[str], stored: set[str]) -> None:
        _, names = self._globals.setdefault(id(owner), (owner, {}))
        for name in used:
            value = owner.get(name, MISSING)
            held = isinstance(value, nn.Module) or not isinstance(value, PLAIN)
            if name in stored or (held and value is not MISSING):
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
        inner = wrapped = None
        if isinstance(value, (classmethod, staticmethod, types.MethodType)):
            inner = value.__func__
        elif isinstance(value, property):
            inner = value.fget
        elif isinstance(value, functools.partial):
            inner = value.func
        if not isinstance(value, type):
            wrapped = (attributes_of(value) or {}).get("__wrapped__")
        for item in (value, inner, wrapped, type(value)):
            if isinstance(item, (type, types.FunctionType)):
                self._todo.append(item)


def _functions_of(kind: type) -> Iterator[types.FunctionType]:
    """Methods of a class and of those above it, also those that a decorator has wrapped."""
    for base in filter(_is_users, kind.__mro__):
        for value in vars(base).values():
            found = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
            while isinstance(found, types.FunctionType):
                yield found
                found = vars(found).get("__wrapped__")


def _names_stored_by(kind: type) -> dict[str, None]:
    """Attributes that methods assign, of an object or of the class, which may not have them yet."""
    return {
        name: None
        for function in _functions_of(kind)
        for name in sorted(_names_in(function.__code__)[1])
        if not isinstance(vars(kind).get(name), _FIXED)
    }


def _is_users(item: Any) -> bool:
    home = item.__name__ if isinstance(item, types.ModuleType) else item.__module__
    return str(home).partition(".")[0] not in NOT_LOOKED_INTO


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
