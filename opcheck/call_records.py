"""The record of a call that was judged or crashed, and what the books need of it besides."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Any

from opcheck.calls import Call, Site
from opcheck.compare import Judgement, spell_tensor
from opcheck.comparison import Outcome
from opcheck.records import OpRecord, Verdict

__all__ = ["Entry", "RunTag", "call_crashed", "checker_crashed", "record_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTag:
    """What all records of a run have in common."""

    run_id: str
    rank: int
    criterion: str


@dataclass(frozen=True, slots=True)
class Entry:
    """A record on its way into the books."""

    record: OpRecord
    site: Site
    signature: tuple[Any, ...]
    num_compared: int
    """Elements."""


def record_of(call: Call, out: Any, found: Judgement, outcome: Outcome, run: RunTag) -> OpRecord:
    """Of a call that gave `out` and was found so; its values are spelled, none is kept."""
    inputs, outputs = _spelled(call, out)
    return OpRecord(
        op=call.traits.name,
        module=call.site.module,
        phase=call.site.phase,
        index=call.index,
        step=call.step,
        occurrence=call.occurrence,
        inputs=inputs,
        outputs=outputs,
        verdict=Verdict.PASS if found.passed else Verdict.FAIL,
        metrics=found.metrics,
        source=call.source,
        reason=found.reason,
        notes=found.notes,
        sample=found.sample,
        criterion=run.criterion,
        rtol=outcome.rtol,
        atol=outcome.atol,
        reference=outcome.judged.label,
        run_id=run.run_id,
        rank=run.rank,
    )


def call_crashed(call: Call, out: Any, run: RunTag) -> Entry:
    """Checking a call crashed; called while the exception is handled."""
    error = traceback.format_exc()
    try:
        inputs, outputs = _spelled(call, out)
    except Exception:  # noqa: BLE001 - then without them
        inputs = outputs = ()
    record = OpRecord(
        op=call.traits.name, module=call.site.module, phase=call.site.phase,
        index=call.index, step=call.step, occurrence=call.occurrence,
        inputs=inputs, outputs=outputs, source=call.source,
        verdict=Verdict.INCONCLUSIVE, reason="checking this call crashed",
        error=error, criterion=run.criterion, run_id=run.run_id, rank=run.rank,
    )  # fmt: skip
    return Entry(record, call.site, call.signature, 0)


def checker_crashed(name: str, reason: str, run: RunTag, *, index: int, step: int) -> Entry:
    """Something crashed that has no call yet, or belongs to none; called while it is handled."""
    record = OpRecord(
        op=name if name.count(".") >= 2 else f"{name}.default",
        index=index, step=step, verdict=Verdict.INCONCLUSIVE,
        reason=reason, error=traceback.format_exc(), criterion=run.criterion,
        run_id=run.run_id, rank=run.rank,
    )  # fmt: skip
    return Entry(record, Site("", "other"), (name,), 0)


def _spelled(call: Call, out: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    inputs = tuple(spell_tensor((*call.args, *call.kwargs.values())))
    return inputs, tuple(spell_tensor(out))
