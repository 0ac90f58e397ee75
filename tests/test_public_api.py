"""The public names and their parameters: a change here is a change for users."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import opcheck

PUBLIC = {
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
}

CHECK_PARAMETERS = {
    "model": None,
    "log_dir": "logs",
    "rtol": 1e-4,
    "atol": 1e-5,
    "criterion": None,
    "max_checks": 10,
    "max_overhead": None,
    "log_once": True,
    "max_numel": 1_000_000,
    "large": "sample",
    "workers": 0,
    "include": (),
    "exclude": (),
    "modules": (),
    "start_step": 0,
    "num_steps": None,
    "on_failure": "log",
    "seed": 0,
    "quiet": False,
    "blame": False,
    "repeat": False,
    "selftest": False,
    "max_shadow_bytes": 1 << 30,
    "repro_dir": None,
    "repro_seconds": 20.0,
    "max_repros": 20,
    "max_repro_bytes": 1 << 28,
    "record": None,
    "record_dir": "records",
    "max_recorded": 1000,
    "max_record_bytes": 1 << 30,
}

FIELDS = {
    "OpRecord": {
        "criterion",
        "error",
        "index",
        "inputs",
        "metrics",
        "module",
        "op",
        "outputs",
        "phase",
        "rank",
        "reason",
        "reference",
        "run_id",
        "source",
        "step",
        "verdict",
    },
    "Metrics": {
        "actual_at",
        "expected_at",
        "max_abs",
        "max_rel",
        "mean_abs",
        "num_nonfinite",
        "num_out",
        "q",
        "rmse_ratio",
        "worst_index",
    },
    "Coverage": {
        "checked",
        "counting_stopped_at",
        "elements_checked",
        "elements_seen",
        "errors",
        "failed",
        "seen",
        "skipped",
        "unchecked_signatures",
    },
}


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_public_names_are_pinned() -> None:
    assert set(opcheck.__all__) == PUBLIC
    assert len(opcheck.__all__) == len(PUBLIC)


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_public_name_is_there_and_listed(name: str) -> None:
    assert getattr(opcheck, name).__doc__
    assert name in dir(opcheck)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="chekc"):
        opcheck.chekc  # noqa: B018 - the access is the test


def test_parameters_of_check_are_pinned() -> None:
    parameters = inspect.signature(opcheck.check).parameters
    assert {name: parameter.default for name, parameter in parameters.items()} == CHECK_PARAMETERS
    keyword_only = [
        name
        for name, parameter in parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    ]
    assert keyword_only == [name for name in CHECK_PARAMETERS if name != "model"]


@pytest.mark.parametrize("kind", FIELDS)
def test_documented_fields_are_there(kind: str) -> None:
    names = {field.name for field in dataclasses.fields(getattr(opcheck, kind))}
    assert FIELDS[kind] <= names


def test_verdicts_are_strings_in_upper_case() -> None:
    assert {str(verdict) for verdict in opcheck.Verdict} == {"PASS", "FAIL", "INCONCLUSIVE"}
    assert opcheck.Verdict.PASS == "PASS"


def test_argument_errors_are_the_builtin_ones_too() -> None:
    assert issubclass(opcheck.ArgumentError, ValueError)
    assert issubclass(opcheck.ArgumentTypeError, TypeError)
    assert issubclass(opcheck.LogReadError, ValueError)
    assert issubclass(opcheck.LogWriteError, OSError)
    for name in sorted(name for name in PUBLIC if name.endswith("Error")):
        assert issubclass(getattr(opcheck, name), opcheck.OpcheckError)


def test_reading_a_log_does_not_load_torch() -> None:
    code = "import sys, opcheck; opcheck.load_run, opcheck.Run; print('torch' in sys.modules)"
    assert run_python(code) == "False"


def test_check_can_be_called_right_after_a_lazy_import() -> None:
    assert run_python("import opcheck; print(opcheck.check.__name__)") == "check"
