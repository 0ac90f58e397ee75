"""What would the present settings miss? Known faults, planted into the results of a real step.

A call that passed is judged again with its result spoiled, by the same rule and reference. Only
copies are spoiled: the step goes on with its own results.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opcheck.calls import Call
from opcheck.compare import Judgement
from opcheck.expected import leaves_of
from opcheck.planting import FAULTS, Fault, Subject
from opcheck.printing import Style, style_for
from opcheck.records import Coverage, UncheckedSignature
from opcheck.references import Reference, host_array
from opcheck.settings import Settings

__all__ = ["MAX_CALLS", "Judge", "Missed", "Planter", "SelfTest", "spelled"]

MAX_CALLS = 2
"""Calls of each signature, module and phase that faults are planted into."""
GROSS_CHANGE = 0.1
"""A gross fault moves some element by more than this share of the result's rms."""

Judge = Callable[[Call, Any], Judgement]
"""The rule in force, on a call and what it gave."""


@dataclass(frozen=True, slots=True)
class Missed:
    """A planted fault that nobody would have seen."""

    op: str
    dtype: str
    kind: str
    gross: bool
    module: str
    phase: str
    change: float
    """Largest change, as a share of the result's rms."""


@dataclass(frozen=True, slots=True)
class SelfTest:
    """What was planted and what was found; `str()` is the table for a person.

    Attributes:
        planted: (op, dtype, kind) -> how many faults.
        found: (op, dtype, kind) -> how many of these the settings in force call a FAIL.
        missed: the others, one by one.
        gross: how many were gross: no rounding, in any dtype.
        gross_found: how many of these were found.
        errors: tracebacks of faults that could not be judged.
        unseen: ops of the step that were never checked, and why: any fault there is missed.
        settings: the settings that judged.
    """

    planted: dict[tuple[str, str, str], int]
    found: dict[tuple[str, str, str], int]
    missed: tuple[Missed, ...]
    gross: int
    gross_found: int
    errors: tuple[str, ...]
    unseen: tuple[UncheckedSignature, ...]
    settings: str

    @property
    def num_planted(self) -> int:
        """All planted faults."""
        return sum(self.planted.values())

    @property
    def num_found(self) -> int:
        """Those that were found."""
        return sum(self.found.values())

    @property
    def all_found(self) -> bool:
        """Something was planted, everything planted was found, nothing crashed."""
        return 0 < self.num_planted == self.num_found and not self.errors

    def __str__(self) -> str:
        return "\n".join(lines_of(self, style_for(None)))


class Planter:
    """Plants into the calls of one session."""

    def __init__(self) -> None:
        self._planted: Counter[tuple[str, str, str]] = Counter()
        self._found: Counter[tuple[str, str, str]] = Counter()
        self._calls: Counter[tuple[Any, ...]] = Counter()
        self._missed: list[Missed] = []
        self._gross = [0, 0]
        self._errors: list[str] = []

    def plant(self, call: Call, out: Any, reference: Reference, judge: Judge) -> None:
        """Spoil the results of a call that passed, one fault at a time, and judge each.

        Args:
            call: with its arguments as the op left them.
            out: what the op gave; neither is changed.
            reference: of the call.
            judge: the rule in force.
        """
        place = call.signature, call.site.module, call.site.phase, call.traits.name
        if self._calls[place] >= MAX_CALLS:
            return
        self._calls[place] += 1
        for number, value in _results(call, out):
            golden = _golden_of(reference, number)
            for fault in FAULTS:
                self._try(fault, Subject(call, value, golden), out, judge)

    def _try(self, fault: Fault, subject: Subject, out: Any, judge: Judge) -> None:
        call = subject.call
        try:
            wrong = fault.planted(subject)
            if wrong is None:
                return
            judgement = judge(*_with_result(call, out, subject.value, wrong))
        except Exception:  # noqa: BLE001 - the step goes on; the result tells of it
            self._errors.append(f"{call.traits.name}, {fault.kind}:\n{traceback.format_exc()}")
            return
        if judgement.skip is not None:
            return
        key = call.traits.name, _spelled(subject.value), fault.kind
        change = _change(subject.value, wrong)
        gross = fault.gross and change > GROSS_CHANGE
        self._planted[key] += 1
        self._gross[0] += gross
        if judgement.passed:
            self._missed.append(Missed(*key, gross, call.site.module, call.site.phase, change))
            return
        self._found[key] += 1
        self._gross[1] += gross

    def result(self, coverage: Coverage, settings: str) -> SelfTest:
        """Everything so far."""
        gross, gross_found = self._gross
        return SelfTest(
            dict(self._planted), dict(self._found), tuple(self._missed), gross, gross_found,
            tuple(self._errors), coverage.unchecked_signatures, settings,
        )  # fmt: skip


def _results(call: Call, out: Any) -> Iterator[tuple[int, Tensor]]:
    """The first dense result with elements: returned, or written in place."""
    written = [
        value
        for param, value in call.traits.bound(call.args, call.kwargs)
        if param.mutated and value is not None
    ]
    leaves = leaves_of(out) if out is not None else []
    for number, leaf in enumerate([*leaves, *leaves_of(written)]):
        value = leaf.value
        if isinstance(value, Tensor) and value.layout is torch.strided and value.numel():
            yield number, value
            return


