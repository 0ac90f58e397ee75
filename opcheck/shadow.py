"""A step's values carried along in float64: what each call inherits, and what is born in it.

Every call runs a second time in float64 on the float64 values of its inputs (`mirrors.py`), and
what comes out are the float64 values of its results. Integers, bools, Python numbers, random draws
and results that are right in more than one way are taken from the step itself, so that the chain
follows the path that the step took. Where a call cannot be followed the chain begins again from
the actual values, and that is counted.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opcheck import _torch
from opcheck.arrays import Array, flat_of, rms
from opcheck.call_dtypes import is_inexact
from opcheck.calls import Call, Param
from opcheck.expected import leaves_of
from opcheck.golden_rules import COMPARED_OUTPUTS, argument
from opcheck.mirrors import Mirrors
from opcheck.outside import outside_everything
from opcheck.reconstruct import RECONSTRUCTED
from opcheck.records import Blame, SkipReason
from opcheck.references import Reference, Result, host_array, in_float64
from opcheck.snapshots import to_host
from opcheck.tensor_kinds import is_plain_tensor, tensors_in, tensors_within

__all__ = ["Shadow", "is_followed", "worded"]

AMPLIFIED = 10.0
"""How many times the error of its inputs a call must hand on to be called `amplified`."""
AMPLIFIED_FLOOR = 8.0
"""And how many eps of its dtype that must be: below it nothing is lost that anybody would miss."""

_COPIES = frozenset(
    {"clone", "copy", "_to_copy", "lift", "lift_fresh_copy", "_pin_memory", "pin_memory", "_to_cpu"}
)
_COPIES_INTO = frozenset({"copy_", "_foreach_copy_"})
_EXACT_WRITES = frozenset({"zero_", "fill_", "_foreach_zero_"})
_WATCHED = frozenset({SkipReason.OUT_VARIANT, SkipReason.RANDOM, SkipReason.SIDE_EFFECT})
_NOT_FOLLOWED = frozenset(
    {
        SkipReason.RANDOM, SkipReason.TOO_LARGE, SkipReason.UNSUPPORTED_TYPE,
        SkipReason.SIDE_EFFECT, SkipReason.NO_CPU_KERNEL, SkipReason.OP_RAISED,
    }
)  # fmt: skip
"""Reasons for not checking a call that are reasons for not following it, too."""


def is_followed(call_base: str, skip: SkipReason) -> bool:
    """True for ops that are never checked and yet move values or write to them."""
    return skip in _WATCHED or call_base in _COPIES or call_base in _COPIES_INTO


def worded(blame: Blame, *, passed: bool, dtype: torch.dtype | None) -> Blame:
    """The word for where the error of a call came from."""
    floor = AMPLIFIED_FLOOR * torch.finfo(dtype or torch.float32).eps
    if not passed:
        word = "born"
    elif blame.inputs < 1.0 and blame.inherited > max(floor, AMPLIFIED * blame.inputs):
        word = "amplified"  # of inputs without a right digit there is nothing left to lose
    else:
        word = "inherited" if blame.inherited > blame.born else "rounding"
    return replace(blame, word=word)


class Shadow:
    """The float64 values of one session."""

    def __init__(self, *, limit_bytes: int, max_numel: int, seed: int) -> None:
        self.mirrors = Mirrors(limit_bytes)
        self.problem = ""
        """Traceback of the first crash of ours in here."""
        self._max_numel = max_numel
        self._seed = seed
        self._followed = 0
        self._no_room = 0
        self._restarts: Counter[str] = Counter()

    def before(self, call: Call) -> None:
        """About to run: what it writes to is mirrored as it is."""
        traits = call.traits
        if not traits.mutates or traits.base in _EXACT_WRITES or traits.base in _COPIES_INTO:
            return
        if call.skipped in _NOT_FOLLOWED:
            return
        with outside_everything():
            for param, tensor in _tensors(call):
                if param.mutated and self._may_mirror(tensor) and not self.mirrors.ensure(tensor):
                    self._no_room += 1

    def follow(
        self, call: Call, out: Any, reference: Reference | None, skip: SkipReason | None = None
    ) -> Blame | None:
        """The op gave `out`: run its float64 twin. With a `reference`, measure both."""
        call.followed = True
        try:
            with outside_everything():
                if skip in _NOT_FOLLOWED and call.traits.base != "native_dropout":
                    self.restart(call, str(skip))
                    return None
                return self._follow(call, out, reference)
        except Exception:  # noqa: BLE001 - of ours; told in the report, and no verdict hangs on it
            self.crashed(call)
            return None

    def crashed(self, call: Call) -> None:
        """Following a call crashed: the first traceback is kept, and the chain begins again."""
        self.problem = self.problem or traceback.format_exc()
        self.restart(call, "the shadow crashed")

    def restart(self, call: Call, why: str) -> None:
        """What the call wrote to is as it should be from now on."""
        known = [tensor for tensor in _all_tensors(call) if self.mirrors.get(tensor) is not None]
        anything = call.traits.skip is SkipReason.SIDE_EFFECT  # it need not say what it writes to
        for param, tensor in _tensors(call):
            if param.mutated and not anything:
                self.mirrors.refresh(tensor)
        for tensor in known if anything else ():
            self.mirrors.refresh(tensor)
        self._restarts[why] += bool(known)

    def forget(self, why: str = "") -> None:
        """Everything is as it should be from now on: something ran that nobody could see."""
        self._restarts[why] += bool(len(self.mirrors) and why)
        self.mirrors.clear()

    def counts(self) -> dict[str, int]:
        """What `Coverage.shadow` holds."""
        found = {"followed": self._followed}
        found |= {
            f"restarted: {why}": count for why, count in self._restarts.most_common() if count
        }
        lost = self.mirrors.evicted + self._no_room
        if lost:
            found["restarted: no memory"] = lost
        found["peak bytes"] = self.mirrors.peak_bytes
        found["limit bytes"] = self.mirrors.limit_bytes
        return found

    # ---- one call ----

    def _follow(self, call: Call, out: Any, reference: Reference | None) -> Blame | None:
        base = call.traits.base
        leaves = _torch.tree_leaves((call.args, call.kwargs, out))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if not all(map(is_plain_tensor, tensors)):
            self.restart(call, str(SkipReason.UNSUPPORTED_TYPE))
        elif any(tensor.numel() > self._max_numel for tensor in tensors):
            self.restart(call, str(SkipReason.TOO_LARGE))
        elif base in _COPIES:
            self._copied(argument(call, call.traits.params[0].name), out)
        elif base in _COPIES_INTO:
            self._copied_into(call)
        elif base in _EXACT_WRITES:
            for param, tensor in _tensors(call):
                if param.mutated:
                    self.mirrors.refresh(tensor)
        elif base == "native_dropout":
            self._dropped_out(call, out)
        elif base in RECONSTRUCTED and reference is None:
            self.restart(call, "results that are not unique")
        else:
            return self._run(call, out, reference)
        return None

    def _run(self, call: Call, out: Any, given: Reference | None) -> Blame | None:
        if call.out_dtype is None:
            call.out_dtype = next((item.dtype for item in _inexact(out)), None)
        reference = given or in_float64(call, seed=self._seed)
        if reference is None:
            self.restart(call, "no float64 kernel")
            return None
        mirrored = any(self.mirrors.get(tensor) is not None for _, tensor in _tensors(call))
        inputs = self._input_error(call) if given is not None and mirrored else 0.0
        try:
            golden = reference.golden() if given is not None or not mirrored else None
            result = reference.on(self.mirrors.get) if mirrored else golden
        except Exception as error:  # noqa: BLE001 - on these values; the op itself may refuse them
            self.restart(call, f"the reference raised {type(error).__name__}")
            return None
        if result is None:
            return None
        found = self._measure(call, out, golden, result, inputs) if golden and given else None
        if call.traits.base in RECONSTRUCTED:
            self.restart(call, "results that are not unique")
            return None if found is None else replace(found, inherited=0.0, total=found.born)
        self._take(call, out, result)
        return found

    def _take(self, call: Call, out: Any, result: Result) -> None:
        """Give the results of the step the values of the float64 run."""
        given = {_torch.memory_of(tensor) for tensor in _all_tensors(call)}
        whole = True
        for actual, wanted in _pairs(call, out, result.out):
            if _torch.memory_of(actual) not in given:
                whole &= self._write(actual, wanted)
        for actual, wanted in _pairs(call, _written(call), result.written, written=True):
            if self.mirrors.get(actual) is None:  # it was resized, or there was no room
                whole &= self._write(actual, wanted)
        self._followed += whole

    def _write(self, actual: Tensor, wanted: Any) -> bool:
        if not _fits(actual, wanted):
            self.mirrors.drop(actual)
            self._restarts["a result of another shape"] += 1
            return False
        has_room = self.mirrors.write(actual, wanted)
        self._no_room += not has_room
        return has_room

    # ---- copies ----

    def _copied(self, source: Any, out: Any) -> None:
        for actual in _inexact(out):
            values = self._values(source, actual.dtype)
            if values is not None:
                self._write(actual, values)

    def _copied_into(self, call: Call) -> None:
        targets, sources = call.args[0], argument(call, "src", call.args[1])
        if isinstance(targets, Tensor):
            targets, sources = [targets], [sources]
        for target, source in zip(targets, sources, strict=True):
            if not self._may_mirror(target):
                continue
            values = self._values(source, target.dtype)
            if values is None:
                self.mirrors.refresh(target)
            else:
                self._no_room += not self.mirrors.write(target, values)

    def _values(self, source: Any, dtype: torch.dtype) -> Tensor | None:
        """float64 values of what was copied; None where the copy is as it should be."""
        if not isinstance(source, Tensor) or not is_inexact(source.dtype):
            return None
        if source.dtype.is_complex and not dtype.is_complex:
            return None
        known = self.mirrors.get(source)
        if known is None and _narrows(source.dtype, dtype) and self._may_mirror(source):
            return to_host(source).to(torch.complex128 if dtype.is_complex else torch.float64)
        return known

    def _dropped_out(self, call: Call, out: Any) -> None:
        """The mask is the step's own, the values are not."""
        source = self.mirrors.get(call.args[0])
        share = float(argument(call, "p"))
        if source is None or share >= 1.0:
            return
        trains = argument(call, "train") is not False
        self._write(out[0], source * to_host(out[1]) * (1.0 / (1.0 - share) if trains else 1.0))

    # ---- numbers ----

    def _may_mirror(self, tensor: Tensor) -> bool:
        return (
            is_plain_tensor(tensor)
            and is_inexact(tensor.dtype)
            and tensor.numel() <= self._max_numel
        )

    def _input_error(self, call: Call) -> float:
        worst = 0.0
        for _, tensor in _tensors(call):
            known = self.mirrors.get(tensor)
            if known is not None:
                actual = call.before.get(id(tensor), tensor)
                worst = max(worst, _share(host_array(actual), known.numpy()))
        return worst

    def _measure(
        self, call: Call, out: Any, golden: Result, result: Result, inputs: float
    ) -> Blame | None:
        """The figures of the results and of what was written."""
        born = inherited = total = 0.0
        measured = False
        written = _written(call)
        for values, of_golden, of_result, are_written in (
            (out, golden.out, result.out, False),
            (written, golden.written, result.written, True),
        ):
            expected = _pairs(call, values, of_golden, written=are_written)
            chain = _pairs(call, values, of_result, written=are_written)
            for (actual, own), (_, wanted) in zip(expected, chain, strict=True):
                if not (_fits(actual, own) and _fits(actual, wanted)):
                    continue
                if measured and _has_statistics(call):
                    break
                measured = True
                got, own_values, values64 = map(host_array, (actual, own, wanted))
                born = max(born, _share(got, own_values))
                if result is not golden:
                    inherited = max(inherited, _share(own_values, values64))
                    total = max(total, _share(got, values64))
        if not measured:
            return None
        total = total if result is not golden else born
        return Blame(born=born, inherited=inherited, total=total, inputs=inputs)


