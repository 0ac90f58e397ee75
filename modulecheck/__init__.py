"""Two implementations of a model: which module differs, and where was the difference born.

Eager against `torch.compile`, module by module, in a real training step::

    checker = PrecisionChecker()
    checker.wrap_by_policy(model, (Block,))
    checker.install(model)
    loss = run_step(model)
    result = checker.collect(loss)
    checker.report(result, csv_path="report.csv")

Any two implementations, tensor by tensor::

    module_register_tensor_checker(reference_model, tensor_checker)
    module_register_tensor_checker(model, tensor_checker)
    reference_model(x), model(x)
    tensor_checker.check_equal()

Names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from modulecheck.checker import PrecisionChecker
    from modulecheck.collective_audit import CollectiveAudit, audit_collectives
    from modulecheck.collective_findings import CollectiveFinding
    from modulecheck.culprit import Culprit
    from modulecheck.ranks import MergedReport, RankReport, merge_reports
    from modulecheck.results import CompareResult, ModuleDiff, TensorDiff
    from modulecheck.tensor_asserts import assert_tensor_allclose, assert_tensor_equal
    from modulecheck.tensor_dump import DumpMode, load_dump
    from modulecheck.tensor_hooks import module_register_tensor_checker
    from modulecheck.tensor_records import (
        ModuleFinding,
        NameMismatch,
        TensorCheckResult,
        TensorRecord,
    )
    from modulecheck.tensor_store import TensorFileError
    from modulecheck.tensors import TensorChecker, tensor_checker

_HOME = {
    "CollectiveAudit": "collective_audit",
    "CollectiveFinding": "collective_findings",
    "CompareResult": "results",
    "Culprit": "culprit",
    "DumpMode": "tensor_dump",
    "MergedReport": "ranks",
    "ModuleDiff": "results",
    "ModuleFinding": "tensor_records",
    "NameMismatch": "tensor_records",
    "PrecisionChecker": "checker",
    "RankReport": "ranks",
    "TensorCheckResult": "tensor_records",
    "TensorChecker": "tensors",
    "TensorDiff": "results",
    "TensorFileError": "tensor_store",
    "TensorRecord": "tensor_records",
    "assert_tensor_allclose": "tensor_asserts",
    "assert_tensor_equal": "tensor_asserts",
    "audit_collectives": "collective_audit",
    "load_dump": "tensor_dump",
    "merge_reports": "ranks",
    "module_register_tensor_checker": "tensor_hooks",
    "tensor_checker": "tensors",
}

__all__ = [
    "CollectiveAudit",
    "CollectiveFinding",
    "CompareResult",
    "Culprit",
    "DumpMode",
    "MergedReport",
    "ModuleDiff",
    "ModuleFinding",
    "NameMismatch",
    "PrecisionChecker",
    "RankReport",
    "TensorCheckResult",
    "TensorChecker",
    "TensorDiff",
    "TensorFileError",
    "TensorRecord",
    "assert_tensor_allclose",
    "assert_tensor_equal",
    "audit_collectives",
    "load_dump",
    "merge_reports",
    "module_register_tensor_checker",
    "tensor_checker",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'modulecheck' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"modulecheck.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
