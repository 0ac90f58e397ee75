"""Which memory an op may change.

Memory is known by its storage. `torch.from_numpy` and `torch.from_dlpack` put a storage of their
own around memory that another one has too: those are told by the addresses that they span.
"""

from __future__ import annotations

import bisect
import itertools
from typing import Any

from torch import Tensor

from opcheck import _torch
from opcheck.calls import Call
from opcheck.tensor_kinds import is_plain_tensor, tensors_within

__all__ = ["meets_in_other_storage", "memory_written"]


def memory_written(call: Call) -> set[int]:
    """Storages that the op may write to, and those of other arguments that hold the same bytes."""
    written, others = _storages(call)
    return {*written, *_meeting(written, others)}


def meets_in_other_storage(call: Call) -> bool:
    """What the op writes lies in memory that another argument reads by another storage.

    torch refuses arguments that overlap, and sees only those of one storage. What comes of it is
    known where a pointwise op reads each element at the very place that it writes.
    """
    written, others = _storages(call)
    meeting = _meeting(written, others)
    if not meeting:
        return False
    tensors = _tensors(call)
    pointwise = "pointwise" in _torch.tags_of(call.func)
    return any(
        _overlap(_extent(tensor), _extent(target))
        and not (pointwise and _place(tensor) == _place(target))
        for tensor in tensors
        if _torch.memory_of(tensor) in meeting
        for target in tensors
        if _torch.memory_of(target) in written
    )


def _tensors(call: Call) -> list[Tensor]:
    return [item for item in tensors_within((call.args, call.kwargs)) if is_plain_tensor(item)]


def _storages(call: Call) -> tuple[dict[int, Any], dict[int, Any]]:
    """By id: the storages of what may be written to, and those of all else."""
    bound = call.traits.bound(call.args, call.kwargs)
    changed = [value for param, value in bound if param.mutated and value is not None]
    written = {_torch.memory_of(item): item.untyped_storage() for item in tensors_within(changed)}
    others = {
        _torch.memory_of(item): item.untyped_storage()
        for item in (_tensors(call) if written else ())
        if _torch.memory_of(item) not in written
    }
    return written, others


Span = tuple[str, int, int]
"""Type of device, first address, the one after the last."""


def _span(storage: Any) -> Span:
    first = int(storage.data_ptr())
    return storage.device.type, first, first + int(storage.nbytes())


def _extent(tensor: Tensor) -> Span:
    first = tensor.data_ptr()
    if not tensor.numel():
        return tensor.device.type, first, first
    steps = zip(tensor.size(), tensor.stride(), strict=True)
    length = 1 + sum((size - 1) * stride for size, stride in steps)
    return tensor.device.type, first, first + length * tensor.element_size()


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.size(), tensor.stride()


def _overlap(left: Span, right: Span) -> bool:
    return left[0] == right[0] and left[1] < right[2] and right[1] < left[2]


def _meeting(written: dict[int, Any], others: dict[int, Any]) -> set[int]:
    """Those of the others that span an address of one that is written.

    Sorted: a step of an optimizer has thousands of both.
    """
    if not written or not others:
        return set()
    spans = sorted(span for span in map(_span, written.values()) if span[1] < span[2])
    begins = [(device, first) for device, first, _ in spans]
    ends = list(itertools.accumulate(((device, stop) for device, _, stop in spans), max))
    found: set[int] = set()
    for key, storage in others.items():
        device, first, stop = _span(storage)
        place = bisect.bisect_left(begins, (device, stop))
        if first < stop and place and ends[place - 1] > (device, first):
            found.add(key)
    return found
