"""One call as lines of text: what, where, how far off."""

from __future__ import annotations

import math

from opcheck.printing import Style, number
from opcheck.records import OpRecord, Sample

__all__ = ["call_lines", "module_of", "render_call"]


def module_of(record: OpRecord, style: Style, limit: int = 400) -> str:
    """The module of a call as it is printed, at most `limit` characters."""
    return style.text(record.module, limit) if record.module else "<root>"


def call_lines(record: OpRecord, style: Style) -> list[str]:
    """One call: what, where, how far off."""
    metrics = record.metrics
    rank = f", rank {record.rank}" if record.rank else ""
    where = f"{style.text(record.phase)}, step {record.step}, call {record.index}{rank}"
    lines = style.field("op", style.text(record.op))
    lines += style.field("module", f"{module_of(record, style)} ({where})")
    lines += style.field("source", style.text(record.source))
    lines += style.field("worst", _worst(record))
    if metrics.num_elements:
        text = f"{metrics.num_out:,} of {metrics.num_elements:,} beyond what is allowed"
        if metrics.num_nonfinite:
            text += f"; {metrics.num_nonfinite:,} differ in being NaN or infinite"
        lines += style.field("elements", text)
    if record.sample is not None:
        lines += style.field("looked at", _looked_at(record.sample))
    lines += style.field("rmse", _rmse(record))
    documented = (
        f"max_abs {metrics.max_abs:.3e}, mean_abs {metrics.mean_abs:.3e},"
        f" max_rel {metrics.max_rel:.3e}"
    )
    if metrics.expected_rms is not None:
        documented += f"; rms of the expected values {metrics.expected_rms:.3e}"
    lines += style.field("errors", documented)
    if record.blame is not None:
        blame = record.blame
        text = f"{blame.word}: born here {blame.born:.2e}, inherited {blame.inherited:.2e}, total"
        text += f" {blame.total:.2e}, in the worst input {blame.inputs:.2e} (shares of the expected"
        lines += style.field("blame", style.text(f"{text} size)"))
    if record.repeats is not None:
        text = "gave the same bits again" if record.repeats else "did NOT give the same bits again"
        lines += style.field("repeat", text)
    for name, values in (("inputs", record.inputs), ("outputs", record.outputs)):
        lines += style.field(name, style.text(", ".join(values)))
    judged = f"{record.criterion}, against {record.reference}"
    if record.criterion == "allclose":
        judged += f", rtol={record.rtol!r}, atol={record.atol!r}"
    lines += style.field("judged by", style.text(judged))
    lines += style.field("reason", style.text(record.reason, 1000))
    for note in record.notes:
        lines += style.field("note", style.text(note, 1000))
    return lines


def _looked_at(sample: Sample) -> str:
    text = f"{sample.detail} ({sample.strategy}, seed {sample.seed}"
    if sample.covers_all:
        return text + "; every element had a part in the verdict)"
    return text + f", {100 * sample.share:.3g}% of the elements; the rest was not looked at)"


def _worst(record: OpRecord) -> str:
    metrics = record.metrics
    text = f"q {number(metrics.q)}"
    if metrics.worst_index is not None:
        index = ", ".join(map(str, metrics.worst_index))
        output = f" of output {metrics.worst_output}" if len(record.outputs) > 1 else ""
        text += (
            f" at [{index}]{output}: actual {number(metrics.actual_at)},"
            f" expected {number(metrics.expected_at)}"
        )
        if metrics.allowed_at is not None:
            text += f", allowed error {number(metrics.allowed_at)}"
    return text + ("" if math.isnan(metrics.q) else " (q above 1 fails)")


def _rmse(record: OpRecord) -> str:
    metrics = record.metrics
    parts = []
    if metrics.rmse_ratio is not None:
        whose = "the reference" if record.reference == "cpu kernel" else "correct rounding"
        parts.append(f"RMS error {metrics.rmse_ratio:.3g} times that of {whose}")
    if metrics.mean_shift is not None:
        parts.append(f"mean signed shift {metrics.mean_shift:.3g}")
    return ", ".join(parts)


def render_call(record: OpRecord, style: Style) -> list[str]:
    """One call with everything that its record holds."""
    lines = [style.paint(f"call {record.index}: {record.verdict.value}", "bold")]
    lines += call_lines(record, style)
    if record.metrics.allclose is not None:
        word = "holds" if record.metrics.allclose else "does not hold"
        text = f"{word} (rtol={record.rtol!r}, atol={record.atol!r}), whichever criterion judges"
        lines += style.field("allclose", text)
    lines += style.field("occurrence", f"{record.occurrence} of this op in step and module")
    if record.run_id:
        lines += style.field("run", f"{style.text(record.run_id)}, rank {record.rank}")
    if record.error is not None:
        lines.append("  opcheck's own error:")
        lines += [f"    {style.text(line)}" for line in record.error.split("\n")]
    return lines
