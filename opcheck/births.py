"""The first NaN or Inf of a run: which call made it, and of what.

A call that agrees with its reference may still be where a step dies, so this is told whatever the
verdict. Looked at are the results of checked calls, of casts to float16 (where most overflows
are), and with `blame=True` of all calls.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opcheck import _torch
from opcheck.arrays import Array
from opcheck.call_dtypes import is_inexact
from opcheck.calls import Call, Param
from opcheck.expected import leaves_of
from opcheck.printing import number
from opcheck.records import Birth, OpRecord
from opcheck.references import host_array
from opcheck.tensor_kinds import is_plain_tensor, tensors_in

__all__ = ["Births", "asks_for_nonfinite", "is_cast_to_half", "sentence"]


def is_cast_to_half(base: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True for copies that may overflow: from another floating dtype to float16."""
    if base == "_to_copy":
        target, source = kwargs.get("dtype"), args[0].dtype
    elif base == "copy_":
        target, source = args[0].dtype, getattr(args[1], "dtype", None)
    else:
        return False
    return target is torch.float16 and source in (torch.float32, torch.bfloat16, torch.float64)


def asks_for_nonfinite(call: Call) -> bool:
    """True when a number among the arguments is not finite itself: a mask filled with -inf."""
    return any(
        isinstance(value, float) and not math.isfinite(value)
        for value in _torch.tree_leaves((call.args, call.kwargs))
    )


def sentence(birth: Birth) -> str:
    """For the notes of the record."""
    place = f"[{', '.join(map(str, birth.place))}]"
    how = "has it from its inputs" if birth.arrived else "made it of finite inputs"
    return f"the first NaN or Inf of the run: {birth.value} at {place}; {birth.op} {how}: " + (
        "; ".join(birth.inputs)
    )


class Births:
    """Keeps the first of one session."""

    def __init__(self) -> None:
        self.first: Birth | None = None

    def look(self, call: Call, out: Any, verdict: str) -> Birth | None:
        """The op gave `out`: the birth, if this call is the first to hold one."""
        if self.first is not None or asks_for_nonfinite(call):
            return None
        found = _first_nonfinite(call, out)
        if found is None:
            return None
        output, place, value, shape = found
        inputs = list(_inputs(call))
        arrays = [host_array(tensor) for _, tensor in inputs if is_inexact(tensor.dtype)]
        arrived = any(not np.isfinite(array).all() for array in arrays)
        if arrived and not any(np.isnan(array).any() for array in arrays):
            return None  # infinities in a mask are there on purpose
        self.first = Birth(
            op=call.traits.name, module=call.site.module, phase=call.site.phase, step=call.step,
            index=call.index, source=call.source, value=value, output=output, place=place,
            inputs=tuple(_spelled(call, inputs, place, shape)), verdict=verdict, arrived=arrived,
        )  # fmt: skip
        return self.first

    def concluded(self, record: OpRecord) -> None:
        """The verdict of a call is final."""
        first = self.first
        if first is not None and (first.index, first.op) == (record.index, record.op):
            self.first = replace(first, verdict=record.verdict.value)


def _first_nonfinite(
    call: Call, out: Any
) -> tuple[int, tuple[int, ...], str, tuple[int, ...]] | None:
    """Output, index, value and shape of the first element that is not finite."""
    bound = call.traits.bound(call.args, call.kwargs)
    written = [value for param, value in bound if param.mutated and value is not None]
    for output, leaf in enumerate(leaves_of([out, *written])):
        value = leaf.value
        if not (isinstance(value, Tensor) and is_inexact(value.dtype)):
            continue
        if not is_plain_tensor(value):
            continue
        array = host_array(value)
        wrong = ~np.isfinite(array)
        if wrong.any():
            place = np.unravel_index(int(np.argmax(wrong)), array.shape)
            text = number(array[place].item())
            return output, tuple(int(at) for at in place), text, array.shape
    return None


def _inputs(call: Call) -> Iterator[tuple[Param, Tensor]]:
    """The tensor arguments as they were before the call."""
    for param, value in call.traits.bound(call.args, call.kwargs):
        for item in filter(is_plain_tensor, tensors_in((value,))):
            before = call.before.get(id(item))
            if not param.mutated:
                yield param, item if before is None else before
            elif before is not None and not param.kwarg_only:  # of out= nothing is read
                yield param, before


_MOST_NAMED = 6


def _spelled(
    call: Call,
    inputs: list[tuple[Param, Tensor]],
    place: tuple[int, ...],
    shape: tuple[int, ...],
) -> Iterator[str]:
    """Each tensor input with its value at the place, where it has one, and its range."""
    pointwise = "pointwise" in _torch.tags_of(call.func)
    for param, tensor in inputs[:_MOST_NAMED]:
        array = host_array(tensor)
        text = f"{param.name} {tuple(tensor.shape)}:{str(tensor.dtype).removeprefix('torch.')}"
        if array.shape == shape and (pointwise or len(inputs) == 1 or param.mutated):
            text += f" is {number(array[place].item())} there"
        elif pointwise and _broadcasts(array, shape):
            text += f" is {number(np.broadcast_to(array, shape)[place].item())} there"
        if array.size > 1 and array.dtype.kind in "fiu":
            text += f", {_range(array)}"
        yield text
    if len(inputs) > _MOST_NAMED:
        yield f"and {len(inputs) - _MOST_NAMED} more tensors"
    for param, value in call.traits.bound(call.args, call.kwargs):
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if is_number and param.kind in ("tensor", "scalar"):
            yield f"{param.name} = {number(value)}"


def _broadcasts(array: Array, shape: tuple[int, ...]) -> bool:
    return array.ndim <= len(shape) and all(
        size in (1, wanted) for size, wanted in zip(array.shape[::-1], shape[::-1], strict=False)
    )


def _range(array: Array) -> str:
    finite = array[np.isfinite(array)]
    if not finite.size:
        return "nothing in it is finite"
    text = f"from {number(finite.min().item())} to {number(finite.max().item())}"
    lost = array.size - finite.size
    return f"{text}, {lost:,} not finite" if lost else text
