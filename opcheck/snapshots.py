"""Copies of what an op may change, from before it ran, with memory shared as it was."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opcheck import _torch
from opcheck.calls import Call, Param
from opcheck.golden_rules import READS_STORAGE
from opcheck.tensor_kinds import tensors_in
from opcheck.written import memory_written

__all__ = ["cloned_together", "copy_strided", "same_dtype", "snapshot", "to_host", "widened_like"]


def snapshot(call: Call) -> None:
    """Copy everything that the op may change, and what shares its memory, before it runs."""
    traits = call.traits
    keeps = traits.base in READS_STORAGE
    if not traits.mutates and not keeps:
        return
    by_storage: dict[int, list[Tensor]] = {}
    for _, value in traits.bound(call.args, call.kwargs):
        for tensor in tensors_in((value,)):
            group = by_storage.setdefault(_torch.memory_of(tensor), [])
            if all(tensor is not item for item in group):
                group.append(tensor)
    for storage in by_storage if keeps else memory_written(call):
        group = by_storage[storage]
        if len(group) == 1 and not keeps:
            call.before[id(group[0])] = copy_strided(group[0])
        else:
            _copy_group(call, group)


def _copy_group(call: Call, group: list[Tensor]) -> None:
    """Tensors that share memory share it in the copy as well."""
    call.before_groups = True
    whole = torch.empty(0, dtype=torch.uint8, device=group[0].device)
    whole = whole.set_(group[0].untyped_storage()).detach().to("cpu", copy=True)
    for tensor in group:
        view = torch.empty(0, dtype=tensor.dtype)
        view.set_(whole.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
        call.before[id(tensor)] = view


def copy_strided(tensor: Tensor) -> Tensor:
    """A copy on the CPU with the same strides and own memory."""
    plain = tensor.detach()
    if plain.is_contiguous() or plain.numel() == 0:
        return plain.to("cpu", copy=True)
    if 0 in plain.stride():
        return to_host(plain.contiguous())
    copy = torch.empty_strided(plain.size(), plain.stride(), dtype=plain.dtype, device="cpu")
    return copy.copy_(plain)


def to_host(tensor: Tensor) -> Tensor:
    """The tensor on the CPU; itself where it is there already. Strides are kept."""
    plain = tensor.detach()
    if plain.device.type == "cpu":
        return plain
    return copy_strided(plain)


def same_dtype(
    before: dict[int, Tensor], fresh: dict[int, Tensor], param: Param, tensor: Tensor
) -> Tensor:
    """The tensor as it was before the op, in memory of its own where anything may write to it."""
    source = before.get(id(tensor))
    if source is None:
        return to_host(tensor)
    if not fresh and before:
        fresh.update(cloned_together(before))
    return fresh[id(tensor)]


def cloned_together(before: dict[int, Tensor]) -> dict[int, Tensor]:
    """Copies of the copies, those that share memory sharing it again."""
    storages: dict[int, Any] = {}
    found: dict[int, Tensor] = {}
    for key, tensor in before.items():
        storage = tensor.untyped_storage()
        own = storages.setdefault(_torch.storage_id(storage), storage.clone())
        view = torch.empty(0, dtype=tensor.dtype)
        view.set_(own, tensor.storage_offset(), tensor.size(), tensor.stride())
        found[key] = view
    return found


def widened_like(call: Call, source: Tensor, dtype: torch.dtype) -> Tensor:
    """The widened view of shared memory: one float64 storage for all views of one storage."""
    storage = source.untyped_storage()
    shared = call.wide_storages.get(_torch.storage_id(storage))
    if shared is None:
        flat = torch.empty(0, dtype=source.dtype)
        size = storage.nbytes() // source.element_size()
        flat.set_(storage, 0, (size,), (1,))
        shared = call.wide_storages[_torch.storage_id(storage)] = (source.dtype, flat.to(dtype))
    if shared[0] != source.dtype:
        raise NotImplementedError("views of one memory in several dtypes have no float64 twin")
    return shared[1].as_strided(source.size(), source.stride(), source.storage_offset())
