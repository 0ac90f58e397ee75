"""One call of a wrapped module: what is compared, when, and what came of it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from modulecheck import _torch, trees
from modulecheck.goldens import Goldens, Key, array_of, results_of
from modulecheck.hooks import RegionGradients
from modulecheck.judging import Compared, Documented, Rule, compare, documented, quick
from modulecheck.recording import Recorder
from modulecheck.replay import Replayed, Snapshot, arguments
from modulecheck.results import ModuleDiff, TensorDiff
from modulecheck.watching import undefined_casts
from opcheck import tolerances as tol
from opcheck.records import Verdict
from opcheck.verdicts import rms

__all__ = ["Item", "ModuleCall"]

Array = npt.NDArray[Any]

_NOISE = 8.0
"""A gradient whose rms is below this many eps of the largest gradient of its call is taken for
rounding noise: a float64 run that disagrees with it says nothing."""
_started = itertools.count()


@dataclass(slots=True)
class Item:
    """One tensor on both sides; arrays are held only until it is judged."""

    kind: str
    """A field of ModuleDiff."""
    key: Key
    name: str
    shape: tuple[int, ...]
    dtype: str
    actual: Array | None = None
    eager: Array | None = None
    result: Compared | None = None

    def diff(self) -> TensorDiff:
        """For the report."""
        result = self.result or Compared(verdict=Verdict.INCONCLUSIVE, reason="was not judged")
        numbers = result.documented
        return TensorDiff(
            numbers.max_abs, numbers.mean_abs, numbers.max_rel, numbers.allclose, self.shape,
            verdict=result.verdict, metrics=result.metrics, name=self.name,
            reason=result.reason, notes=result.notes,
        )  # fmt: skip


_UNKNOWN = Documented(float("nan"), float("nan"), float("nan"), allclose=False)


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
        self.output_nonfinite = False
        self.closed = False
        self.error: str | None = None
        self._golden_always, self._recorder = golden_always, recorder
        self._items: list[Item] = []
        self._open: list[str] = []
        self._note = ""
        self._replayed: Replayed | None = None
        self._ran_again = False

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
        for item in self._items:
            item.actual = item.eager = None

    # ---- forward ----

    def compare_inputs(self, before: list[Tensor], received: list[Tensor]) -> None:
        """The snapshot from before the compiled call, and what the replay gets, bit for bit."""
        for place, (expected, actual) in enumerate(zip(before, received, strict=True)):
            item = self._item("fwd_input", ("received", place), f"input {place}", expected)
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

    def compare_forward(self, output: Any, replayed: Replayed) -> None:
        """Outputs, changed arguments, changed buffers; what is not settled keeps its values."""
        problem = trees.differing_structure(output, replayed.output)
        if problem:
            self._differs("fwd_output", ("output", "structure"), "structure", problem)
            return
        pairs = zip(trees.named_tensors(output), trees.named_tensors(replayed.output), strict=True)
        for place, ((name, actual), (_, eager)) in enumerate(pairs):
            self._look("fwd_output", ("output", place), name, actual, eager)
            self._look_at_gradient(actual, eager)
        self._compare_mutated(replayed)

    def _look_at_gradient(self, actual: Tensor, eager: Tensor) -> None:
        finite = actual.is_floating_point() or actual.is_complex()
        if finite and actual.layout is torch.strided and not np.isfinite(array_of(actual)).all():
            self.output_nonfinite = True
        if eager.requires_grad and not actual.requires_grad:
            self._items[-1].result = Compared(
                verdict=Verdict.FAIL,
                reason="the compiled output is cut off from the gradient, eager's is not",
                documented=_UNKNOWN,
            )

    def _compare_mutated(self, replayed: Replayed) -> None:
        if self.snapshot is None or self.region is None:
            return
        old = dict(trees.named_tensors(arguments(self.snapshot.args, self.snapshot.kwargs)))
        after = dict(trees.named_tensors(self.region.arguments))
        for name, eager in trees.named_tensors(replayed.arguments):
            actual = after.pop(name, None)
            if actual is None:
                reason = "eager has put a tensor there"
                self._differs("mutated", ("argument", name), f"argument {name}", reason)
            elif name not in old or _changed(old[name], actual) or _changed(old[name], eager):
                self._look("mutated", ("argument", name), f"argument {name}", actual, eager)
        for name in after:
            reason = "compiled has put a tensor there"
            self._differs("mutated", ("argument", name), f"argument {name}", reason)
        buffers = dict(self.module.named_buffers())
        for name, eager in replayed.buffers.items():
            before, now = self.snapshot.buffers.get(name), buffers.get(name)
            if before is None or now is None:
                reason = "it exists on one side only"
                self._differs("mutated", ("buffer", name), f"buffer {name}", reason)
            elif _changed(before, now) or _changed(before, eager):
                self._look("mutated", ("buffer", name), f"buffer {name}", now, eager)

    # ---- looking at one pair ----

    def _differs(self, kind: str, key: Key, name: str, reason: str) -> None:
        item = Item(kind, key, name, (), "")
        item.result = Compared(verdict=Verdict.FAIL, reason=reason, documented=_UNKNOWN)
        self._items.append(item)

    def _item(self, kind: str, key: Key, name: str, tensor: Tensor) -> Item:
        dtype = str(tensor.dtype).removeprefix("torch.")
        item = Item(kind, key, name, tuple(tensor.shape), dtype)
        self._items.append(item)
        return item

    def _look(self, kind: str, key: Key, name: str, actual: Tensor, eager: Tensor) -> None:
        """Settle a pair at a glance, or keep copies of both sides for the full rule."""
        item = self._item(kind, key, name, actual)
        for what in ("shape", "dtype", "device"):
            mine, theirs = getattr(actual, what), getattr(eager, what)
            if mine != theirs:
                mine, theirs = (tuple(x) if what == "shape" else x for x in (mine, theirs))
                reason = f"{what} is {mine}, eager gives {theirs}"
                item.result = Compared(verdict=Verdict.FAIL, reason=reason, documented=_UNKNOWN)
                item.actual = array_of(actual).copy()
                return
        y, c = array_of(actual), array_of(eager)
        item.dtype = _real_dtype(actual.dtype)
        first = quick(y, c, item.dtype, self.rule)
        golden = self._golden_always and y.dtype.kind in "fc" and y.size > 0
        if first.settled and not (golden and self.rule.criterion == "calibrated"):
            item.result = first
            item.actual = y.copy() if first.verdict == Verdict.FAIL else None
            return
        item.actual, item.eager = y.copy(), c.copy()

    # ---- backward ----

    def wait_for_backward(self, replayed: Replayed) -> None:
        """Keep the eager graph until the real gradients are known."""
        self._replayed = replayed

    def compare_backward(self) -> None:
        """The gradients that the call itself produced in the real backward."""
        region, replayed = self.region, self._replayed
        if self.closed or region is None or replayed is None or self.snapshot is None:
            return
        by_key = results_of(replayed)
        sources = [key for key in region.sources if key in region.of_outputs]
        grads = [region.of_outputs[key] for key in sources]
        of_inputs, of_parameters = replayed.gradients([by_key[key] for key in sources], grads)
        self._replayed = None
        for place, eager in enumerate(of_inputs):
            if replayed.input_leaves[place] is not None:
                found = region.found.get(("input", place))
                self._look_at_pair(
                    "grad_input", ("grad_input", place), f"input {place}", found, eager
                )
        for name, eager in of_parameters.items():
            found = region.found.get(("parameter", name))
            self._look_at_pair("param_grads", ("param", name), name, found, eager)
        self._settle(sources, grads)
        self.close("")

    def _look_at_pair(
        self, kind: str, key: Key, name: str, actual: Tensor | None, eager: Tensor | None
    ) -> None:
        if actual is None and eager is None:
            return
        if actual is not None and eager is not None:
            self._look(kind, key, name, actual, eager)
            return
        present = actual if actual is not None else eager
        if present is None:
            return
        item = self._item(kind, key, name, present)
        has, lacks = ("compiled", "eager") if actual is not None else ("eager", "compiled")
        if not array_of(present).any():
            note = f"{lacks} gives no gradient, {has} exact zeros"
            item.result = Compared(verdict=Verdict.PASS, notes=(note,))
            return
        isolated = self.region is None or not self.region.has_unknown_edges
        item.result = Compared(
            verdict=Verdict.FAIL if isolated else Verdict.INCONCLUSIVE,
            reason=f"{lacks} gives no gradient"
            if isolated
            else "gradient_not_isolated: it cannot be told from what other users add",
            documented=_UNKNOWN,
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

    # ---- judging ----

    def _settle(self, sources: list[Key], grads: list[Tensor]) -> None:
        left = [item for item in self._items if item.result is None]
        if left and self.snapshot is not None:
            goldens = Goldens(
                self.module, self.snapshot, sources=sources, grads=grads,
                forward_error=self._forward_error, seed=self.index,
            )  # fmt: skip
            order = sorted(left, key=lambda item: item.kind not in ("fwd_output", "mutated"))
            for item in order:
                self._judge(item, goldens)
        for item in self._items:
            if item.result is not None and item.result.verdict == Verdict.FAIL:
                item.result = self._reconsidered(item, item.result)
        self._record(sources, grads)
        for item in self._items:
            item.actual = item.eager = None

    def _record(self, sources: list[Key], grads: list[Tensor]) -> None:
        """Hand a failing call on, as long as everything that it used is there."""
        failed = [
            item
            for item in self._items
            if item.result is not None and item.result.verdict == Verdict.FAIL
        ]
        if not failed or self._recorder is None or self.snapshot is None:
            return
        self._recorder.offer(
            self.name, self.module, self.snapshot,
            failed=[item.key for item in failed],
            actual={item.key: item.actual for item in failed if item.actual is not None},
            sources=sources, grads=grads, index=self.index,
        )  # fmt: skip

    def _judge(self, item: Item, goldens: Goldens) -> None:
        if item.actual is None or item.eager is None:
            return
        is_gradient = item.kind in ("grad_input", "param_grads")
        references = goldens.references(
            item.key,
            kinks=is_gradient and self._forward_passed(),
            noise_floor=self._noise_floor(item.dtype) if is_gradient else 0.0,
        )
        result = compare(
            item.actual, item.eager, dtype=item.dtype, rule=self.rule, references=references
        )
        if goldens.missing and result.settled:
            result = _with_note(result, f"no float64 run ({goldens.missing})")
        item.result = result

    def _forward_passed(self) -> bool:
        forward = [i for i in self._items if i.kind in ("fwd_output", "mutated")]
        return all(i.result is not None and i.result.verdict == Verdict.PASS for i in forward)

    def _noise_floor(self, dtype: str) -> float:
        gradients = [
            rms(item.eager.reshape(-1))
            for item in self._items
            if item.kind in ("grad_input", "param_grads")
            and item.eager is not None
            and item.eager.dtype.kind == "f"
        ]
        return _NOISE * tol.EPS[dtype] * max(gradients, default=0.0)

    def _forward_error(self) -> float:
        """Largest rms distance of the two sides' outputs, as a share of the output's rms."""
        eps = tol.EPS["float32"]
        shares = [eps]
        for item in self._items:
            if item.kind == "fwd_output" and item.actual is not None and item.eager is not None:
                both = [side.reshape(-1).astype(np.float64) for side in (item.actual, item.eager)]
                size = rms(both[1])
                shares += [rms(both[0] - both[1]) / size] if size else []
                shares.append(tol.EPS.get(item.dtype, eps) / 4)
        return float(np.nanmax(shares))

    def _reconsidered(self, item: Item, result: Compared) -> Compared:
        """A FAIL that has another explanation than a fault is no verdict."""
        why = ""
        if self.random_differs:
            why = "the two sides drew other random numbers"
        elif _torch.user_hooks(self.module):
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
        return self.snapshot is not None and undefined_casts(self.module, self.snapshot) > 0

    # ---- results ----

    def diff(self) -> ModuleDiff:
        """What was found in this call."""
        groups: dict[str, list[TensorDiff] | None] = {
            kind: [item.diff() for item in self._items if item.kind == kind] or None
            for kind in ("fwd_input", "fwd_output", "grad_input", "param_grads", "mutated")
        }
        note = "; ".join(self._open) or self._note
        if self._ran_again:
            note = f"{note}; " if note else ""
            note += "backward ran through it more than once: the first was compared"
        return ModuleDiff(self.name, note=note, inconclusive=bool(self._open), **groups)  # type: ignore[arg-type]


def _with_note(result: Compared, note: str) -> Compared:
    return Compared(
        verdict=result.verdict, reason=result.reason, notes=(*result.notes, note),
        documented=result.documented, metrics=result.metrics,
    )  # fmt: skip


def _real_dtype(dtype: torch.dtype) -> str:
    """Of the components; of 8-bit floats and the like float32, which is more exact than they."""
    name = str(dtype.to_real() if dtype.is_complex else dtype).removeprefix("torch.")
    if not dtype.is_floating_point and not dtype.is_complex:
        return name
    return name if name in tol.EPS else "float16"


def _changed(before: Tensor, after: Tensor) -> bool:
    if before.shape != after.shape or before.dtype != after.dtype:
        return True
    return not np.array_equal(
        array_of(before), array_of(after), equal_nan=before.is_floating_point()
    )
