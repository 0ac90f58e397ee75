"""A module run again in eager, on copies of what one call got, without any side effect."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from modulecheck import _torch, trees
from modulecheck.attributes import attribute_tensors
from modulecheck.buffers import all_buffers, copied_buffers, put_buffers
from modulecheck.distributed import is_fsdp2, no_collectives
from modulecheck.snapshot import RandomState, Snapshot, arguments, copied_together
from modulecheck.undisturbed import undisturbed
from opcheck.exits import uncut
from opcheck.golden_rules import wider

__all__ = [
    "Replayed",
    "Snapshot",
    "arguments",
    "as_in",
    "replay",
    "replaying",
    "same_dtype",
    "together",
    "widened",
]

Convert = Callable[[Tensor, str], Tensor]
"""Own memory for a tensor; the name says which one it is ("" for the same-dtype replay)."""


class _Link(torch.autograd.Function):
    """Hands `data` on as if it had been computed from `leaf`: it may be changed in place."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, data: Tensor) -> Tensor:
        return data.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


class _Replaying(threading.local):
    depth = 0
    together = False


_now = _Replaying()


@contextlib.contextmanager
def together(*, agreed: bool) -> Iterator[None]:
    """Runs inside may talk to the other ranks, which do the same."""
    before = _now.together
    try:
        _now.together = agreed
        yield
    finally:
        _now.together = before


def replaying() -> bool:
    """True while this thread runs a module again: wrapped modules inside are not checked then."""
    return _now.depth > 0


@dataclass(slots=True)
class Replayed:
    """What a run again gave; holds its autograd graph until `gradients` is asked for."""

    output: Any
    arguments: dict[str, Any]
    """Positional ones by number, after the run."""
    inputs: list[Tensor]
    """What the module received, after the run: in-place changes are in it."""
    buffers: dict[str, Tensor]
    """After the run, by every name that they have."""
    attributes: dict[str, Tensor]
    """Tensors in plain attributes of the module after the run."""
    input_leaves: list[Tensor | None]
    """Beside `inputs`; None where the input wants no gradient."""
    parameter_leaves: dict[str, Tensor]
    random_after: Tensor
    """State of torch's CPU generator after the run."""

    def gradients(
        self,
        outputs: list[Tensor],
        grads: list[Tensor],
        *,
        mode: AbstractContextManager[Any] | None = None,
        compiled: bool = False,
    ) -> tuple[list[Tensor | None], dict[str, Tensor | None]]:
        """Gradients of inputs and of parameters; the graph is gone afterwards.

        Args:
            outputs: where gradients come in.
            grads: those gradients.
            mode: sees every op of the backward.
            compiled: the outputs are those of compiled code.
        """
        leaves = [leaf for leaf in self.input_leaves if leaf is not None]
        names = [name for name, leaf in self.parameter_leaves.items() if leaf.requires_grad]
        wanted = leaves + [self.parameter_leaves[name] for name in names]
        pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if o.requires_grad]
        if not wanted or not pairs:
            return [None] * len(self.input_leaves), dict.fromkeys(names)
        with _running(compiled=compiled), mode or contextlib.nullcontext():
            found = list(
                torch.autograd.grad(
                    [o for o, _ in pairs],
                    wanted,
                    [g.to(o.dtype) for o, g in pairs],
                    allow_unused=True,
                )
            )
        of_inputs = iter(found[: len(leaves)])
        return (
            [None if leaf is None else next(of_inputs) for leaf in self.input_leaves],
            dict(zip(names, found[len(leaves) :], strict=True)),
        )


class _Holder(nn.Module):
    """Reaches the module under names of its own, and looks at the buffers before they go back."""

    def __init__(
        self,
        module: nn.Module,
        modes: Sequence[AbstractContextManager[Any]],
        through: Callable[..., Any] | None,
        state: dict[str, Tensor],
    ) -> None:
        super().__init__()
        self.inner = module
        self.modes = modes
        # in a tuple, because a module among the attributes would be a submodule of this one
        self.call = (through,)
        self.state = state
        self.buffers_after: dict[str, Tensor] = {}
        self.attributes_after: dict[str, Tensor] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # the hooks of FSDP2 are outside of what is compared
        run = self.inner.forward if is_fsdp2(self.inner) else _torch.call_impl(self.inner)
        with contextlib.ExitStack() as stack:
            for mode in self.modes:
                stack.enter_context(mode)
            out = (self.call[0] or run)(*args, **kwargs)
        self.buffers_after = all_buffers(self.inner)
        self.attributes_after = attribute_tensors(self.inner, self.state)
        return out


def same_dtype(tensor: Tensor, name: str) -> Tensor:
    """The same memory, without autograd; nobody may write to it."""
    return tensor.detach()


def widened(tensor: Tensor, name: str) -> Tensor:
    """A float64 (complex128) copy; integers as they are."""
    return tensor.detach().to(wider(tensor.dtype), copy=True)


def _as_is(saved: Tensor) -> Tensor:
    return saved


