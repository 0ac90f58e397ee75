"""When is an index right? When it leads to the value, however ties were broken.

70% of the bf16 rows of length 1024 tie at their ten largest, so positions may differ between two
correct kernels. Values are compared exactly elsewhere; here indices are followed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from torch import Tensor

from opcheck.calls import Call
from opcheck.golden_rules import argument
from opcheck.references import host_array

__all__ = ["INDEX_RULES"]


def _gathered(source: np.ndarray[Any, Any], index: np.ndarray[Any, Any], dim: int) -> Any:
    """Values that the indices lead to, or None where one is out of range."""
    if not source.ndim:
        return source if not index.any() else None
    size = source.shape[dim]
    if index.size and (int(index.min()) < 0 or int(index.max()) >= size):
        return None
    return np.take_along_axis(source, index, axis=dim)


def _same(left: Any, right: Any) -> bool:
    return left is not None and bool(np.array_equal(left, right, equal_nan=True))


def _values_and_indices(call: Call, number: int, actual: Sequence[Any]) -> bool:
    """`(values, indices)` along a dimension, kept or reduced."""
    source = host_array(call.args[0])
    values, index = (host_array(leaf.value) for leaf in actual[:2])
    dim = argument(call, "dim", -1)
    if source.ndim and values.ndim < source.ndim:
        values, index = np.expand_dims(values, dim), np.expand_dims(index, dim)
    if not _same(_gathered(source, index, dim), values):
        return False
    if call.traits.base in ("topk", "sort"):
        ordered = np.sort(index, axis=dim) if index.ndim else index
        return not index.ndim or not bool((np.diff(ordered, axis=dim) == 0).any())
    return True


def _extreme_index(call: Call, number: int, actual: Sequence[Any]) -> bool:
    """`argmax` and `argmin`: the index leads to the extreme value."""
    source = host_array(call.args[0])
    dim = argument(call, "dim")
    index = host_array(actual[number].value)
    if dim is None:
        source, index, dim = source.reshape(-1), index.reshape(-1), 0
    elif source.ndim and index.ndim < source.ndim:
        index = np.expand_dims(index, dim)
    extreme = np.max if call.traits.base == "argmax" else np.min
    if not source.ndim:
        return not index.any()
    return _same(_gathered(source, index, dim), extreme(source, axis=dim, keepdims=True))


def _pooled(call: Call, number: int, actual: Sequence[Any]) -> bool:
    """Max pooling: an index counts within the flattened plane of its channel."""
    source: Tensor = call.args[0]
    values: Tensor = actual[0].value
    planes = 3 if "3d" in call.traits.base else 2
    flat = host_array(source.flatten(-planes))
    index = host_array(actual[number].value.flatten(-planes))
    return _same(_gathered(flat, index, -1), host_array(values.flatten(-planes)))


INDEX_RULES: Mapping[str, Callable[[Call, int, Sequence[Any]], bool]] = MappingProxyType(
    {
        "topk": _values_and_indices,
        "sort": _values_and_indices,
        "max": _values_and_indices,
        "min": _values_and_indices,
        "median": _values_and_indices,
        "nanmedian": _values_and_indices,
        "mode": _values_and_indices,
        "kthvalue": _values_and_indices,
        "cummax": _values_and_indices,
        "cummin": _values_and_indices,
        "argmax": _extreme_index,
        "argmin": _extreme_index,
        "max_pool2d_with_indices": _pooled,
        "max_pool3d_with_indices": _pooled,
        "adaptive_max_pool2d": _pooled,
        "adaptive_max_pool3d": _pooled,
        "fractional_max_pool2d": _pooled,
        "fractional_max_pool3d": _pooled,
    }
)
"""Op base name -> whether the indices of its results are right although they differ."""
