"""Eager against `torch.compile`, module by module, in a real training step.

::

    checker = PrecisionChecker()
    checker.wrap_by_policy(model, (Block,))
    checker.install(model)
    loss = run_step(model)
    result = checker.collect(loss)
    checker.report(result, csv_path="report.csv")

Names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from modulecheck.checker import PrecisionChecker
    from modulecheck.results import CompareResult, ModuleDiff, TensorDiff

_HOME = {
    "CompareResult": "results",
    "ModuleDiff": "results",
    "PrecisionChecker": "checker",
    "TensorDiff": "results",
}

__all__ = ["CompareResult", "ModuleDiff", "PrecisionChecker", "TensorDiff"]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'modulecheck' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"modulecheck.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
