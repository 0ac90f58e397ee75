"""The command `opcheck`. Reading logs imports no torch; `demo` and `run` import it when called."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from opcheck.arguments import Commands, build_parser
from opcheck.commandline import EXIT_USAGE, run_command
from opcheck.errors import LogReadError, PlotError
from opcheck.logfile import Progress
from opcheck.printing import Style, style_for
from opcheck.records import EXIT_STATUS, OpRecord
from opcheck.whole_files import write_new

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    commands = Commands(
        review=_review, diff=_diff, merge=_merge, export=_export, demo=_demo, run=_run,
        selftest=_selftest, replay=_replay,
    )  # fmt: skip
    return run_command(build_parser(commands), argv)


# ---- commands -----------------------------------------------------------------------------------


def _review(chosen: argparse.Namespace) -> int:
    from opcheck.blame_text import render_blame
    from opcheck.export import run_json, run_markdown
    from opcheck.report import op_table, render
    from opcheck.review import Filter, load_run
    from opcheck.tree import render_tree

    where = Filter(op=chosen.op, module=chosen.module, phase=chosen.phase, step=chosen.step)
    with _progress() as progress:
        run = load_run(
            chosen.log, run=chosen.run, where=where if str(where) else None, progress=progress
        )
    status = EXIT_STATUS[run.verdict]
    if chosen.call is not None:
        return _call(chosen, run, status)
    if chosen.plot is not None and not chosen.blame:
        raise PlotError("--plot draws the errors along a step; give --blame, too")
    blame = _blame(chosen, run) if chosen.blame else {}
    if chosen.json:
        _print_json({**run_json(run, sort=chosen.sort), **blame})
        return status
    if chosen.markdown:
        print(run_markdown(run))
        return status
    style = style_for(sys.stdout)
    table = render_tree(run, style) if chosen.tree else op_table(run, style, sort=chosen.sort)
    if chosen.tree:
        table.insert(0, style.paint("modules (numbers include the children)", "bold"))
    tables = [table, _other_runs(run, style)]
    if chosen.blame:
        tables = [*render_blame(run, style), _other_runs(run, style)]
    print(render(run, style=style, log_path=chosen.log, tables=tables, run_option=chosen.run or ""))
    return status


def _blame(chosen: argparse.Namespace, run: Any) -> dict[str, Any]:
    """What `--blame` adds to the JSON, after the picture has been drawn."""
    from opcheck.blame import blame_json, blame_step

    found = blame_step(run)
    if found is None:
        text = "its records do not say where errors came from; check with blame=True"
        raise LogReadError(f"{chosen.log}: {text}")
    if chosen.plot is not None:
        from opcheck.blameplot import save_plot

        save_plot(found, Path(chosen.plot))
    return {"blame": blame_json(run)}


def _call(chosen: argparse.Namespace, run: Any, status: int) -> int:
    from opcheck.call_text import render_call
    from opcheck.record_json import to_json

    records = run.with_index(chosen.call)
    if not records:
        print(
            f"opcheck: {chosen.log}: no record of call {chosen.call} in run"
            f" {style_for(sys.stderr).text(run.run_id)}: it was not checked, or is filtered out",
            file=sys.stderr,
        )
        return EXIT_USAGE
    if chosen.json:
        _print_json({"calls": [to_json(record) for record in records]})
        return status
    style = style_for(sys.stdout)
    print("\n\n".join("\n".join(render_call(record, style)) for record in records))
    return status


def _other_runs(run: Any, style: Style) -> list[str]:
    if not run.others:
        return []
    lines = [style.paint("other runs in this log (--run ID shows one)", "bold")]
    shown = run.others[-10:]
    lines += [f"  {style.text(name, 60) or '(no id)'}  {count:,} records" for name, count in shown]
    if len(run.others) > len(shown):
        lines.append(f"  and {len(run.others) - len(shown):,} more")
    return lines


def _diff(chosen: argparse.Namespace) -> int:
    from opcheck.export import diff_json, diff_markdown
    from opcheck.review import load_run
    from opcheck.rundiff import compare_runs
    from opcheck.rundiff_report import render_diff

    with _progress() as progress:
        a = load_run(chosen.a, run=chosen.run_a, progress=progress)
        b = load_run(chosen.b, run=chosen.run_b, progress=progress)
    diff = compare_runs(a, b)
    if chosen.json:
        _print_json(diff_json(diff))
    elif chosen.markdown:
        print(diff_markdown(diff))
    else:
        print(render_diff(diff, style_for(sys.stdout)))
    return EXIT_STATUS[diff.verdict[0]]


def _merge(chosen: argparse.Namespace) -> int:
    from opcheck.merging import merge_logs
    from opcheck.report import render

    with _progress() as progress:
        run, differences = merge_logs(chosen.logs, chosen.out, run=chosen.run, progress=progress)
    style = style_for(sys.stdout)
    for line in differences:
        print(f"opcheck: {style.text(line)}", file=sys.stderr)
    print(render(run, style=style, log_path=chosen.out))
    return EXIT_STATUS[run.verdict]


def _export(chosen: argparse.Namespace) -> int:
    from opcheck.export import write_csv
    from opcheck.review import Filter, load_run

    where = Filter(op=chosen.op, module=chosen.module, phase=chosen.phase, step=chosen.step)
    with _progress() as progress:
        run = load_run(chosen.log, run=chosen.run, where=where, progress=progress)
    for warning in run.warnings:
        print(f"opcheck: {style_for(sys.stderr).text(warning)}", file=sys.stderr)
    if chosen.out is None:
        write_csv(run.records, sys.stdout)
        return 0
    try:
        write_new(Path(chosen.out), lambda file: _write_text(run.records, file))
    except OSError as error:
        print(f"opcheck: {chosen.out}: {error.strerror}", file=sys.stderr)
        return EXIT_USAGE
    return 0


def _write_text(records: Sequence[OpRecord], file: BinaryIO) -> None:
    from opcheck.export import write_csv

    text = io.TextIOWrapper(file, encoding="utf-8", newline="")
    write_csv(records, text)
    text.detach()


def _demo(chosen: argparse.Namespace) -> int:
    from opcheck.demo import main as demo_main

    return int(demo_main(clean=chosen.clean, log_dir=chosen.log_dir))


def _replay(chosen: argparse.Namespace) -> int:
    from opcheck.replaying import replay_file, replay_folder, write_pytest

    if chosen.repro.is_dir():
        if chosen.pytest is not None or chosen.device is not None:
            print(
                "opcheck: --pytest and --device are for a reproducer, not a folder", file=sys.stderr
            )
            return EXIT_USAGE
        return replay_folder(chosen.repro, load=chosen.load)
    if chosen.pytest is not None:
        write_pytest(chosen.repro, chosen.pytest)
        return 0
    return replay_file(chosen.repro, device=chosen.device, load=chosen.load)


_RUN_OPTIONS = (
    "log_dir", "rtol", "atol", "criterion", "max_checks", "max_overhead", "max_numel", "large",
    "workers", "include", "exclude", "modules", "start_step", "num_steps", "blame", "repeat",
)  # fmt: skip


def _run(chosen: argparse.Namespace) -> int:
    from opcheck.runner import run_script

    return int(run_script(chosen.script, chosen.args, _run_options(chosen)))


def _selftest(chosen: argparse.Namespace) -> int:
    from opcheck.runner import selftest_script

    return int(selftest_script(chosen.script, chosen.args, _run_options(chosen)))


def _run_options(chosen: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(chosen, name) for name in _RUN_OPTIONS if hasattr(chosen, name)}


# ---- output -------------------------------------------------------------------------------------


def _print_json(data: dict[str, Any]) -> None:
    print(json.dumps(_strict(data), indent=1, allow_nan=False))


def _strict(value: Any) -> Any:
    """NaN and Inf as strings: a header may hold anything that Python's JSON reader takes."""
    if isinstance(value, dict):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(item) for item in value]
    if isinstance(value, float) and not value - value == 0:  # noqa: SIM201
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    return value


@contextlib.contextmanager
def _progress() -> Iterator[Progress | None]:
    """After a second of reading: how far, on a terminal's stderr only."""
    if not sys.stderr.isatty():
        yield None
        return
    begin = time.monotonic()
    last = begin
    shown = False

    def tell(done: int, size: int) -> None:
        nonlocal last, shown
        now = time.monotonic()
        if now - begin > 1 and now - last > 0.1:
            last, shown = now, True
            share = 100 * done // max(size, 1)
            print(f"\rreading {share:3d}% of {size >> 20:,} MiB", end="", file=sys.stderr)
            sys.stderr.flush()

    try:
        yield tell
    finally:
        if shown:
            print("\r" + " " * 40 + "\r", end="", file=sys.stderr, flush=True)
