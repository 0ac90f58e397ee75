"""One pass over a log: the runs in it, and of each its groups and coverage.

A record line as the writer writes it is not decoded: its beginning (op, module, phase) and its end
(run, rank) are looked up as bytes, and of the middle only verdict and q are read. This is exact,
because inside a JSON string every quote has a backslash before it, so that `,"verdict":"` can only
be a key; whatever has another shape is decoded in full.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opcheck.errors import LogReadError
from opcheck.groups import Filter, Group, order_of, worse
from opcheck.logfile import (
    LINE_START,
    Problems,
    Progress,
    coverage_from,
    parse_json_line,
    parse_text_line,
    read_chunks,
    record_from,
    schema_problem,
)
from opcheck.records import Coverage, OpRecord, Verdict

__all__ = ["TEXT_MARK", "LogScan", "RunScan", "scan_log"]

TEXT_MARK = re.compile(rb"(?:^|\] )Op: ")
_HEAD = re.compile(rb'\{"type":"record","op":"([^"\\]*)","module":"([^"\\]*)","phase":"([^"\\]*)"')
_TAIL = re.compile(rb',"run_id":"([^"\\]*)","rank":(\d{1,9})\}')
_ORDER = re.compile(rb',"index":(\d{1,18}),"step":(\d{1,18}),')


class _Cell:
    """A group under way; the first failing line is kept undecoded."""

    __slots__ = ("first_line", "first_order", "group", "line_number")

    def __init__(self, group: Group) -> None:
        self.group = group
        self.first_order: tuple[int, int] | None = None
        self.first_line = b""
        self.line_number = 0


@dataclass
class _RankScan:
    """One rank of a run: its cells by undecoded beginning of the line; None is filtered out."""

    run: RunScan
    rank: int
    cells: dict[bytes, _Cell | None] = field(default_factory=dict)
    num_records: int = 0
    num_covered: int = -1
    """Records there were when the coverage was written; -1: it never was."""


@dataclass
class RunScan:
    """A run as it stands in one log file."""

    run_id: str
    header: Mapping[str, Any] = field(default_factory=dict)
    refused: str = ""
    is_newer: bool = False
    ranks: dict[int, _RankScan] = field(default_factory=dict)
    coverages: dict[int, Coverage] = field(default_factory=dict)
    cells: dict[tuple[int, str, str, str], _Cell] = field(default_factory=dict)
    num_failed: int = 0
    """FAIL records, filtered ones included."""
    num_errors: int = 0
    is_text: bool = False

    @property
    def num_records(self) -> int:
        """Of all ranks, filtered ones included."""
        return sum(rank.num_records for rank in self.ranks.values())

    @property
    def finished(self) -> bool:
        """Every rank's coverage stands behind its last record."""
        return bool(self.ranks) and all(
            rank.num_covered == rank.num_records for rank in self.ranks.values()
        )

    @property
    def groups(self) -> list[Group]:
        """What was counted."""
        groups = (cell.group for cell in self.cells.values())
        return [group for group in groups if group.checked or group.errors]


@dataclass
class LogScan:
    """A log file: its runs in the order in which they began."""

    path: Path
    runs: dict[str, RunScan] = field(default_factory=dict)
    problems: Problems = field(default_factory=Problems)
    torn: bool = False
    num_lines: int = 0


def scan_log(
    path: Path, *, where: Filter | None = None, progress: Progress | None = None
) -> LogScan:
    """Read a log once.

    Raises:
        LogReadError: it cannot be opened, or no line of it is one of ours.
    """
    scanner = _Scanner(path, where or Filter())
    for chunk in read_chunks(path, scanner.log.problems, progress):
        scanner.take(chunk.lines, chunk.first_line, is_torn=chunk.is_torn)
    scanner.decode_first_failures()
    if not scanner.log.runs and scanner.log.num_lines:
        first = next(iter(scanner.log.problems.shown), f"{path}:1: nothing in it")
        msg = f"{path}: not a log of opcheck; {first}"
        raise LogReadError(msg)
    return scanner.log


