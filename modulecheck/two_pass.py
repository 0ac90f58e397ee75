"""Two-pass: the step on an eager copy of the model and on a compiled one.

The two are held against each other, and against float64 runs of the whole step.

What differs may have come in with the inputs or the output gradients of a module. So a module that
fails is run again in eager on what the compiled side gave to it: if it fails there too, the
difference begins in it, else it is inherited.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from modulecheck.backends import random_as_eager
from modulecheck.chain import LOSS, ChainGoldens, ChainJudge, Change
from modulecheck.comparing import ModuleCall
from modulecheck.graphs import GraphDump
from modulecheck.items import FORWARD, GRADIENTS
from modulecheck.keeping import Keeper
from modulecheck.paired import PairedCall, paired_calls
from modulecheck.pairing import Pairs, forward_error
from modulecheck.recording import RecordedCall, Recorder
from modulecheck.remarks import (
    NOT_CALLED,
    NOTHING_TO_COMPILE,
    Settings,
    notes_of,
    problem_of,
)
from modulecheck.replay import replay
from modulecheck.results import ModuleDiff, TensorDiff, merged
from modulecheck.selection import Plan
from modulecheck.sides import RunStep, Side, run_side, same_inputs
from modulecheck.twins import copied, twins_of
from modulecheck.watching import num_ops
from opcheck import tolerances as tol
from opcheck.records import Verdict

__all__ = ["TwoPass"]

PHASES = ("forward", "backward")


class TwoPass:
    """One comparison.

    Attributes:
        loss_eager: what the step returned on the eager copy; NaN where that was None.
        loss_compiled: the same of the compiled copy.
        loss_verdict: by the criterion in force.
        loss_reason: why it is not PASS.
    """

    def __init__(self, plan: Plan, settings: Settings, model: nn.Module) -> None:
        """Copy the values of the model; nothing runs yet."""
        self._plan, self._settings, self._model = plan, settings, model
        self._modules = {target.name: target.module for target in plan.targets}
        self._keeper = Keeper(model)
        self._recorder = Recorder(
            limit_mb=settings.record_limit_mb,
            backend=settings.backend,
            fqns={target.name: target.fqn for target in plan.targets},
        )
        self._calls: dict[str, list[PairedCall]] = {}
        self._problem = problem_of(plan)
        self._random_switched = False
        self._compile_notes: list[str] = []
        self._graphs = GraphDump(settings.graph_dir)
        self.loss_eager = self.loss_compiled = math.nan
        self.loss_recorded = False
        self.loss_verdict: Verdict | None = None
        self.loss_reason = ""
        self.backward_order: list[str] = []

    # ---- the runs ----

    def run(self, run_step: RunStep) -> None:
        """Run the step on both copies, compare, and find where differences begin.

        Raises:
            ModelCopyError: the model cannot be copied.
            Whatever `run_step` raises.
        """
        eager = self._side(run_step, copied(self._model))
        with (
            random_as_eager(self._settings.backend) as self._random_switched,
            self._graphs.written(),
        ):
            compiled = self._side(run_step, copied(self._model), backend=self._settings.backend)
        self.backward_order = list(compiled.backward_order)
        self._compile_notes = compiled.notes
        self._take_losses(eager, compiled)
        self._problem = self._problem or _problem_of_runs(eager, compiled)
        if same_inputs(eager, compiled) and eager.was_called:
            self._compare(run_step, eager, compiled)
        else:
            self.loss_verdict = Verdict.INCONCLUSIVE
        eager.release()
        compiled.release()

    def _side(
        self,
        run_step: RunStep,
        twin: nn.Module,
        *,
        backend: Any = None,
        change: Change | None = None,
    ) -> Side:
        if change is not None:
            change.on_model(twin)
        wide = change is not None and change.wide
        return run_side(
            run_step, twin, twins_of(self._plan.targets, self._model, twin),
            original=self._model, keeper=self._keeper, backend=backend,
            cast_dtype=None if wide else self._settings.cast_dtype,
            convert=None if change is None else change.on_input,
        )  # fmt: skip

    def _take_losses(self, eager: Side, compiled: Side) -> None:
        self.loss_eager, self.loss_compiled = eager.loss, compiled.loss
        self.loss_recorded = eager.loss_recorded and compiled.loss_recorded
        if eager.loss_recorded != compiled.loss_recorded:
            self._problem = "run_step returned a loss in one of the two runs only"

    # ---- comparing ----

    def _compare(self, run_step: RunStep, eager: Side, compiled: Side) -> None:
        for name in dict.fromkeys((*eager.order, *compiled.order)):
            self._calls[name] = list(paired_calls(name, eager, compiled))
        for call in self._all_calls():
            if self._is_compiled(call):
                call.compare(self._settings.rule, golden_always=self._settings.golden_always)
        loss = self._loss_pair()
        self._judge(run_step, loss, eager)
        for call in self._all_calls():
            if call.random_differs:
                call.reconsider("the two sides drew other random numbers")
        self._find_origins()
        for call in self._all_calls():
            call.pairs.release()

    def _all_calls(self) -> Iterator[PairedCall]:
        return itertools.chain.from_iterable(self._calls.values())

    def _is_compiled(self, call: PairedCall) -> bool:
        """False where no compiled code ran: then there is nothing to compare."""
        side = call.compiled
        if side is None or side.compiled is None or not side.compiled.is_eager or side.error:
            return True
        if num_ops(self._modules[call.name], side.snapshot) == 0:
            call.close(NOTHING_TO_COMPILE)
        else:
            call.open_because(side.compiled.why_eager)
        return False

    def _judge(self, run_step: RunStep, loss: Pairs, eager: Side) -> None:
        """Settle with float64 runs of the whole step what a glance has left."""
        wanted = {
            (call.name, call.index, item.key)
            for call in self._all_calls()
            for item in call.pairs.unsettled
        }
        items = list(itertools.chain.from_iterable(c.pairs.items for c in self._all_calls()))
        goldens = ChainGoldens(
            lambda change: self._side(run_step, copied(self._model), change=change),
            wanted=wanted,
            eager=eager,
            forward_error=forward_error(items),
        )
        for kinds in (FORWARD, GRADIENTS):
            # a kink explains nothing where the forward is wrong
            passes = not any(call.pairs.failed for call in self._all_calls())
            for call in self._all_calls():
                judge = ChainJudge(goldens, call.name, call.index)
                call.pairs.judge(judge, kinds=kinds, kinks=passes)
        loss.judge(ChainJudge(goldens, "", 0))
        for item in loss.items:
            self._take_loss_verdict(item.diff())

    def _loss_pair(self) -> Pairs:
        pairs = Pairs(self._settings.rule)
        if self.loss_recorded:
            both = (self.loss_compiled, self.loss_eager)
            mine, theirs = (torch.tensor(loss, dtype=torch.float64) for loss in both)
            # a loss is as exact as the least exact tensor on its way, whatever its own dtype
            pairs.look("loss", LOSS, "", mine, theirs, dtype=self._coarsest_dtype())
        return pairs

    def _coarsest_dtype(self) -> str:
        found = {item.dtype for call in self._all_calls() for item in call.pairs.items}
        known = [dtype for dtype in ("float32", *found) if dtype in tol.EPS]
        return max(known, key=lambda dtype: tol.EPS[dtype])

    def _take_loss_verdict(self, diff: TensorDiff) -> None:
        both = self.loss_eager, self.loss_compiled
        same_class = all(map(math.isfinite, both)) or str(both[0]) == str(both[1])
        fails = diff.judged != Verdict.PASS or not same_class
        self.loss_verdict = Verdict.FAIL if fails else Verdict.PASS
        if fails:
            self.loss_reason = (
                f"loss: eager {both[0]:.9g}, compiled {both[1]:.9g}, beyond the criterion"
            )

    # ---- where it begins ----

    def _find_origins(self) -> None:
        """Run what fails again on its own; where nothing begins, everything."""
        failing = [call for call in self._all_calls() if call.pairs.failed]
        begins = [self._begins(call) for call in failing]
        if not failing or any(begins):
            return
        # nothing is wrong on its own: rounding that grows, if that holds for every module
        agree = self.loss_verdict != Verdict.FAIL and all(map(self._agrees, self._all_calls()))
        for call in failing:
            call.settle(agree=agree)

    def _begins(self, call: PairedCall) -> bool:
        """True when a difference begins in this call; what does not is marked as inherited."""
        again = self._run_again(call)
        own = [phase for phase in PHASES if call.failed_in(phase) and _own(call, phase, again)]
        for phase in PHASES:
            if call.failed_in(phase) and phase not in own:
                call.inherits(phase)
        return bool(own)

    def _agrees(self, call: PairedCall) -> bool:
        """The module in eager on what the compiled side gave to it passes, or has been seen to."""
        if call.is_empty:
            return True
        if call.again is None:
            self._run_again(call)
        again = call.again
        return again is not None and again.compared > 0 and again.verdict == Verdict.PASS

    def _run_again(self, call: PairedCall) -> ModuleDiff | None:
        """The module in eager on what the compiled side gave to it; None: it cannot be told."""
        side, module = call.compiled, self._modules.get(call.name)
        if side is None or module is None or side.moved:
            return None
        again = ModuleCall(
            call.name, module, rule=self._settings.rule, index=call.index, recorder=self._recorder
        )
        again.snapshot = snapshot = side.snapshot.on(module)
        again.region, side.region.arguments = side.region, side.after
        try:
            with _modes(module, side.training):
                replayed = replay(module, snapshot)
                again.compare_forward(
                    side.output, replayed, buffers=side.buffers, attributes=side.attributes
                )
                again.wait_for_backward(replayed)
                again.finish()
        except Exception:  # noqa: BLE001 - where it came in then tells
            return None
        call.again = again.diff()
        return call.again

    # ---- results ----

    def diffs(self) -> list[ModuleDiff]:
        """One for each module in the order in which they first ran, then the skipped ones."""
        found = []
        for name, calls in self._calls.items():
            parts = [call.diff() for call in calls]
            found.append(merged(name, parts) if parts else ModuleDiff(name, note=NOT_CALLED))
        found += [ModuleDiff(name, note=NOT_CALLED) for name in self._idle()]
        return found + [ModuleDiff(name, note=marker) for name, marker in self._plan.skipped]

    def _idle(self) -> list[str]:
        checked = [target.name for target in self._plan.targets if target.checked]
        return [name for name in checked if name not in self._calls]

    def problem(self) -> str:
        """Why no PASS can be given although nothing failed."""
        return self._problem

    def notes(self) -> list[str]:
        """What the reader of a report should know."""
        found = notes_of(
            self._plan, self._settings.backend,
            random_switched=self._random_switched, idle=self._idle(),
        )  # fmt: skip
        found += self._compile_notes
        return found + self._keeper.notes + self._graphs.notes() + self._recorder.notes()

    def first_nonfinite(self) -> str:
        """Nothing: both losses are there."""
        return ""

    def recordings(self) -> list[RecordedCall]:
        """The failing calls in which a difference begins, for a drill-down."""
        return list(self._recorder.calls)


def _problem_of_runs(eager: Side, compiled: Side) -> str:
    if not eager.was_called and not compiled.was_called:
        instead = ", it called the original one" if eager.original_called else ""
        return (
            f"nothing was compared: run_step never called the model it was given{instead}; it must"
            " use its argument"
        )
    if not same_inputs(eager, compiled):
        return (
            "nothing was compared: run_step gave the model other inputs in the second run; it must"
            " be repeatable, with a fixed batch"
        )
    if not any((*eager.calls.values(), *compiled.calls.values())):
        return "nothing was compared: no wrapped module was called by run_step"
    errors = [*eager.errors, *compiled.errors]
    return f"checking crashed: {errors[0]}" if errors else ""


def _own(call: PairedCall, phase: str, again: ModuleDiff | None) -> bool:
    """The difference arises in the call itself, by running it again or else by what came in."""
    if again is not None:
        kinds = ("fwd_output", "mutated") if phase == "forward" else ("grad_input", "param_grad")
        judged = {item.judged for kind, _, item in again.tensors() if kind in kinds}
        if Verdict.FAIL in judged:
            return True
        if judged and Verdict.INCONCLUSIVE not in judged:
            return False
    return not call.came_in_different(phase)


@contextlib.contextmanager
def _modes(module: nn.Module, training: dict[str, bool]) -> Iterator[None]:
    """Train or eval as it was in the call."""
    before = {name: item.training for name, item in module.named_modules()}
    _set_modes(module, training)
    try:
        yield
    finally:
        _set_modes(module, before)


def _set_modes(module: nn.Module, training: dict[str, bool]) -> None:
    for name, item in module.named_modules():
        item.training = training.get(name, item.training)
