"""A run, or one of its calls, as text and as markdown. Lead with the verdict, and of what."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from opcheck.call_text import call_lines, module_of
from opcheck.printing import Style, style_for
from opcheck.records import Coverage, SkipReason, Verdict
from opcheck.review import Run, Tally
from opcheck.runnotes import nonfinite_lines, overhead_text, repeat_lines

__all__ = [
    "one_line",
    "op_table",
    "render",
    "short_op",
    "sort_tallies",
    "spans",
]

MAX_ROWS = 20
MAX_UNCHECKED = 8
_VERDICT_COLOR = {Verdict.PASS: "green", Verdict.FAIL: "red", Verdict.INCONCLUSIVE: "yellow"}
_NUMBERS = frozenset({"seen", "checked", "failed", "crashed", "max q", "call"})


def render(
    run: Run,
    *,
    width: int | None = None,
    color: bool = False,
    log_path: str | Path | None = None,
    style: Style | None = None,
    tables: Sequence[Sequence[str]] = (),
    run_option: str = "",
) -> str:
    """The report of a run: verdict, first divergence, failing ops, coverage, what to do next.

    `width` is in columns (None: those of the terminal); `log_path` is named in the commands,
    with `--run run_option` where that is not the last run of the log; `tables` are blocks of
    lines that stand before the coverage.
    """
    style = style or style_for(sys.stdout, width=width, color=color)
    blocks = [_head(run, style)]
    blocks.append(_first_divergence(run, style))
    if run.verdict is not Verdict.PASS:
        blocks.append(_first_error(run, style))
        blocks.append(_failing(run, style))
    blocks.append(nonfinite_lines(run.coverage, style))
    blocks.extend(list(table) for table in tables)
    blocks.append(repeat_lines(run.coverage, style))
    blocks.append(_coverage(run, style))
    blocks.append(_unchecked(run.coverage, style))
    blocks.append(_next(run, style, log_path, run_option))
    return "\n\n".join("\n".join(block) for block in blocks if block)


def one_line(run: Run, log_path: str | Path | None = None, *, style: Style | None = None) -> str:
    """The line that ends a session: verdict, of what, first divergence, where to read on."""
    style = style or style_for(sys.stdout)
    parts = [f"opcheck: {run.verdict.value}", _of_what(run)]
    if run.verdict_reason and run.verdict is not Verdict.FAIL:
        parts.append(run.verdict_reason)
    if run.coverage.left_by:
        parts.append(f"cut short by {style.text(run.coverage.left_by, 200)}")
    first = run.first_divergence
    if first is not None:
        at = f" at {style.text(first.source, 80)}" if first.source else ""
        parts.append(
            f"first divergence: {style.text(first.op, 80)} in {module_of(first, style, 80)},"
            f" {style.text(first.phase, 20)}{at}"
        )
    if log_path is not None:
        parts.append(f"opcheck review {style.text(_quoted(log_path), 4000)}")
    return "; ".join(part for part in parts if part)


# ---- the parts of the report --------------------------------------------------------------------


def short_op(op: str) -> str:
    """How an op is named in tables: `gelu`, `add.Tensor`; other namespaces stay."""
    return op.removeprefix("aten.").removesuffix(".default")


def _quoted(path: str | Path) -> str:
    return shlex.quote(str(path))


def _of_what(run: Run) -> str:
    coverage = run.coverage
    failed = f"{run.num_failed:,} failed, " if run.num_failed else ""
    stopped = coverage.counting_stopped_at
    if not run.finished:
        return f"{failed}{coverage.checked:,} calls checked, how many were seen is not known"
    signatures = ""
    if coverage.signatures_seen:
        signatures = (
            f" ({coverage.signatures_checked:,} of {coverage.signatures_seen:,}"
            " computing signatures)"
        )
    later = "" if stopped is None else f"; counting stopped after call {stopped:,}"
    return f"{failed}{coverage.checked:,} of {coverage.seen:,} calls checked{signatures}{later}"


def _head(run: Run, style: Style) -> list[str]:
    verdict = style.paint(run.verdict.value, _VERDICT_COLOR[run.verdict])
    lines = style.wrap(_of_what(run), "  ", f"opcheck: {run.verdict.value}: ")
    lines[0] = lines[0].replace(run.verdict.value, style.paint(verdict, "bold"), 1)
    if run.verdict is Verdict.INCONCLUSIVE:
        lines += style.wrap(style.text(run.verdict_reason), "  ")
    facts = []
    if run.run_id:
        facts.append(f"run {style.text(run.run_id, 60)}")
    facts += _ranks(run)
    if run.coverage.steps:
        facts.append(_count(run.coverage.steps, "step"))
    started = run.header.get("started")
    if started:
        facts.append(f"started {style.text(started, 40)}")
    if facts:
        lines += style.wrap(", ".join(facts), "  ")
    stopped = run.coverage.counting_stopped_at
    if stopped is not None:
        text = f"counting stopped after call {stopped:,}: every budget was used up, and nothing"
        lines += style.wrap(f"{text} later is seen (max_checks, num_steps)", "    ", "  ")
    if run.coverage.left_by:
        text = f"cut short by {style.text(run.coverage.left_by, 200)}; what follows did not run"
        lines += style.wrap(text, "    ", "  ")
    if run.where is not None and str(run.where):
        lines += style.wrap(f"only {style.text(run.where)}; verdict and coverage: whole run", "  ")
    for warning in run.warnings:
        lines += style.wrap(f"warning: {style.text(warning)}", "    ", "  ")
    return lines


def _ranks(run: Run) -> list[str]:
    if len(run.ranks) > 1:
        return [f"ranks {spans(run.ranks)}"]
    world = run.header.get("world_size", 1)
    return [f"rank {run.rank} of {world}"] if isinstance(world, int) and world > 1 else []


def spans(numbers: Iterable[int]) -> str:
    """`0-3, 7`."""
    parts: list[list[int]] = []
    for value in sorted(numbers):
        if parts and value == parts[-1][1] + 1:
            parts[-1][1] = value
        else:
            parts.append([value, value])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)


def _count(amount: int, noun: str) -> str:
    return f"{amount:,} {noun}{'' if amount == 1 else 's'}"


def _title(text: str, style: Style) -> str:
    return style.paint(text, "bold")


def _first_divergence(run: Run, style: Style) -> list[str]:
    first = run.first_divergence
    if first is None:
        return []
    return [_title("first divergence", style), *call_lines(first, style), *_rank_lines(run, style)]


def _rank_lines(run: Run, style: Style) -> list[str]:
    """On which ranks the first fault is: one alone, some, or all."""
    first = run.first_divergence
    if first is None or len(run.ranks) < 2:
        return []
    failing = {
        group.rank
        for group in run.groups
        if group.failed
        and (group.op, group.module, group.phase) == (first.op, first.module, first.phase)
    }
    if failing == set(run.ranks):
        text = f"on all ranks ({spans(run.ranks)})"
    else:
        only = "only " if len(failing) == 1 else ""
        others = spans(set(run.ranks) - failing)
        noun = "rank" if len(failing) == 1 else "ranks"
        text = f"on {only}{noun} {spans(failing)}; not on {others}"
    lines = style.field("ranks", text)
    differences = run.rank_differences()
    if differences:
        lines += style.field(
            "",
            f"ranks differ in what they called: {len(differences):,} ops;"
            f" first: {style.text(differences[0])}",
        )
    return lines


def op_table(run: Run, style: Style, *, sort: str = "first", max_rows: int = MAX_ROWS) -> list[str]:
    """A line for each op: seen, checked, failed, crashed, the largest q."""
    tallies = sort_tallies(run.by_op().values(), sort)
    rows = [
        [
            short_op(tally.name),
            "-" if tally.seen is None else f"{tally.seen:,}",
            f"{tally.checked:,}",
            f"{tally.failed:,}" if tally.failed else "",
            f"{tally.errors:,}" if tally.errors else "",
            f"{tally.max_q:.3g}" if tally.checked else "",
            ", ".join(sorted(tally.phases)),
        ]
        for tally in tallies[:max_rows]
    ]
    head = ["op", "seen", "checked", "failed", "crashed", "max q", "phases"]
    red = [bool(tally.failed) for tally in tallies[:max_rows]]
    lines = [_title("by op", style), *style.table(head, rows, numbers=_NUMBERS, red=red)]
    if len(tallies) > max_rows:
        lines.append(f"  and {len(tallies) - max_rows:,} more")
    return lines


def sort_tallies(tallies: Iterable[Tally], sort: str) -> list[Tally]:
    """By "q", "failed", "checked", "seen" or "name"; "first" is as they come."""
    if sort == "first":
        return list(tallies)
    if sort == "name":
        return sorted(tallies, key=lambda tally: tally.name)
    if sort == "q":
        return sorted(tallies, key=lambda t: math.inf if math.isnan(t.max_q) else t.max_q)[::-1]
    return sorted(tallies, key=lambda tally: getattr(tally, sort) or 0, reverse=True)


def _first_error(run: Run, style: Style) -> list[str]:
    record = run.first_error
    if record is None:
        return []
    lines = [_title("checking crashed (opcheck's own error, not the program's), first:", style)]
    lines += style.field("op", style.text(record.op))
    lines += style.field("module", f"{module_of(record, style)} (call {record.index})")
    lines += style.field("error", style.text((record.error or "").strip().split("\n")[-1]))
    return lines


def _failing(run: Run, style: Style) -> list[str]:
    failing = [group for group in run.groups if group.failed]
    if not failing:
        return []
    rows: dict[tuple[str, str, str], Tally] = {}
    for group in failing:
        key = (group.op, group.module, group.phase)
        rows.setdefault(key, Tally(name=group.op)).add(group)
    ordered = sorted(rows.items(), key=lambda item: _first_order(item[1]))
    head = ["op", "module", "phase", "failed", "max q", "call"]
    if len(run.ranks) > 1:
        head.append("ranks")
    cells = []
    for (op, module, phase), tally in ordered[:MAX_ROWS]:
        _, call = _first_order(tally)
        row = [short_op(op), module or "<root>", phase, f"{tally.failed:,}/{tally.checked:,}"]
        row += [f"{tally.max_q:.3g}", str(call)]
        if len(run.ranks) > 1:
            row.append(spans(tally.failing_ranks))
        cells.append(row)
    lines = [_title("failing ops, first divergence first", style)]
    lines += style.table(head, cells, numbers=_NUMBERS)
    if len(ordered) > MAX_ROWS:
        lines.append(f"  and {len(ordered) - MAX_ROWS:,} more")
    return lines


def _first_order(tally: Tally) -> tuple[int, int]:
    first = tally.first_failure
    return (first.step, first.index) if first is not None else (0, 0)


_SKIP_WORDS = {
    SkipReason.LAYOUT: "views, layout, memory: nothing is computed",
    SkipReason.RANDOM: "drew random numbers",
    SkipReason.UNINITIALIZED: "memory that nobody has written yet",
    SkipReason.OUT_VARIANT: "out= variant",
    SkipReason.NO_CPU_KERNEL: "no kernel for the CPU to compare with",
    SkipReason.SIDE_EFFECT: "running it again would act outside the step",
    SkipReason.BUDGET_USED_UP: "its signature was checked max_checks times",
    SkipReason.OUT_OF_TIME: "checking it would have exceeded max_overhead",
    SkipReason.ALREADY_LOGGED: "log_once: it has failed before",
    SkipReason.TOO_LARGE: "a tensor above max_numel",
    SkipReason.UNWRAPPED: "of a wrapper tensor; the calls on what it holds follow",
    SkipReason.UNSUPPORTED_TYPE: "a tensor type or dtype without a reference",
    SkipReason.EXCLUDED: "by include or exclude",
    SkipReason.OUTSIDE_MODULES: "by modules",
    SkipReason.OUTSIDE_STEPS: "by start_step or num_steps",
    SkipReason.REFERENCE_NOT_AVAILABLE: "no reference for these arguments",
    SkipReason.NO_INDEPENDENT_REFERENCE: "only the kernel itself could be the reference",
    SkipReason.OVERLAPPING: "writes several elements to the same memory, so that any may stay",
    SkipReason.NOTHING_TO_COMPARE: "gives no value back",
    SkipReason.OP_RAISED: "the op itself raised",
    SkipReason.INTERRUPTED: "Ctrl-C came before its check was done",
    SkipReason.INSIDE_COMPILED_REGION: "inside a compiled region or higher-order op",
    SkipReason.NOT_CHECKABLE: "above max_numel, and no part of it stands alone",
}


def _coverage(run: Run, style: Style) -> list[str]:
    coverage = run.coverage
    if not run.finished:
        text = f"{coverage.checked:,} checked, {coverage.errors:,} crashed, counted from the log"
        return [_title("coverage", style), *style.wrap(text, "  ")]
    skipped = sum(coverage.skipped.values())
    sign = "=" if coverage.adds_up else "does NOT equal"
    line = (
        f"{coverage.seen:,} calls seen {sign} {coverage.checked:,} checked"
        f" + {skipped:,} skipped + {coverage.errors:,} crashed"
    )
    lines = [_title("coverage", style), *style.wrap(line, "    ", "  ")]
    if coverage.elements_seen:
        share = 100 * coverage.elements_checked / coverage.elements_seen
        sampled = ""
        if coverage.elements_sampled:
            sampled = (
                f"; {coverage.elements_sampled:,} sampled of large results,"
                f" {coverage.elements_unseen:,} not looked at"
            )
        text = (
            f"{coverage.elements_checked:,} of {coverage.elements_seen:,} elements"
            f" ({share:.1f}%){sampled}"
        )
        lines += style.wrap(text, "    ", "  ")
    ordered = sorted(coverage.skipped.items(), key=lambda item: -item[1])
    rows = [[f"{count:,}", reason.value, _SKIP_WORDS[reason]] for reason, count in ordered if count]
    if rows:
        lines += style.table(["skipped", "reason", "meaning"], rows, numbers=frozenset({"skipped"}))
    peak = f"checks raised the peak memory by {coverage.check_peak_bytes / 2**20:,.0f} MiB"
    if coverage.overhead is not None:
        lines += style.wrap(f"{overhead_text(coverage.overhead)}; {peak}", "    ", "  ")
    elif coverage.check_seconds:
        spent = f"{coverage.check_seconds:.2f} s spent checking, beside the step's own time"
        lines += style.wrap(f"{spent}; {peak}", "    ", "  ")
    return lines


def _unchecked(coverage: Coverage, style: Style) -> list[str]:
    unchecked = sorted(coverage.unchecked_signatures, key=lambda item: -item.calls)
    if not unchecked:
        return []
    rows = [
        [short_op(item.op), item.signature, item.reason.value, f"{item.calls:,}"]
        for item in unchecked[:MAX_UNCHECKED]
    ]
    title = f"computing signatures never checked: {len(unchecked):,}"
    lines = [_title(title, style)]
    lines += style.table(["op", "arguments", "reason", "calls"], rows, numbers=frozenset({"calls"}))
    if len(unchecked) > MAX_UNCHECKED:
        lines.append(f"  and {len(unchecked) - MAX_UNCHECKED:,} more (--json lists all)")
    return lines


def _next(run: Run, style: Style, log_path: str | Path | None, run_option: str) -> list[str]:
    if log_path is None or run.verdict is Verdict.PASS:
        return []
    log = style.text(_quoted(log_path), 4000)
    if run_option:
        log += f" --run {style.text(shlex.quote(run_option))}"
    first = run.first_divergence or run.first_error
    lines = [_title("next", style)]
    if first is not None:
        lines.append(f"  opcheck review {log} --call {first.index}")
    lines.append(f"  opcheck review {log} --tree")
    if run.coverage.shadow:
        lines.append(f"  opcheck review {log} --blame --plot growth.svg")
    if run.coverage.skipped.get(SkipReason.BUDGET_USED_UP) and run.verdict is not Verdict.FAIL:
        lines.append("  max_checks=None checks every call")
    return lines
