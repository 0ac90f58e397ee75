"""A check of tensors for people: safe to print whatever a tag holds."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from opcheck.printing import Style, number, style_for

if TYPE_CHECKING:
    from modulecheck.tensor_records import TensorCheckResult, TensorRecord

__all__ = ["printed_line", "record_lines", "report_lines"]

_MAX_LISTED = 20


def printed_line(record: TensorRecord, style: Style) -> str:
    """The documented line, the tag made printable."""
    before = record.line[: len(record.line) - len(record.tag)]
    line = before + (style.text(record.tag) or "''")
    if record.missing_sides:
        line += f" (missing: {', '.join(style.text(side, 80) for side in record.missing_sides)})"
    return line


def record_lines(record: TensorRecord, style: Style) -> list[str]:
    """Everything about one tag that differs."""
    rows = [("tag", style.text(record.tag) or "''"), ("reason", record.reason)]
    rows += [
        ("side", f"{style.text(side, 80)}  {shape}")
        for side, shape in zip(record.sides, record.descriptions, strict=False)
    ]
    if record.failing_side and len(record.sides) > 2:
        rows.append(("differs", f"{style.text(record.failing_side, 80)} from the first"))
    rows += [
        ("around" if not place else "", f"{list(index)}  {number(expected)}  {number(actual)}")
        for place, (index, expected, actual) in enumerate(record.neighbourhood)
    ]
    rows += [("note", note) for note in record.notes]
    lines: list[str] = []
    for name, text in rows:
        lines += style.wrap(text, " " * 11, first=f"  {name:<9}")
    return lines


def report_lines(result: TensorCheckResult, *, width: int | None = None) -> list[str]:
    """Verdict, first divergence, where it was born, and what was not compared."""
    style = style_for(sys.stdout, width=width, color=False)
    compared = len(result.records) - len(result.unmatched)
    head = f"{result.verdict}: {result.reason}" if result.reason else f"{result.verdict}"
    elements = sum(record.num_elements for record in result.records)
    judged = result.criterion
    if judged == "allclose":
        judged += f", rtol={result.rtol:g} atol={result.atol:g}"
    lines = style.wrap(head, "  ", first="")
    lines.append(
        f"  {compared:,} of {len(result.records):,} tags compared, {elements:,} elements; {judged}"
    )
    if result.excluded:
        lines.append(f"  {result.excluded:,} tensors left out by exclude=")
    if result.not_run:
        lines.append(f"  {len(result.not_run):,} modules did not run on any side")
    first = result.first_divergence
    if first is not None:
        lines += ["", "first divergence", *record_lines(first, style)]
    lines += _findings(result, style)
    lines += _unmatched(result, style)
    for title, items in (
        ("reproducers (opcheck replay FILE runs one)", (*result.repros, *result.repro_notes)),
        ("crashes of the checker", result.problems),
        ("not registered", tuple(f"{tag}: {kind}" for tag, kind in result.not_registered)),
    ):
        if items:
            lines += ["", title, *_listed([f"  {style.text(item, 1000)}" for item in items])]
    return lines


def _listed(lines: list[str]) -> list[str]:
    if len(lines) <= _MAX_LISTED:
        return lines
    return [*lines[:_MAX_LISTED], f"  and {len(lines) - _MAX_LISTED:,} more"]


def _findings(result: TensorCheckResult, style: Style) -> list[str]:
    rows = []
    order = ("origin", "unclear", "contains", "inherited")
    for found in sorted(result.findings, key=lambda found: order.index(found.kind)):
        name = style.text(found.module) or "<root>"
        call = f" (call {found.call})" if found.call else ""
        rows.append(f"  {found.kind:<9}  {name}{call}: {style.text(found.reason)}")
    return ["", "modules whose outputs differ", *_listed(rows)] if rows else []


def _unmatched(result: TensorCheckResult, style: Style) -> list[str]:
    lines: list[str] = []
    if result.name_mismatches:
        rows = []
        for item in result.name_mismatches:
            closest = ", ".join(style.text(name) for name in item.closest)
            hint = f"; closest: {closest}" if closest else ""
            rows.append(
                f"  {style.text(item.name) or '<root>'}: in {style.text(item.side, 80)},"
                f" not in {style.text(item.other_side, 80)}{hint}"
            )
        lines += ["", "modules without a counterpart (rename= maps names)", *_listed(rows)]
    if result.unmatched:
        rows = [
            f"  {style.text(record.tag) or repr('')}: {style.text(record.reason)}"
            for record in result.unmatched
        ]
        lines += ["", "tags without a counterpart", *_listed(rows)]
    return lines
