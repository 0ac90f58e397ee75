"""Tensors, arguments and limits of a reproducer as readable Python."""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opcheck.packing import Packed, View, placed
from opcheck.repro_limits import Limit

__all__ = ["Tensors", "identifier", "spell_value"]

MAX_INLINE = 256
"""Numbers that are printed into the file; of more, all tensors go to a file beside it."""


def identifier(name: str) -> str:
    """A Python name like `name`."""
    text = re.sub(r"\W", "_", name) or "value"
    if text[0].isdigit() or keyword.iskeyword(text) or text in _TAKEN:
        text = f"{text}_" if not text[0].isdigit() else f"arg_{text}"
    return text


_TAKEN = frozenset(
    {
        "torch", "math", "os", "sys", "inf", "nan", "device", "wide", "put", "call", "reference",
        "inputs", "results", "judge", "main", "saved", "tensors", "constants", "compute", "given",
        "held", "Graph", "DEVICE",
    }
)  # fmt: skip
"""Names of a reproducer's own."""


# ---- numbers ------------------------------------------------------------------------------------


def _spell_number(value: Any, dtype: torch.dtype) -> str:
    """The shortest decimal that gives the same number in `dtype`."""
    if isinstance(value, complex):
        real, imag = (_spell_number(part, _REAL[dtype]) for part in (value.real, value.imag))
        return f"complex({real}, {imag})"
    if not isinstance(value, float):
        return repr(value)
    if not math.isfinite(value):
        return repr(value)
    if dtype is torch.float64:
        return repr(value)
    for digits in range(1, 18):
        text = f"{value:.{digits}g}"
        if torch.tensor(float(text), dtype=dtype).item() == value:
            return text if "." in text or "e" in text else f"{text}.0"
    return repr(value)


_REAL = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}


def _nested(values: Any, dtype: torch.dtype) -> str:
    if isinstance(values, list):
        return f"[{', '.join(_nested(item, dtype) for item in values)}]"
    return _spell_number(values, dtype)


def _literal(tensor: Tensor) -> str:
    """`torch.tensor([...], dtype=...)`."""
    dtype = str(tensor.dtype)
    if 0 in tensor.shape:
        return f"torch.empty({tuple(tensor.shape)}, dtype={dtype})"
    return f"torch.tensor({_nested(tensor.tolist(), tensor.dtype)}, dtype={dtype})"


def spell_value(value: Any, spell_view: Callable[[View], str]) -> str:
    """An argument as Python: a tensor by its name, anything else as it is written.

    Raises:
        TypeError: there is no way to write it.
    """
    if isinstance(value, View):
        return spell_view(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(spell_value(item, spell_view) for item in value)}]"
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return str(value)
    if isinstance(value, torch.device):
        return "device"
    if isinstance(value, torch.Generator):
        return f"torch.Generator({value.device.type!r}).manual_seed({value.initial_seed()})"
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return repr(value)
    raise TypeError(f"no way to write an argument of type {type(value).__name__}: {value!r}")


# ---- tensors ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Tensors:
    """The tensors of a reproducer under their names, printed or kept beside the file."""

    packed: Packed
    names: dict[View, str]
    limits: Sequence[Limit] = ()
    saved: dict[str, Tensor] = field(default_factory=dict)
    """What goes into the file beside it; empty where all is printed."""

    def __post_init__(self) -> None:
        """Decide where the numbers go."""
        numel = sum(item.numel() for item in self.packed.storages)
        if numel <= MAX_INLINE and all(_size(limit) <= MAX_INLINE for limit in self.limits):
            return
        for place, storage in enumerate(self.packed.storages):
            self.saved[f"memory_{place}"] = storage
        for place, limit in enumerate(self.limits):
            for key, value in limit.items():
                if isinstance(value, np.ndarray):
                    self.saved[f"limit_{place}_{key}"] = torch.from_numpy(_narrow(value))

    def view_lines(self) -> list[str]:
        """Statements that make every named tensor; they use `device` and `wide`."""
        users: dict[int, list[View]] = {}
        for view in self.names:
            users.setdefault(view.storage, []).append(view)
        lines: list[str] = []
        for place, views in users.items():
            lines += self._storage_lines(place, views)
        return lines

    def _storage_lines(self, place: int, views: list[View]) -> list[str]:
        storage, first = self.packed.storages[place], views[0]
        is_bytes = any(view.dtype != storage.dtype for view in views)
        if len(views) == 1 and first.is_plain and first.numel == storage.numel() and not is_bytes:
            source = (
                f"{self._saved(place)}.reshape({first.size})"
                if self.saved
                else _literal(placed(storage, first))
            )
            return [f"{self.names[first]} = put({source}, device, wide)"]
        wide = "False" if is_bytes else "wide"
        source = self._saved(place) if self.saved else _literal(storage)
        lines = [f"memory_{place} = put({source}, device, {wide})"]
        for view in views:
            cast = f".view({view.dtype})" if is_bytes else ""
            text = f"memory_{place}{cast}.as_strided({view.size}, {view.stride}, {view.offset})"
            text += ".conj()" if view.is_conj else ""
            text += "._neg_view()" if view.is_neg else ""
            name = self.names[view]
            lines.append(f"{name} = {text}")
            if is_bytes:
                lines.append(f"{name} = put({name}, device, wide) if wide else {name}")
        return lines

    def constant(self, name: str, tensor: Tensor) -> str:
        """A tensor of the reference alone."""
        if tensor.numel() <= MAX_INLINE:
            return _literal(tensor)
        self.saved[name] = tensor.detach().clone()
        return f"saved()[{name!r}]"

    def _saved(self, place: int) -> str:
        return f"saved()['memory_{place}']"

    def limit_lines(self) -> list[str]:
        """The list of limits, one a line."""
        return [f"        {self._limit(place, limit)}," for place, limit in enumerate(self.limits)]

    def _limit(self, place: int, limit: Limit) -> str:
        parts = []
        for key, value in limit.items():
            if isinstance(value, np.ndarray):
                text = f"saved()['limit_{place}_{key}'].tolist()" if self.saved else _rounded(value)
            else:
                text = repr(value)
            parts.append(f"{key!r}: {text}")
        return "{" + ", ".join(parts) + "}"


def _narrow(values: Any) -> Any:
    """A limit in float32 where that holds it: seven digits are plenty."""
    with np.errstate(all="ignore"):
        single = values.astype(np.float32)
    return single if np.isfinite(single).all() and (single[values > 0] > 0).all() else values.copy()


def _size(limit: Limit) -> int:
    return max((value.size for value in limit.values() if isinstance(value, np.ndarray)), default=0)


def _rounded(values: Any) -> str:
    """Eight digits are enough for a limit, and can be read."""
    texts = [f"{value:.8g}" for value in values.tolist()]
    if len(set(texts)) == 1:
        return f"[{texts[0]}] * {len(texts)}"
    return f"[{', '.join(texts)}]"
