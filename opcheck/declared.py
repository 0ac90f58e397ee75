"""The dtypes that results should have where the reference ran in float64.

An op declares them, and its meta kernel is asked.

A reference in float64 says nothing about the dtype of the result. The meta kernel computes dtypes
and shapes without values, and is no kernel of the device under test.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opcheck.calls import Call
from opcheck.golden_rules import SAVED_STATISTICS, wider

__all__ = ["DeclaredDtypes", "declared_results", "expected_dtype"]

Dtypes = tuple[torch.dtype | None, ...]


class DeclaredDtypes:
    """Asks once for each kind of call."""

    def __init__(self) -> None:
        self._known: dict[Any, Dtypes | None] = {}

    def of(self, call: Call) -> Dtypes | None:
        """One dtype for each result in order, None where it is no tensor; None: nobody knows."""
        if call.traits.mutates:
            return None
        key = call.func, _kind((call.args, call.kwargs))
        if key not in self._known:
            self._known[key] = _asked(call)
        return self._known[key]


def _kind(value: Any) -> Any:
    """What of the arguments may decide a dtype; sizes and values do not."""
    if isinstance(value, Tensor):
        return value.dtype, value.dim() == 0
    if isinstance(value, dict):
        return tuple((name, _kind(item)) for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(_kind(item) for item in value)
    return value if isinstance(value, (bool, str, torch.dtype)) else type(value)


def declared_results(call: Call) -> Any:
    """Results on the meta device, which have a dtype and sizes alone; None: nobody knows."""
    args, kwargs = _on_meta(call.args), _on_meta(call.kwargs)
    try:
        return call.func(*args, **kwargs)
    except Exception:  # noqa: BLE001 - many ops have no meta kernel, or one that needs values
        return None


def _asked(call: Call) -> Dtypes | None:
    out = declared_results(call)
    if out is None:
        return None
    unknown = SAVED_STATISTICS.get(call.traits.base, frozenset())
    inputs = {dtype for dtype in call.signature[1::2] if dtype.is_floating_point}
    # mse_loss_backward and smooth_l1_loss_backward of a 16-bit input and a float32 target give
    # 16 bit on the CPU and declare float32, threshold_backward the other way round: where dtypes
    # are mixed, which one is nobody's fault, unless the op promotes its inputs
    mixed = inputs if len(inputs) > 1 and not _promotes(call) else set()
    return tuple(
        None if number in unknown or dtype in mixed else dtype
        for number, dtype in enumerate(_dtypes_of(out))
    )


def _promotes(call: Call) -> bool:
    """Every pointwise op does, but for some backward formulas that carry the tag as well."""
    return torch.Tag.pointwise in call.func.tags and not call.traits.base.endswith("_backward")


def _on_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, dict):
        return {name: _on_meta(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_on_meta(item) for item in value]
    return torch.device("meta") if isinstance(value, torch.device) else value


def _dtypes_of(out: Any) -> list[torch.dtype | None]:
    if isinstance(out, (list, tuple)):
        return [dtype for item in out for dtype in _dtypes_of(item)]
    return [out.dtype if isinstance(out, Tensor) else None]


def expected_dtype(
    call: Call, number: int, actual: torch.dtype, *, golden: torch.dtype
) -> torch.dtype:
    """What the dtype of a result should be, where no kernel of the same dtype tells.

    Args:
        call: with `declared` set.
        number: of the result.
        actual: its dtype.
        golden: that of the float64 reference's result.
    """
    if call.declared and number < len(call.declared) and call.declared[number] is not None:
        found: torch.dtype = call.declared[number]
        return found
    if call.declared is None and golden == wider(golden):
        # nobody declares it: results of inputs of one dtype have that dtype (no sample of OpInfo
        # in float32, bfloat16, float16 or complex64 is an exception)
        if call.given_dtypes is None:
            call.given_dtypes = frozenset(call.signature[1::2])
        narrow: set[torch.dtype] = {dtype for dtype in call.given_dtypes if wider(dtype) == golden}
        if len(narrow) == 1 and "dtype" not in call.kwargs:
            return narrow.pop()
    return actual if wider(actual) == wider(golden) else golden
