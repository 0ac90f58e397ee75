"""Logs of several ranks written as one, and the order of their calls compared."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from opcheck.errors import LogReadError, LogWriteError
from opcheck.logfile import Progress, parse_json_line
from opcheck.logrecords import LightCall, LogRecords, light_calls
from opcheck.record_json import to_json
from opcheck.records import SCHEMA, SCHEMA_VERSION
from opcheck.review import Run, find_logs, join_ranks, load_run

__all__ = ["merge_logs", "sequence_differences"]


def merge_logs(
    paths: Sequence[str | Path],
    out: str | Path,
    *,
    run: str | None = None,
    progress: Progress | None = None,
) -> tuple[Run, list[str]]:
    """Write the last run of each log (or the one with this id) as one run of several ranks.

    Returns the run as it is written, and in what the ranks' calls differ.

    Raises:
        LogReadError: a log cannot be read, or two are of the same rank.
        LogWriteError: `out` is there already, or cannot be written.
    """
    logs = [log for path in paths for log in find_logs(path)]
    runs = [load_run(log, run=run, progress=progress) for log in dict.fromkeys(logs)]
    empty = [str(part.logs[0]) for part in runs if not part.records and not part.header]
    if empty:
        msg = f"nothing to merge in {', '.join(empty)}: the log is empty"
        raise LogReadError(msg)
    merged = join_ranks(runs)
    target = Path(out)
    if target.exists():
        msg = f"{target}: is there already; remove it or choose another name"
        raise LogWriteError(msg)
    _write(target, runs, merged)
    return load_run(target), sequence_differences(runs)


def _write(target: Path, runs: Sequence[Run], merged: Run) -> None:
    """Through a file beside it, so that half a log never bears the name."""
    try:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as error:
        msg = f"{target}: cannot be written: {error.strerror}"
        raise LogWriteError(msg) from error
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(_line(_header(runs, merged)))
            for run in runs:
                for line in _records(run, merged.run_id):
                    file.write(line + b"\n")
                if run.finished:
                    data = {"type": "coverage", "run_id": merged.run_id, "rank": run.rank}
                    file.write(_line({**data, **to_json(run.coverage)}))
        Path(name).replace(target)
    except OSError as error:
        msg = f"{target}: cannot be written: {error.strerror}"
        raise LogWriteError(msg) from error
    finally:
        with contextlib.suppress(OSError):
            Path(name).unlink()


def _line(data: dict[str, Any]) -> bytes:
    return json.dumps(data, separators=(",", ":")).encode() + b"\n"


def _header(runs: Sequence[Run], merged: Run) -> dict[str, Any]:
    parts = [
        {"path": str(run.logs[0]), "run_id": run.run_id, "rank": rank}
        for run in runs
        for rank in run.ranks
    ]
    return {
        **merged.header,
        "type": "header",
        "schema": SCHEMA,
        "version": SCHEMA_VERSION,
        "run_id": merged.run_id,
        "rank": merged.rank,
        "ranks": list(merged.ranks),
        "merged": parts,
    }


def _records(run: Run, run_id: str) -> Any:
    """The record lines of a run under another run id."""
    records = run.records
    if not isinstance(records, LogRecords):
        yield from (_line({"type": "record", **to_json(r), "run_id": run_id})[:-1] for r in records)
        return
    before = b',"run_id":' + json.dumps(run.run_id).encode()
    after = b',"run_id":' + json.dumps(run_id).encode()
    for _, line in records.record_lines():
        if before == after and line.startswith(b"{"):
            yield line
            continue
        head, mark, tail = line.rpartition(before)
        if mark and line.startswith(b'{"type":"record"') and tail.startswith(b',"rank":'):
            yield head + after + tail
        else:
            data, _ = parse_json_line(line)
            yield _line({**data, "run_id": run_id})[:-1]


def sequence_differences(runs: Sequence[Run]) -> list[str]:
    """For each rank whose calls differ from those of the first one: where that begins."""
    return [text for other in runs[1:] if (text := _first_difference(runs[0], other))]


def _first_difference(a: Run, b: Run) -> str:
    both = zip_longest(light_calls(a.records), light_calls(b.records))
    for place, (left, right) in enumerate(both):
        if left is None or right is None or left.key != right.key:
            return (
                f"rank {b.rank} differs from rank {a.rank} from checked call {place} on:"
                f" {_name(right)} where rank {a.rank} has {_name(left)}"
            )
    return ""


def _name(call: LightCall | None) -> str:
    if call is None:
        return "no more calls"
    return f"{call.op} in {call.module or '<root>'} ({call.phase}, step {call.step})"
