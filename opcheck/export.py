"""A run for other programs: JSON, CSV, markdown. Nothing from a log is interpreted on the way."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping
from typing import Any, TextIO

from opcheck.groups import Tally
from opcheck.printing import number, spreadsheet_cell, visible
from opcheck.record_json import to_json
from opcheck.records import Blame, Coverage, Metrics, OpRecord
from opcheck.report import short_op, sort_tallies
from opcheck.review import Run
from opcheck.rundiff import Change, RunDiff

__all__ = ["diff_json", "diff_markdown", "run_json", "run_markdown", "write_csv"]

MAX_CELL = 200


# ---- JSON ---------------------------------------------------------------------------------------


def run_json(run: Run, *, sort: str = "first") -> dict[str, Any]:
    """Strict JSON once dumped; `first_failures` has one record for each op, module, phase, rank."""
    first = run.first_divergence
    return {
        "schema": "opcheck.review",
        "version": 1,
        "verdict": run.verdict.value,
        "verdict_reason": run.verdict_reason,
        "run_id": run.run_id,
        "ranks": list(run.ranks),
        "missing_ranks": list(run.missing_ranks),
        "logs": [str(log) for log in run.logs],
        "finished": run.finished,
        "torn": run.torn,
        "warnings": run.warnings,
        "other_runs": [{"run_id": name, "records": count} for name, count in run.others],
        "filter": str(run.where or ""),
        "header": dict(run.header),
        "coverage": to_json(run.coverage),
        "first_divergence": to_json(first) if first is not None else None,
        "first_failures": [to_json(record) for record in run.first_failures],
        "by_op": [_tally(tally) for tally in sort_tallies(run.by_op().values(), sort)],
        "by_module": [_tally(tally) for tally in sort_tallies(run.by_module().values(), sort)],
        "rank_differences": run.rank_differences(),
    }


def _tally(tally: Tally) -> dict[str, Any]:
    first = tally.first_failure
    return {
        "name": tally.name,
        "seen": tally.seen,
        "checked": tally.checked,
        "failed": tally.failed,
        "inconclusive": tally.inconclusive,
        "errors": tally.errors,
        "max_q": to_json(Metrics(q=tally.max_q))["q"],
        "phases": sorted(tally.phases),
        "failing_phases": sorted(tally.failing_phases),
        "failing_ranks": sorted(tally.failing_ranks),
        "first_failure": first.index if first is not None else None,
    }


_LISTS = (
    "newly_failing", "no_longer_failing", "failing_unchecked", "still_failing", "q_changes",
    "only_a", "only_b",
)  # fmt: skip


def diff_json(diff: RunDiff) -> dict[str, Any]:
    """The lists of the diff, and verdict and coverage of both sides."""
    verdict, reason = diff.verdict
    return {
        "schema": "opcheck.diff",
        "version": 1,
        "verdict": verdict.value,
        "verdict_reason": reason,
        "paired": diff.num_paired,
        "a": _side(diff.a),
        "b": _side(diff.b),
        **{name: [_change(change) for change in getattr(diff, name)] for name in _LISTS},
    }


def _side(run: Run) -> dict[str, Any]:
    return {
        "run_id": run.run_id,
        "verdict": run.verdict.value,
        "verdict_reason": run.verdict_reason,
        "warnings": run.warnings,
        "coverage": to_json(run.coverage),
    }


def _change(change: Change) -> dict[str, Any]:
    return {
        "op": change.op,
        "module": change.module,
        "phase": change.phase,
        "calls": change.calls,
        "index_a": change.index_a,
        "index_b": change.index_b,
        "q_a": to_json(Metrics(q=change.q_a))["q"],
        "q_b": to_json(Metrics(q=change.q_b))["q"],
    }


# ---- CSV ----------------------------------------------------------------------------------------

_FIELDS = (
    "run_id", "rank", "step", "index", "occurrence", "op", "module", "phase", "verdict", "reason",
    "source", "inputs", "outputs", "criterion", "reference", "rtol", "atol", "notes", "error",
)  # fmt: skip
_METRICS = tuple(Metrics.__dataclass_fields__)
_BLAME = tuple(Blame.__dataclass_fields__)


def write_csv(records: Iterable[OpRecord], stream: TextIO) -> int:
    """One line a record; returns how many.

    A text that a spreadsheet would take for a formula (it begins with `=`, `+`, `-`, `@`) gets an
    apostrophe in front; control characters are written as backslash codes.
    """
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([*_FIELDS, *_METRICS, "repeats", *(f"blame_{name}" for name in _BLAME)])
    count = 0
    for count, record in enumerate(records, 1):  # noqa: B007
        data: Mapping[str, Any] = to_json(record)
        row = [_csv_cell(getattr(record, name)) for name in _FIELDS]
        row += [_csv_cell(data["metrics"][name]) for name in _METRICS]
        row.append(_csv_cell(record.repeats))
        row += [_csv_cell((data["blame"] or {}).get(name)) for name in _BLAME]
        writer.writerow(row)
    return count


def _csv_cell(value: Any) -> Any:
    if value is None:
        return ""
    if isinstance(value, (int, float)) or value in ("NaN", "Infinity", "-Infinity"):
        return value
    if isinstance(value, (tuple, list)):
        value = ", ".join(map(str, value))
    if isinstance(value, Mapping):
        value = f"{value.get('re')} {value.get('im')}j"
    return spreadsheet_cell(getattr(value, "value", value))


# ---- markdown -----------------------------------------------------------------------------------


def _code(value: object) -> str:
    """A code span: no link, mention, HTML or markup inside is interpreted."""
    text = str(value)
    cut = len(text) - MAX_CELL
    text = visible(text[:MAX_CELL]) + (f"… ({cut:,} more characters)" if cut > 0 else "")
    if not text.strip():
        return ""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * (longest + 1)
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{space}{text}{space}{fence}".replace("|", "\\|")


def _markdown_table(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows)]


def run_markdown(run: Run) -> str:
    """For an issue tracker: the verdict, the first divergence, what fails, the coverage."""
    coverage = run.coverage
    seen = f"{coverage.seen:,}" if run.finished else "an unknown number of"
    lines = [
        f"**opcheck: {run.verdict.value}**: {run.num_failed:,} failed,"
        f" {coverage.checked:,} of {seen} calls checked"
    ]
    if run.verdict.value == "INCONCLUSIVE":
        lines.append(f"Inconclusive: {_code(run.verdict_reason)}")
    lines += [f"Warning: {_code(warning)}" for warning in run.warnings]
    birth = coverage.first_nonfinite
    if birth is not None:
        where = f"{birth.op} in {birth.module or '<root>'}, {birth.phase}, call {birth.index}"
        made = [where, f"{birth.value} at {list(birth.place)}", birth.source, *birth.inputs]
        lines.append(f"The first NaN or Inf: {'; '.join(_code(text) for text in made if text)}")
    first = run.first_divergence
    if first is not None:
        lines += ["", "First divergence:", "", *_markdown_table(["", ""], _call_rows(first))]
    rows = [
        [
            _code(short_op(record.op)),
            _code(record.module or "<root>"),
            _code(record.phase),
            _code(record.source),
            number(record.metrics.q),
            number(record.metrics.max_abs),
            str(record.index),
        ]
        for record in run.first_failures
    ]
    if rows:
        head = ["op", "module", "phase", "source", "q", "max_abs", "call"]
        lines += ["", "Failing, first call of each:", "", *_markdown_table(head, rows)]
    skipped = [
        [_code(reason.value), f"{count:,}"] for reason, count in coverage.skipped.items() if count
    ]
    if skipped:
        lines += ["", *_markdown_table(["not checked, because", "calls"], skipped)]
    unchecked = [
        [_code(item.op), _code(item.signature), _code(item.reason.value), f"{item.calls:,}"]
        for item in coverage.unchecked_signatures
    ]
    if unchecked:
        head = ["never checked", "arguments", "reason", "calls"]
        lines += ["", *_markdown_table(head, unchecked)]
    return "\n".join(lines)


def _call_rows(record: OpRecord) -> list[list[str]]:
    metrics = record.metrics
    where = f"{record.phase}, step {record.step}, call {record.index}, rank {record.rank}"
    rows = [
        ["op", _code(record.op)],
        ["module", _code(record.module or "<root>")],
        ["where", _code(where)],
        ["source", _code(record.source)],
        ["q", number(metrics.q)],
        ["at", _code(metrics.worst_index)],
        ["actual, expected", f"{number(metrics.actual_at)}, {number(metrics.expected_at)}"],
        ["allowed error", number(metrics.allowed_at)],
        ["elements out", f"{metrics.num_out:,} of {metrics.num_elements:,}"],
        ["RMS ratio", number(metrics.rmse_ratio)],
        ["inputs", _code(", ".join(record.inputs))],
        ["outputs", _code(", ".join(record.outputs))],
        ["reason", _code(record.reason)],
    ]
    return [row for row in rows if row[1] not in ("", "-")]


def diff_markdown(diff: RunDiff) -> str:
    """The tables of a diff for an issue tracker."""
    verdict, reason = diff.verdict
    lines = [
        f"**opcheck diff: {verdict.value}**: {_code(reason)}; {diff.num_paired:,} calls paired"
    ]
    for name in _LISTS:
        changes: list[Change] = getattr(diff, name)
        if not changes:
            continue
        rows = [
            [
                _code(short_op(change.op)),
                _code(change.module or "<root>"),
                _code(change.phase),
                f"{change.calls:,}",
                number(change.q_a) if change.index_a is not None else "-",
                number(change.q_b) if change.index_b is not None else "-",
            ]
            for change in changes
        ]
        head = ["op", "module", "phase", "calls", "q of A", "q of B"]
        lines += ["", f"{name.replace('_', ' ')}:", "", *_markdown_table(head, rows)]
    return "\n".join(lines)


def coverage_changes(a: Coverage, b: Coverage) -> list[str]:
    """Counts that differ, as `name: A -> B`."""
    pairs = [
        (name, getattr(a, name), getattr(b, name))
        for name in ("seen", "checked", "errors", "signatures_seen", "signatures_checked")
    ]
    reasons = sorted({*a.skipped, *b.skipped}, key=lambda reason: reason.value)
    pairs += [
        (f"skipped, {reason.value}", a.skipped.get(reason, 0), b.skipped.get(reason, 0))
        for reason in reasons
    ]
    lines = [f"{name}: {old:,} -> {new:,}" for name, old, new in pairs if old != new]
    old_signatures = {(item.op, item.signature) for item in a.unchecked_signatures}
    new_signatures = {(item.op, item.signature) for item in b.unchecked_signatures}
    lines += [
        f"never checked in B only: {op} ({signature})"
        for op, signature in sorted(new_signatures - old_signatures)
    ]
    lines += [
        f"never checked in A only: {op} ({signature})"
        for op, signature in sorted(old_signatures - new_signatures)
    ]
    return lines
