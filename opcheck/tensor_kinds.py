"""What a tensor is: plain memory, or a wrapper of something else."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from opcheck import _torch

__all__ = [
    "HALF",
    "held_tensors",
    "is_plain_tensor",
    "tensors_in",
    "tensors_within",
    "unwraps_itself",
]

HALF = (torch.float16, torch.bfloat16)
"""Floating dtypes of 16 bits."""

_PLAIN_TYPES = frozenset({Tensor, torch.nn.Parameter, torch.nn.Buffer})


def is_plain_tensor(tensor: Tensor) -> bool:
    """True for strided, not quantized, not nested, not fake tensors that hold real memory."""
    return (
        (type(tensor) in _PLAIN_TYPES or _is_plain_subclass(type(tensor)))
        and tensor.layout is torch.strided
        and (tensor.is_cpu or tensor.device.type != "meta")
        and not tensor.is_quantized
        and not tensor.is_nested
        and not _torch.is_functional(tensor)
    )


@functools.cache
def _is_plain_subclass(kind: type[Tensor]) -> bool:
    """A subclass that only carries attributes: dispatch treats it like a Tensor."""
    disabled = _torch.disabled_torch_dispatch
    return getattr(kind, "__torch_dispatch__", disabled) is disabled


def unwraps_itself(types: tuple[type, ...]) -> bool:
    """True when a wrapper subclass (DTensor, jagged) will dispatch its inner tensors again.

    A mode that answers NotImplemented for those sees the inner calls one by one.
    """
    return any(hasattr(kind, "__tensor_flatten__") for kind in types)


def held_tensors(tensor: Tensor) -> list[Tensor]:
    """What a wrapper subclass holds, the local shard of a DTensor; nothing for other tensors."""
    if type(tensor) in _PLAIN_TYPES or not hasattr(tensor, "__tensor_flatten__"):
        return []
    return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among arguments, one level of lists included, as operator schemas have them."""
    for value in values:
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, Tensor):
                yield item


def tensors_within(value: Any) -> Iterator[Tensor]:
    """The tensors among the leaves of a nested value, once for each place."""
    return (leaf for leaf in _torch.tree_leaves(value) if isinstance(leaf, Tensor))
