"""A diff of two runs as text."""

from __future__ import annotations

from opcheck.export import coverage_changes
from opcheck.printing import Style
from opcheck.records import Verdict
from opcheck.report import short_op
from opcheck.review import Run
from opcheck.rundiff import Change, RunDiff

__all__ = ["render_diff"]

MAX_ROWS = 20
_COLOR = {Verdict.PASS: "green", Verdict.FAIL: "red", Verdict.INCONCLUSIVE: "yellow"}
_TITLES = (
    ("newly_failing", "fail in B, not in A"),
    ("failing_unchecked", "fail in A, not checked in B"),
    ("no_longer_failing", "fail in A, no longer in B"),
    ("still_failing", "fail in both"),
    ("q_changes", "largest q changed by a factor of 2 or more"),
    ("only_a", "checked in A only"),
    ("only_b", "checked in B only"),
)


def render_diff(diff: RunDiff, style: Style) -> str:
    """Verdict, both sides, then a table for each kind of change."""
    verdict, reason = diff.verdict
    word = style.paint(style.paint(verdict.value, _COLOR[verdict]), "bold")
    blocks = [
        [
            f"opcheck diff: {word}: {style.text(reason)}",
            *_side("A", diff.a, style),
            *_side("B", diff.b, style),
            f"  {diff.num_paired:,} calls paired by step, module, phase, op and occurrence",
        ]
    ]
    for name, title in _TITLES:
        changes: list[Change] = getattr(diff, name)
        if changes:
            blocks.append(_table(title, changes, style))
    if diff.a.finished and diff.b.finished:
        changed = coverage_changes(diff.a.coverage, diff.b.coverage)
        if changed:
            lines = [
                line for text in changed for line in style.wrap(style.text(text), "    ", "  ")
            ]
            blocks.append([style.paint("coverage, A -> B", "bold"), *lines])
    return "\n\n".join("\n".join(block) for block in blocks)


def _side(name: str, run: Run, style: Style) -> list[str]:
    reason = f" ({style.text(run.verdict_reason)})" if run.verdict_reason else ""
    logs = ", ".join(style.text(log, 200) for log in run.logs)
    text = f"{run.verdict.value}{reason}, run {style.text(run.run_id, 60) or '(no id)'}, {logs}"
    lines = style.wrap(text, "     ", f"  {name}: ")
    for warning in run.warnings:
        lines += style.wrap(f"warning: {style.text(warning)}", "       ", "     ")
    return lines


def _table(title: str, changes: list[Change], style: Style) -> list[str]:
    rows = [
        [
            short_op(change.op),
            change.module or "<root>",
            change.phase,
            f"{change.calls:,}",
            f"{change.q_a:.3g}" if change.index_a is not None else "-",
            f"{change.q_b:.3g}" if change.index_b is not None else "-",
            "-" if change.index_a is None else str(change.index_a),
            "-" if change.index_b is None else str(change.index_b),
        ]
        for change in changes[:MAX_ROWS]
    ]
    head = ["op", "module", "phase", "calls", "q A", "q B", "call A", "call B"]
    numbers = frozenset(head[3:])
    lines = [style.paint(title, "bold"), *style.table(head, rows, numbers=numbers)]
    if len(changes) > MAX_ROWS:
        lines.append(f"  and {len(changes) - MAX_ROWS:,} more")
    return lines