def _golden_of(reference: Reference, number: int) -> Callable[[], Any]:
    def golden() -> Any:
        leaves = leaves_of(reference.golden().out)
        value = leaves[number].value if number < len(leaves) else None
        return host_array(value) if isinstance(value, Tensor) else None

    return golden


def _with_result(call: Call, out: Any, old: Tensor, new: Tensor) -> tuple[Call, Any]:
    """The call and its output with one tensor replaced wherever it stands."""
    if not call.traits.mutates:
        return call, _swapped(out, old, new)
    kwargs = {name: _swapped(value, old, new) for name, value in call.kwargs.items()}
    args = tuple(_swapped(value, old, new) for value in call.args)
    return replace(call, args=args, kwargs=kwargs), _swapped(out, old, new)


def _swapped(value: Any, old: Tensor, new: Tensor) -> Any:
    # no nested function: one that calls itself is a cycle, which would keep gradients alive, and
    # AccumulateGrad would copy instead of taking them
    if value is old:
        return new
    if isinstance(value, (list, tuple)):
        found = [_swapped(item, old, new) for item in value]
        return found if isinstance(value, list) else tuple(found)
    return value


def _spelled(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def _change(right: Tensor, wrong: Tensor) -> float:
    if right.shape != wrong.shape or right.dtype != wrong.dtype:
        return float("inf")
    wide = np.complex128 if right.is_complex() else np.float64
    with np.errstate(all="ignore"):
        left, other = (host_array(item).astype(wide) for item in (right, wrong))
        if not np.array_equal(np.isfinite(left), np.isfinite(other)):
            return float("inf")
        keep = np.isfinite(left) & np.isfinite(other)
        if not keep.any():
            return 0.0
        size = float(np.sqrt(np.mean(np.abs(left[keep]) ** 2)))
        most = float(np.abs(left[keep] - other[keep]).max())
        return most / size if size else float("inf") if most else 0.0


def spelled(settings: Settings) -> str:
    """The settings that decide what is found."""
    checks = "every call" if settings.max_checks is None else f"{settings.max_checks} calls"
    rule = settings.criterion
    if rule == "allclose":
        rule += f" (rtol {settings.rtol:g}, atol {settings.atol:g})"
    return f"{rule}; {checks} of each signature are checked, up to {settings.max_numel:,} elements"


# ---- for a person -------------------------------------------------------------------------------

_SHOWN = 20


def lines_of(result: SelfTest, style: Style) -> list[str]:
    """The table: by kind, then what is missed by op, then where nothing could be planted."""
    if not result.num_planted:
        lines = ["opcheck selftest: no fault could be planted, so nothing is known"]
    else:
        lines = [
            f"opcheck selftest: {result.num_found:,} of {result.num_planted:,} planted faults found"
            f" ({result.num_found / result.num_planted:.1%}); gross ones"
            f" {result.gross_found:,} of {result.gross:,}"
        ]
    lines += [f"judged by {result.settings}", ""]
    lines += _by_kind(result)
    lines += _by_op(result, style)
    if result.unseen:
        lines += ["", "never checked, so that any fault there is missed"]
        lines += [_unseen(item, style) for item in result.unseen[:_SHOWN]]
        if len(result.unseen) > _SHOWN:
            lines.append(f"  and {len(result.unseen) - _SHOWN:,} more")
    if result.errors:
        lines += ["", f"{len(result.errors)} planted faults could not be judged, the first:"]
        lines.append(style.text(result.errors[0], 2000))
    return lines


def _unseen(item: UncheckedSignature, style: Style) -> str:
    where = style.text(f"{item.op} ({item.signature})", 100)
    return f"  {where}: {item.reason.value}, {item.calls:,} calls"


def _by_kind(result: SelfTest) -> list[str]:
    lines = []
    for fault in FAULTS:
        planted = sum(count for key, count in result.planted.items() if key[2] == fault.kind)
        if planted:
            found = sum(count for key, count in result.found.items() if key[2] == fault.kind)
            share = f"{found / planted:.0%}"
            lines.append(f"  {fault.kind:<28} {found:>6,} of {planted:>6,}  {share:>5}")
    return lines


def _by_op(result: SelfTest, style: Style) -> list[str]:
    if not result.missed:
        return []
    places: dict[tuple[str, str], Counter[str]] = {}
    for item in result.missed:
        places.setdefault((item.op, item.dtype), Counter())[item.kind] += 1
    ranked = sorted(places.items(), key=lambda place: -sum(place[1].values()))
    lines = ["", "missed, by op"]
    for (op, dtype), kinds in ranked[:_SHOWN]:
        spelled = ", ".join(
            f"{kind} ({count} of {result.planted[op, dtype, kind]})"
            for kind, count in kinds.most_common()
        )
        lines.append(f"  {style.text(op, 60)} {dtype}: {spelled}")
    if len(ranked) > _SHOWN:
        lines.append(f"  and {len(ranked) - _SHOWN:,} more ops")
    return lines
