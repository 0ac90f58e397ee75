"""Logs to a run: what failed first, where, how often, and what was never looked at.

A `Run` holds the groups (rank, op, module, phase) of its records and, of each group, the first
failing record in full. All that is printed comes from these; the records themselves stay in the
file and are read again when somebody asks for them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from opcheck.errors import LogReadError, SchemaVersionError
from opcheck.groups import (
    Filter,
    Group,
    Tally,
    add_coverages,
    group_records,
    importance,
    order_of,
)
from opcheck.logfile import Progress
from opcheck.logrecords import LogRecords
from opcheck.records import CallCount, Coverage, OpRecord, Verdict, session_verdict
from opcheck.scan import LogScan, RunScan, scan_log
from opcheck.validation import a_count, a_function, a_path, a_string, an_instance

__all__ = ["Filter", "Run", "Tally", "find_logs", "join_ranks", "load_run"]

MAX_WORLD = 65536


@dataclass(kw_only=True)
class Run:
    """One run of a checked program, live or out of a log."""

    header: Mapping[str, Any] = field(default_factory=dict)
    records: Sequence[OpRecord] = ()
    """Every checked call, and every one whose checking crashed."""
    coverage: Coverage = field(default_factory=Coverage)
    run_id: str = ""
    rank: int = 0
    """The lowest, where there are several."""
    ranks: tuple[int, ...] = ()
    torn: bool = False
    """The last line of the log was cut."""
    finished: bool = True
    """The log says what was seen; False: `coverage` is counted from the records alone."""
    warnings: list[str] = field(default_factory=list)
    where: Filter | None = None
    """`records` and groups hold these only; verdict and coverage are of the whole run."""
    others: tuple[tuple[str, int], ...] = ()
    """Other runs in the same log: run id and number of records."""
    unfinished_reason: str = "the run did not finish: its coverage is missing"
    missing_ranks: tuple[int, ...] = ()
    logs: tuple[Path, ...] = ()
    counted_groups: list[Group] | None = None
    whole_failed: int | None = None
    """FAIL records of the whole run, where `where` hides some."""

    def __post_init__(self) -> None:
        self.run_id = self.run_id or str(self.header.get("run_id", ""))
        if not self.ranks:
            rank = self.header.get("rank", 0)
            self.rank = rank if isinstance(rank, int) and not self.rank else self.rank
            self.ranks = (self.rank,)

    @cached_property
    def groups(self) -> list[Group]:
        """Counts by rank, op, module and phase."""
        if self.counted_groups is not None:
            return self.counted_groups
        return group_records(self.records)

    @cached_property
    def _judged(self) -> tuple[Verdict, str]:
        failed = self.num_failed
        if failed:
            of = max(self.coverage.checked, failed)
            return Verdict.FAIL, f"{failed:,} of {of:,} checked calls failed"
        if not self.finished:
            return Verdict.INCONCLUSIVE, self.unfinished_reason
        verdict, reason = session_verdict(self.coverage)
        if verdict is Verdict.PASS and self.missing_ranks:
            missing = ", ".join(map(str, self.missing_ranks))
            return Verdict.INCONCLUSIVE, f"no log of rank {missing}"
        if verdict is Verdict.PASS and not self.coverage.adds_up:
            return Verdict.INCONCLUSIVE, "the coverage does not add up"
        return verdict, reason

    @property
    def num_failed(self) -> int:
        """FAIL calls of the whole run, whatever is filtered."""
        counted = self.whole_failed
        if counted is None:
            counted = sum(group.failed for group in self.groups)
        return max(self.coverage.failed, counted)

    @property
    def verdict(self) -> Verdict:
        """PASS, FAIL or INCONCLUSIVE, of the whole run."""
        return self._judged[0]

    @property
    def verdict_reason(self) -> str:
        """Why it is not PASS, one sentence; "" for PASS."""
        return self._judged[1]

    @cached_property
    def failures(self) -> list[OpRecord]:
        """The FAIL records, first divergence first."""
        if isinstance(self.records, LogRecords):
            return sorted(self.records.failing(), key=order_of)
        failing = (record for record in self.records if record.verdict is Verdict.FAIL)
        return sorted(failing, key=order_of)

    @cached_property
    def first_failures(self) -> list[OpRecord]:
        """The first FAIL record of each op, module, phase and rank, first divergence first."""
        firsts = (group.first_failure for group in self.groups)
        return sorted((record for record in firsts if record is not None), key=order_of)

    @property
    def first_divergence(self) -> OpRecord | None:
        """The FAIL record that came first."""
        return self.first_failures[0] if self.first_failures else None

    @property
    def first_error(self) -> OpRecord | None:
        """The first record whose checking crashed."""
        firsts = [group.first_error for group in self.groups if group.first_error is not None]
        return min(firsts, key=order_of, default=None)

    def with_index(self, index: int) -> list[OpRecord]:
        """The records of the n-th dispatched call, one of each rank."""
        a_count("index", index)
        if isinstance(self.records, LogRecords):
            return self.records.with_index(index)
        return [record for record in self.records if record.index == index]

    def rank_differences(self) -> list[str]:
        """Calls that were not checked equally often on all ranks, a sentence each."""
        counts: dict[tuple[str, str, str], dict[int, int]] = {}
        for group in self.groups:
            ranks = counts.setdefault((group.op, group.module, group.phase), {})
            ranks[group.rank] = group.checked + group.errors
        lines = []
        for (op, module, phase), by_rank in counts.items():
            each = [by_rank.get(rank, 0) for rank in self.ranks]
            if len(set(each)) > 1:
                times = ", ".join(f"{n} on rank {r}" for r, n in zip(self.ranks, each, strict=True))
                lines.append(f"{op} in {module or '<root>'}, {phase}: {times}")
        return lines

    def by_op(self) -> dict[str, Tally]:
        """Sums by op, first divergence first, then by q."""
        return self._tallies("op")

    def by_module(self) -> dict[str, Tally]:
        """Sums by module (its own calls, not its children's), first divergence first."""
        return self._tallies("module")

    def _tallies(self, name: str) -> dict[str, Tally]:
        tallies: dict[str, Tally] = {}
        for group in self.groups:
            key = getattr(group, name)
            tallies.setdefault(key, Tally(name=key)).add(group)
        if self.where is None or self.where.step is None:
            for count in self.coverage.calls:
                if self.where is None or self.where.takes_group(
                    count.op, count.module, count.phase
                ):
                    key = getattr(count, name)
                    tally = tallies.setdefault(key, Tally(name=key))
                    tally.seen = (tally.seen or 0) + count.seen
                    tally.phases.add(count.phase)
        return dict(sorted(tallies.items(), key=lambda item: importance(item[1])))

    def filter(
        self,
        *,
        op: str | None = None,
        module: str | None = None,
        phase: str | None = None,
        step: int | None = None,
    ) -> Run:
        """The same run with only these records; verdict and coverage stay those of the whole."""
        where = Filter(op=op, module=module, phase=phase, step=step)
        kept = [record for record in self.records if where.takes(record)]
        return replace(
            self, records=kept, where=where, counted_groups=None, whole_failed=self.num_failed
        )


# ---- from files ---------------------------------------------------------------------------------

_RANK_FILE = re.compile(r"(.*)\.rank(\d+)\.(?:jsonl|log)")


def find_logs(path: str | Path) -> list[Path]:
    """The log files that a path names: itself, or those of a folder (one, or one of each rank).

    Raises:
        LogReadError: a folder with no log, or with several of which none is the obvious one.
    """
    folder = a_path("path", path)
    try:
        if not folder.is_dir():
            return [folder]
        files = sorted(folder.iterdir())
    except (OSError, ValueError) as error:
        msg = f"{folder}: cannot be read: {getattr(error, 'strerror', None) or error}"
        raise LogReadError(msg) from error
    for suffix in (".jsonl", ".log"):
        logs = [file for file in files if file.suffix == suffix and file.is_file()]
        ranks = {file: found for file in logs if (found := _RANK_FILE.fullmatch(file.name))}
        alone = [file for file in logs if file not in ranks]
        alone = [file for file in alone if file.stem == "precision"] or alone
        stems = {found[1] for found in ranks.values()}
        if len(alone) + len(stems) > 1:
            newest = max(logs, key=lambda file: file.stat().st_mtime)
            kept = {newest.stem, ranks[newest][1]} if newest in ranks else {newest.stem}
            alone = [file for file in alone if file.stem in kept]
            ranks = {file: found for file, found in ranks.items() if found[1] in kept}
            if alone and ranks:
                alone, ranks = ([], ranks) if newest in ranks else (alone, {})
        if alone:
            return alone
        if ranks:
            return sorted(ranks, key=lambda file: int(ranks[file][2]))
    msg = f"{folder}: a folder without a log (precision.jsonl, precision.rankN.jsonl or .log)"
    raise LogReadError(msg)


def load_run(
    path: str | Path,
    *,
    run: str | None = None,
    where: Filter | None = None,
    progress: Progress | None = None,
) -> Run:
    """The last run in a log (or the one with this id), read as a stream.

    `path` is a log file or a folder with one; where a folder holds a log of each rank, the run of
    all ranks is given.

    Raises:
        ArgumentTypeError: an argument has a type that is not allowed.
        LogReadError: it cannot be read, is no log, or has no such run.
        SchemaVersionError: the run was written by a newer version.
    """
    a_string("run", run, optional=True)
    if where is not None:
        an_instance("where", where, Filter, "a Filter or None")
    if progress is not None:
        a_function("progress", progress)
    runs: list[Run] = []
    for log in find_logs(path):
        scan = scan_log(log, where=where, progress=progress)
        wanted = run
        if wanted is None and runs and runs[0].run_id in scan.runs:
            wanted = runs[0].run_id
        runs.append(_run_from(scan, wanted, where))
    return join_ranks(runs)


def _run_from(scan: LogScan, run_id: str | None, where: Filter | None) -> Run:
    if run_id is not None and run_id not in scan.runs:
        known = ", ".join(list(scan.runs)[-10:])
        msg = f"{scan.path}: no run {run_id!r}; it has: {known}"
        raise LogReadError(msg)
    if not scan.runs:
        return Run(
            finished=False,
            unfinished_reason=f"the log {scan.path} is empty",
            logs=(scan.path,),
        )
    found = scan.runs[run_id if run_id is not None else next(reversed(scan.runs))]
    if found.refused:
        kind = SchemaVersionError if found.is_newer else LogReadError
        raise kind(found.refused)
    ranks = tuple(sorted(found.ranks)) or (0,)
    made = Run(
        header=found.header,
        records=LogRecords([scan.path], [found.run_id], found.num_records, where),
        coverage=_coverage_of(found),
        run_id=found.run_id,
        rank=ranks[0],
        ranks=ranks,
        torn=scan.torn,
        finished=found.finished,
        warnings=[*scan.problems.warnings, *_doubts(scan.path, found)],
        where=where,
        others=tuple(
            (other.run_id, other.num_records) for other in scan.runs.values() if other is not found
        ),
        logs=(scan.path,),
        counted_groups=found.groups,
        whole_failed=found.num_failed,
    )
    if found.is_text:
        made.unfinished_reason = "the text log names failures only"
    if "ranks" in found.header:
        made.missing_ranks = _missing_ranks(found.header, ranks)
    return made


def _coverage_of(found: RunScan) -> Coverage:
    if found.coverages:
        return add_coverages(list(found.coverages.values()))
    return Coverage(
        seen=found.num_records,
        checked=found.num_records - found.num_errors,
        failed=found.num_failed,
        errors=found.num_errors,
        calls=tuple(
            CallCount(
                module=group.module,
                phase=group.phase,
                op=group.op,
                seen=group.checked + group.errors,
                checked=group.checked,
                failed=group.failed,
                errors=group.errors,
            )
            for group in found.groups
        ),
    )


def _doubts(path: Path, found: RunScan) -> list[str]:
    """Where a log does not agree with itself."""
    if found.is_text:
        return []
    lines = []
    if not found.header:
        lines.append(f"{path}: the run has no header: its beginning is missing")
    if found.coverages and not found.finished:
        lines.append(f"{path}: records follow the last coverage: the run was cut in its next part")
    elif found.coverages:
        coverage = add_coverages(list(found.coverages.values()))
        counted = coverage.checked + coverage.errors
        if counted != found.num_records:
            lines.append(
                f"{path}: the coverage counts {counted:,} checked calls,"
                f" the log has {found.num_records:,} records of them"
            )
    return lines


def _missing_ranks(header: Mapping[str, Any], ranks: Sequence[int]) -> tuple[int, ...]:
    world = header.get("world_size", 1)
    if not isinstance(world, int) or not 1 < world <= MAX_WORLD:
        return ()
    return tuple(sorted(set(range(world)) - set(ranks)))


def join_ranks(runs: Sequence[Run]) -> Run:
    """The runs of several ranks as one.

    Raises:
        LogReadError: two of them are of the same rank.
    """
    if len(runs) == 1:
        return runs[0]
    owners: dict[int, Run] = {}
    for run in runs:
        for rank in run.ranks:
            if rank in owners:
                names = " and ".join(str(log) for log in (*owners[rank].logs, *run.logs))
                msg = f"{names} are both of rank {rank}: not the ranks of one job"
                raise LogReadError(msg)
            owners[rank] = run
    ranks = tuple(sorted(owners))
    logs = tuple(log for run in runs for log in run.logs)
    first = owners[ranks[0]]
    records = LogRecords(
        logs, [run.run_id for run in runs], sum(len(run.records) for run in runs), first.where
    )
    return replace(
        first,
        records=records,
        coverage=add_coverages([run.coverage for run in runs]),
        rank=ranks[0],
        ranks=ranks,
        torn=any(run.torn for run in runs),
        finished=all(run.finished for run in runs),
        warnings=[warning for run in runs for warning in run.warnings],
        logs=logs,
        missing_ranks=_missing_ranks(first.header, ranks),
        counted_groups=[group for run in runs for group in run.groups],
        whole_failed=sum(run.whole_failed or 0 for run in runs),
    )
