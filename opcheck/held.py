"""Calls that made NaN or Inf of finite inputs are held until their module ends, which tells why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from opcheck.births import asks_for_nonfinite
from opcheck.callers import CallerTracker
from opcheck.calls import Call
from opcheck.compare import Judgement
from opcheck.modules import ModuleFrame, ModuleTracker
from opcheck.nonfinite import Born, is_finite, judge_origin
from opcheck.outside import is_ours, outside_everything, reference_depth
from opcheck.records import OpRecord, Verdict
from opcheck.tensor_kinds import tensors_in

__all__ = ["can_hold", "made_nonfinite", "with_origin"]


def made_nonfinite(call: Call, out: Any, found: Judgement) -> bool:
    """Right by its reference, and yet NaN or Inf came of finite inputs."""
    if not (found.passed and found.nonfinite) or asks_for_nonfinite(call):
        return False
    inputs = [
        call.before.get(id(item), item) for item in tensors_in((*call.args, *call.kwargs.values()))
    ]
    written = [] if not call.traits.mutates else list(call.args)
    return is_finite(inputs) and not is_finite((out, written))


def can_hold(call: Call) -> bool:
    """True for the first such call of an open module: its end tells whether it was right."""
    frame = call.frame
    return frame is not None and not frame.held and call.site.phase == "forward"


def with_origin(
    record: OpRecord,
    frame: ModuleFrame,
    kwargs: Mapping[str, Any],
    output: Any,
    tracker: ModuleTracker | CallerTracker,
) -> OpRecord:
    """The final record of a held call, now that its module has ended with `output`."""
    depth = reference_depth()
    try:
        with tracker.looking_away(), outside_everything():
            born = judge_origin(frame, kwargs, output, record.op, tracker.random_calls)
    except BaseException as error:
        if not is_ours(error, depth):
            raise
        text = f"{record.op} made a non-finite value; looking into it crashed: {error!r}"
        born = Born(failed=False, text=text)
    if born.failed:
        return replace(record, verdict=Verdict.FAIL, reason=born.text)
    return replace(record, notes=(*record.notes, born.text))