def _has_statistics(call: Call) -> bool:
    """Norms and attention keep statistics for backward, of which the mean may be near 0."""
    base = call.traits.base
    return "backward" not in base and ("norm" in base or "attention" in base)


def _share(actual: Array, expected: Array) -> float:
    """Rms error as a share of the rms of the expected values, over what is finite."""
    with np.errstate(all="ignore"):
        want = flat_of(expected).astype(np.float64, copy=False)
        error = flat_of(actual).astype(np.float64, copy=False) - want
        finite = np.isfinite(error)
        if not finite.all():
            error, want = error[finite], want[finite]
        wrong, size = rms(error), rms(want)
    if not wrong:
        return 0.0
    return wrong / size if size else float("inf")


# ---- the tensors of a call ----------------------------------------------------------------------


def _inexact(value: Any) -> Iterator[Tensor]:
    for leaf in leaves_of(value):
        if isinstance(leaf.value, Tensor) and is_inexact(leaf.value.dtype):
            yield leaf.value


def _tensors(call: Call) -> Iterator[tuple[Param, Tensor]]:
    for param, value in call.traits.bound(call.args, call.kwargs):
        for item in tensors_in((value,)):
            if is_plain_tensor(item):
                yield param, item


def _all_tensors(call: Call) -> Iterator[Tensor]:
    """Nested lists included: collectives take lists of lists."""
    return filter(is_plain_tensor, tensors_within((call.args, call.kwargs)))


