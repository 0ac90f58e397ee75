"""What a module keeps in plain attributes: counters, lists, caches, tensors that are no buffers.

A forward may read and write them as it does buffers, so they are copied before a call, and a run
again begins from copies of those: it computes what the call computed, and the module's own objects
are not touched.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from modulecheck import _torch, trees
from modulecheck.outer_state import MAX_VALUES, OuterState, outer_tensors, parts

__all__ = ["Attributes", "attribute_tensors"]

CopyAll = Callable[[list[Tensor]], list[Tensor]]

_OF_TORCH = (frozenset(nn.Module().__dict__) - {"training"}) | {_torch.COMPILED_CALL, "forward"}
_ATOMS = (
    int, float, complex, bool, str, bytes, type(None), type, torch.dtype, torch.device,
    types.FunctionType, types.BuiltinFunctionType,
)  # fmt: skip
_AROUND = (nn.Module, torch.optim.Optimizer, torch.utils.data.DataLoader, types.ModuleType)


class _Left:
    """Stands for a value that is not copied."""


@dataclass(frozen=True, slots=True)
class Attributes:
    """Copies, by path of the submodule and name."""

    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    owned: dict[int, tuple[Tensor, str]] = field(default_factory=dict)
    """Parameters and buffers that stand among the values, by id, with their names."""
    outer: dict[str, Tensor] = field(default_factory=dict)
    """Tensors that the code of the module keeps outside of it; no copies."""

    @classmethod
    def take(
        cls,
        module: nn.Module,
        buffers: Mapping[str, Tensor],
        copies: CopyAll,
        *,
        outer: OuterState | None = None,
    ) -> Attributes:
        """Copy what the submodules have.

        Args:
            module: the module.
            buffers: copies of its buffers, by name.
            copies: copies tensors.
            outer: what its code keeps outside of it.
        """
        memo: dict[int, Any] = {}
        owned: dict[int, tuple[Tensor, str]] = {}
        for name, item in (*module.named_parameters(), *module.named_buffers()):
            twin = memo[id(item)] = buffers.get(name, item)
            owned[id(twin)] = twin, name
        values = {path: _own(item) for path, item in module.named_modules()}
        held = {} if outer is None else _not_owned(module, outer.tensors())
        return cls(_twins(values, memo, copies), owned, held)

    def put(self, module: nn.Module, state: Mapping[str, Tensor], copies: CopyAll) -> None:
        """Give the module copies of them; who calls puts the module's own back.

        Args:
            module: the module, or a copy of it.
            state: what it runs with in place of its parameters and buffers, by name.
            copies: copies tensors.
        """
        memo: dict[int, Any] = {
            key: state[name] for key, (_, name) in self.owned.items() if name in state
        }
        twins = _twins(self.values, memo, copies)
        for path, item in module.named_modules():
            if path not in twins:
                continue
            for name in _own(item).keys() - twins[path].keys():
                del item.__dict__[name]
            kept = twins[path].items()
            item.__dict__.update((name, value) for name, value in kept if value is not _Left)

    def tensors(self) -> dict[str, Tensor]:
        """Those that are neither parameters nor buffers, by dotted name."""
        return {**self.outer, **_named(self.values, self.owned)}

    def all_tensors(self) -> list[Tensor]:
        """The module's own, each once."""
        own = _named(self.values, self.owned).values()
        return list({id(item): item for item in own}.values())


def attribute_tensors(
    module: nn.Module, state: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Tensors in plain attributes, and outside of the module, as they are now, by dotted name.

    Args:
        module: the module.
        state: what it runs with in place of its parameters and buffers.
    """
    owned = {id(item) for item in (*module.parameters(), *module.buffers())}
    owned.update(id(item) for item in (state or {}).values())
    values = {path: _own(item) for path, item in module.named_modules()}
    held = _named(
        {
            path: {name: _Left if _reached(value) is None else value for name, value in own.items()}
            for path, own in values.items()
        },
        owned,
    )
    return {**_not_owned(module, outer_tensors(module.modules())), **held}


def _not_owned(module: nn.Module, outer: dict[str, Tensor]) -> dict[str, Tensor]:
    """A module may hold by attribute what its code reaches as a global too."""
    if not outer:
        return {}
    owned = {id(item) for item in (*module.parameters(), *module.buffers())}
    return {name: tensor for name, tensor in outer.items() if id(tensor) not in owned}


def _named(values: Mapping[str, Mapping[str, Any]], owned: Any) -> dict[str, Tensor]:
    return {
        name: tensor
        for path, own in values.items()
        for name, tensor in trees.named_tensors(own, path)
        if id(tensor) not in owned
    }


def _own(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in module.__dict__.items() if name not in _OF_TORCH}


def _twins(
    values: Mapping[str, Mapping[str, Any]], memo: dict[int, Any], copies: CopyAll
) -> dict[str, dict[str, Any]]:
    reached = {
        (path, name): _reached(value) for path, own in values.items() for name, value in own.items()
    }
    found = {id(item): item for held in reached.values() for item in held or ()}
    new = [item for key, item in found.items() if key not in memo and isinstance(item, Tensor)]
    memo.update(zip(map(id, new), copies(new), strict=True))
    for key, item in found.items():
        if isinstance(item, torch.Generator):
            memo[key] = item.clone_state()
    return {
        path: {
            name: _Left if reached[path, name] is None else _copied(value, memo)
            for name, value in own.items()
        }
        for path, own in values.items()
    }


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, _ATOMS):
        return value
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # noqa: BLE001 - what refuses to be copied in any way is left alone
        return _Left


def _reached(value: Any) -> list[Any] | None:
    """Tensors and generators that it holds; None: it is no state of a forward."""
    todo, found = [value], []
    seen: dict[int, Any] = {}  # held: a container may make what it gives, anew each time
    num_values = 0
    while todo:
        item = todo.pop()
        num_values += 1
        if num_values > MAX_VALUES:
            return None
        if isinstance(item, _ATOMS) or id(item) in seen:
            continue
        seen[id(item)] = item
        if isinstance(item, (Tensor, torch.Generator)):
            found.append(item)
        elif isinstance(item, _AROUND) or callable(item):
            return None
        else:
            todo += parts(item)
    return found