@contextlib.contextmanager
def _running(*, compiled: bool = False) -> Iterator[None]:
    """Reference work: the generators are put back, dispatch modes and checkpoint hooks are out."""
    before, depth = RandomState.now(), _now.depth
    try:
        _now.depth = depth + 1
        with contextlib.ExitStack() as stack:
            stack.enter_context(_torch.no_modes())
            if not compiled:  # a mode turns compile off, and hooks make it another graph
                if not _now.together:
                    stack.enter_context(no_collectives())
                if _torch.has_saved_tensors_hooks():  # torch.func.grad refuses any
                    stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_as_is, _as_is))
            yield
    finally:
        _now.depth = depth
        uncut(before.restore)


@contextlib.contextmanager
def as_in(snapshot: Snapshot, *, autocast: bool) -> Iterator[None]:
    """Autocast, grad mode and inference mode of the call."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(snapshot.inference))
        stack.enter_context(torch.set_grad_enabled(snapshot.grad_enabled))
        for item in snapshot.autocast:
            dtype = snapshot.cast_dtype or item.dtype
            enabled = autocast and (item.enabled or snapshot.cast_dtype is not None)
            stack.enter_context(
                torch.autocast(item.device, dtype=dtype, enabled=enabled, cache_enabled=False)
            )
        yield


@_torch.not_by_dynamo
def replay(
    module: nn.Module,
    snapshot: Snapshot,
    convert: Convert = same_dtype,
    *,
    autocast: bool = True,
    on_inputs: Callable[[list[Tensor], list[Tensor]], None] | None = None,
    modes: Sequence[AbstractContextManager[Any]] = (),
    through: Callable[..., Any] | None = None,
) -> Replayed:
    """Run the module in eager on copies of what the call got.

    Args:
        module: its parameters, buffers, hooks, attributes and gradients are as before afterwards.
        snapshot: what the call got; is not changed.
        convert: applied to every input, parameter and buffer.
        autocast: False: run without, as a float64 run must.
        on_inputs: shown the tensors of the snapshot and what the module is about to receive.
        modes: see every op of the forward; the last one first.
        through: called in place of the module, such as a compiled version of its call.

    Raises:
        Whatever the module raises.
    """
    originals = trees.tensors((snapshot.args, snapshot.kwargs))
    with _running(compiled=through is not None), as_in(snapshot, autocast=autocast):
        given = _inputs(originals, convert)
        leaves: list[Tensor | None] = []
        passed: dict[int, Tensor] = {}
        if on_inputs is not None:
            on_inputs(originals, given)
        for original, data in zip(originals, given, strict=True):
            leaf = None
            if snapshot.wants_grad[id(original)] and snapshot.grad_enabled:
                leaf = data.detach().requires_grad_()
                data = _Link.apply(leaf, data)  # type: ignore[no-untyped-call]
            leaves.append(leaf)
            passed[id(original)] = data
        args, kwargs = trees.rebuilt(
            (snapshot.args, snapshot.kwargs), lambda tensor: passed[id(tensor)], fresh=True
        )
        parameters = {
            name: _leaf(convert(item.detach(), f"parameter {name}"), item, through)
            for name, item in module.named_parameters()
        }
        buffers = copied_buffers(snapshot.buffers, lambda originals: _own(originals, convert))
        holder = _Holder(module, modes, through, {**parameters, **buffers})
        state = {f"inner.{name}": item for name, item in parameters.items()}
        snapshot.random.restore()
        with undisturbed(module), snapshot.outer.again(_held_copies(convert)):
            put_buffers(module, buffers, snapshot.unset)
            snapshot.attributes.put(module, {**parameters, **buffers}, _held_copies(convert))
            output = torch.func.functional_call(holder, state, args, kwargs)
        return Replayed(
            output=output,
            arguments=arguments(args, kwargs),
            inputs=[passed[id(item)] for item in originals],
            buffers=holder.buffers_after,
            attributes=holder.attributes_after,
            input_leaves=leaves,
            parameter_leaves=parameters,
            random_after=torch.get_rng_state(),
        )


def _held_copies(convert: Convert) -> Callable[[list[Tensor]], list[Tensor]]:
    """Copies of what a module keeps in attributes; they may be changed in place."""

    def copies(originals: list[Tensor]) -> list[Tensor]:
        given = _own(originals, convert)
        return [
            _Link.apply(data.requires_grad_(), data)  # type: ignore[no-untyped-call]
            if original.requires_grad and torch.is_grad_enabled()
            else data
            for original, data in zip(originals, given, strict=True)
        ]

    return copies


def _own(originals: list[Tensor], convert: Convert) -> list[Tensor]:
    """Copies of tensors of a module that are no parameters."""
    if convert is same_dtype:
        return copied_together(originals)
    return [convert(item.detach(), f"buffer {place}") for place, item in enumerate(originals)]


def _leaf(data: Tensor, original: Tensor, through: Callable[..., Any] | None) -> Tensor:
    """A compiler treats parameters apart from other tensors."""
    if through is not None:
        return nn.Parameter(data, requires_grad=original.requires_grad)
    return data.requires_grad_(original.requires_grad)


def _inputs(originals: list[Tensor], convert: Convert) -> list[Tensor]:
    if convert is same_dtype:
        return copied_together(originals)
    return [convert(item, f"input {place}") for place, item in enumerate(originals)]
