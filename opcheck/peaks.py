"""How high the memory of this process has been, as the operating system counts it."""

from __future__ import annotations

import contextlib
import importlib
import sys
from pathlib import Path
from typing import Any

__all__ = ["peak_bytes"]


def _imported() -> Any:
    try:
        return importlib.import_module("resource")
    except ImportError:  # Windows
        return None


_resource = _imported()
_UNIT = 1 if sys.platform == "darwin" else 1024


def _most_resident() -> int:
    return int(_resource.getrusage(_resource.RUSAGE_SELF).ru_maxrss) * _UNIT


def _own_peak() -> int | None:
    """Of this program alone, in bytes; None where there is no such file (Linux has it)."""
    with contextlib.suppress(OSError):
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        for line in status.splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return None


def _inherited() -> int:
    """What a program begins with on Linux: the peak of the process that started it; else 0."""
    if _resource is None:
        return 0
    most, own = _most_resident(), _own_peak()
    return most if own is not None and own < most else 0


_INHERITED = _inherited()


def peak_bytes() -> int:
    """Most resident memory so far, in bytes; 0 where the platform does not tell.

    It never falls, so that what a piece of work adds to it is how far that work went beyond
    everything before. Asking takes a microsecond, and some tens while the process that started this
    one had more.
    """
    if _resource is None:
        return 0
    most = _most_resident()
    if most > _INHERITED:
        return most
    own = _own_peak()
    return most if own is None else own
