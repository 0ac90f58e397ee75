"""Inputs of registered kernels: kept from before the call, compared after it.

A kernel that was not written by torch may write where its schema does not say so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from opcheck import _torch
from opcheck.calls import Call, Param
from opcheck.compare import Judgement
from opcheck.golden_rules import SCRATCH
from opcheck.outside import outside_everything
from opcheck.references import host_array
from opcheck.snapshots import copy_strided, snapshot
from opcheck.tensor_kinds import tensors_in
from opcheck.written import memory_written

__all__ = ["keep_inputs", "keep_whole", "with_changed_inputs"]


def keep_inputs(call: Call) -> None:
    """Copy every tensor argument before a registered kernel runs.

    Where memory runs out the inputs are taken as they are after the call.
    """
    call.in_kernel = True
    if call.is_large:  # slices of what it changes were kept, and a copy of all costs too much
        return
    with outside_everything(), contextlib.suppress(RuntimeError):
        for _, tensor in _tensors(call):
            if id(tensor) not in call.before:
                call.before[id(tensor)] = copy_strided(tensor)


def keep_whole(call: Call) -> None:
    """Copy all that a large op may change, where somebody keeps the call; out of memory: nothing.

    The checks of large calls look at slices that they keep themselves.
    """
    twin = replace(call, before={}, before_groups=False)
    with outside_everything(), contextlib.suppress(RuntimeError, MemoryError):
        snapshot(twin)
        call.whole_before = twin.before


def with_changed_inputs(call: Call, out: Any, found: Judgement) -> Judgement:
    """Fail a call that changed or gave back an argument which its schema does not let it."""
    may_change, scratch = memory_written(call), SCRATCH.get(call.traits.base, ())
    for param, tensor in _tensors(call):
        before = call.before.get(id(tensor))
        if before is None or _torch.memory_of(tensor) in may_change or param.name in scratch:
            continue
        if tensor.shape != before.shape or _bits(tensor) != _bits(before):
            reason = f"argument {param.name!r} was changed, which the schema does not allow"
            return replace(found, passed=False, reason=reason)
    return _with_shared_results(call, out, found)


def _with_shared_results(call: Call, out: Any, found: Judgement) -> Judgement:
    """A result that shares memory with an input would be changed with it by a later step."""
    if call.traits.may_alias:
        return found
    memory = {_torch.memory_of(tensor): param.name for param, tensor in _tensors(call)}
    for leaf in _torch.tree_leaves(out):
        if isinstance(leaf, Tensor) and leaf.numel():
            name = memory.get(_torch.memory_of(leaf))
            if name is not None:
                reason = f"a result shares memory with argument {name!r}, unlike the schema says"
                return replace(found, passed=False, reason=reason)
    return found


def _tensors(call: Call) -> Iterator[tuple[Param, Tensor]]:
    for param, value in call.traits.bound(call.args, call.kwargs):
        for item in tensors_in((value,)):
            yield param, item


def _bits(tensor: Tensor) -> bytes:
    return host_array(tensor).tobytes()
