"""One call of a wrapped module in two runs of a step: eager's beside compiled's."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest

from modulecheck.compared import Compared, Rule
from modulecheck.goldens import Key
from modulecheck.items import GRADIENTS, Item, with_note
from modulecheck.pairing import Pairs
from modulecheck.remarks import NOTHING_TO_COMPILE
from modulecheck.results import ModuleDiff
from modulecheck.sides import Side, SideCall, same_random
from opcheck.records import Verdict

__all__ = ["PairedCall", "paired_calls"]

MISSING_FORWARD = "MISSING_fwd_in_compiled"
MISSING_FORWARD_IN_EAGER = "MISSING_fwd_in_eager"
MISSING_BACKWARD = "MISSING_bwd_in_compiled"
MISSING_BACKWARD_IN_EAGER = "MISSING_bwd_in_eager"

GROWN = "rounding from before it has grown: the module agrees with eager on what it got"

_KINDS = ("fwd_input", "fwd_output", "mutated", "grad_input", "grad_output", "param_grads")


class PairedCall:
    """What both sides got and gave in one call.

    Attributes:
        index: which call of the module on the eager side, from 0.
        pairs: the tensors.
        inherited: phases whose differences came in from outside.
        again: what running the module again in eager, on what the compiled side got, has found.
    """

    def __init__(
        self, name: str, index: int, eager: SideCall | None, compiled: SideCall | None
    ) -> None:
        self.name, self.index = name, index
        self.eager, self.compiled = eager, compiled
        self.pairs = Pairs(Rule("allclose", 0.0, 0.0))
        self.inherited: list[str] = []
        self.again: ModuleDiff | None = None
        self._open: list[str] = []
        self._note = ""

    @property
    def is_empty(self) -> bool:
        """No op runs in the module: there is nothing to agree on."""
        return self._note == NOTHING_TO_COMPILE

    def open_because(self, reason: str) -> None:
        """The call cannot be a PASS."""
        self._open.append(reason)

    def close(self, note: str) -> None:
        """There is nothing to compare."""
        self._note = note

    def compare(self, rule: Rule, *, golden_always: bool) -> None:
        """Pair every tensor; what a glance does not settle waits for `judge`."""
        self.pairs = Pairs(rule, golden_always=golden_always)
        eager, compiled = self.eager, self.compiled
        if eager is None or compiled is None:
            self._open.append(MISSING_FORWARD if compiled is None else MISSING_FORWARD_IN_EAGER)
            return
        for side, call in (("eager", eager), ("compiled", compiled)):
            if call.error:
                self._open.append(f"checking crashed ({side}): {call.error.splitlines()[0]}")
        if self._open:
            return
        if compiled.compiled is not None and compiled.compiled.doubt:
            self._open.append(compiled.compiled.doubt)
        self._compare_inputs(eager, compiled)
        self.pairs.outputs(compiled.output, eager.output)
        self.pairs.arguments(
            compiled.arguments, compiled.after, eager.after, eager_before=eager.arguments
        )
        self.pairs.buffers(
            compiled.snapshot.buffers, compiled.buffers, eager.buffers,
            eager_before=eager.snapshot.buffers,
        )  # fmt: skip
        self.pairs.attributes(
            compiled.snapshot.attributes.tensors(), compiled.attributes, eager.attributes,
            eager_before=eager.snapshot.attributes.tensors(),
        )  # fmt: skip
        self._compare_gradients(eager, compiled)

    def _compare_inputs(self, eager: SideCall, compiled: SideCall) -> None:
        mine, theirs = compiled.inputs, eager.inputs
        if len(mine) != len(theirs):
            reason = f"{len(mine)} tensors came in, in eager {len(theirs)}"
            self.pairs.differs("fwd_input", ("received", "structure"), "structure", reason)
            return
        for place, (actual, expected) in enumerate(zip(mine, theirs, strict=True)):
            key: Key = ("received", place)
            self.pairs.look("fwd_input", key, f"input {place}", actual, expected)

    def _compare_gradients(self, eager: SideCall, compiled: SideCall) -> None:
        mine, theirs = compiled.gradients(), eager.gradients()
        if bool(mine) != bool(theirs):
            self._open.append(MISSING_BACKWARD if theirs else MISSING_BACKWARD_IN_EAGER)
            return
        isolated = not (eager.region.has_unknown_edges or compiled.region.has_unknown_edges)
        for key in dict.fromkeys((*theirs, *mine)):
            what, name = key
            kind = "param_grads" if what == "param" else what
            label = {"grad_input": f"input {name}"}.get(what, str(name))
            self.pairs.gradient(kind, key, label, mine.get(key), theirs.get(key), isolated=isolated)

    # ---- after judging ----

    @property
    def random_differs(self) -> bool:
        """The two sides drew other random numbers, before the call or in it."""
        if self.eager is None or self.compiled is None:
            return False
        return not same_random(self.eager, self.compiled)

    def failed_in(self, phase: str) -> list[Item]:
        """Failing items of "forward" or "backward"; inputs are neither."""
        backward = phase == "backward"
        return [
            item
            for item in self.pairs.failed
            if item.kind != "fwd_input" and (item.kind in GRADIENTS) == backward
        ]

    def came_in_different(self, phase: str) -> bool:
        """Its inputs, or in backward its output gradients, differ already."""
        kinds = ("fwd_input",) if phase == "forward" else ("fwd_input", "grad_output")
        return any(item.kind in kinds for item in self.pairs.failed)

    def reconsider(self, why: str, items: list[Item] | None = None) -> None:
        """What failed has another explanation than a fault: it is no verdict."""
        for item in self.pairs.failed if items is None else items:
            if item.result is not None:
                item.result = Compared(
                    verdict=Verdict.INCONCLUSIVE, reason=f"{why} ({item.result.reason})",
                    notes=item.result.notes, documented=item.result.documented,
                    metrics=item.result.metrics,
                )  # fmt: skip

    def inherits(self, phase: str) -> None:
        """What failed in this phase began elsewhere."""
        self.inherited.append(phase)
        for item in self.failed_in(phase):
            if item.result is not None:
                item.result = with_note(item.result, "inherited")

    def settle(self, *, agree: bool) -> None:
        """Nothing begins anywhere: what failed is rounding that grew, or nobody can tell.

        Args:
            agree: every module agrees with eager on what it got, and so do the losses.
        """
        if not agree:
            self.reconsider("more than rounding explains, and no compared module is its origin")
            return
        for item in self.pairs.failed:
            if item.result is not None:
                item.result = Compared(
                    verdict=Verdict.PASS, notes=(*item.result.notes, GROWN),
                    documented=item.result.documented, metrics=item.result.metrics,
                )  # fmt: skip

    def diff(self) -> ModuleDiff:
        """For the result."""
        groups = {kind: self.pairs.of_kind(kind) for kind in _KINDS}
        note = "; ".join(self._open) or self._note
        diff = ModuleDiff(self.name, note=note, **groups)  # type: ignore[arg-type]
        diff.inconclusive, diff.inherited = bool(self._open), tuple(self.inherited)
        return diff


def paired_calls(name: str, eager: Side, compiled: Side) -> Iterator[PairedCall]:
    """The calls of one module, forward beside forward and recompute beside recompute."""
    theirs, mine = eager.calls.get(name, []), compiled.calls.get(name, [])
    index_of = {id(call): place for place, call in enumerate(theirs)}
    for recompute in (False, True):
        left = [call for call in theirs if call.is_recompute == recompute]
        right = [call for call in mine if call.is_recompute == recompute]
        for place, (one, other) in enumerate(zip_longest(left, right)):
            if recompute and (one is None or other is None) and not _has_gradients(one, other):
                continue  # a recompute may end as soon as it has what it needs
            index = place if one is None else index_of[id(one)]
            yield PairedCall(name, index, one, other)


def _has_gradients(*calls: SideCall | None) -> bool:
    return any(call is not None and bool(call.gradients()) for call in calls)
