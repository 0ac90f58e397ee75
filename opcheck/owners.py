"""Which module owns a parameter, its gradient, or what an optimizer keeps for it.

Tensors are known by their ids, which may be given to others once a tensor is freed: what is known
is asked anew for every optimizer step, and in backward for every graph with a leaf that is unknown.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from opcheck import _torch
from opcheck.tensor_kinds import held_tensors

__all__ = ["Owners"]


class Owners:
    """Of the modules below `roots`, under their `names`; both are the caller's and may change."""

    def __init__(self, roots: Collection[nn.Module], names: Mapping[nn.Module, str]) -> None:
        self._roots = roots
        self._names = names
        self._owners: dict[int, str] = {}
        self._state_size = (0, 0)
        self._num_unknown = 0
        """Times in an optimizer's step that its newest entries did not hold what was asked for."""
        self._asked_in = -1
        """Graph task that last met a leaf of no known module."""

    def clear(self) -> None:
        """Forget everything."""
        self._owners = {}
        self._asked_in = -1

    def of(self, tensors: list[Any], optimizer: Any = None) -> str:
        """FQN of the module that owns the parameters among `tensors`, "" if not one alone.

        A parameter's gradient and its state in `optimizer`, whose step runs, count as the
        parameter.
        """
        found = self._known(tensors)
        if None in found and optimizer is not None:
            state = getattr(optimizer, "state", {})
            if _size_of(state) != self._state_size:  # made in this step
                self._learn_new_state(state)
                found = self._known(tensors)
                if None in found and self._is_worth_asking():
                    self._learn_all(optimizer)
                    found = self._known(tensors)
        found.discard(None)
        return found.pop() or "" if len(found) == 1 else ""

    def of_gradient(self, parameter: Tensor, task: int) -> str:
        """FQN of the module whose parameter gets a gradient in this graph task; "" for none."""
        if id(parameter) not in self._owners and self._asked_in != task:
            self._asked_in = task  # once: a graph may have as many leaves of no module
            self._learn_all()
        return self._owners.get(id(parameter), "")

    def learn(self, optimizer: Any) -> None:
        """The step of an optimizer begins."""
        self._num_unknown = 0
        self._learn_all(optimizer)

    # ---- asking ----

    def _known(self, tensors: list[Any]) -> set[str | None]:
        return {self._owners.get(id(tensor)) for tensor in tensors}

    def _learn_all(self, optimizer: Any = None) -> None:
        owners = self._owners = {}
        for root in self._roots:
            for module in root.modules():
                fqn = self._names.get(module, "")
                for parameter in _torch.own_parameters(module).values():
                    owners.setdefault(id(parameter), fqn)
        state = getattr(optimizer, "state", {})
        self._state_size = _size_of(state)
        for group in getattr(optimizer, "param_groups", ()):
            self._learn_values(group["params"], state)

    def _learn_new_state(self, state: Any) -> None:
        """Entries that the running step made since they were last looked at.

        A state is filled parameter by parameter, so that the last known entry may have grown; to
        go through all parameters for each new entry would take their number squared.
        """
        num_known, size = self._state_size[0], _size_of(state)
        self._state_size = size
        new = itertools.islice(reversed(state), max(0, size[0] - num_known) + 1)
        self._learn_values(new, state)

    def _is_worth_asking(self) -> bool:
        """Not the last entry grew but others: true for the 1st, 2nd, 4th, 8th... time of a step."""
        self._num_unknown += 1
        return self._num_unknown & (self._num_unknown - 1) == 0

    def _learn_values(self, parameters: Iterable[Any], state: Any) -> None:
        owners = self._owners
        for parameter in parameters:
            owner = owners.get(id(parameter))
            if owner is None:
                continue
            for value in (parameter, parameter.grad, *state.get(parameter, {}).values()):
                if isinstance(value, Tensor):
                    for tensor in (value, *held_tensors(value)):
                        owners[id(tensor)] = owner


def _size_of(state: Any) -> tuple[int, int]:
    """Grows with every entry of an optimizer's state, which is filled parameter by parameter."""
    return len(state), len(next(reversed(state.values()))) if state else 0
