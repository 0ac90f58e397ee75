"""Names of the modules and parameters of a model, as the reference calls them."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from modulecheck.tensor_groups import output_tag, tag_matches
from opcheck.errors import ArgumentError, ArgumentTypeError
from opcheck.modules import clean_fqn

__all__ = ["MappedNames", "Rename", "mapped_names"]

Rename: TypeAlias = (
    Mapping[str, str | None] | Sequence[tuple[str, str]] | Callable[[str], str | None]
)


CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""They are never called, so a name of one needs no counterpart."""


@dataclass(frozen=True, slots=True)
class MappedNames:
    """The modules of a model under the names of the reference; keeps none of them alive."""

    names: tuple[str, ...]
    """Of the modules that compute, not of mere containers."""
    _hooked: list[tuple[str, weakref.ref[nn.Module]]]
    _all: list[tuple[str, weakref.ref[nn.Module]]]
    """(own name, module), wrapped ones included."""
    _rename: Callable[[str], str | None]

    def hooked(self) -> Iterator[tuple[str, nn.Module]]:
        """One module per name: of a wrapper and what it wraps, the wrapper."""
        for name, reference in self._hooked:
            module = reference()
            if module is not None:
                yield name, module

    def state(self) -> Iterator[tuple[str, str, torch.Tensor, bool]]:
        """(name, name of the module, tensor, is a buffer), parameters of a module first.

        Tied parameters appear under each of their names.
        """
        for own_name, reference in self._all:
            module, owner = reference(), self._rename(own_name)
            if module is None or owner is None:
                continue
            both = (
                (module.named_parameters(recurse=False, remove_duplicate=False), False),
                (module.named_buffers(recurse=False, remove_duplicate=False), True),
            )
            for items, is_buffer in both:
                for key, value in items:
                    name = self._rename(f"{own_name}.{key}" if own_name else key)
                    if name is not None:
                        yield name, owner, value, is_buffer


def mapped_names(model: nn.Module, rename: Rename | None, exclude: Sequence[str]) -> MappedNames:
    """Names of the modules of `model`, wrappers stripped, renamed, without those left out.

    Raises:
        ArgumentError: two modules get one name, or a pattern is none.
        ArgumentTypeError: `rename` is nothing that renames, or gives something else than a name.
    """
    convert = _converter(rename)
    hooked: dict[str, tuple[str, nn.Module]] = {}
    everything: list[tuple[str, weakref.ref[nn.Module]]] = []
    for full_name, module in model.named_modules():
        own_name = clean_fqn(full_name, model)
        name = convert(own_name)
        if name is None or any(tag_matches(output_tag(name), pattern) for pattern in exclude):
            continue
        everything.append((own_name, weakref.ref(module)))
        known = hooked.get(name)
        if known is None:
            hooked[name] = (own_name, module)
        elif known[0] != own_name:
            raise ArgumentError(
                f"rename: {known[0] or '<root>'!r} and {own_name or '<root>'!r} would both be"
                f" {name or '<root>'!r}; a rename to None leaves a module out"
            )
    return MappedNames(
        tuple(name for name, (_, module) in hooked.items() if not isinstance(module, CONTAINERS)),
        [(name, weakref.ref(module)) for name, (_, module) in hooked.items()],
        everything,
        convert,
    )


def _converter(rename: Rename | None) -> Callable[[str], str | None]:
    if rename is None:
        return lambda name: name
    if isinstance(rename, Mapping):
        return _by_mapping(rename)
    if callable(rename):
        return _checked(rename)
    if isinstance(rename, (list, tuple)):
        return _by_patterns(rename)
    raise ArgumentTypeError(
        f"rename: expected a dict, a list of (pattern, replacement) or a function, got"
        f" {type(rename).__name__}"
    )


def _by_mapping(rename: Mapping[str, str | None]) -> Callable[[str], str | None]:
    """The longest name, or beginning of whole parts, that the dict has."""
    given: Mapping[Any, Any] = rename
    for key, value in given.items():
        if not isinstance(key, str) or not (value is None or isinstance(value, str)):
            raise ArgumentTypeError(f"rename: expected names to names, got {key!r}: {value!r}")

    def convert(name: str) -> str | None:
        parts = name.split(".") if name else []
        for end in range(len(parts), -1, -1):
            begin = ".".join(parts[:end])
            if begin in rename and (end or not parts):
                new = rename[begin]
                return None if new is None else ".".join(filter(None, [new, *parts[end:]]))
        return name

    return convert


def _by_patterns(rename: Sequence[Any]) -> Callable[[str], str | None]:
    try:
        pairs = [(re.compile(pattern), replacement) for pattern, replacement in rename]
    except (re.error, ValueError, TypeError) as error:
        raise ArgumentError(f"rename: expected (pattern, replacement) pairs: {error}") from error

    def convert(name: str) -> str | None:
        for pattern, replacement in pairs:
            name = pattern.sub(replacement, name)
        return name

    return convert


def _checked(rename: Callable[[str], str | None]) -> Callable[[str], str | None]:
    def convert(name: str) -> str | None:
        new = rename(name)
        if new is not None and not isinstance(new, str):
            raise ArgumentTypeError(f"rename: gave {type(new).__name__} for {name!r}")
        return new

    return convert
