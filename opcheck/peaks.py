"""How high the memory of this process has been, as the operating system counts it."""

from __future__ import annotations

import importlib
import sys
from typing import Any

__all__ = ["peak_bytes"]


def _imported() -> Any:
    try:
        return importlib.import_module("resource")
    except ImportError:  # Windows
        return None


_resource = _imported()
_UNIT = 1 if sys.platform == "darwin" else 1024


def peak_bytes() -> int:
    """Most resident memory so far, in bytes; 0 where the platform does not tell.

    It never falls, so that what a piece of work adds to it is how far that work went beyond
    everything before. To ask takes a microsecond.
    """
    if _resource is None:
        return 0
    return int(_resource.getrusage(_resource.RUSAGE_SELF).ru_maxrss) * _UNIT
