"""The printed report and the CSV, in the documented formats."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from modulecheck.csv_files import CSV_FIELDS, write_table
from modulecheck.culprit import Culprit
from modulecheck.results import BACKWARD, FORWARD, CompareResult, ModuleDiff, TensorDiff
from opcheck.printing import visible
from opcheck.records import Verdict

__all__ = [
    "CSV_FIELDS",
    "csv_rows",
    "drilldown_lines",
    "outcome",
    "print_report",
    "reason_of",
    "report_lines",
    "write_csv",
]

ROOT = "<root>"
MAX_PASS_ROWS = 20
"""More rows of PASS in one section are counted instead of printed, in a terminal."""

_WIDE = "=" * 72
_RULE = "  " + "-" * 68
_NAME_WIDTH = 52
_MARKER = {Verdict.PASS: "pass", Verdict.FAIL: "FAIL", Verdict.INCONCLUSIVE: "WARN"}
_NAN_LOSS = (
    "Note: In single-pass mode, the eager value in the Loss line is shown as nan, which is"
    " expected. Accuracy is determined by the per-module FORWARD OUTPUT and BACKWARD."
)
_FORWARD = {"fwd_output": "", "mutated": ".mutated"}
_BACKWARD = {"grad_input": ".grad_input", "grad_output": ".grad_output", "param_grad": ""}


# ---- text ---------------------------------------------------------------------------------------


def print_report(result: CompareResult, *, verbose: bool = False) -> None:
    """Print to stdout; passes collapse only where a person reads it in a terminal."""
    collapse = not verbose and sys.stdout.isatty()
    print("\n".join(report_lines(result, collapse=collapse)))  # noqa: T201 - documented


def report_lines(result: CompareResult, *, collapse: bool = False) -> Iterator[str]:
    """The report, line by line."""
    yield from _head(result)
    if result.show_input:
        yield from _section("FORWARD INPUT", result, {"fwd_input": ""}, collapse=collapse)
    yield from _section("FORWARD OUTPUT", result, _FORWARD, collapse=collapse, marks=True)
    yield from _section("BACKWARD", result, _BACKWARD, collapse=collapse)
    yield _WIDE
    yield f"  RESULT: {outcome(result)}"
    yield _WIDE
    yield from _tail(result)
    yield from drilldown_lines(result)


def _head(result: CompareResult) -> Iterator[str]:
    loss = (
        f"eager={result.loss_eager:.6f}  compiled={result.loss_compiled:.6f}"
        f"  diff={result.loss_diff:.3e}"
    )
    yield _WIDE
    yield f"  Loss  {loss}"
    if result.is_single_pass:
        yield "  Mode  single_pass"
    if result.cast_dtype is not None:
        yield f"  Cast  cast_dtype={result.cast_dtype}"
    yield _WIDE
    if result.is_single_pass:
        yield _NAN_LOSS
    for note in result.notes:
        yield f"Note: {visible(note)}"


def outcome(result: CompareResult) -> str:
    """What stands behind `RESULT:`."""
    verdict, reason = result.judgement
    judged = f"atol={_short(result.atol)} rtol={_short(result.rtol)}"
    if result.criterion != "allclose":
        judged += f"; judged: {result.criterion}"
    if verdict == Verdict.PASS:
        return f"ALL PASS  ({judged})"
    if verdict == Verdict.FAIL:
        return f"FAILED  ({judged})"
    return f"INCONCLUSIVE  ({visible(reason)})"


def _short(number: float) -> str:
    """1e-4 and not 0.0001, as documented."""
    text = f"{number:.17g}" if number == 0 else f"{number:e}"
    if "e" not in text:
        return text
    digits, exponent = text.split("e")
    digits = f"{float(digits):.6g}"
    return f"{digits}e{int(exponent)}"


def _section(
    title: str,
    result: CompareResult,
    kinds: dict[str, str],
    *,
    collapse: bool,
    marks: bool = False,
) -> Iterator[str]:
    yield ""
    yield f"  {title}"
    yield _RULE
    passed = 0
    rows = [row for diff in result.diffs for row in _rows(diff, kinds)]
    num_passed = sum(row.passed for row in rows)
    for row in rows:
        passed += row.passed
        if collapse and row.passed and num_passed > MAX_PASS_ROWS:
            continue
        yield from row.lines
    if collapse and num_passed > MAX_PASS_ROWS:
        hint = "report(..., verbose=True) shows them"
        yield f"  pass  {num_passed} rows passed and are not shown; {hint}"
    if marks:
        yield from _marker_rows(result)
    if not rows and title == "BACKWARD":
        yield "  None"


class _Row:
    def __init__(self, name: str, diff: TensorDiff) -> None:
        self.passed = diff.judged == Verdict.PASS
        extra = ""
        if diff.notes:
            extra = f"  ({'; '.join(diff.notes)})"
        self.lines = [f"  {_MARKER[diff.judged]}  {_fitted(name)} {diff}{visible(extra)}"]
        if not self.passed:
            where = f"{diff.name}: " if diff.name else ""
            self.lines.append(f"        {visible(where + (diff.reason or 'outside allclose'))}")


def _rows(diff: ModuleDiff, kinds: dict[str, str]) -> Iterator[_Row]:
    calls = diff.calls or [diff]
    name = diff.name or ROOT
    for place, call in enumerate(calls):
        suffix = f"@call{place}" if len(calls) > 1 else ""
        tensors = [item for item in call.tensors() if item[0] in kinds]
        for kind, index, item in tensors:
            several = sum(other == kind for other, _, _ in tensors) > 1
            part = f".{item.name}.grad" if kind == "param_grad" else kinds[kind]
            if kind == "mutated" and item.name:
                part = f".{item.name.replace(' ', '.')}"
            elif several and kind != "param_grad":
                part += f"[{index}]"
            yield _Row(f"{name}{suffix}{part}", item)


def _marker_rows(result: CompareResult) -> Iterator[str]:
    for diff in result.diffs:
        name = diff.name or ROOT
        if diff.skipped:
            yield f"  skip {diff.note}  {visible(name)}"
            continue
        for place, call in enumerate(diff.calls or [diff]):
            if call.note:
                suffix = f"@call{place}" if len(diff.calls) > 1 else ""
                marker = "WARN" if call.inconclusive or call.note.startswith("MISSING") else "note"
                yield f"  {marker} {visible(call.note)}  {visible(name)}{suffix}"


def _fitted(name: str) -> str:
    """Exactly as wide as the column; a long name loses its middle."""
    name = visible(name)
    if len(name) > _NAME_WIDTH:
        head = (_NAME_WIDTH - 3) // 3
        name = f"{name[:head]}...{name[len(name) - (_NAME_WIDTH - 3 - head) :]}"
    return name.ljust(_NAME_WIDTH)


def _tail(result: CompareResult) -> Iterator[str]:
    if result.loss_reason:
        yield f"  {visible(result.loss_reason)}"
    suspects = result.suspects
    if not suspects:
        return
    name, phase = suspects[0]
    yield f"  First divergence: {visible(name or ROOT)} ({phase})"
    for name, phase in suspects:
        yield f"    {visible(name or ROOT)} ({phase}): {visible(reason_of(result, name, phase))}"


def reason_of(result: CompareResult, name: str, phase: str) -> str:
    """Why the module of this name fails in forward or backward, "" if it does not."""
    diff = next(diff for diff in result.diffs if diff.name == name)
    kinds = FORWARD if phase == "forward" else BACKWARD
    for place, call in enumerate(diff.calls or [diff]):
        if phase in call.inherited:
            continue
        for kind, index, item in call.tensors():
            if kind in kinds and item.judged == Verdict.FAIL:
                where = f"call {place}, " if len(diff.calls) > 1 else ""
                label = item.name or f"[{index}]"
                return f"{where}{kind} {label}: {item.reason or 'outside allclose'}"
    return ""


# ---- drill-down ---------------------------------------------------------------------------------


def drilldown_lines(result: CompareResult) -> Iterator[str]:
    """The section of a drill-down; nothing where there was none."""
    if not result.culprits:
        return
    yield ""
    yield "  DRILL-DOWN"
    yield _RULE
    for culprit in result.culprits:
        marker = _MARKER[Verdict.FAIL if culprit.reproduced else Verdict.INCONCLUSIVE]
        yield f"  {marker}  {visible(culprit.module or ROOT)} ({culprit.phase})"
        for label, text in _facts(culprit):
            yield f"        {label:<8} {visible(text)}"


def _facts(culprit: Culprit) -> Iterator[tuple[str, str]]:
    facts = [
        ("stage", culprit.stage),
        ("kernel", culprit.kernel),
        ("op", f"{culprit.op}  (node {culprit.node})" if culprit.node else culprit.op),
        ("fused", _counted(culprit.other_ops)),
        ("also in", ", ".join(culprit.also_in)),
        ("tensor", culprit.tensor),
        ("line", culprit.source),
        ("error", _error(culprit)),
        ("why", culprit.explanation),
        *(("advice", text) for text in culprit.advice),
        ("missed", culprit.not_reached.strip().split("\n")[-1]),
        ("repro", culprit.repro),
    ]
    return ((label, text) for label, text in facts if text)


def _counted(names: Sequence[str]) -> str:
    counts = Counter(names)
    return ", ".join(name if count == 1 else f"{name} x{count}" for name, count in counts.items())


def _error(culprit: Culprit) -> str:
    metrics = culprit.metrics
    if not metrics.num_elements:
        return ""
    out = f", {metrics.num_out} of {metrics.num_elements} elements" if metrics.num_out else ""
    return f"max_abs={metrics.max_abs:.3e}  max_rel={metrics.max_rel:.3e}{out}"


# ---- CSV ----------------------------------------------------------------------------------------


def csv_rows(result: CompareResult) -> Iterator[list[str]]:
    """The rows below the head; each has nine fields."""
    yield _loss_row(result)
    for diff in result.diffs:
        name = diff.name or ROOT
        if diff.skipped:
            yield [name, "note", "0", "SKIP", "", "", "", "", diff.note]
            continue
        for place, call in enumerate(diff.calls or [diff]):
            prefix = f"call={place}" if len(diff.calls) > 1 else ""
            for kind, index, item in call.tensors():
                if kind == "fwd_input" and not result.show_input:
                    continue
                yield _tensor_row(name, kind, index, item, prefix)
            if call.note:
                status = "WARN" if call.inconclusive or call.note.startswith("MISSING") else "SKIP"
                note = f"{prefix} {call.note}".strip()
                yield [name, "note", "0", status, "", "", "", "", note]


def _loss_row(result: CompareResult) -> list[str]:
    verdict, _ = result._judge_loss()
    status = {Verdict.PASS: "PASS", Verdict.FAIL: "FAIL"}.get(verdict, "WARN")
    if result.is_single_pass:
        shape = f"compiled={result.loss_compiled:.6f}"
        if not result.loss_recorded:
            status = "SKIP"
        return ["LOSS", "loss", "0", status, "N/A", "N/A", "N/A", shape, "single_pass mode"]
    shape = f"eager={result.loss_eager:.6f} compiled={result.loss_compiled:.6f}"
    return ["LOSS", "loss", "0", status, _exact(result.loss_diff), "N/A", "N/A", shape, ""]


def _tensor_row(name: str, kind: str, index: int, item: TensorDiff, prefix: str) -> list[str]:
    status = {Verdict.PASS: "PASS", Verdict.FAIL: "FAIL"}.get(item.judged, "WARN")
    notes = [prefix] if prefix else []
    if kind in ("param_grad", "mutated") and item.name:
        notes.append(item.name)
    if item.judged != Verdict.PASS and item.reason:
        notes.append(item.reason)
    notes += item.notes
    return [
        name, kind, str(index), status, _exact(item.max_abs), _exact(item.mean_abs),
        _exact(item.max_rel), str(tuple(item.shape)), " ".join(notes),
    ]  # fmt: skip


def _exact(number: float) -> str:
    return "nan" if math.isnan(number) else f"{number:.6e}"


def write_csv(result: CompareResult, path: Path) -> None:
    """Write the whole file or nothing, and say where it is.

    Raises:
        LogWriteError: it cannot be written.
    """
    write_table(path, CSV_FIELDS, csv_rows(result))
    print(f"CSV report saved to: {path}")  # noqa: T201 - documented
