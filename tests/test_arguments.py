"""A wrong argument is an error that names the parameter, what was given and what is allowed."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import modulecheck
import opcheck
from modulecheck import CompareResult, PrecisionChecker, TensorChecker
from opcheck import ArgumentError, ArgumentTypeError


class Odd:
    """Nothing that any parameter takes."""

    def __repr__(self) -> str:
        return "<odd>"


ODD = Odd()
MODEL = nn.Sequential(nn.Linear(2, 2))
NUMBER = (ODD, "1", None, -1, math.nan, True)
SECONDS = (*NUMBER, math.inf)
COUNT = (ODD, "1", -1, 1.5, True)
FLAG = (ODD, "no", 1, None)
PATH = (ODD, 3)
NAME = (ODD, 3)
GLOBS = (ODD, 3, None, [3])
MODULE = (ODD, "model", 3)
CHOICE = (ODD, 3, "some")
FUNCTION = (ODD, 3, "f")

CHECK: dict[str, tuple[Any, ...]] = {
    "model": MODULE, "log_dir": (*PATH, None), "rtol": SECONDS, "atol": SECONDS,
    "criterion": CHOICE, "max_checks": COUNT, "max_overhead": (ODD, "x", 0, -1, math.inf, True),
    "log_once": FLAG, "max_numel": (*COUNT, None), "large": (*CHOICE, None),
    "workers": (*COUNT, None), "include": GLOBS, "exclude": GLOBS, "modules": GLOBS,
    "start_step": (*COUNT, None), "num_steps": COUNT, "on_failure": (*CHOICE, None),
    "seed": (*COUNT, None), "quiet": FLAG, "blame": FLAG, "repeat": FLAG, "selftest": FLAG,
    "max_shadow_bytes": (*COUNT, None), "repro_dir": PATH, "repro_seconds": SECONDS,
    "max_repros": (*COUNT, None), "max_repro_bytes": (*COUNT, None), "record": CHOICE,
    "record_dir": (*PATH, None), "max_recorded": (*COUNT, None),
    "max_record_bytes": (*COUNT, None),
}  # fmt: skip
ENABLE = {
    **{name: CHECK[name] for name in ("rtol", "atol", "max_checks", "log_once")},
    "path": PATH, "criterion": CHOICE, "large": (*CHOICE, None),
}  # fmt: skip
REGISTER = {
    "config": (ODD, 3, None, "add"), "user_include_ops": (ODD, 3, [3]),
    "user_exclude_ops": (ODD, 3, [3]), "cpp_patched_ops": (ODD, 3, [3]), "lib": (ODD, None),
    "dispatch_key": NAME,
}  # fmt: skip
CHECKER: dict[str, tuple[Any, ...]] = {
    "backend": (ODD, 3, None), "threshold": SECONDS, "dump_graphs": FLAG,
    "graph_dir": (*PATH, None), "cast_dtype": (ODD, "bfloat16", torch.int64),
    "capture_input": FLAG, "single_pass": FLAG, "criterion": CHOICE, "rtol": SECONDS,
    "golden": (*CHOICE, None), "record_limit_mb": SECONDS, "rank_timeout_s": SECONDS,
    "repro_dir": PATH,
}  # fmt: skip
TENSORS = {"keep": (*CHOICE, None), "quiet": FLAG, "repro_dir": PATH}
EQUAL = {
    "dump_mode": (ODD, "all", None), "dump_path": (*PATH, None), "equal_nan": FLAG,
    "check_dtype": FLAG,
}  # fmt: skip
CLOSE = {"rtol": SECONDS, "atol": SECONDS, **EQUAL}
HOOKS = {
    "modules": (ODD, 3, None, "model", [ODD]), "checker": (ODD, None), "side": (ODD, 3, [3]),
    "rename": (ODD, 3, "x"), "strict": FLAG, "exclude": GLOBS, "parameters": FLAG,
    "buffers": FLAG, "inputs": FLAG, "outputs": FLAG,
}  # fmt: skip
MERGE = {
    "paths": (ODD, "a.csv", [3], []), "out": (*PATH, None), "scenario": (*NAME, ""),
    "ranks": (ODD, 3, [ODD], [-1], [0, 1]),
}  # fmt: skip
CLASSES = (ODD, (), (3,), None)


def build(kind: Any, **given: Any) -> Callable[..., Any]:
    """`kind` with arguments that are right, over which wrong ones go."""
    return lambda **wrong: kind(**{**given, **wrong})


def session() -> opcheck.Session:
    return opcheck.check(MODEL, quiet=True)


def assertion(kind: Any) -> Callable[..., Any]:
    return build(kind, actual=1.0, expected=1.0)


def registering(**given: Any) -> Any:
    library = torch.library.Library("aten", "IMPL")
    return opcheck.PrecisionCheckRegister(**{"config": [], "lib": library, **given})


RESULT = CompareResult(1.0, 1.0)
CALLS: dict[str, tuple[Callable[..., Any], Any, dict[str, tuple[Any, ...]]]] = {
    "check": (opcheck.check, opcheck.check, CHECK),
    "enable_precision_check": (
        build(opcheck.enable_precision_check), opcheck.enable_precision_check, ENABLE
    ),
    "PrecisionCheckRegister": (registering, None, REGISTER),
    "checked_kernel": (
        build(opcheck.checked_kernel, key="mm", fn=torch.mm), opcheck.checked_kernel,
        {"key": (ODD, 3, None, "no_such_op", "mm.no"), "fn": (ODD, 3, None)},
    ),
    "load_run": (
        build(opcheck.load_run, path="log"), opcheck.load_run,
        {"path": (*PATH, None), "run": NAME, "where": (ODD, 3), "progress": FUNCTION},
    ),
    "Run.filter": (
        build(opcheck.Run().filter), opcheck.Run().filter,
        {"op": NAME, "module": NAME, "phase": CHOICE, "step": COUNT},
    ),
    "Run.with_index": (
        opcheck.Run().with_index, opcheck.Run().with_index, {"index": (*COUNT, None)}
    ),
    "Session.report": (session().report, session().report, {"width": (*COUNT, 0)}),
    "Session.certify": (
        build(session().certify, step=lambda: None), session().certify,
        {"step": (*FUNCTION, None), "optimizers": (ODD, 3, None, [ODD])},
    ),
    "PrecisionChecker": (PrecisionChecker, PrecisionChecker, CHECKER),
    "wrap": (
        build(PrecisionChecker().wrap, module=MODEL), PrecisionChecker().wrap,
        {"module": (*MODULE, None), "name": NAME},
    ),
    "wrap_by_policy": (
        build(PrecisionChecker().wrap_by_policy, model=MODEL, module_classes=nn.Linear),
        PrecisionChecker().wrap_by_policy,
        {"model": (*MODULE, None), "module_classes": CLASSES},
    ),
    "wrap_all_children": (
        build(PrecisionChecker().wrap_all_children, model=MODEL),
        PrecisionChecker().wrap_all_children,
        {"model": (*MODULE, None), "depth": (*COUNT, None)},
    ),
    "ignore": (PrecisionChecker().ignore, PrecisionChecker().ignore, {"module": (*MODULE, None)}),
    "ignore_by_policy": (
        build(PrecisionChecker().ignore_by_policy, model=MODEL, module_classes=nn.Linear),
        PrecisionChecker().ignore_by_policy,
        {"model": (*MODULE, None), "module_classes": CLASSES},
    ),
    "install": (PrecisionChecker().install, PrecisionChecker().install, {"model": (*MODULE, None)}),
    "record_loss": (
        PrecisionChecker().record_loss, PrecisionChecker().record_loss,
        {"loss": (ODD, None, "loss", torch.ones(2), torch.ones(0))},
    ),
    "collect": (
        PrecisionChecker().collect, None, {"keep_installed": FLAG},
    ),
    "compare": (
        build(PrecisionChecker().compare, run_step=lambda model: None, model=MODEL),
        PrecisionChecker().compare,
        {"run_step": (*FUNCTION, None), "model": (*MODULE, None)},
    ),
    "compare of copies": (
        build(
            PrecisionChecker(single_pass=False).compare, run_step=lambda model: None, model=MODEL
        ),
        PrecisionChecker().compare,
        {"run_step": (*FUNCTION, None), "model": (*MODULE, None)},
    ),
    "report": (
        build(PrecisionChecker().report, result=RESULT), PrecisionChecker().report,
        {
            "result": (ODD, None), "csv_path": PATH, "verbose": FLAG, "gather": FLAG,
            "scenario": (*NAME, None),
        },
    ),
    "drilldown": (
        build(PrecisionChecker().drilldown, result=RESULT), PrecisionChecker().drilldown,
        {
            "result": (ODD, None), "budget_s": NUMBER, "max_compiles": (*COUNT, None),
            "progress": FUNCTION, "repro_dir": PATH, "model": (ODD, 3), "backend": (ODD, 3),
            "classes": (ODD, 3, None),
        },
    ),
    "save": (
        build(PrecisionChecker().save, result=RESULT, path="a.mc"), PrecisionChecker().save,
        {"result": (ODD, None), "path": (*PATH, None)},
    ),
    "CompareResult.load": (
        CompareResult.load, CompareResult.load, {"path": (*PATH, None, "nowhere.mc")}
    ),
    "merge_reports": (
        build(modulecheck.merge_reports, paths=["a_rank0.csv"], out="b.csv"),
        modulecheck.merge_reports, MERGE,
    ),
    "audit_collectives": (
        modulecheck.audit_collectives, modulecheck.audit_collectives,
        {"model": MODULE, "max_sums": (*COUNT, None, 0), "timeout_s": (*NUMBER, 0)},
    ),
    "TensorChecker": (TensorChecker, TensorChecker, TENSORS),
    "check_equal": (TensorChecker(quiet=True).check_equal, TensorChecker().check_equal, EQUAL),
    "check_allclose": (
        TensorChecker(quiet=True).check_allclose, TensorChecker().check_allclose, CLOSE
    ),
    "TensorChecker.check": (
        TensorChecker(quiet=True).check, None,
        {
            **CLOSE, "criterion": (*CHOICE, None), "equal_nan": (ODD, 1, "no"),
            "check_dtype": (ODD, 1, "no"),
        },
    ),
    "register_tensor": (
        build(TensorChecker().register_tensor, tag="t", tensor=1.0), None,
        {"tag": (*NAME, None), "side": NAME},
    ),
    "TensorChecker.save": (
        TensorChecker().save, TensorChecker().save, {"path": (*PATH, None)}
    ),
    "module_register_tensor_checker": (
        build(
            modulecheck.module_register_tensor_checker, modules=MODEL,
            checker=TensorChecker(quiet=True),
        ),
        modulecheck.module_register_tensor_checker, HOOKS,
    ),
    "load_dump": (modulecheck.load_dump, modulecheck.load_dump, {"path": (*PATH, None)}),
    "assert_tensor_equal": (
        assertion(modulecheck.assert_tensor_equal), None,
        {"equal_nan": FLAG, "check_dtype": FLAG, "tag": (*NAME, None)},
    ),
    "assert_tensor_allclose": (
        assertion(modulecheck.assert_tensor_allclose), None,
        {
            "rtol": SECONDS, "atol": SECONDS, "equal_nan": FLAG, "check_dtype": FLAG,
            "tag": (*NAME, None),
        },
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    opcheck.disable_precision_check()


@pytest.mark.parametrize(
    ("call", "parameter"), [(call, name) for call in CALLS for name in CALLS[call][2]]
)
def test_a_wrong_argument_is_named(call, parameter, tmp_path):
    function, _, wrong = CALLS[call]
    for value in wrong[parameter]:
        with pytest.raises((ArgumentError, ArgumentTypeError)) as caught:
            function(**{parameter: value})
        message = str(caught.value)
        if value == "nowhere.mc":  # what is wrong is the file
            assert message.startswith("nowhere.mc: cannot be read"), message
            continue
        assert message.startswith((f"{parameter}: ", f"{parameter} ")), message
        assert len(message) < 300
    assert list(tmp_path.iterdir()) == []  # nothing was begun


@pytest.mark.parametrize("call", [call for call in CALLS if CALLS[call][1] is not None])
def test_no_parameter_is_left_out(call):
    _, function, wrong = CALLS[call]
    assert set(inspect.signature(function).parameters) == set(wrong)


def test_paths_of_load_are_looked_at():
    with pytest.raises(ArgumentTypeError, match="paths: expected a path, got <odd>"):
        TensorChecker.load(ODD)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="paths: expected at least one file"):
        TensorChecker.load()


def test_a_long_argument_is_named_by_its_class():
    with pytest.raises(ArgumentTypeError, match=r"^log_dir: expected a path, got .* Sequential$"):
        opcheck.check(log_dir=MODEL)  # type: ignore[arg-type]


def test_one_glob_leaves_out_what_it_matches_and_nothing_else(tmp_path):
    """A string is one glob, not one of each of its letters."""
    for name in ("a", "b"):
        checker = TensorChecker()
        checker.register_tensor("kept", 1.0)
        checker.register_tensor("rotary", 1.0 if name == "a" else 2.0)
        checker.save(tmp_path / f"{name}.npz")
    files = (tmp_path / "a.npz", tmp_path / "b.npz")
    assert TensorChecker.load(*files, quiet=True, exclude="*rotary*").check_equal()
    assert not TensorChecker.load(*files, quiet=True).check_equal()
