"""Single-pass: the compiled module does the step, eager runs beside it on the same inputs.

Forward and gradients of a call are compared as soon as the real step has produced them, before an
optimizer can move a parameter. What equal bits or a few roundings settle is settled at once; the
rest waits for the call's backward, so that one float64 run serves both.
"""

from __future__ import annotations

import contextlib
import itertools
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from modulecheck import _torch, trees
from modulecheck.attributes import attribute_tensors
from modulecheck.backends import random_as_eager
from modulecheck.buffers import all_buffers
from modulecheck.comparing import ModuleCall
from modulecheck.compilations import Compiled, CompileLog
from modulecheck.distributed import CollectiveError, ranks_of, sharded_inside
from modulecheck.graphs import GraphDump
from modulecheck.hooks import Boundary
from modulecheck.recording import RecordedCall, Recorder
from modulecheck.region_gradients import RegionGradients
from modulecheck.remarks import (
    NOT_CALLED,
    NOTHING_TO_COMPILE,
    Settings,
    notes_of,
    problem_of,
)
from modulecheck.replay import Replayed, Snapshot, replay, together
from modulecheck.results import ModuleDiff, merged
from modulecheck.selection import Plan
from modulecheck.sidechannel import Agreement, SideChannel
from modulecheck.snapshot import NotComparableError
from modulecheck.watching import num_ops
from opcheck.exits import uncut

__all__ = ["SinglePass"]

_epochs = itertools.count()
"""Installs of this process: ranks that install as often know which one another rank means."""


@dataclass
class _Watched:
    """A wrapped module and its calls in this step."""

    name: str
    module: nn.Module
    calls: list[ModuleCall] = field(default_factory=list)


