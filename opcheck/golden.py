"""A whole module run again in float64, without copying it and without anybody noticing."""

from __future__ import annotations

import random
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from opcheck import _torch
from opcheck.calls import traits_of
from opcheck.exits import uncut
from opcheck.global_hooks import modules_undisturbed
from opcheck.golden_rules import wider
from opcheck.modes import Mode
from opcheck.outside import outside_everything
from opcheck.records import SkipReason
from opcheck.tensor_kinds import is_plain_tensor, tensors_within

__all__ = [
    "CannotRunAgainError",
    "Contents",
    "OpTrace",
    "attributes_of",
    "contents_kept",
    "run_module",
    "runs_again",
    "slots_of",
]

OpTrace = list[tuple[Any, Any]]
"""(overload, result) of every op that the run dispatched, in order."""

_PLAIN = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


def runs_again(args: Any, kwargs: Any) -> bool:
    """True when every input is a tensor or a plain value, so that a second run changes nothing.

    A cache object among the inputs would grow twice.
    """
    return all(
        isinstance(leaf, (Tensor, *_PLAIN)) for leaf in _torch.tree_leaves((args, dict(kwargs)))
    )


class CannotRunAgainError(Exception):
    """A second run would be noticed; the message says by what. Nothing was changed."""


class _Trace(Mode):
    """Notes every op, and stops a run that reaches out of itself before it does so."""

    def __init__(self, own: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: OpTrace = []
        self.refused = ""
        self._own: dict[int, _torch.StorageWeakRef] = {}
        """Memory that the run may write to: its inputs and what it made itself.

        A weak reference keeps the id from being given to memory of somebody else.
        """
        self._add(own)

    def _handle(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.refused = self.refused or self._objection(func, args, kwargs)
        if self.refused:
            raise CannotRunAgainError(self.refused)
        out = func(*args, **kwargs)
        given = {_torch.memory_of(leaf) for leaf in tensors_within((args, kwargs))}
        self._add(leaf for leaf in tensors_within(out) if _torch.memory_of(leaf) not in given)
        # a later in-place op must not rewrite what this one gave
        self.ops.append((func, _torch.tree_map(_copied, out)))
        return out

    def _add(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._own[_torch.storage_id(storage)] = _torch.StorageWeakRef(storage)

    def _objection(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        if isinstance(func, _torch.HigherOrderOperator):
            return f"it runs {func.name()}"
        traits = traits_of(func)
        if traits.skip is SkipReason.SIDE_EFFECT:
            return f"it calls {traits.name}, which acts outside the module"
        for param, value in traits.bound(args, kwargs):
            if param.mutated and any(
                _torch.memory_of(leaf) not in self._own for leaf in tensors_within(value)
            ):
                return f"{traits.name} writes to a tensor that is no parameter, buffer or input"
        return ""


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


class _Forward(nn.Module):
    """Calls `forward` and not `__call__`, so that no hook of the module runs again."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.forward(*args, **kwargs)


def run_module(
    module: nn.Module, args: Any, kwargs: Any, *, convert: Callable[[Tensor], Tensor] | None = None
) -> tuple[Any, OpTrace]:
    """Run `module` on its inputs with state and inputs converted, float64 by default.

    Parameters, buffers, hooks, attributes, RNG and fast paths are as before afterwards.

    Args:
        module: any module; it is not copied.
        args: positional inputs, tensors of any dtype.
        kwargs: keyword inputs.
        convert: what happens to each tensor of state and inputs; must give own memory.

    Returns:
        The outputs and the trace of dispatched ops.

    Raises:
        CannotRunAgainError: the run would be noticed.
        Whatever the module raises in that dtype.
    """
    convert = convert or widened
    state = {name: convert(tensor) for name, tensor in _state(module)}
    args, kwargs = _torch.tree_map(
        lambda leaf: convert(leaf) if isinstance(leaf, Tensor) else leaf, (args, dict(kwargs))
    )
    holder = _Forward(module)
    with _quietly(module), _Trace([*state.values(), *tensors_within((args, kwargs))]) as trace:
        out = torch.func.functional_call(
            holder, {f"inner.{name}": tensor for name, tensor in state.items()}, args, kwargs
        )
    if trace.refused:  # the module itself swallowed the exception
        raise CannotRunAgainError(trace.refused)
    return out, trace.ops


def widened(tensor: Tensor) -> Tensor:
    """A float64 (complex128) copy with own memory; integers are copied as they are."""
    return tensor.detach().to(wider(tensor.dtype), copy=True)


def own_copy(tensor: Tensor) -> Tensor:
    """A copy in the same dtype with own memory."""
    return tensor.detach().clone()


def _state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if not is_plain_tensor(tensor):  # sharded: its ops would talk to other ranks
            raise CannotRunAgainError(f"{name} is no plain tensor")
        yield name, tensor


@contextmanager
def _quietly(module: nn.Module) -> Iterator[None]:
    fast_path = torch.backends.mha.get_fastpath_enabled()
    random_states = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
    with (
        outside_everything(),
        torch.no_grad(),
        _attributes_kept(module),
        modules_undisturbed(module),
    ):
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast_path)
            torch.set_rng_state(random_states[0])
            random.setstate(random_states[1])
            np.random.set_state(random_states[2])  # noqa: NPY002


_MOST_OBJECTS = 20_000
_OBJECTS_OF_A_MODULE = 16
"""Dicts and sets that `nn.Module` makes for each: they are no reason to give up a large model."""


def _attributes_kept(root: nn.Module) -> AbstractContextManager[None]:
    return contents_kept([vars(item) for item in root.modules()])


@contextmanager
def contents_kept(values: Iterable[Any]) -> Iterator[None]:
    """What lists, dicts, sets and plain objects hold, to any depth, is put back.

    Raises:
        CannotRunAgainError: there is too much of it.
    """
    kept = Contents(values)
    try:
        yield
    finally:
        uncut(kept.put_back)


class Contents:
    """What lists, dicts, sets and plain objects hold, to any depth.

    Tensors and modules are held, and not looked into.

    Raises:
        CannotRunAgainError: there is too much of it.
    """

    def __init__(self, values: Iterable[Any]) -> None:
        self._kept: dict[int, tuple[Any, Any]] = {}
        waiting: list[Any] = list(values)
        most = _MOST_OBJECTS + _OBJECTS_OF_A_MODULE * len(waiting)
        while waiting:
            value = waiting.pop()
            if id(value) in self._kept or isinstance(value, (Tensor, nn.Module, type)):
                continue
            content = _content(value)
            if content is None:
                continue
            self._kept[id(value)] = value, content
            waiting += content.values() if isinstance(content, dict) else content
            if len(self._kept) > most:
                raise CannotRunAgainError("its attributes hold too many objects to put back")

    def put_back(self) -> None:
        """As it was when this was made."""
        for value, content in self._kept.values():
            _put_back(value, content)

    def members(self) -> Iterator[Any]:
        """What they hold, tensors among it."""
        for _, content in self._kept.values():
            yield from content.values() if isinstance(content, dict) else content

    def exchange(self, twins: Mapping[int, Any]) -> None:
        """Let them hold other objects, until `put_back`.

        Args:
            twins: by id of what was held when this was made.
        """
        if not twins:
            return
        for value, content in self._kept.values():
            if isinstance(content, dict):
                new: Any = {name: _exchanged(item, twins) for name, item in content.items()}
            else:
                new = [_exchanged(item, twins) for item in content]
            _put_back(value, new)


def attributes_of(value: Any) -> dict[str, Any] | None:
    """The `__dict__` of an object, None where it has none; runs none of its code."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return found if isinstance(found, dict) else None


def slots_of(value: Any) -> dict[str, Any]:
    """Descriptors of the slots that the classes of an object declare, by name."""
    return {
        name: slot
        for kind in reversed(type(value).__mro__)
        if "__slots__" in vars(kind)
        for name, slot in vars(kind).items()
        if isinstance(slot, types.MemberDescriptorType)
    }


def _exchanged(item: Any, twins: Mapping[int, Any]) -> Any:
    if type(item) is tuple:
        new = tuple(_exchanged(part, twins) for part in item)
        return item if all(map(_is, new, item)) else new
    return twins.get(id(item), item)


def _is(left: Any, right: Any) -> bool:
    return left is right


def _kind_of(value: dict[Any, Any]) -> Any:
    """The class whose methods are called: a dict of the user's may do more in its own."""
    return OrderedDict if isinstance(value, OrderedDict) else dict


def _content(value: Any) -> Any:
    """A shallow copy of what an object holds, None where it holds nothing."""
    if isinstance(value, dict):
        return dict(_kind_of(value).items(value))
    if isinstance(value, (list, tuple, set, deque)):
        return list(value)
    if callable(value):
        return None
    attributes, slots = attributes_of(value), slots_of(value)
    if attributes is None and not slots:
        return None
    found = dict(attributes or {})
    for name, slot in slots.items():
        with suppress(AttributeError):  # nothing is in it
            found[name] = slot.__get__(value)
    return found


def _put_back(value: Any, content: Any) -> None:
    if isinstance(value, tuple) or _holds(value, content):
        return
    if isinstance(value, dict):
        kind = _kind_of(value)
        kind.clear(value)
        for key, item in content.items():
            kind.__setitem__(value, key, item)
    elif isinstance(value, (list, set, deque)):
        value.clear()
        value.update(content) if isinstance(value, set) else value.extend(content)
    else:
        _put_attributes_back(value, content)


def _put_attributes_back(value: Any, content: dict[str, Any]) -> None:
    attributes, slots = attributes_of(value), slots_of(value)
    if attributes is not None:
        attributes.clear()
        attributes.update((name, item) for name, item in content.items() if name not in slots)
    for name, slot in slots.items():
        if name in content:
            slot.__set__(value, content[name])
        else:
            with suppress(AttributeError):
                slot.__delete__(value)


def _holds(value: Any, content: Any) -> bool:
    now = _content(value)
    if len(now) != len(content):
        return False
    if isinstance(content, dict):
        now, content = [*now, *now.values()], [*content, *content.values()]
    return all(left is right for left, right in zip(now, content, strict=True))
