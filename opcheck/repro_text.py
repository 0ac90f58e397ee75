"""Tensors, arguments and limits as readable Python, and the frame of a reproducer around them."""

from __future__ import annotations

import inspect
import keyword
import math
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opcheck import repro_judge
from opcheck.packing import Packed, View, placed
from opcheck.printing import visible
from opcheck.repro_limits import Limit
from opcheck.runstate import RunState, machine

__all__ = ["MARK", "Registered", "Tensors", "docstring", "frame", "identifier", "spell_value"]

MARK = "# --- load the library that registers the kernel here ---"
"""Where a person, or `opcheck replay --load`, puts the import of a library under test."""
MAX_INLINE = 256
"""Numbers that are printed into the file; of more, all tensors go to a file beside it."""
WIDTH = 96


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


# ---- the frame ----------------------------------------------------------------------------------


def docstring(title: str, facts: Mapping[str, str]) -> str:
    """The head of the file, safe whatever the texts hold."""
    width = max((len(name) for name in facts), default=0) + 2
    lines = [_quoted(title), ""]
    for name, text in facts.items():
        wrapped = textwrap.wrap(_quoted(text), WIDTH - width, break_on_hyphens=False) or [""]
        heads = [name, *[""] * (len(wrapped) - 1)]
        lines += [f"{head:{width}}{part}" for head, part in zip(heads, wrapped, strict=True)]
    lines += ["", "Exit status: 1 the fault is there, 0 it is not, 3 it cannot be told."]
    return '"""' + "\n".join(lines) + '\n"""'


def _quoted(text: str) -> str:
    return visible(text).replace("\\", "\\\\").replace('"', "'")


def _judge_text() -> str:
    source = inspect.getsource(repro_judge)
    return source.split("# ---- copied from here on ----\n", 1)[1].strip()


_HEAD = """\
from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import math
import os
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import inf, nan
"""

_SAVED = '''\
@functools.cache
def saved():
    """The tensors in the file beside this one."""
    return torch.load(Path(__file__).with_suffix(".pt"), weights_only=True)'''

_HELPERS = '''\
def put(tensor, device, wide):
    """A copy on the device; in float64 (complex128) where `wide`."""
    if wide and tensor.is_floating_point():
        tensor = tensor.to(torch.float64)
    elif wide and tensor.is_complex():
        tensor = tensor.to(torch.complex128)
    return tensor.to(device, copy=True)


def load(name):
    """A module by its name or by its path, or a shared library."""
    if name.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(name).stem, name)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module
    if name.endswith((".so", ".dylib", ".dll")):
        return torch.ops.load_library(name)
    return importlib.import_module(name)


def kernel_of(op, key):
    """Says where the kernel of an op was registered."""
    try:
        return repr(torch.library.get_kernel(op, key))
    except RuntimeError:
        return "none"'''

_END = """\
if __name__ == "__main__":
    try:
        status = main()
    except Exception:
        traceback.print_exc()
        status = 3
    sys.exit(status)"""

_LOAD = """\
    names = os.environ.get("REPRO_LOAD", "").split(os.pathsep)
    loaded = [load(name) for name in names if name]"""

_WARN = """\
    for op, key in registered:
        if kernel_of(op, key) == before[op, key]:
            print(f"note: another kernel of {op} ({key}) had the fault: load its library")
    return loaded"""


@dataclass(frozen=True, slots=True)
class Registered:
    """A kernel that is not torch's own."""

    op: str
    """`aten::gelu`"""
    key: str
    """Dispatch key: CPU, CUDA, ..."""
    where: str
    """Where it was registered."""
    module: str = ""
    """The Python module that did it, where that is known."""


def _kernels_function(registered: Sequence[Registered]) -> str:
    pairs = [(item.op, item.key) for item in registered]
    modules = dict.fromkeys(item.module for item in registered)
    lines = [
        "def load_kernels():",
        '    """What is under test; the references are there by now, where they can be."""',
    ]
    if registered:
        lines += [
            f"    registered = {pairs!r}",
            "    before = {pair: kernel_of(*pair) for pair in registered}",
        ]
    lines.append(f"    {MARK}")
    for item in registered:
        by = f" by {item.module}" if item.module else ""
        lines.append(f"    # {_quoted(item.op)} ({item.key}): {_quoted(item.where)}{_quoted(by)}")
    lines += [f"    # import {name}" for name in modules if _is_module_name(name)]
    lines.append(_LOAD)
    lines.append(_WARN if registered else "    return loaded")
    return "\n".join(lines)


def _is_module_name(name: str) -> bool:
    return name != "__main__" and all(part.isidentifier() for part in name.split("."))


def _limits_function(tensors: Tensors) -> str:
    lines = ["def limits():", '    """By which each result is judged."""', "    return ["]
    return "\n".join([*lines, *tensors.limit_lines(), "    ]"])


def _configure_function(state: RunState) -> str:
    lines = ["def configure():", '    """As it was when the fault was found."""']
    return "\n".join(lines + [f"    {line}" for line in state.settings()])


def frame(
    *,
    title: str,
    facts: Mapping[str, str],
    state: RunState,
    tensors: Tensors,
    body: Sequence[str],
    main: str,
    registered: Sequence[Registered] = (),
    imports: Sequence[str] = (),
) -> str:
    """A whole reproducer.

    Args:
        title: its first line.
        facts: what was found where; the machine is added.
        state: of the process at the call.
        tensors: with their limits.
        body: functions that are of this fault.
        main: the function that runs them and gives the exit status.
        registered: kernels in force that are not torch's own.
        imports: further import statements.
    """
    parts = [
        "\n".join([_HEAD.rstrip(), *imports]),
        *body,
        _configure_function(state),
        _kernels_function(registered),
        _limits_function(tensors),
        main,
        "# ---- how it is judged: the same in every reproducer ----",
        *([_SAVED] if tensors.saved else []),
        _HELPERS,
        _judge_text(),
        _END,
    ]
    return (
        "\n\n\n".join(
            [f"{docstring(title, {**facts, 'machine': machine()})}\n\n{parts[0]}", *parts[1:]]
        )
        + "\n"
    )
