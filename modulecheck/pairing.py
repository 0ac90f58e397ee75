"""The tensors of one call on both sides: paired, settled at a glance, or judged by references."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from modulecheck import trees
from modulecheck.compared import Compared, References, Rule, flat, quick
from modulecheck.goldens import Key, array_of
from modulecheck.items import FORWARD, GRADIENTS, UNKNOWN, Item, with_note
from modulecheck.judging import compare
from modulecheck.results import TensorDiff
from opcheck import tolerances as tol
from opcheck.records import Verdict
from opcheck.verdicts import rms

__all__ = ["Judge", "Pairs", "forward_error"]

Array = npt.NDArray[Any]

NOT_REPEATABLE = (
    "eager gives something else each time it runs on the same: state outside of the module (an"
    " iterator, a file, a global), or kernels that do not repeat themselves"
)
_NOISE = 8.0
"""A gradient whose rms is below this many eps of the largest gradient of its call is taken for
rounding noise: a float64 run that disagrees with it says nothing."""


class Judge(Protocol):
    """Whoever has float64 runs of the call."""

    @property
    def missing(self) -> str:
        """Why there is no float64 run."""

    @property
    def refused(self) -> str:
        """Why there is one only op by op."""

    @property
    def autocast(self) -> str:
        """The dtype in which some ops compute, "" without autocast."""

    def expect_kinks(self, failing: dict[Key, int]) -> None:
        """For these gradients, of so many elements, kinks are asked for."""

    def references(self, key: Key, *, kinks: bool, noise_floor: float) -> References:
        """What the rule may ask for, of one tensor."""


class Pairs:
    """What one call gave and got, compiled beside eager.

    Attributes:
        items: one a tensor, in the order in which they were looked at.
        output_nonfinite: the compiled side gave NaN or Inf.
    """

    def __init__(self, rule: Rule, *, golden_always: bool = False) -> None:
        self.rule = rule
        self.items: list[Item] = []
        self.output_nonfinite = False
        self._share = 0.0
        self._largest_gradient = 0.0
        self._golden_always = golden_always

    # ---- looking ----

    def add(self, kind: str, key: Key, name: str, tensor: Tensor) -> Item:
        """A new item, not judged."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        item = Item(kind, key, name, tuple(tensor.shape), dtype)
        self.items.append(item)
        return item

    def differs(
        self, kind: str, key: Key, name: str, reason: str, *, verdict: Verdict = Verdict.FAIL
    ) -> None:
        """A verdict on structure: the two sides do not even have the same tensors."""
        item = Item(kind, key, name, (), "")
        item.result = Compared(verdict=verdict, reason=reason, documented=UNKNOWN)
        self.items.append(item)

    def look(
        self, kind: str, key: Key, name: str, actual: Tensor, eager: Tensor, *, dtype: str = ""
    ) -> None:
        """Settle a pair at a glance, or keep copies of both sides for the full rule.

        Args:
            kind: a field of ModuleDiff.
            key: which tensor.
            name: for the report.
            actual: of the compiled side.
            eager: of the eager one.
            dtype: in which they were computed, where that is not their own.
        """
        item = self.add(kind, key, name, actual)
        for what in ("shape", "dtype", "device", "placements"):  # the last of DTensors
            mine, theirs = (getattr(side, what, None) for side in (actual, eager))
            if mine != theirs:
                if what == "shape":
                    mine, theirs = tuple(actual.shape), tuple(eager.shape)
                reason = f"{what} is {mine}, eager gives {theirs}"
                item.result = Compared(verdict=Verdict.FAIL, reason=reason, documented=UNKNOWN)
                item.actual = array_of(actual).copy()
                return
        y, c = array_of(actual), array_of(eager)
        if kind in GRADIENTS and c.dtype.kind == "f":  # of those, too, that a glance will settle
            self._largest_gradient = max(self._largest_gradient, _finite_rms(c))
        item.dtype = dtype or real_dtype(actual.dtype)
        first = quick(y, c, item.dtype, self.rule)
        golden = self._golden_always and y.dtype.kind in "fc" and y.size > 0
        if first.settled and not (golden and self.rule.criterion == "calibrated"):
            item.result = first
            item.actual = y.copy() if first.verdict == Verdict.FAIL else None
            return
        item.actual, item.eager = y.copy(), c.copy()

    def outputs(self, output: Any, eager_output: Any) -> None:
        """Everything that the call returned."""
        if trees.holds_iterator(output) or trees.holds_iterator(eager_output):
            self.differs(
                "fwd_output", ("output", "iterator"), "iterator",
                "the output is or holds an iterator, which the step alone may read",
                verdict=Verdict.INCONCLUSIVE,
            )  # fmt: skip
            return
        problem = trees.differing_structure(output, eager_output)
        if problem:
            self.differs("fwd_output", ("output", "structure"), "structure", problem)
            return
        pairs = zip(trees.named_tensors(output), trees.named_tensors(eager_output), strict=True)
        for place, ((name, actual), (_, eager)) in enumerate(pairs):
            self.look("fwd_output", ("output", place), name, actual, eager)
            self._look_at_gradient(actual, eager)

    def _look_at_gradient(self, actual: Tensor, eager: Tensor) -> None:
        finite = actual.is_floating_point() or actual.is_complex()
        if finite and actual.layout is torch.strided and not np.isfinite(array_of(actual)).all():
            self.output_nonfinite = True
        if eager.requires_grad and not actual.requires_grad:
            self.items[-1].result = Compared(
                verdict=Verdict.FAIL,
                reason="the compiled output is cut off from the gradient, eager's is not",
                documented=UNKNOWN,
            )

    def arguments(
        self,
        before: Mapping[str, Any],
        actual: Mapping[str, Any],
        eager: Mapping[str, Any],
        *,
        eager_before: Mapping[str, Any] | None = None,
    ) -> None:
        """Arguments by name; those that a side has changed are compared.

        Args:
            before: what the compiled call got.
            actual: the same after it.
            eager: after the eager call.
            eager_before: what the eager call got, where it did not get the same.
        """
        old, after, theirs = (dict(trees.named_tensors(side)) for side in (before, actual, eager))
        theirs_old = None if eager_before is None else dict(trees.named_tensors(eager_before))
        self._written("argument", old, after, theirs, theirs_old)

    def buffers(
        self,
        before: Mapping[str, Tensor],
        actual: Mapping[str, Tensor],
        eager: Mapping[str, Tensor],
        *,
        eager_before: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Buffers by every name that they have, as `arguments`."""
        self._written("buffer", before, actual, eager, eager_before)

    def attributes(
        self,
        before: Mapping[str, Tensor],
        actual: Mapping[str, Tensor],
        eager: Mapping[str, Tensor],
        *,
        eager_before: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Tensors in plain attributes of the module by name, as `arguments`."""
        self._written("attribute", before, actual, eager, eager_before)

    def _written(
        self,
        what: str,
        before: Mapping[str, Tensor],
        actual: Mapping[str, Tensor],
        eager: Mapping[str, Tensor],
        eager_before: Mapping[str, Tensor] | None,
    ) -> None:
        """Tensors by name that a side wrote to, put there or took away; tied ones once."""
        theirs_old = before if eager_before is None else eager_before
        seen = set()
        for name in dict.fromkeys((*eager, *actual)):
            mine, theirs = actual.get(name), eager.get(name)
            which = tuple(map(id, (before.get(name), theirs_old.get(name), mine, theirs)))
            if which in seen:
                continue
            seen.add(which)
            key, label = (what, name), f"{what} {name}"
            if mine is None or theirs is None:
                has = "eager" if mine is None else "compiled"
                self.differs("mutated", key, label, f"only {has} has it after the call")
            elif _is_written(before, name, mine) or _is_written(theirs_old, name, theirs):
                self.look("mutated", key, label, mine, theirs)

    def gradient(
        self, kind: str, key: Key, name: str, actual: Tensor | None, eager: Tensor | None,
        *, isolated: bool,
    ) -> None:  # fmt: skip
        """A gradient that either side may lack.

        Args:
            kind: a field of ModuleDiff.
            key: which tensor.
            name: for the report.
            actual: of the compiled call.
            eager: of the eager one.
            isolated: False: what lacks may be among the gradients that could not be told apart.
        """
        if actual is not None and eager is not None:
            self.look(kind, key, name, actual, eager)
            return
        present = actual if actual is not None else eager
        if present is None:
            return
        item = self.add(kind, key, name, present)
        has, lacks = ("compiled", "eager") if actual is not None else ("eager", "compiled")
        if not array_of(present).any():
            note = f"{lacks} gives no gradient, {has} exact zeros"
            item.result = Compared(verdict=Verdict.PASS, notes=(note,))
            return
        item.result = Compared(
            verdict=Verdict.FAIL if isolated else Verdict.INCONCLUSIVE,
            reason=f"{lacks} gives no gradient"
            if isolated
            else "gradient_not_isolated: it cannot be told from what other users add",
            documented=UNKNOWN,
        )

    # ---- judging ----

    @property
    def unsettled(self) -> list[Item]:
        """What needs references, forward first: whether it passed is asked in backward."""
        left = [item for item in self.items if item.result is None]
        return sorted(left, key=lambda item: item.kind in GRADIENTS)

    @property
    def failed(self) -> list[Item]:
        """Judged and wrong."""
        return [item for item in self.items if item.failed]

    def judge(
        self, judge: Judge, *, kinds: Container[str] | None = None, kinks: bool = True
    ) -> None:
        """Settle what a glance has left.

        Args:
            judge: has the references.
            kinds: of items; None: all.
            kinks: gradients may jump where the forward of this call passed.
        """
        self._share = self.forward_error()
        chosen = [item for item in self.unsettled if kinds is None or item.kind in kinds]
        for item in chosen:
            self._judge(item, judge, kinks=False)
        if kinks and self._forward_passed():
            self._look_for_kinks(chosen, judge)

    @property
    def in_doubt(self) -> list[Item]:
        """Wrong, or right only because eager is far off."""
        return [item for item in self.items if item.in_doubt]

    def doubt(self, again: Mapping[Key, Tensor]) -> None:
        """Where eager gives something else on the same inputs, nothing can be held against it."""
        forward = [item for item in self.items if item.kind in FORWARD]
        if all(self._repeats(item, again.get(item.key)) for item in forward):
            return
        for item in self.in_doubt:
            item.result = Compared(
                verdict=Verdict.INCONCLUSIVE, reason=NOT_REPEATABLE,
                documented=item.result.documented if item.result else UNKNOWN,
            )  # fmt: skip

    def _repeats(self, item: Item, again: Tensor | None) -> bool:
        if item.eager is None or again is None:
            return True
        values = array_of(again)
        if values.shape != item.eager.shape:
            return False
        return quick(values, item.eager, item.dtype, self.rule).settled

    def _look_for_kinks(self, items: list[Item], judge: Judge) -> None:
        """A gradient may jump where the forward does not: judge those that are out once more."""
        failing = [item for item in items if item.may_be_a_kink]
        judge.expect_kinks({item.key: math.prod(item.shape) for item in failing})
        for item in failing:
            self._judge(item, judge, kinks=True)

    def _judge(self, item: Item, judge: Judge, *, kinks: bool) -> None:
        if item.actual is None or item.eager is None:
            return
        is_gradient = item.kind in GRADIENTS
        floor = self._noise_floor(item.dtype, judge.autocast) if is_gradient else 0.0
        references = judge.references(item.key, kinks=kinks, noise_floor=floor)
        result = compare(
            item.actual, item.eager, dtype=item.dtype, rule=self.rule,
            references=replace(references, always=self._golden_always),
        )  # fmt: skip
        if judge.missing:
            result = with_note(result, f"no float64 run ({judge.missing})")
        elif judge.refused:
            result = with_note(result, f"judged by float64 op by op ({judge.refused})")
        item.result = result

    def release(self) -> None:
        """Let go of every array."""
        for item in self.items:
            item.actual = item.eager = None

    def of_kind(self, kind: str) -> list[TensorDiff] | None:
        """For a field of ModuleDiff."""
        return [item.diff() for item in self.items if item.kind == kind] or None

    def _forward_passed(self) -> bool:
        forward = [i for i in self.items if i.kind in ("fwd_output", "mutated")]
        return all(i.result is not None and i.result.verdict == Verdict.PASS for i in forward)

    def _noise_floor(self, dtype: str, autocast: str) -> float:
        eps = max(tol.EPS[dtype], tol.EPS.get(autocast, 0.0))
        return _NOISE * eps * self._largest_gradient

    def forward_error(self) -> float:
        """Largest rms distance of the two sides' outputs, as a share of the output's rms."""
        return max(self._share, forward_error(self.items))


def _finite_rms(values: Array) -> float:
    with np.errstate(all="ignore"):
        found = rms(values.reshape(-1))
    return found if math.isfinite(found) else 0.0


def forward_error(items: Iterable[Item]) -> float:
    """Largest rms distance of two sides' outputs, as a share of the output's rms."""
    eps = tol.EPS["float32"]
    shares = [eps]
    for item in items:
        if item.kind == "fwd_output" and item.actual is not None and item.eager is not None:
            both = [flat(side).astype(np.float64) for side in (item.actual, item.eager)]
            size = rms(both[1])
            shares += [rms(both[0] - both[1]) / size] if size else []
            shares.append(tol.EPS.get(item.dtype, eps) / 4)
    return float(np.nanmax(shares))


def real_dtype(dtype: torch.dtype) -> str:
    """Of the components; of 8-bit floats and the like float16, which is more exact than they."""
    name = str(dtype.to_real() if dtype.is_complex else dtype).removeprefix("torch.")
    if not dtype.is_floating_point and not dtype.is_complex:
        return name
    return name if name in tol.EPS else "float16"


def _is_written(before: Mapping[str, Tensor], name: str, after: Tensor) -> bool:
    return name not in before or changed(before[name], after)


def changed(before: Tensor, after: Tensor) -> bool:
    """The values, the shape or the dtype are other ones; NaN is NaN."""
    if before.shape != after.shape or before.dtype != after.dtype:
        return True
    return not np.array_equal(
        array_of(before), array_of(after), equal_nan=before.is_floating_point()
    )
