"""Which modules are compiled and compared, and which are left out of the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from modulecheck import _torch
from modulecheck.distributed import inside_ddp
from opcheck.errors import ArgumentError
from opcheck.modules import clean_fqn
from opcheck.validation import a_count, a_string, an_instance, wrong_type

__all__ = ["COMPILED_BY_USER", "IGNORED", "INSIDE_COMPILED", "Plan", "Selection"]

IGNORED = "IGNORED"
COMPILED_BY_USER = "SKIP_compiled_wrapper"
INSIDE_COMPILED = "SKIP_inside_compiled"

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True, slots=True)
class Target:
    """A module to compile."""

    name: str
    module: nn.Module
    checked: bool
    """False: ignored, that is compiled as the others and not compared."""
    fqn: str = ""
    """Its place in the model, which `name` may replace in the report."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a selection means on one model."""

    targets: tuple[Target, ...]
    skipped: tuple[tuple[str, str], ...]
    """(name, marker) of modules that get a row and no comparison."""


@dataclass
class Selection:
    """What `wrap` and `ignore` have marked."""

    wrapped: dict[nn.Module, str | None] = field(default_factory=dict)
    ignored: set[nn.Module] = field(default_factory=set)

    def wrap(self, module: nn.Module, name: str | None = None) -> None:
        """Mark one module; `name` replaces its FQN in the report."""
        _require_module("module", module)
        self.wrapped[module] = a_string("name", name, optional=True)

    def wrap_by_policy(self, model: nn.Module, classes: Any) -> list[nn.Module]:
        """Mark every module of these classes."""
        found = _of_classes(model, classes)
        for module in found:
            self.wrapped.setdefault(module, None)
        return found

    def wrap_all_children(self, model: nn.Module, depth: Any) -> list[nn.Module]:
        """Mark the modules at a depth; containers do not use up depth."""
        _require_module("model", model)
        depth = a_count("depth", depth)
        found = list(dict.fromkeys(_at_depth(inside_ddp(model), depth)))
        for module in found:
            self.wrapped.setdefault(module, None)
        return found

    def ignore(self, module: nn.Module) -> None:
        """Leave one module out of the report."""
        _require_module("module", module)
        self.ignored.add(module)

    def ignore_by_policy(self, model: nn.Module, classes: Any) -> None:
        """Leave every module of these classes out of the report."""
        self.ignored.update(_of_classes(model, classes))

    def plan(self, model: nn.Module) -> Plan:
        """Outermost wrapped modules are compiled; what lies inside them is compiled with them.

        Raises:
            ArgumentError: a wrapped module is no part of the model, or two have one name.
        """
        names = {module: clean_fqn(name, model) for name, module in model.named_modules()}
        lost = [module for module in self.wrapped if module not in names]
        if lost:
            raise ArgumentError(
                f"wrap: {type(lost[0]).__name__} is not a module of the model given to install()"
                f" ({type(model).__name__}); wrap modules of that model, or install the other one"
            )
        held = {getattr(item, "_orig_mod", None) for item in names if is_compiled(item)}
        targets: list[Target] = []
        skipped: list[tuple[str, str]] = []
        for module, inside in _with_fate(model, self.wrapped):
            name = self.wrapped.get(module) or names[module]
            if module in self.ignored:
                skipped.append((name, IGNORED))
            elif module in self.wrapped and (inside or is_compiled(module)):
                skipped.append((name, _marker(module, held)))
            if module in self.wrapped and not inside and not is_compiled(module):
                checked, run = module not in self.ignored, inside_ddp(module)
                targets.append(Target(name, run, checked, fqn=names[module]))
        counts = Counter(target.name for target in targets)
        twice = [name for name, count in counts.items() if count > 1]
        if twice:
            raise ArgumentError(
                f"wrap: {counts[twice[0]]} modules have the name {twice[0]!r} in the report;"
                " wrap(module, name) takes another one for each"
            )
        return Plan(tuple(targets), tuple(dict.fromkeys(skipped)))


def is_compiled(module: nn.Module) -> bool:
    """The user compiled it before we came."""
    return _torch.is_compiled_wrapper(module) or _torch.compiled_call(module) is not None


def _marker(module: nn.Module, inside_wrapper: set[Any]) -> str:
    compiled = is_compiled(module) or module in inside_wrapper
    return COMPILED_BY_USER if compiled else INSIDE_COMPILED


def _with_fate(model: nn.Module, wrapped: Any) -> list[tuple[nn.Module, bool]]:
    """Every module once, with whether it lies inside a compiled or wrapped one on every path."""
    inside: dict[nn.Module, bool] = {}
    done: set[tuple[nn.Module, bool]] = set()
    todo = [(model, False)]
    while todo:
        module, below = todo.pop()
        if (module, below) in done:
            continue
        done.add((module, below))
        inside[module] = inside.get(module, True) and below
        deeper = below or module in wrapped or is_compiled(module)
        todo += [(child, deeper) for child in reversed(list(module.children()))]
    return [(module, inside[module]) for module in model.modules()]


def _require_module(field: str, value: Any) -> None:
    an_instance(field, value, nn.Module, "a torch.nn.Module")


def _of_classes(model: nn.Module, classes: Any) -> list[nn.Module]:
    _require_module("model", model)
    given = (classes,) if isinstance(classes, type) else classes
    wanted = tuple(given) if isinstance(given, Iterable) else ()
    if not wanted or not all(isinstance(item, type) for item in wanted):
        raise wrong_type("module_classes", "classes of modules", classes)
    return [module for module in model.modules() if isinstance(module, wanted)]


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """Children, those of containers in place of the container."""
    for child in module.children():
        if isinstance(child, _CONTAINERS):
            yield from _parts(child)
        else:
            yield child


def _at_depth(module: nn.Module, depth: int) -> Iterator[nn.Module]:
    for part in _parts(module):
        if depth == 0 or not any(True for _ in _parts(part)):
            yield part
        else:
            yield from _at_depth(part, depth - 1)
