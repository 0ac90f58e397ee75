"""A session: the context manager around a step, and what it found."""

from __future__ import annotations

import contextlib
import sys
import uuid
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from loguru import logger
from torch import nn

from opcheck.blame_text import render_blame
from opcheck.certificate import Certificate, Surroundings, certify
from opcheck.compiled_regions import compiled_regions
from opcheck.environment import process_rank, run_header
from opcheck.errors import ArgumentError, PrecisionError
from opcheck.exits import Exits
from opcheck.groups import Groups
from opcheck.kernel_table import kernels
from opcheck.modules import ModuleTracker
from opcheck.overhead import OverheadBudget
from opcheck.passes import release_scratch
from opcheck.pipeline import Pipeline
from opcheck.presence import Presence
from opcheck.printing import style_for
from opcheck.recorded_calls import CallRecorder
from opcheck.records import Coverage, OpRecord, Verdict
from opcheck.report import one_line, render
from opcheck.repro import ReproKeeper
from opcheck.review import Run
from opcheck.selftest import SelfTest, spelled
from opcheck.settings import Settings
from opcheck.sinks import LogFiles, log_names
from opcheck.stopwatch import Stopwatch
from opcheck.switch import SWITCH, Observer
from opcheck.validation import a_count

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Session"]


class Session:
    """What a `with opcheck.check(...)` block saw. Made by `check`, not by hand.

    Attributes:
        records: every checked call, and every call whose checking crashed, in order of dispatch.
        failures: the FAIL records, first divergence first.
        coverage: what became of every call; `seen == checked + sum(skipped) + errors`.
        verdict: PASS, FAIL or INCONCLUSIVE.
        repros: the reproducers that were written, with `repro_dir`.
    """

    def __init__(self, model: nn.Module | None, settings: Settings) -> None:
        self.settings = settings
        self._surroundings: Surroundings | None = None
        self._certificate: Certificate | None = None
        self._around: tuple[Surroundings, Surroundings] | None = None
        """Of the last context; compared when somebody asks."""
        self.run_id = uuid.uuid4().hex[:12]
        self.rank, self._world_size = process_rank()
        text, lines = log_names(self.rank, self._world_size)
        self.log_path = settings.log_dir / lines
        self._files = LogFiles(settings.log_dir / text, self.log_path, quiet=settings.quiet)
        self._records: list[OpRecord] = []
        self._in_order = True
        self._groups = Groups()
        """Of the records: to count them anew at every exit would take their number squared."""
        self._logged: set[tuple[str, str, str]] = set()
        self._header: dict[str, Any] | None = None
        self._callback_error: BaseException | None = None
        self._exits: Exits | None = None
        self._written = (-1, 0)
        """Calls seen, and steps that were not, when the coverage was written last."""
        self._tracker = ModuleTracker(
            model,
            on_step_end=self.next_step,
            on_module_end=self._module_ended,
            on_crash=self._crashed_in,
        )
        self._repros = (
            None if settings.repro_dir is None else ReproKeeper(settings.repro_dir, settings)
        )
        self._recorder = (
            None
            if settings.record is None
            else CallRecorder(settings.record_dir, settings, run_id=self.run_id, rank=self.rank)
        )
        share = settings.max_overhead
        self._budget = None if share is None else OverheadBudget(share)
        self._pipeline = Pipeline(
            settings, self._tracker, run_id=self.run_id, rank=self.rank, emit=self._keep,
            budget=self._budget,
            keepers=tuple(item for item in (self._repros, self._recorder) if item is not None),
        )  # fmt: skip
        self._presence = Presence(
            self._tracker, self._pipeline, on_step_end=self._unseen_step_ended
        )

    # ---- results ----

    @property
    def records(self) -> list[OpRecord]:
        """Every checked call and every ERROR, in order of dispatch."""
        self._pipeline.settle()
        if not self._in_order:
            self._records.sort(key=lambda record: record.index)
            self._in_order = True
        return self._records

    @property
    def failures(self) -> list[OpRecord]:
        """The FAIL records, first divergence first."""
        return [record for record in self.records if record.verdict is Verdict.FAIL]

    @property
    def coverage(self) -> Coverage:
        """What was seen, and what became of it."""
        return self._pipeline.coverage()

    @property
    def verdict(self) -> Verdict:
        """Of the whole session."""
        return self._run().verdict

    def report(self, *, width: int | None = None) -> str:
        """The findings for a person, as text of at most `width` columns."""
        a_count("width", width, optional=True, least=1)
        run, style = self._run(), style_for(sys.stdout, width=width, color=False)
        tables = render_blame(run, style) if self.settings.blame else []
        text = render(run, style=style, log_path=self.log_path, tables=tables)
        lines = [*self._saved(), *self._problems()]
        return "\n".join([text, "", *lines]) if lines else text

    @property
    def repros(self) -> list[Path]:
        """The reproducers that were written, first divergence first."""
        paths = self._repros.paths if self._repros is not None else {}
        return [paths[index] for index in sorted(paths)]

    def _saved(self) -> list[str]:
        lines = []
        if self._repros is not None:
            lines += [f"reproducer: {path}" for path in self.repros]
            lines += [f"reproducers: {note}" for note in self._repros.notes]
        if self._recorder is not None:
            count, folder = self._recorder.num_written, self.settings.record_dir
            lines += [f"recorded: {count} calls in {folder}; opcheck replay {folder}"]
            lines += [f"recorded: {note}" for note in self._recorder.notes]
        return lines

    def _problems(self) -> list[str]:
        problem = self._files.problem
        found = [f"the log is incomplete: {problem}"] if problem else []
        own = self._pipeline.own_problem
        return [*found, f"opcheck's own error, beside the verdict:\n{own}"] if own else found

    def selftest(self) -> SelfTest:
        """Which planted faults the settings found and which they would miss, so far.

        Raises:
            RuntimeError: the session was made without `selftest=True`.
        """
        planter = self._pipeline.planter
        if planter is None:
            raise RuntimeError("selftest(): nothing was planted; use opcheck.check(selftest=True)")
        return planter.result(self.coverage, spelled(self.settings))

    @property
    def certificate(self) -> Certificate:
        """What the checker left as it was.

        After a context: modes, hooks, settings, train/eval modes. After `certify`: everything
        that the step leaves behind, bit for bit.
        """
        if self._certificate is None and self._around is not None:
            before, after = self._around
            self._certificate = before.beside(after)
        return self._certificate or Certificate(0, ())

    def certify(
        self, step: Callable[[], Any], *, optimizers: Iterable[torch.optim.Optimizer] = ()
    ) -> Certificate:
        """Run `step()` without and with the checker from the same state, and compare bit for bit.

        Afterwards everything is as if the step had run once, in this session. Parameters,
        buffers, gradients, attributes of the modules, the optimizers' states and the random
        generators are put back between the runs; a data iterator or a file sees both.

        Args:
            step: the step; what it returns is compared as well.
            optimizers: that it uses.

        Returns:
            The certificate, also in `certificate`.

        Raises:
            ArgumentError: the session has no model, so nobody knows what to compare.
            Whatever `step` raises; the state is then as before.
        """
        if self._tracker.model is None:
            raise ArgumentError("certify: needs opcheck.check(model), to know what to compare")
        self._certificate = certify(step, self._tracker.model, lambda: self, optimizers=optimizers)
        return self._certificate

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Session cannot be copied or pickled, it belongs to the code it watches; keep"
            " session.records and session.coverage, or opcheck.load_run(session.log_path)"
        )

    def _run(self) -> Run:
        records, coverage = self.records, self.coverage
        return Run(
            header=self._header or {}, records=records, coverage=coverage,
            counted_groups=self._groups.all(),
        )  # fmt: skip

    # ---- the context ----

    def __enter__(self) -> Self:
        if self._exits is not None and self._exits.is_pending:
            raise RuntimeError("this session is entered already; make another with opcheck.check()")
        budget = self._budget
        exits = Exits()
        try:
            self._exits = exits
            if budget is not None:  # where entering fails
                exits.add(budget.left)
            with budget.entering() if budget is not None else contextlib.nullcontext():
                self._enter(exits)
        except BaseException:
            exits.run()
            self._presence.end()
            raise
        return self

    def _enter(self, exits: Exits) -> None:
        """Put everything on; what takes it off again is noted before it is there."""
        kernels().look_again()
        self._surroundings = Surroundings.now(self._tracker.model)
        exits.add(self._files.close)
        self._files.open()
        if self._header is None:
            self._header = run_header(self.run_id, self.rank, self._world_size, self.settings)
            self._files.header(self._header)
        else:
            self.next_step()
        region_ran = self._compiled_region_ran
        exits.add(partial(compiled_regions.ignore, region_ran))
        compiled_regions.listen(region_ran)
        observer: Observer = self._pipeline
        if self._budget is not None:
            observer = watch = Stopwatch(self._pipeline, self._budget)
            self._tracker.charge = watch.hook_ran
        exits.add(partial(SWITCH.leave, observer))
        SWITCH.enter(observer)
        self._presence.begin(observer, exits)
        exits.add(self._write_coverage)

    def _charged(self) -> contextlib.AbstractContextManager[None]:
        """What runs in here is no part of the step."""
        return contextlib.nullcontext() if self._budget is None else self._budget.charged()

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        exits = self._exits
        if exits is None:
            return
        is_entered = False
        try:
            try:
                is_entered = exits.is_pending
                self._refuse_elsewhere(exits)
                if is_entered:
                    self._presence.end()
                    self._conclude(kind, is_fork=exits.is_fork)
            finally:
                exits.run()
        finally:
            exits.run()  # Ctrl-C may have come at the first instruction of the other one
        if is_entered:
            self._left(kind, is_fork=exits.is_fork)

    @staticmethod
    def _refuse_elsewhere(exits: Exits) -> None:
        if exits.is_pending and exits.is_elsewhere:
            raise RuntimeError(
                "this session was entered by another thread, whose calls it sees; leave it there"
            )

    def _left(self, kind: type[BaseException] | None, *, is_fork: bool) -> None:
        """Everything is off: tell of it."""
        release_scratch()
        if self._surroundings is not None:
            self._around = (self._surroundings, Surroundings.now(self._tracker.model))
            self._certificate = None
        if self._budget is not None:
            self._budget.gone()
        if is_fork:  # the parent tells of it
            return
        if self._repros is not None:
            self._repros.write(may_shrink=kind is None)
        if not self.settings.quiet:
            self._say()
        if kind is None:
            self._raise_what_waited()

    def _conclude(self, kind: type[BaseException] | None, *, is_fork: bool) -> None:
        try:
            if kind is not None:
                self._pipeline.left_by(kind.__name__)
            if not is_fork:
                with self._charged():
                    stopped = kind is not None and issubclass(kind, KeyboardInterrupt)
                    self._pipeline.close(wait=not stopped)
        finally:
            self._pipeline.release()
            self._pipeline.forget_values()
            if self._budget is not None:
                self._budget.left()

    def _write_coverage(self) -> None:
        pipeline = self._pipeline
        state = (pipeline.ledger.seen, pipeline.num_rests + self._presence.is_resting)
        if self._written == state:  # entered again with nothing left to see
            return
        try:
            self._files.coverage(self.coverage, self.run_id, self.rank)
            self._written = state
        except Exception as error:  # noqa: BLE001 - our crash must not be the user's
            self._files.note(error)

    def _raise_what_waited(self) -> None:
        error, self._callback_error = self._callback_error, None
        if error is not None:
            raise error
        if self.settings.on_failure == "raise" and any(g.failed for g in self._groups.all()):
            raise PrecisionError(one_line(self._run(), self.log_path), self.failures[0])

    def next_step(self) -> None:
        """End the present step; where an optimizer runs, steps are told apart without this."""
        self._tracker.step_ended()
        if self._presence.is_resting:
            self._pipeline.end_rest()
        elif self._pipeline.ledger.has_calls_in_step:
            self._pipeline.end_step()
        self._presence.decide()

    def _unseen_step_ended(self) -> None:
        try:
            with self._charged():
                self.next_step()
        except Exception:  # noqa: BLE001 - our crash must not be the user's
            self._crashed_in("module_hook")

    def _compiled_region_ran(self) -> None:
        if self._presence.is_looking:
            self._pipeline.compiled_region_ran()

    def _say(self) -> None:
        try:
            run = self._run()
            level = "INFO" if run.verdict is Verdict.PASS else "WARNING"
            line = one_line(run, self.log_path)
        except Exception as error:  # noqa: BLE001 - our crash must not be the user's
            level, line = "WARNING", f"opcheck: INCONCLUSIVE; summing up crashed: {error!r}"
        if self.repros:
            line += f"; {len(self.repros)} reproducers in {self.settings.repro_dir}"
        if self._files.problem:
            line += f" (the log is incomplete: {self._files.problem})"
        logger.bind(opcheck=self.run_id).log(level, line)

    # ---- records ----

    def _crashed_in(self, where: str) -> None:
        self._pipeline.crashed_in(where)

    def _module_ended(self, *args: Any) -> None:
        self._pipeline.module_ended(*args)

    def _keep(self, record: OpRecord) -> None:
        if self._records and record.index < self._records[-1].index:
            self._in_order = False
        self._records.append(record)
        self._groups.add(record)
        self._files.record(record)
        if record.verdict is not Verdict.FAIL:
            return
        place = (record.op, record.module, record.phase)
        if not (self.settings.log_once and place in self._logged):
            self._logged.add(place)
            self._files.failure(record)
        if callable(self.settings.on_failure) and self._callback_error is None:
            try:
                self.settings.on_failure(record)
            except BaseException as error:  # noqa: BLE001 - raised on leaving, not in the step
                self._callback_error = error
