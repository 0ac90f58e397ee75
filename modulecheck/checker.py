"""PrecisionChecker: the documented face of the comparison of eager and `torch.compile`."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from modulecheck import report as _report
from modulecheck.backends import require_backend, require_backend_or_name
from modulecheck.budget import Budget
from modulecheck.call_repro import write_call_repro, write_repros
from modulecheck.compared import Rule
from modulecheck.culprit import Culprit
from modulecheck.drilldown import drill
from modulecheck.gathering import gathered, report_ranks
from modulecheck.locating import locate
from modulecheck.remarks import Settings
from modulecheck.results import CompareResult
from modulecheck.selection import Selection
from modulecheck.sidechannel import TIMEOUT_S
from modulecheck.sides import as_float
from modulecheck.single_pass import SinglePass
from modulecheck.twins import refuse_without_values
from modulecheck.two_pass import TwoPass
from opcheck import tolerances as tol
from opcheck.errors import ArgumentError
from opcheck.validation import (
    a_count,
    a_flag,
    a_function,
    a_number,
    a_path,
    a_string,
    an_instance,
    one_of,
    several,
)

__all__ = ["PrecisionChecker"]

Module = TypeVar("Module", bound=nn.Module)
REPRO_SECONDS = 120.0
CRITERIA = ("calibrated", "allclose")
GOLDEN = ("auto", "always")


class PrecisionChecker:
    """Compare each wrapped module of a model, compiled, with the same module in eager.

    ::

        checker = PrecisionChecker()
        checker.wrap_by_policy(model, (Block,))
        checker.install(model)
        loss = run_step(model)
        result = checker.collect(loss)
        checker.report(result, csv_path="report.csv")
    """

    def __init__(
        self,
        backend: Any = "aot_eager",
        threshold: float = 1e-4,
        dump_graphs: bool = False,  # noqa: FBT001, FBT002 - documented
        graph_dir: str = "./graph_dump",
        cast_dtype: torch.dtype | None = None,
        capture_input: bool = True,  # noqa: FBT001, FBT002 - documented
        single_pass: bool = True,  # noqa: FBT001, FBT002 - documented
        *,
        criterion: str | None = None,
        rtol: float = tol.MODULE_RTOL,
        golden: str = "auto",
        record_limit_mb: float = 512.0,
        rank_timeout_s: float = TIMEOUT_S,
        repro_dir: str | Path | None = None,
    ) -> None:
        """Nothing is compiled yet.

        Args:
            backend: of `torch.compile`, a name or a callable.
            threshold: the absolute tolerance of the documented criterion; another one than 1e-4
                makes that criterion judge.
            dump_graphs: write the graphs of the step to `graph_dir`.
            graph_dir: where to.
            cast_dtype: run the wrapped modules under `torch.autocast` of this dtype.
            capture_input: False: leave the inputs out of the report.
            single_pass: compare inside one step. False: run eager and compiled apart.
            criterion: "calibrated" judges by float64, "allclose" by `threshold` and `rtol`. None:
                calibrated, unless threshold or rtol were changed.
            rtol: the relative tolerance of the documented criterion.
            golden: "auto": run float64 where a quick look does not settle it; "always": also where
                it does.
            record_limit_mb: memory for copies of failing calls, in MiB, which a drill-down needs;
                0: keep none.
            rank_timeout_s: seconds that one rank waits for another, where ranks share a model.
            repro_dir: after the step, write each failing call that was recorded to this folder, as
                a Python file that runs with torch alone, for at most two minutes; a `drilldown`
                writes better ones. None: none.

        Raises:
            ArgumentError: a value that is not allowed.
            ArgumentTypeError: a type that is not allowed.
        """
        require_backend_or_name(backend)
        a_number("threshold", threshold)
        a_flag("dump_graphs", dump_graphs)
        a_path("graph_dir", graph_dir)
        _validate_dtype(cast_dtype)
        a_flag("capture_input", capture_input)
        a_flag("single_pass", single_pass)
        one_of("criterion", criterion, allowed=CRITERIA, optional=True)
        a_number("rtol", rtol)
        one_of("golden", golden, allowed=GOLDEN)
        a_number("record_limit_mb", record_limit_mb)
        a_number("rank_timeout_s", rank_timeout_s)
        a_path("repro_dir", repro_dir, optional=True)
        changed = threshold != tol.MODULE_ATOL or rtol != tol.MODULE_RTOL
        self.backend, self.threshold, self.rtol = backend, threshold, rtol
        self.dump_graphs, self.graph_dir = dump_graphs, graph_dir
        self.cast_dtype, self.capture_input = cast_dtype, capture_input
        self.single_pass = single_pass
        self.criterion = criterion or ("allclose" if changed else "calibrated")
        self.golden = golden
        self.record_limit_mb = record_limit_mb
        self.rank_timeout_s = rank_timeout_s
        self.repro_dir = repro_dir
        self._selection = Selection()
        self._run: SinglePass | None = None
        self._is_installed = False
        self._loss: float | None = None

    # ---- which modules ----

    def wrap(self, module: Module, name: str | None = None) -> Module:
        """Compile and compare this module; `name` replaces its name in the report."""
        self._selection.wrap(module, name)
        return module

    def wrap_by_policy(self, model: nn.Module, module_classes: Any) -> list[nn.Module]:
        """Compile and compare every module of these classes; returns them."""
        return self._selection.wrap_by_policy(model, module_classes)

    def wrap_all_children(self, model: nn.Module, depth: int = 1) -> list[nn.Module]:
        """Compile and compare the submodules at a depth; returns them.

        Depth 0 takes the children of the model, 1 their children. ModuleList, ModuleDict and
        Sequential do not use up depth; a module without children above that depth is taken.
        """
        return self._selection.wrap_all_children(model, depth)

    def ignore(self, module: Module) -> Module:
        """Leave this module out of the verdict; it still runs."""
        self._selection.ignore(module)
        return module

    def ignore_by_policy(self, model: nn.Module, module_classes: Any) -> None:
        """Leave every module of these classes out of the verdict."""
        self._selection.ignore_by_policy(model, module_classes)

    # ---- a step ----

    def install(self, model: nn.Module) -> None:
        """Replace the wrapped modules with compiled versions, in place.

        Raises:
            RuntimeError: single_pass is False, it is installed already, or inductor lacks a C++
                compiler.
            ArgumentError: a wrapped module is no part of the model.
        """
        if not self.single_pass:
            raise RuntimeError(
                "install() needs single_pass=True; with single_pass=False use compare(run_step,"
                " model), which runs eager and compiled apart"
            )
        if self._is_installed:
            raise RuntimeError(
                "install(): already installed; call collect() first, or collect(...,"
                " keep_installed=True) between steps"
            )
        require_backend(self.backend, model)
        run = SinglePass(self._selection.plan(model), self._settings())
        try:
            self._run, self._loss = run, None
            run.install()
            self._is_installed = True
        except BaseException:
            run.remove()
            self._run, self._is_installed = None, False
            raise

    def _settings(self) -> Settings:
        return Settings(
            backend=self.backend,
            rule=Rule(criterion=self.criterion, atol=self.threshold, rtol=self.rtol),
            cast_dtype=self.cast_dtype,
            golden_always=self.golden == "always",
            record_limit_mb=self.record_limit_mb,
            timeout_s=self.rank_timeout_s,
            graph_dir=Path(self.graph_dir) if self.dump_graphs else None,
        )

    @contextlib.contextmanager
    def installed(self, model: nn.Module) -> Iterator[PrecisionChecker]:
        """`install`, and the model as before on the way out, also after an exception.

        `collect` may come inside or after it.
        """
        self.install(model)
        try:
            try:
                yield self
            finally:
                self._uninstall()
        except BaseException:
            self._uninstall()  # Ctrl-C may have come at the first instruction of the other one
            if self._run is not None:
                self._run.forget()
            self._run = None
            raise

    def _uninstall(self) -> None:
        if self._is_installed and self._run is not None:
            self._run.remove()
        self._is_installed = False

    def record_loss(self, loss: Tensor | float) -> None:
        """The loss of the compiled step, for `collect()` without an argument."""
        self._loss = as_float(loss)

    def collect(
        self, loss: Tensor | float | None = None, *, keep_installed: bool = False
    ) -> CompareResult:
        """What was found in the step since `install`; the model is as before.

        Args:
            loss: of the compiled step.
            keep_installed: go on comparing, with the next step.

        Raises:
            RuntimeError: `install` was not called.
        """
        a_flag("keep_installed", keep_installed)
        run = self._run
        if run is None:
            raise RuntimeError("collect(): nothing is installed; call install(model) first")
        try:
            if loss is not None:
                self._loss = as_float(loss)
            run.finish()
            result = self._result(run)
        finally:
            if keep_installed and self._is_installed:
                run.forget()
            else:
                self._uninstall()
                run.forget()
                self._run = None
            self._loss = None
        return self._with_repros(result)

    def compare(self, run_step: Callable[[nn.Module], Any], model: nn.Module) -> CompareResult:
        """Run `run_step(model)` and compare; it returns the loss.

        With single_pass=True it runs once, on the model itself. With single_pass=False it runs on
        copies, eager and compiled, and up to a few times more in float64; what it does to the
        model, to optimizers and to the model's inputs is undone.

        Raises:
            ArgumentError: single_pass is False and the model cannot be copied, or has parameters
                without values.
            Whatever `run_step` raises.
        """
        a_function("run_step", run_step)
        if not self.single_pass:
            return self._compare_copies(run_step, model)
        with self.installed(model):
            loss = run_step(model)
        return self.collect(loss)

    def _compare_copies(
        self, run_step: Callable[[nn.Module], Any], model: nn.Module
    ) -> CompareResult:
        require_backend(self.backend, model)
        refuse_without_values(model)
        run = TwoPass(self._selection.plan(model), self._settings(), model)
        run.run(run_step)
        result = self._result(run)
        result.loss_eager, result.loss_compiled = run.loss_eager, run.loss_compiled
        result.loss_recorded, result.single_pass = run.loss_recorded, False
        result.loss_verdict, result.loss_reason = run.loss_verdict, run.loss_reason
        return self._with_repros(result)

    def _with_repros(self, result: CompareResult) -> CompareResult:
        if self.repro_dir is not None and result.recordings:
            budget = Budget(seconds=REPRO_SECONDS)
            result.repros, notes = write_repros(Path(self.repro_dir), result.recordings, budget)
            result.notes += [f"reproducer: {path}" for path in result.repros] + notes
        return result

    def _result(self, run: SinglePass | TwoPass) -> CompareResult:
        return CompareResult(
            loss_eager=math.nan,
            loss_compiled=math.nan if self._loss is None else self._loss,
            diffs=run.diffs(),
            cast_dtype=self.cast_dtype,
            loss_recorded=self._loss is not None,
            criterion=self.criterion,
            atol=self.threshold,
            rtol=self.rtol,
            notes=run.notes(),
            problem=run.problem(),
            nonfinite_module=run.first_nonfinite(),
            backward_order=list(run.backward_order),
            show_input=self.capture_input,
            recordings=run.recordings(),
        )

    # ---- drill-down ----

    def drilldown(
        self,
        result: CompareResult,
        *,
        budget_s: float = 300.0,
        max_compiles: int = 60,
        progress: Callable[[str], object] | Literal[False] | None = None,
        repro_dir: str | Path | None = "repro",
        model: nn.Module | Callable[[], nn.Module] | None = None,
        backend: Any = None,
        classes: Iterable[type] = (),
    ) -> list[Culprit]:
        """Follow each suspect of a result from its recorded call to stage, kernel, op and line.

        What could not be followed is in the list too, with the reason. The result keeps the list,
        and `report` and `save` show it from then on. Ctrl-C stops and gives what was found. Model,
        caches, compile configuration and generators are as before.

        Args:
            result: of `collect`, `compare` or `CompareResult.load`.
            budget_s: seconds for all suspects; what has begun is not cut short.
            max_compiles: for all suspects.
            progress: None: one line in the terminal while it runs, nothing in a log. False:
                nothing. A function: is told every step.
            repro_dir: a script for each culprit is written there that shows it again; None: none.
            model: the model, or a function that builds it, where the result comes from a file, or
                FSDP2 has sharded it. Its weights are not used.
            backend: in place of the recorded one.
            classes: of which objects among the arguments may be made from a file.

        Raises:
            ArgumentError, ArgumentTypeError: something that a result from a file needs is missing
                or is another one.
        """
        _validate_result(result)
        a_number("budget_s", budget_s, may_be_inf=True)
        a_count("max_compiles", max_compiles)
        folder = a_path("repro_dir", repro_dir, optional=True)
        if backend is not None:
            require_backend_or_name(backend)
        wanted = several("classes", classes, "a list of classes")
        return drill(
            result, locate, budget=Budget(seconds=budget_s, compiles=max_compiles),
            progress=progress,
            reproduce=None if folder is None else partial(write_call_repro, folder),
            model=model, backend=backend, classes=wanted,
        )  # fmt: skip

    # ---- report ----

    def save(self, result: CompareResult, path: str | Path) -> None:
        """Write a result to a file that `CompareResult.load` reads, here or elsewhere.

        Raises:
            LogWriteError: it cannot be written.
        """
        _validate_result(result)
        result.save(a_path("path", path))

    def report(
        self,
        result: CompareResult,
        csv_path: str | Path | None = None,
        *,
        verbose: bool = False,
        gather: bool = False,
        scenario: str = "core",
    ) -> None:
        """Print the result, and write a CSV where a path is given.

        Args:
            result: of `collect` or `compare`.
            csv_path: replaced as a whole, or left alone when writing fails.
            verbose: print every row that passed, also in a terminal.
            gather: every rank of the process group calls this; rank 0 prints its own report and a
                line for each rank, and writes the rows of all to one CSV of eleven columns. A rank
                that does not call it within `rank_timeout_s` is named as missing.
            scenario: for that CSV, a name for what was run.

        Raises:
            LogWriteError: the CSV cannot be written.
            ArgumentError: scenario is no name.
        """
        _validate_result(result)
        path = a_path("csv_path", csv_path, optional=True)
        a_flag("verbose", verbose)
        a_flag("gather", gather)
        a_string("scenario", scenario)
        merged = None
        if gather:
            rank, merged = gathered(result, scenario=scenario, timeout_s=self.rank_timeout_s)
            if rank:
                return
        _report.print_report(result, verbose=verbose)
        if merged is not None:
            report_ranks(merged, path)
        elif path is not None:
            _report.write_csv(result, path)


def _validate_dtype(cast_dtype: Any) -> None:
    if cast_dtype is None:
        return
    an_instance("cast_dtype", cast_dtype, torch.dtype, "a torch.dtype or None")
    if not cast_dtype.is_floating_point:
        raise ArgumentError(f"cast_dtype: expected a floating dtype, got {cast_dtype}")


def _validate_result(result: Any) -> None:
    an_instance("result", result, CompareResult, "what collect() or compare() returned")