class SinglePass:
    """From `install` to `remove`; `diffs` gives what was found."""

    def __init__(self, plan: Plan, settings: Settings) -> None:
        self._plan, self._settings = plan, settings
        self._boundaries: list[Boundary] = []
        self._stack = contextlib.ExitStack()
        self._watched: list[_Watched] = []
        self._in_backward: dict[int, list[ModuleCall]] = {}
        """By backward: one may run inside of another, and one that raised has no end."""
        self._log = CompileLog()
        self._graphs = GraphDump(settings.graph_dir)
        self._recorder = Recorder(
            limit_mb=settings.record_limit_mb,
            backend=settings.backend,
            fqns={target.name: target.fqn for target in plan.targets},
        )
        self._epoch, self._step = next(_epochs), 0
        self._channel: SideChannel | None = None
        self.random_switched = False
        self.backward_order: dict[str, None] = {}

    # ---- life ----

    def install(self) -> None:
        """Compile every target in place."""
        settings = self._settings
        self.random_switched = self._stack.enter_context(random_as_eager(settings.backend))
        self._log = self._stack.enter_context(CompileLog().listening())
        self._stack.enter_context(self._graphs.written())
        try:
            for target in self._plan.targets:
                watched = _Watched(target.name, target.module)
                if target.checked:
                    self._watched.append(watched)
                boundary = Boundary(
                    target.module,
                    settings.backend,
                    cast_dtype=settings.cast_dtype,
                    around=self._around(watched) if target.checked else None,
                    num_modules=len(self._plan.targets),
                )
                self._boundaries.append(boundary)
                boundary.put_on()
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """The model is as before `install`."""
        uncut(self._remove)

    def _remove(self) -> None:
        for boundary in self._boundaries:
            boundary.remove()
        self._boundaries.clear()
        self._stack.close()

    def finish(self) -> None:
        """Judge what no backward has reached."""
        for watched in self._watched:
            for call in watched.calls:
                self._guarded(call, call.cut_short)

    def forget(self) -> None:
        """Drop the calls of this step."""
        for watched in self._watched:
            for call in watched.calls:
                call.release()
            watched.calls.clear()
        self.backward_order.clear()
        self._in_backward.clear()
        self._recorder.forget()
        self._log.forget()
        self._step += 1

    # ---- a call ----

    def _around(self, watched: _Watched) -> Callable[[Any, Any, Any], Any]:
        def around(compiled: Any, args: Any, kwargs: Any) -> Any:
            call = ModuleCall(
                watched.name, watched.module, rule=self._settings.rule, index=len(watched.calls),
                golden_always=self._settings.golden_always, recorder=self._recorder,
            )  # fmt: skip
            self._guarded(call, lambda: self._before(call, args, kwargs))
            with self._log.call(watched.name, watched.module) as found:
                output = compiled(*args, **kwargs)
            watched.calls.append(call)
            if not call.closed:
                self._guarded(call, lambda: self._after(call, output, found))
            return output

        return around

    def _guarded(self, call: ModuleCall, work: Callable[[], None]) -> None:
        """Our failure is a finding, never an exception in the user's step."""
        try:
            with together(agreed=call.agreement is not None):
                work()
        except (CollectiveError, NotComparableError) as error:
            call.open_because(str(error))
            call.close("")
        except Exception as error:  # noqa: BLE001 - whatever it is, the step goes on
            call.crashed(f"{type(error).__name__}: {error}", traceback.format_exc())

    @_torch.not_by_dynamo
    def _before(self, call: ModuleCall, args: Any, kwargs: Any) -> None:
        call.region = RegionGradients(call.module, args, kwargs)
        call.snapshot = Snapshot.take(
            call.module, args, kwargs, cast_dtype=self._settings.cast_dtype
        )
        call.recompute = _torch.inside_autograd()
        self._find_ranks(call, args, kwargs)

    def _find_ranks(self, call: ModuleCall, args: Any, kwargs: Any) -> None:
        """DTensors: running the module again is a collective, which all of them have to want."""
        ranks = ranks_of([*call.module.parameters(), *trees.tensors((args, kwargs))])
        if not ranks or sharded_inside(call.module):
            return
        if self._channel is None:
            self._channel = SideChannel.of_default_group(
                f"calls/{self._epoch}", timeout_s=self._settings.timeout_s
            )
        if self._channel is None:
            raise RuntimeError("DTensors of several ranks, and no process group")
        name = f"{self._step}/{call.name}/{call.index}"
        call.agreement = Agreement(self._channel, ranks, name)

    @_torch.not_by_dynamo
    def _after(self, call: ModuleCall, output: Any, found: Compiled) -> None:
        if call.snapshot is None or call.region is None:
            return
        random_after = torch.get_rng_state()
        if found.is_eager:
            call.all_ranks_are_ready(ready=False)
            self._not_compiled(call, call.snapshot, found)
            return
        call.artifacts = tuple(found.ran.artifacts)
        if found.doubt:
            call.open_because(found.doubt)
        if call.snapshot.parameters_moved(call.module):
            call.open_because("the forward writes its own parameters, so it cannot be run again")
            return
        sharded = sharded_inside(call.module)
        if sharded:
            call.open_because(
                f"sharded: FSDP2 holds the parameters of {sharded} sharded, and gathering them once"
                " more would be a collective; wrap the modules that fully_shard was applied to"
            )
            return
        if not call.all_ranks_are_ready():
            call.close("")
            return
        replayed = self._replay(call, call.snapshot)
        call.random_differs = not torch.equal(random_after, replayed.random_after)
        attributes = attribute_tensors(call.module)
        call.compare_forward(
            output, replayed, buffers=all_buffers(call.module), attributes=attributes
        )
        wants = replayed_wants_grad(replayed)
        has_backward = call.region.attach(
            output,
            attributes,
            on_first=lambda: self._reached(call),
            on_done=lambda: self._done(call),
        )
        call.region.forget_inputs()
        if has_backward and wants:
            call.wait_for_backward(replayed)
        else:
            call.finish()

    def _replay(self, call: ModuleCall, snapshot: Snapshot) -> Replayed:
        return replay(call.module, snapshot, on_inputs=call.compare_inputs)

    def _not_compiled(self, call: ModuleCall, snapshot: Snapshot, found: Compiled) -> None:
        if call.agreement is None and num_ops(call.module, snapshot) == 0:
            call.close(NOTHING_TO_COMPILE)
            return
        call.open_because(found.why_eager)
        call.close("")

    # ---- backward ----

    def _reached(self, call: ModuleCall) -> None:
        self.backward_order.setdefault(call.name)
        backward = _torch.graph_task_id()
        if backward not in self._in_backward:
            self._in_backward[backward] = []
            _torch.queue_after_backward(lambda: self._backward_ends(backward))
        self._in_backward[backward].append(call)

    def _done(self, call: ModuleCall) -> None:
        self._guarded(call, call.compare_backward)

    def _backward_ends(self, backward: int) -> None:
        for call in self._in_backward.pop(backward, []):
            self._guarded(call, call.compare_backward)

    # ---- results ----

    def diffs(self) -> list[ModuleDiff]:
        """One for each module in the order in which they first ran, then the skipped ones."""
        found = []
        for watched in self._watched:
            if not watched.calls:
                found.append(ModuleDiff(watched.name, note=NOT_CALLED))
                continue
            found.append(merged(watched.name, [call.diff() for call in watched.calls]))
        found += [ModuleDiff(name, note=marker) for name, marker in self._plan.skipped]
        return found

    def problem(self) -> str:
        """Why nothing could be compared, "" if something could."""
        found = problem_of(self._plan)
        if not found and not any(watched.calls for watched in self._watched):
            found = "nothing was compared: no wrapped module was called between install and collect"
        return found

    def notes(self) -> list[str]:
        """What the reader of a report should know."""
        found = notes_of(
            self._plan,
            self._settings.backend,
            random_switched=self.random_switched,
            idle=[watched.name for watched in self._watched if not watched.calls],
        )
        return found + self._log.notes() + self._graphs.notes() + self._recorder.notes()

    def recordings(self) -> list[RecordedCall]:
        """The failing calls that were kept, for a drill-down."""
        return list(self._recorder.calls)

    def first_nonfinite(self) -> str:
        """The first module with NaN or Inf in what it gave, "" if there is none."""
        calls = [call for watched in self._watched for call in watched.calls]
        bad = sorted((call.started, call.name) for call in calls if call.output_nonfinite)
        return bad[0][1] if bad else ""


def replayed_wants_grad(replayed: Replayed) -> bool:
    """Some input or parameter of the eager run has a gradient to be asked for."""
    return any(leaf is not None for leaf in replayed.input_leaves) or any(
        leaf.requires_grad for leaf in replayed.parameter_leaves.values()
    )
