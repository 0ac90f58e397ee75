"""Which module owns a parameter, its gradient, or what an optimizer keeps for it.

Tensors are looked up by id, which is given to another once a tensor is freed: so a parameter counts
as known only while its module has it, and what goes with one (a gradient, the optimizer's state)
only while it lives and the step runs. All are asked anew for every optimizer step, and parameters
in backward for every graph with a leaf that is unknown. Nothing is kept alive, and there are no
weak references to parameters: `torch.utils.swap_tensors` refuses tensors that have one.
"""

from __future__ import annotations

import itertools
import weakref
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
        self._parameters: dict[int, tuple[weakref.ref[nn.Module], str, str]] = {}
        """Module, name in it, FQN."""
        self._beside: dict[int, tuple[weakref.ref[Tensor], str]] = {}
        """Gradients and state while a step runs, and the FQN."""
        self._state_size = (0, 0)
        self._num_unknown = 0
        """Times in an optimizer's step that its newest entries did not hold what was asked for."""
        self._asked_in = -1
        """Graph task that last met a leaf of no known module."""

    def clear(self) -> None:
        """Forget everything."""
        self._parameters, self._beside = {}, {}
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
        owner = self._owner_of(parameter)
        if owner is None and self._asked_in != task:
            self._asked_in = task  # once: a graph may have as many leaves of no module
            self._learn_all()
            owner = self._owner_of(parameter)
        return owner or ""

    def learn(self, optimizer: Any) -> None:
        """The step of an optimizer begins."""
        self._num_unknown = 0
        self._learn_all(optimizer)

    def step_ended(self) -> None:
        """Gradients and state are no longer known."""
        self._beside = {}

    # ---- asking ----

    def _known(self, tensors: list[Any]) -> set[str | None]:
        return {self._owner_of(tensor) for tensor in tensors}

    def _owner_of(self, tensor: Any) -> str | None:
        beside = self._beside.get(id(tensor))
        if beside is not None and beside[0]() is tensor:
            return beside[1]
        place = self._parameters.get(id(tensor))
        if place is None:
            return None
        module, name, fqn = place[0](), place[1], place[2]
        if module is None:
            return None
        own = _torch.own_parameters(module)  # of TorchScript no dict, but it knows what it holds
        return fqn if name in own and own[name] is tensor else None

    def _learn_all(self, optimizer: Any = None) -> None:
        parameters = self._parameters = {}
        self._beside = {}
        for root in self._roots:
            for module in root.modules():
                itself, fqn = weakref.ref(module), self._names.get(module, "")
                for name, parameter in _torch.own_parameters(module).items():
                    parameters.setdefault(id(parameter), (itself, name, fqn))
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
        for parameter in parameters:
            owner = self._owner_of(parameter)
            if owner is None:
                continue
            found = [*held_tensors(parameter)]
            for value in (parameter.grad, *state.get(parameter, {}).values()):
                if isinstance(value, Tensor):
                    found += [value, *held_tensors(value)]
            for tensor in found:
                self._beside[id(tensor)] = weakref.ref(tensor), owner


def _size_of(state: Any) -> tuple[int, int]:
    """Grows with every entry of an optimizer's state, which is filled parameter by parameter."""
    return len(state), len(next(reversed(state.values()))) if state else 0
