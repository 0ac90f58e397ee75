"""Find the PyTorch op that computes a wrong number, while the step runs.

::

    with opcheck.check(model) as session:
        loss = step()
    print(session.report())

Names are loaded when they are first used, so that reading a log imports no torch. Where torch is
there already, its CPU kernels are noted now, before anybody can register others over them.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from opcheck.version import __version__ as __version__

if TYPE_CHECKING:
    from opcheck.errors import (
        ArgumentError,
        ArgumentTypeError,
        LogReadError,
        LogWriteError,
        OpcheckError,
        PrecisionError,
        SchemaVersionError,
    )
    from opcheck.records import Coverage, Metrics, OpRecord, SkipReason, Verdict
    from opcheck.review import Run, load_run
    from opcheck.session import Session, check

_HOME = {
    "ArgumentError": "errors",
    "ArgumentTypeError": "errors",
    "LogReadError": "errors",
    "LogWriteError": "errors",
    "OpcheckError": "errors",
    "PrecisionError": "errors",
    "SchemaVersionError": "errors",
    "Coverage": "records",
    "Metrics": "records",
    "OpRecord": "records",
    "SkipReason": "records",
    "Verdict": "records",
    "Run": "review",
    "load_run": "review",
    "Session": "session",
    "check": "session",
}

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "Coverage",
    "LogReadError",
    "LogWriteError",
    "Metrics",
    "OpRecord",
    "OpcheckError",
    "PrecisionError",
    "Run",
    "SchemaVersionError",
    "Session",
    "SkipReason",
    "Verdict",
    "check",
    "load_run",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'opcheck' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"opcheck.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])


if "torch" in sys.modules:
    from opcheck._torch import kernels as _kernels

    _kernels()