class _Scanner:
    def __init__(self, path: Path, where: Filter) -> None:
        self.log = LogScan(path)
        self.where = where
        self.tails: dict[bytes, _RankScan] = {}

    def take(self, lines: list[bytes], number: int, *, is_torn: bool) -> None:
        """Count some lines. The loop is written out: it runs once per record."""
        tails, step = self.tails, self.where.step
        self.log.num_lines += len(lines)
        for place, line in enumerate(lines):
            rank = tails.get(line[line.rfind(b',"run_id":"') :])
            at = line.find(b',"index":')
            verdict_at = line.find(b',"verdict":"', at)
            q_at = line.find(b',"q":', verdict_at)
            if (
                rank is None
                or at < 0
                or verdict_at < 0
                or q_at < 0
                or line.find(LINE_START, 9) >= 0
                or not line.startswith(b'PASS"', verdict_at + 12)
            ):
                self.slow(line, number + place, is_torn=is_torn)
                continue
            try:
                cell = rank.cells[line[:at]]
                q = float(line[q_at + 5 : line.find(b",", q_at + 5)])
            except (KeyError, ValueError):
                self.slow(line, number + place, is_torn=is_torn)
                continue
            if step is not None:
                order = _ORDER.match(line, at)
                if order is None:
                    self.slow(line, number + place, is_torn=is_torn)
                    continue
                if int(order[2]) != step:
                    cell = None
            rank.num_records += 1
            if cell is not None:
                group = cell.group
                group.checked += 1
                if not q <= group.max_q:
                    group.max_q = worse(group.max_q, q)

    def slow(self, line: bytes, number: int, *, is_torn: bool) -> None:
        """Any line; what cannot be read becomes a warning."""
        if not line.strip(b"\0\r\t "):
            return
        try:
            if TEXT_MARK.search(line[:80]) and not line.startswith(b"{"):
                self.text_line(line)
            elif not self.failing_line(line, number):
                self.json_line(line, number)
        except LogReadError as error:
            if is_torn:
                self.log.torn = True
                self.log.problems.add(self.log.path, number, "the last line is cut")
            else:
                self.log.problems.add(self.log.path, number, str(error))

    def text_line(self, line: bytes) -> None:
        record = parse_text_line(line.decode("utf-8", "surrogateescape"))
        self.run(record.run_id).is_text = True
        self.count(record)

    def failing_line(self, line: bytes, number: int) -> bool:
        """Count a FAIL line of the known shape; False: it has another shape."""
        tail_at, at = line.rfind(b',"run_id":"'), line.find(b',"index":')
        head, tail = line[:at], line[tail_at:]
        rank, order = self.tails.get(tail), _ORDER.match(line, max(at, 0))
        verdict_at = line.find(b',"verdict":"', at)
        q_at = line.find(b',"q":', verdict_at)
        if rank is None or order is None or verdict_at < 0 or q_at < 0:
            return False
        if (
            head not in rank.cells
            or line.find(LINE_START, 9) >= 0
            or not line.startswith(b'FAIL"', verdict_at + 12)
            or line.find(b',"error":null,', verdict_at) < 0
        ):
            return False
        step_index = int(order[2]), int(order[1])
        try:
            q = float(line[q_at + 5 : line.find(b",", q_at + 5)].strip(b'"'))
        except ValueError:
            return False
        rank.num_records += 1
        rank.run.num_failed += 1
        cell = rank.cells[head]
        if cell is not None and self.where.step in (None, step_index[0]):
            cell.group.checked += 1
            cell.group.failed += 1
            cell.group.max_q = worse(cell.group.max_q, q)
            if cell.first_order is None or step_index < cell.first_order:
                cell.first_order, cell.first_line, cell.line_number = step_index, line, number
        return True

    def json_line(self, line: bytes, number: int) -> None:
        data, is_lost = parse_json_line(line)
        if is_lost:
            self.log.problems.add(self.log.path, number, "a line is cut, the next one follows it")
        kind = data.get("type")
        if kind == "record":
            record = record_from(data)
            cell = self.count(record)
            if not is_lost:
                self.remember(line, record, cell)
        elif kind == "coverage":
            self.coverage(data, number)
        elif kind == "header":
            self.header(data, number)
        else:
            msg = f"a line of unknown type {str(kind)[:40]!r}, ignored"
            raise LogReadError(msg)

    def header(self, data: dict[str, Any], number: int) -> None:
        run = self.run(str(data.get("run_id", "")))
        run.header = data
        run.refused, run.is_newer = schema_problem(data)
        if run.refused:
            run.refused = f"{self.log.path}:{number}: {run.refused}"
        ranks = data.get("ranks", [data.get("rank", 0)])
        for rank in ranks if isinstance(ranks, list) else [0]:
            self.rank(run, rank if isinstance(rank, int) else 0)

    def coverage(self, data: dict[str, Any], number: int) -> None:
        run = self.run(str(data.get("run_id", "")))
        coverage, warning = coverage_from(data)
        if warning:
            self.log.problems.add(self.log.path, number, warning)
        number_of_rank = data.get("rank", run.header.get("rank", 0))
        rank = self.rank(run, number_of_rank if isinstance(number_of_rank, int) else 0)
        run.coverages[rank.rank] = coverage
        rank.num_covered = rank.num_records

    def run(self, run_id: str) -> RunScan:
        if run_id not in self.log.runs:
            self.log.runs[run_id] = RunScan(run_id)
        return self.log.runs[run_id]

    def rank(self, run: RunScan, number: int) -> _RankScan:
        if number not in run.ranks:
            run.ranks[number] = _RankScan(run, number)
        return run.ranks[number]

    def count(self, record: OpRecord) -> _Cell | None:
        """Count a decoded record; None: it is filtered out."""
        run = self.run(record.run_id)
        self.rank(run, record.rank).num_records += 1
        run.num_errors += record.error is not None
        run.num_failed += record.error is None and record.verdict is Verdict.FAIL
        if not self.where.takes_group(record.op, record.module, record.phase):
            return None
        key = (record.rank, record.op, record.module, record.phase)
        cell = run.cells.get(key)
        if cell is None:
            group = Group(rank=record.rank, op=record.op, module=record.module, phase=record.phase)
            cell = run.cells[key] = _Cell(group)
        if self.where.takes(record):
            cell.group.add(record)
            if cell.group.first_failure is record:
                order = order_of(record)
                if cell.first_order is None or order < cell.first_order:
                    cell.first_order, cell.first_line = order, b""
        return cell

    def remember(self, line: bytes, record: OpRecord, cell: _Cell | None) -> None:
        """From now on lines that begin and end like this one need no decoding."""
        tail_at, at = line.rfind(b',"run_id":"'), line.find(b',"index":')
        if tail_at < 0 or at < 0:
            return
        if _HEAD.fullmatch(line, 0, at) and _TAIL.fullmatch(line, tail_at):
            rank = self.rank(self.run(record.run_id), record.rank)
            self.tails[line[tail_at:]] = rank
            rank.cells[line[:at]] = cell

    def decode_first_failures(self) -> None:
        for run in self.log.runs.values():
            for cell in run.cells.values():
                if cell.first_line:
                    try:
                        record = record_from(parse_json_line(cell.first_line)[0])
                    except LogReadError as error:
                        self.log.problems.add(self.log.path, cell.line_number, str(error))
                    else:
                        cell.group.first_failure = record