def _written(call: Call) -> list[Any]:
    bound = call.traits.bound(call.args, call.kwargs)
    return [value for param, value in bound if param.mutated and value is not None]


def _pairs(
    call: Call, actual: Any, wanted: Any, *, written: bool = False
) -> list[tuple[Tensor, Any]]:
    """Inexact results of the step beside those of the float64 run, where they mean something."""
    chosen = None if written else COMPARED_OUTPUTS.get(call.traits.base)
    return [
        (left.value, right.value)
        for number, (left, right) in enumerate(
            zip(leaves_of(actual), leaves_of(wanted), strict=False)
        )
        if (chosen is None or number in chosen)
        and isinstance(left.value, Tensor)
        and is_plain_tensor(left.value)
        and is_inexact(left.value.dtype)
    ]


def _fits(actual: Tensor, wanted: Any) -> bool:
    return (
        isinstance(wanted, Tensor)
        and wanted.shape == actual.shape
        and wanted.dtype.is_complex == actual.dtype.is_complex
    )


def _narrows(source: torch.dtype, target: torch.dtype) -> bool:
    """A cast rounds, overflows or underflows."""
    if not (target.is_floating_point or target.is_complex) or source == target:
        return False
    old, new = torch.finfo(source), torch.finfo(target)
    return new.eps > old.eps or new.max < old.max or new.tiny > old.tiny
