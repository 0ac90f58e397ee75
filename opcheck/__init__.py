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
    from opcheck.checking import check
    from opcheck.errors import (
        ArgumentError,
        ArgumentTypeError,
        LogReadError,
        LogWriteError,
        OpcheckError,
        PrecisionError,
        ReproError,
        SchemaVersionError,
    )
    from opcheck.records import Coverage, Metrics, OpRecord, SkipReason, Verdict
    from opcheck.registrar import (
        PrecisionCheckRegister,
        checked_kernel,
        coverage,
        disable_precision_check,
        enable_precision_check,
    )
    from opcheck.review import Run, load_run
    from opcheck.session import Session

_HOME = {
    "ArgumentError": "errors",
    "ArgumentTypeError": "errors",
    "LogReadError": "errors",
    "LogWriteError": "errors",
    "OpcheckError": "errors",
    "PrecisionError": "errors",
    "ReproError": "errors",
    "SchemaVersionError": "errors",
    "Coverage": "records",
    "Metrics": "records",
    "OpRecord": "records",
    "SkipReason": "records",
    "Verdict": "records",
    "PrecisionCheckRegister": "registrar",
    "checked_kernel": "registrar",
    "coverage": "registrar",
    "disable_precision_check": "registrar",
    "enable_precision_check": "registrar",
    "Run": "review",
    "load_run": "review",
    "Session": "session",
    "check": "checking",
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
    "PrecisionCheckRegister",
    "PrecisionError",
    "ReproError",
    "Run",
    "SchemaVersionError",
    "Session",
    "SkipReason",
    "Verdict",
    "check",
    "checked_kernel",
    "coverage",
    "disable_precision_check",
    "enable_precision_check",
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
    from opcheck.kernel_table import kernels as _kernels

    _kernels()
