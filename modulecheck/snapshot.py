"""What one call of a module got, copied before the module ran."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from modulecheck import trees
from modulecheck.attributes import Attributes
from modulecheck.buffers import all_buffers, copied_buffers, unset_buffers
from modulecheck.outer_state import OuterState
from modulecheck.versions import Version, own_versions

__all__ = [
    "Autocast",
    "NotComparableError",
    "RandomState",
    "Snapshot",
    "arguments",
    "copied_together",
]


class NotComparableError(Exception):
    """A call that cannot be run a second time; the message says why."""


@dataclass(frozen=True, slots=True)
class RandomState:
    """Of every generator that a module may draw from."""

    torch_cpu: Tensor
    devices: list[Tensor]
    python: Any
    numpy: Any

    @classmethod
    def now(cls) -> RandomState:
        """As it is."""
        cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        return cls(
            torch.get_rng_state(),
            torch.cuda.get_rng_state_all() if cuda else [],
            random.getstate(),
            np.random.get_state(),  # noqa: NPY002 - the global one is what a module may use
        )

    def restore(self) -> None:
        """Put it back."""
        torch.set_rng_state(self.torch_cpu)
        if self.devices:
            torch.cuda.set_rng_state_all(self.devices)
        random.setstate(self.python)
        np.random.set_state(self.numpy)  # noqa: NPY002


@dataclass(frozen=True, slots=True)
class Autocast:
    """Of one device type."""

    device: str
    enabled: bool
    dtype: torch.dtype


def _autocast_now() -> list[Autocast]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    devices = ["cpu"]
    if accelerator is not None and torch.amp.is_autocast_available(accelerator.type):
        devices.append(accelerator.type)
    return [
        Autocast(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
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
    """By every name that they have; tied as the module's are."""
    parameter_versions: dict[str, Version]
    random: RandomState
    autocast: list[Autocast]
    grad_enabled: bool
    inference: bool
    cast_dtype: torch.dtype | None = None
    unset: frozenset[str] | None = None
    """Buffers that are registered without a tensor; None: that is not known."""
    attributes: Attributes = field(default_factory=Attributes)
    """What the module keeps beside parameters and buffers; is not in a file."""
    outer: OuterState = field(default_factory=OuterState)
    """What its code keeps outside of it; is not in a file."""

    @classmethod
    def take(
        cls, module: nn.Module, args: Any, kwargs: Any, *, cast_dtype: torch.dtype | None
    ) -> Snapshot:
        """Copy what the call is about to get.

        Raises:
            NotComparableError: it would not be the same call.
            Whatever copying an input raises.
        """
        _refuse(module, args, kwargs)
        originals = trees.tensors((args, kwargs))
        copies = dict(zip(map(id, originals), copied_together(originals), strict=True))
        args, kwargs = trees.rebuilt((args, kwargs), lambda tensor: copies[id(tensor)], fresh=True)
        buffers = copied_buffers(all_buffers(module), copied_together)
        outer = OuterState.of(module.modules(), _with_gradient)
        return cls(
            args=args,
            kwargs=kwargs,
            wants_grad={id(copies[id(item)]): item.requires_grad for item in originals},
            buffers=buffers,
            parameter_versions=own_versions(module),
            random=RandomState.now(),
            autocast=_autocast_now(),
            grad_enabled=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            cast_dtype=cast_dtype,
            unset=unset_buffers(module),
            attributes=Attributes.take(module, buffers, _with_gradient, outer=outer),
            outer=outer,
        )

    def on(self, module: nn.Module) -> Snapshot:
        """The same call of another copy of the module, whose parameters have the same values."""
        return replace(self, parameter_versions=own_versions(module))

    def to_keep(self) -> Snapshot:
        """The same call, without holding on to what is not its own."""
        own = replace(self.attributes, outer={})
        return replace(self, outer=self.outer.forgotten(), attributes=own)

    def autocast_dtype(self) -> str:
        """The name of the dtype that autocast computes in, "" without autocast."""
        on = [item.dtype for item in self.autocast if item.enabled]
        dtype = self.cast_dtype or (on[0] if on else None)
        return "" if dtype is None else str(dtype).removeprefix("torch.")

    def parameters_moved(self, module: nn.Module) -> bool:
        """True when a parameter was written or replaced since."""
        return self.parameter_versions != own_versions(module)

    def parameters_gone(self, module: nn.Module) -> bool:
        """True when a parameter is another tensor now, as after FSDP2 has sharded it again."""
        now, then = dict(module.named_parameters()), self.parameter_versions
        return now.keys() != then.keys() or any(
            now[name] is not version.tensor for name, version in then.items()
        )


def _refuse(module: nn.Module, args: Any, kwargs: Any) -> None:
    for name, item in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(item):
            raise NotComparableError(
                f"lazy: {name} gets its shape in this call; run a batch through the model before"
                " the step that is checked"
            )
        if item.is_meta:
            raise NotComparableError(f"meta: {name} is on the meta device and has no values")
    for name, value in arguments(args, kwargs).items():
        if trees.holds_iterator(value):
            raise NotComparableError(
                f"iterator: argument {name} is or holds one, which can be read only once; give a"
                " list or a tuple"
            )


def _with_gradient(tensors: list[Tensor]) -> list[Tensor]:
    """Copies that want a gradient where the originals do."""
    pairs = zip(tensors, copied_together(tensors), strict=True)
    return [copy.requires_grad_(original.requires_grad) for original, copy in pairs]


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
            # arrays that begin at one address may be of several lengths: the longest holds all
            held = [item.detach().untyped_storage() for item in groups[key]]
            storages[key] = max(held, key=lambda storage: storage.nbytes()).clone()
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
