"""One call of a wrapped module: what is compared, when, and what came of it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn

from modulecheck.artifacts import Artifact
from modulecheck.compared import Compared, Rule, documented
from modulecheck.distributed import is_gathered
from modulecheck.goldens import Goldens, Key, array_of, results_of
from modulecheck.items import Item
from modulecheck.pairing import Pairs
from modulecheck.recording import Recorder
from modulecheck.region_gradients import RegionGradients
from modulecheck.replay import Replayed, Snapshot, arguments, replay
from modulecheck.results import ModuleDiff, TensorDiff
from modulecheck.sidechannel import Agreement
from modulecheck.undisturbed import user_hooks
from modulecheck.watching import undefined_casts
from opcheck.records import Verdict

__all__ = ["ModuleCall"]

_started = itertools.count()


class ModuleCall:
    """From the snapshot before the compiled call to the last gradient."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        *,
        rule: Rule,
        index: int,
        golden_always: bool = False,
        recorder: Recorder | None = None,
    ) -> None:
        self.name, self.module, self.rule, self.index = name, module, rule, index
        self.started = next(_started)
        self.snapshot: Snapshot | None = None
        self.region: RegionGradients | None = None
        self.recompute = False
        self.random_differs = False
        self.closed = False
        self.error: str | None = None
        self.agreement: Agreement | None = None
        """Of a call that cannot be run again by one rank alone."""
        self.artifacts: tuple[Artifact, ...] = ()
        """What ran compiled."""
        self._recorder = recorder
        self._offered: set[Key] = set()
        self._pairs = Pairs(rule, golden_always=golden_always)
        self._open: list[str] = []
        self._note = ""
        self._replayed: Replayed | None = None
        self._ran_again = False

    @property
    def output_nonfinite(self) -> bool:
        """The compiled call gave NaN or Inf."""
        return self._pairs.output_nonfinite

    # ---- ends ----

    def open_because(self, reason: str) -> None:
        """The call cannot be a PASS."""
        self._open.append(reason)

    def crashed(self, reason: str, trace: str) -> None:
        """Our own work failed."""
        self.error = trace
        self.open_because(f"checking crashed: {reason}")
        self.close("")

    def close(self, note: str) -> None:
        """Nothing more is compared."""
        self._note = self._note or note
        self.closed = True
        self.release()

    def release(self) -> None:
        """Let go of every tensor."""
        if self.region is not None:
            self._ran_again = self._ran_again or self.region.ran_again
            self.region.release()
        self._replayed = self.snapshot = self.region = None
        self.artifacts = ()
        self._pairs.release()

    # ---- forward ----

    def compare_inputs(self, before: list[Tensor], received: list[Tensor]) -> None:
        """The snapshot from before the compiled call, and what the replay gets, bit for bit."""
        for place, (expected, actual) in enumerate(zip(before, received, strict=True)):
            item = self._pairs.add("fwd_input", ("received", place), f"input {place}", expected)
            ours, theirs = array_of(expected), array_of(actual)
            if np.array_equal(ours, theirs):
                item.result = Compared(verdict=Verdict.PASS)
                continue
            numbers = documented(ours, theirs, atol=self.rule.atol, rtol=self.rule.rtol)
            same = numbers.max_abs == 0.0
            item.result = Compared(
                verdict=Verdict.PASS if same else Verdict.INCONCLUSIVE,
                reason="" if same else "the eager run did not get what the compiled one got",
                documented=numbers,
            )

    def compare_forward(
        self,
        output: Any,
        replayed: Replayed,
        *,
        buffers: Mapping[str, Tensor],
        attributes: Mapping[str, Tensor],
    ) -> None:
        """Outputs, changed arguments, changed buffers.

        Args:
            output: of the compiled call.
            replayed: the eager one.
            buffers: after the compiled call.
            attributes: tensors in plain attributes after it.
        """
        self._pairs.outputs(output, replayed.output)
        if self.snapshot is None or self.region is None:
            return
        before = arguments(self.snapshot.args, self.snapshot.kwargs)
        self._pairs.arguments(before, self.region.arguments, replayed.arguments)
        self._pairs.buffers(self.snapshot.buffers, buffers, replayed.buffers)
        self._pairs.attributes(self.snapshot.attributes.tensors(), attributes, replayed.attributes)

    # ---- backward ----

    def wait_for_backward(self, replayed: Replayed) -> None:
        """Keep the eager graph until the real gradients are known."""
        self._replayed = replayed
        if is_gathered(self.module):  # a float64 run needs the parameters
            self._settle([], [])

    def compare_backward(self) -> None:
        """The gradients that the call itself produced in the real backward."""
        region, replayed = self.region, self._replayed
        if self.closed or region is None or replayed is None or self.snapshot is None:
            return
        if self.snapshot.parameters_gone(self.module):
            self.open_because(
                "resharded: its parameters were sharded again, or replaced, before its gradients"
                " could be compared"
            )
            self.close("")
            return
        if not self.all_ranks_are_ready():
            self.close("")
            return
        by_key = results_of(replayed)
        arrived = region.of_outputs
        sources = [key for key in region.sources if key in arrived and key in by_key]
        grads = [arrived[key] for key in sources]
        of_inputs, of_parameters = replayed.gradients([by_key[key] for key in sources], grads)
        self._replayed = None
        isolated = not region.has_unknown_edges
        for place, eager in enumerate(of_inputs):
            if replayed.input_leaves[place] is not None and region.wants(("input", place)):
                self._pairs.gradient(
                    "grad_input", ("grad_input", place), f"input {place}",
                    region.found.get(("input", place)), eager, isolated=isolated,
                )  # fmt: skip
        for name, eager in of_parameters.items():
            found = region.found.get(("parameter", name))
            if not region.wants(("parameter", name)):
                continue
            self._pairs.gradient(
                "param_grads", ("param", name), name, found, eager, isolated=isolated
            )
        self._settle(sources, grads)
        self.close("")

    def all_ranks_are_ready(self, *, ready: bool = True) -> bool:
        """True where nobody else has to run the same, or everybody is about to."""
        if self.agreement is None:
            return ready
        if self.agreement.all_are_ready(ready=ready):
            return True
        self._not_in_step()
        return False

    def _not_in_step(self) -> None:
        self.open_because(
            f"ranks_not_in_step: {self.agreement} share its tensors, and not all of them check this"
            " call, so that it cannot be run again"
        )

    def finish(self) -> None:
        """Judge what is left, without gradients."""
        if self.closed:
            return
        if self.region is not None and self.region.fired:
            self.compare_backward()
            return
        self._settle([], [])
        self.close("")

    def cut_short(self) -> None:
        """No backward that has reached this call has ended: judge what is left."""
        if self.closed:
            return
        if self.region is not None and self.region.fired:
            self.open_because("its backward was cut short, so its gradients were not compared")
        self._settle([], [])
        self.close("")

    # ---- judging ----

    def _settle(self, sources: list[Key], grads: list[Tensor]) -> None:
        needed = self.snapshot is not None and self._needs_goldens()
        if needed and self.snapshot is not None:
            goldens = Goldens(
                self.module, self.snapshot, sources=sources, grads=grads,
                forward_error=self._pairs.forward_error, seed=self.index,
            )  # fmt: skip
            if self.agreement is not None:
                goldens.run_all()
            self._pairs.judge(goldens)
            if self.agreement is None and self._pairs.in_doubt:
                self._pairs.doubt(self._given_again(self.snapshot))
        for item in self._pairs.failed:
            if item.result is not None:
                item.result = self._reconsidered(item, item.result)
        self._record(sources, grads)
        self._pairs.release()

    def _given_again(self, snapshot: Snapshot) -> Mapping[Key, Tensor]:
        """What eager gives when it runs once more on the same."""
        return results_of(replay(self.module, snapshot))

    def _needs_goldens(self) -> bool:
        """Something is not settled here, or on a rank that cannot run the module alone."""
        needed = bool(self._pairs.unsettled)
        if self.agreement is None:
            return needed
        votes = self.agreement.votes(vote=needed)
        if votes is None:
            self._not_in_step()
            return False
        return any(votes)

    def _record(self, sources: list[Key], grads: list[Tensor]) -> None:
        """Hand a failing call on, as long as everything that it used is there."""
        failed = [item for item in self._pairs.failed if item.key not in self._offered]
        self._offered.update(item.key for item in failed)
        if not failed or self._recorder is None or self.snapshot is None:
            return
        self._recorder.offer(
            self.name, self.module, self.snapshot,
            failed=[item.key for item in failed],
            actual={item.key: item.actual for item in failed if item.actual is not None},
            sources=sources, grads=grads, index=self.index, artifacts=self.artifacts,
        )  # fmt: skip

    def _reconsidered(self, item: Item, result: Compared) -> Compared:
        """A FAIL that has another explanation than a fault is no verdict."""
        why = ""
        if self.random_differs:
            why = "the two sides drew other random numbers"
        elif user_hooks(self.module):
            why = "hooks_not_replayed: the module has hooks of yours that eager ran without"
        elif item.dtype.startswith(("int", "uint")) and self._casts_undefined():
            why = "a float is cast to an integer that cannot hold it: the value is undefined"
        if not why:
            return result
        return Compared(
            verdict=Verdict.INCONCLUSIVE, reason=f"{why} ({result.reason})", notes=result.notes,
            documented=result.documented, metrics=result.metrics,
        )  # fmt: skip

    def _casts_undefined(self) -> bool:
        if self.agreement is not None:  # the other ranks may have no reason to ask
            return False
        return self.snapshot is not None and undefined_casts(self.module, self.snapshot) > 0

    # ---- results ----

    def diff(self) -> ModuleDiff:
        """What was found in this call."""
        groups: dict[str, list[TensorDiff] | None] = {
            kind: self._pairs.of_kind(kind)
            for kind in ("fwd_input", "fwd_output", "grad_input", "param_grads", "mutated")
        }
        note = "; ".join(self._open) or self._note
        if self._ran_again:
            note = f"{note}; " if note else ""
            note += "backward ran through it more than once: the first was compared"
        return ModuleDiff(self.name, note=note, inconclusive=bool(self._open), **groups)  # type: ignore[arg-type]
