"""A module run again in eager, on copies of what one call got, without any side effect."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from modulecheck import _torch, trees
from opcheck.golden_rules import wider

__all__ = [
    "Replayed",
    "Snapshot",
    "arguments",
    "num_ops",
    "replay",
    "replaying",
    "same_dtype",
    "undefined_casts",
    "widened",
]

Convert = Callable[[Tensor, str], Tensor]
"""Own memory for a tensor; the name says which one it is ("" for the same-dtype replay)."""


# ---- what a call got ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _RandomState:
    torch_cpu: Tensor
    devices: list[Tensor]
    python: Any
    numpy: Any

    @classmethod
    def now(cls) -> _RandomState:
        cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        return cls(
            torch.get_rng_state(),
            torch.cuda.get_rng_state_all() if cuda else [],
            random.getstate(),
            np.random.get_state(),  # noqa: NPY002 - the global one is what a module may use
        )

    def restore(self) -> None:
        torch.set_rng_state(self.torch_cpu)
        if self.devices:
            torch.cuda.set_rng_state_all(self.devices)
        random.setstate(self.python)
        np.random.set_state(self.numpy)  # noqa: NPY002


@dataclass(frozen=True, slots=True)
class _Autocast:
    device: str
    enabled: bool
    dtype: torch.dtype


def _autocast_now() -> list[_Autocast]:
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    return [
        _Autocast(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for device in devices
    ]


@dataclass(slots=True)
class Snapshot:
    """Everything that decides what a call computes, copied before the compiled module ran."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    wants_grad: dict[int, bool]
    """By id of each copied input."""
    buffers: dict[str, Tensor]
    parameter_versions: dict[str, int]
    random: _RandomState
    autocast: list[_Autocast]
    grad_enabled: bool
    inference: bool
    cast_dtype: torch.dtype | None = None

    @classmethod
    def take(
        cls, module: nn.Module, args: Any, kwargs: Any, *, cast_dtype: torch.dtype | None
    ) -> Snapshot:
        """Copy what the call is about to get.

        Raises:
            Whatever copying an input raises.
        """
        originals = trees.tensors((args, kwargs))
        copies = dict(zip(map(id, originals), copied_together(originals), strict=True))
        args, kwargs = trees.rebuilt((args, kwargs), lambda tensor: copies[id(tensor)])
        return cls(
            args=args,
            kwargs=kwargs,
            wants_grad={id(copies[id(item)]): item.requires_grad for item in originals},
            buffers={name: buffer.detach().clone() for name, buffer in module.named_buffers()},
            parameter_versions=_versions(module),
            random=_RandomState.now(),
            autocast=_autocast_now(),
            grad_enabled=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            cast_dtype=cast_dtype,
        )

    def parameters_moved(self, module: nn.Module) -> bool:
        """True when a parameter was written since."""
        return self.parameter_versions != _versions(module)


def _versions(module: nn.Module) -> dict[str, int]:
    return {
        name: -1 if parameter.is_inference() else parameter._version
        for name, parameter in module.named_parameters()
    }


def copied_together(tensors: list[Tensor]) -> list[Tensor]:
    """Copies with the same strides, which share memory where the originals do."""
    groups: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(_storage(tensor), []).append(tensor)
    storages: dict[int, Any] = {}
    copies = []
    for tensor in tensors:
        key = _storage(tensor)
        if len(groups[key]) == 1 and _is_dense(tensor):
            copies.append(tensor.detach().clone())
            continue
        if key not in storages:
            storages[key] = tensor.detach().untyped_storage().clone()
        plain = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        plain.set_(storages[key], tensor.storage_offset(), tensor.size(), tensor.stride())
        copies.append(plain)
    return copies


def _storage(tensor: Tensor) -> int:
    if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
        return -id(tensor)
    try:
        return tensor.untyped_storage().data_ptr() or -id(tensor)
    except RuntimeError:  # a wrapper subclass has no storage of its own
        return -id(tensor)


def _is_dense(tensor: Tensor) -> bool:
    """A clone keeps its strides, or there is no other way to copy it."""
    if _storage(tensor) < 0 or tensor.is_conj() or tensor.is_neg():
        return True
    return tensor.is_contiguous() or tensor.detach().clone().stride() == tensor.stride()


def arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments by name, positional ones by number."""
    return {**{str(place): value for place, value in enumerate(args)}, **kwargs}


# ---- the replay ---------------------------------------------------------------------------------


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


_now = _Replaying()


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
    """Every buffer after the run."""
    input_leaves: list[Tensor | None]
    """Beside `inputs`; None where the input wants no gradient."""
    parameter_leaves: dict[str, Tensor]
    random_after: Tensor
    """State of torch's CPU generator after the run."""

    def gradients(
        self, outputs: list[Tensor], grads: list[Tensor]
    ) -> tuple[list[Tensor | None], dict[str, Tensor | None]]:
        """Gradients of inputs and of parameters; the graph is gone afterwards."""
        leaves = [leaf for leaf in self.input_leaves if leaf is not None]
        names = [name for name, leaf in self.parameter_leaves.items() if leaf.requires_grad]
        wanted = leaves + [self.parameter_leaves[name] for name in names]
        pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if o.requires_grad]
        if not wanted or not pairs:
            return [None] * len(self.input_leaves), dict.fromkeys(names)
        with _running():
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

    def __init__(self, module: nn.Module, mode: _torch.TorchDispatchMode | None) -> None:
        super().__init__()
        self.inner = module
        self.mode = mode
        self.buffers_after: dict[str, Tensor] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.mode or contextlib.nullcontext():
            out = self.inner._call_impl(*args, **kwargs)
        self.buffers_after = dict(self.inner.named_buffers())
        return out


def same_dtype(tensor: Tensor, name: str) -> Tensor:
    """An own copy in the same dtype; parameters are not copied, nobody may write them."""
    return tensor.detach()


def widened(tensor: Tensor, name: str) -> Tensor:
    """A float64 (complex128) copy; integers as they are."""
    return tensor.detach().to(wider(tensor.dtype), copy=True)


@contextlib.contextmanager
def _running() -> Iterator[None]:
    """Reference work: the generators are put back, dispatch modes and checkpoint hooks are out."""
    before = _RandomState.now()
    _now.depth += 1
    try:
        with (
            _torch.no_modes(),
            torch.autograd.graph.saved_tensors_hooks(lambda kept: kept, lambda kept: kept),
        ):
            yield
    finally:
        _now.depth -= 1
        before.restore()


@contextlib.contextmanager
def _as_in(snapshot: Snapshot, *, autocast: bool) -> Iterator[None]:
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
    mode: _torch.TorchDispatchMode | None = None,
) -> Replayed:
    """Run the module in eager on copies of what the call got.

    Args:
        module: its parameters, buffers, hooks, attributes and gradients are as before afterwards.
        snapshot: what the call got; is not changed.
        convert: applied to every input, parameter and buffer.
        autocast: False: run without, as a float64 run must.
        on_inputs: shown the tensors of the snapshot and what the module is about to receive.
        mode: sees every op of the forward.

    Raises:
        Whatever the module raises.
    """
    originals = trees.tensors((snapshot.args, snapshot.kwargs))
    with _running(), _as_in(snapshot, autocast=autocast):
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
            (snapshot.args, snapshot.kwargs), lambda tensor: passed[id(tensor)]
        )
        parameters = {
            name: convert(item.detach(), f"parameter {name}").requires_grad_(item.requires_grad)
            for name, item in module.named_parameters()
        }
        buffers = {
            name: convert(item.clone(), f"buffer {name}") for name, item in snapshot.buffers.items()
        }
        holder = _Holder(module, mode)
        state = {f"inner.{name}": item for name, item in {**parameters, **buffers}.items()}
        snapshot.random.restore()
        with _torch.undisturbed(module):
            output = torch.func.functional_call(holder, state, args, kwargs)
        return Replayed(
            output=output,
            arguments=arguments(args, kwargs),
            inputs=[passed[id(item)] for item in originals],
            buffers=holder.buffers_after,
            input_leaves=leaves,
            parameter_leaves=parameters,
            random_after=torch.get_rng_state(),
        )


def _inputs(originals: list[Tensor], convert: Convert) -> list[Tensor]:
    if convert is same_dtype:
        return copied_together(originals)
    return [convert(item, f"input {place}") for place, item in enumerate(originals)]


class _Counter(_torch.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.ops += 1
        return func(*args, **(kwargs or {}))


def num_ops(module: nn.Module, snapshot: Snapshot) -> int:
    """How many ops the forward of the module runs in eager."""
    counter = _Counter()
    replay(module, snapshot, mode=counter)
    return counter.ops


class _CastWatch(_torch.TorchDispatchMode):
    """Notices casts of floats that no integer of the target dtype can hold."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.undefined = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        source = args[1] if func.overloadpacket is torch.ops.aten.copy_ else args[:1] and args[0]
        if isinstance(out, Tensor) and isinstance(source, Tensor) and source.is_floating_point():
            self._look(source, out.dtype)
        return out

    def _look(self, source: Tensor, dtype: torch.dtype) -> None:
        if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
            return
        whole, limits = source.detach().double().trunc(), torch.iinfo(dtype)
        # the largest int64 rounds up to 2**63, which it cannot hold
        holds = whole.isfinite() & (whole >= float(limits.min)) & (whole < float(limits.max) + 1.0)
        self.undefined += int((~holds).sum())


def undefined_casts(module: nn.Module, snapshot: Snapshot) -> int:
    """Elements that the eager forward casts to an integer dtype which cannot hold them."""
    watch = _CastWatch()
    replay(module, snapshot, mode=watch)
    return watch.undefined
