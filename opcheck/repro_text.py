"""The frame of a reproducer: its head, settings, marked place, limits, and how it judges."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from opcheck import repro_judge
from opcheck.printing import visible
from opcheck.repro_tensors import Tensors
from opcheck.runstate import RunState, machine

__all__ = ["MARK", "Registered", "docstring", "frame"]

MARK = "# --- load the library that registers the kernel here ---"
"""Where a person, or `opcheck replay --load`, puts the import of a library under test."""
WIDTH = 96


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
