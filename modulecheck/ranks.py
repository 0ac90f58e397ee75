"""CSV reports of several ranks and scenarios as one, and what they say together."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from modulecheck.csv_files import CSV_FIELDS, RANK_FIELDS, read_table, write_table
from opcheck.errors import ArgumentError, LogReadError
from opcheck.printing import visible
from opcheck.records import Verdict
from opcheck.validation import a_count, a_path, a_string, several, several_paths

__all__ = ["MergedReport", "RankReport", "merge_reports", "write_merged"]

SCENARIO = "core"
"""The scenario of a file whose name tells none."""

_STATUS = CSV_FIELDS.index("status")
_FORWARD = ("fwd_output", "mutated")
_BACKWARD = ("grad_input", "grad_output", "param_grad")
_VERDICT = {"PASS": Verdict.PASS, "FAIL": Verdict.FAIL, "SKIP": Verdict.PASS}
_VERDICT["WARN"] = Verdict.INCONCLUSIVE
_MARKER = {Verdict.PASS: "pass", Verdict.FAIL: "FAIL", Verdict.INCONCLUSIVE: "WARN"}
_OUTCOME = {Verdict.PASS: "ALL PASS", Verdict.FAIL: "FAILED"}
_RANK = re.compile(r"(?:^|(?<=[._-]))rank[_-]?(\d+)(?=$|[._-])", re.IGNORECASE)
_COMMON_WORDS = ("precision", "report", "")


@dataclass(frozen=True, slots=True)
class Finding:
    """Where a difference begins on one rank."""

    module: str
    phase: str
    """"forward" or "backward"."""
    reason: str


@dataclass(frozen=True, slots=True)
class RankReport:
    """The rows of one rank in one scenario; each has the nine fields of its own report."""

    rank: int
    scenario: str
    rows: tuple[tuple[str, ...], ...]
    verdict: Verdict
    reason: str = ""
    """Why not PASS."""
    first: Finding | None = None
    """The first divergence."""

    @classmethod
    def of_rows(cls, rank: int, scenario: str, rows: Sequence[Sequence[str]]) -> RankReport:
        """What rows say alone: forward in their order, backward against it."""
        kept = tuple(tuple(row) for row in rows)
        verdict, reason = _judged(kept)
        return cls(rank, scenario, kept, verdict, reason, _first_divergence(kept))

    @classmethod
    def missing(cls, rank: int, scenario: str, why: str) -> RankReport:
        """A rank from which nothing has come."""
        note = f"MISSING_rank: {why}"
        row = ("-", "note", "0", "WARN", "", "", "", "", note)
        return cls(rank, scenario, (row,), Verdict.INCONCLUSIVE, note)


@dataclass(frozen=True, slots=True)
class MergedReport:
    """Reports of several ranks and scenarios: by scenario as they came, ranks in order."""

    reports: tuple[RankReport, ...]

    @classmethod
    def of(cls, reports: Sequence[RankReport]) -> MergedReport:
        """Raises LogReadError where two are of one rank and scenario."""
        taken: set[tuple[int, str]] = set()
        for report in reports:
            if (report.rank, report.scenario) in taken:
                raise LogReadError(
                    f"two reports are of rank {report.rank} in scenario {report.scenario!r}; give"
                    " scenario or ranks where the file names do not tell them apart"
                )
            taken.add((report.rank, report.scenario))
        order = list(dict.fromkeys(report.scenario for report in reports))
        key = lambda report: (order.index(report.scenario), report.rank)  # noqa: E731
        return cls(tuple(sorted(reports, key=key)))

    @property
    def verdict(self) -> Verdict:
        """FAIL before INCONCLUSIVE before PASS; a rank that is missing is INCONCLUSIVE."""
        found = {report.verdict for report in self.reports}
        if Verdict.FAIL in found:
            return Verdict.FAIL
        clean = found == {Verdict.PASS} and not self.holes
        return Verdict.PASS if clean else Verdict.INCONCLUSIVE

    @property
    def holes(self) -> list[str]:
        """Ranks below the highest one that have no report in a scenario where others have."""
        found = []
        for scenario in dict.fromkeys(report.scenario for report in self.reports):
            ranks = {report.rank for report in self.reports if report.scenario == scenario}
            lacking = [rank for rank in range(max(ranks)) if rank not in ranks]
            found += [f"rank {rank} has no report in scenario {scenario}" for rank in lacking]
        return found

    @property
    def first_divergence(self) -> tuple[RankReport, Finding] | None:
        """Forward before backward, then the lowest rank of the first scenario."""
        found = [(report, report.first) for report in self.reports if report.first is not None]
        return min(found, key=lambda pair: pair[1].phase != "forward", default=None)

    def rows(self) -> Iterator[list[str]]:
        """The rows of the merged file; each has eleven fields."""
        for report in self.reports:
            for row in report.rows:
                yield [str(report.rank), report.scenario, *row]

    def lines(self) -> Iterator[str]:
        """For a person: a line a rank, and where the difference begins."""
        several = len({report.scenario for report in self.reports}) > 1
        yield "  RANKS"
        yield "  " + "-" * 68
        for report in self.reports:
            name = f"rank {report.rank}" + (f" {report.scenario}" if several else "")
            line = f"  {_MARKER[report.verdict]}  {visible(name):<12} {visible(report.reason)}"
            yield line.rstrip()
        for hole in self.holes:
            yield f"  WARN  {visible(hole)}"
        yield "=" * 72
        yield f"  RESULT OF ALL RANKS: {_OUTCOME.get(self.verdict, 'INCONCLUSIVE')}"
        yield "=" * 72
        if self.first_divergence is not None:
            report, first = self.first_divergence
            where = f"rank {report.rank}, {visible(first.module)} ({first.phase})"
            yield f"  First divergence: {where}: {visible(first.reason)}".rstrip(": ")


def _judged(rows: Sequence[Sequence[str]]) -> tuple[Verdict, str]:
    failed = [row[0] for row in rows if row[_STATUS] == "FAIL"]
    if failed:
        names = list(dict.fromkeys(failed))
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return Verdict.FAIL, f"{names[0]}{more}"
    for row in rows:
        if row[_STATUS] == "WARN":
            return Verdict.INCONCLUSIVE, f"{row[0]}: {row[-1] or row[1]}"
    compared = [row for row in rows if row[1] in _FORWARD + _BACKWARD and row[_STATUS] == "PASS"]
    if not compared:
        return Verdict.INCONCLUSIVE, "nothing was compared"
    return Verdict.PASS, ""


def _first_divergence(rows: Sequence[Sequence[str]]) -> Finding | None:
    for phase, kinds, ordered in (
        ("forward", _FORWARD, rows),
        ("backward", _BACKWARD, _last_module_first(rows)),
    ):
        for row in ordered:
            if row[_STATUS] == "FAIL" and row[1] in kinds:
                return Finding(row[0], phase, f"{row[1]} [{row[2]}] {row[-1]}".rstrip())
    return None


def _last_module_first(rows: Sequence[Sequence[str]]) -> list[Sequence[str]]:
    """Backward reaches first what forward reached last; rows of one module keep their order."""
    names = list(dict.fromkeys(row[0] for row in rows))
    return sorted(rows, key=lambda row: -names.index(row[0]))


# ---- files --------------------------------------------------------------------------------------


def merge_reports(
    paths: Sequence[str | Path],
    out: str | Path,
    *,
    scenario: str | None = None,
    ranks: Sequence[int] | None = None,
) -> MergedReport:
    """Write the CSV reports of several ranks and scenarios as one, with `rank,scenario` before.

    Rank and scenario come from the file names: `precision_rank0.csv` is rank 0 of `core`,
    `precision_bf16_rank1.csv` rank 1 of `bf16`. A file that is merged already keeps its own. Rows
    are as they were, by scenario in the order of the files, then by rank.

    Args:
        paths: what `PrecisionChecker.report` has written.
        out: replaced as a whole, or left alone when writing fails.
        scenario: of all files, in place of what their names tell.
        ranks: one a file, in place of what their names tell.

    Returns:
        What the files say together; `verdict`, `first_divergence`, `lines()`.

    Raises:
        ArgumentError: no paths, or not as many ranks; `out` is one of the paths.
        ArgumentTypeError: an argument has a type that is not allowed.
        LogReadError: a file cannot be read, is no such report, tells no rank, or two are of one
            rank and scenario.
        LogWriteError: `out` cannot be written.
    """
    files, target = several_paths("paths", paths), a_path("out", out)
    given = None if ranks is None else several("ranks", ranks, "a list of ranks, one a file")
    _check_arguments(files, target, scenario, given)
    reports: list[RankReport] = []
    for place, file in enumerate(files):
        fields, rows = read_table(file)
        _check_status(file, fields, rows)
        if fields == RANK_FIELDS:
            reports += _of_merged(file, rows)
            continue
        rank = _rank_of(file) if given is None else given[place]
        reports.append(RankReport.of_rows(rank, scenario or _scenario_of(file), rows))
    merged = MergedReport.of(reports)
    write_merged(merged, target)
    return merged


def write_merged(merged: MergedReport, path: Path) -> None:
    """Write the file of eleven columns.

    Raises:
        LogWriteError: it cannot be written.
    """
    write_table(path, RANK_FIELDS, merged.rows())


def _check_arguments(
    files: Sequence[Path], target: Path, scenario: str | None, ranks: Sequence[int] | None
) -> None:
    if not files:
        raise ArgumentError("paths: expected at least one CSV report, got none")
    if ranks is not None:
        for rank in ranks:
            a_count("ranks", rank)
        if len(ranks) != len(files):
            raise ArgumentError(f"ranks: expected {len(files)}, one a file, got {len(ranks)}")
    if a_string("scenario", scenario, optional=True) == "":
        raise ArgumentError("scenario: expected a name, got ''")
    if any(file.resolve() == target.resolve() for file in files):
        raise ArgumentError(f"out: {target} is one of the files to merge; choose another name")


def _check_status(file: Path, fields: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    place = fields.index("status")
    for row in rows:
        if row[place] not in _VERDICT:
            raise LogReadError(
                f"{file}: expected a status of {', '.join(_VERDICT)}, got {row[place][:40]!r}"
            )


def _of_merged(file: Path, rows: Sequence[Sequence[str]]) -> list[RankReport]:
    parts: dict[tuple[int, str], list[Sequence[str]]] = {}
    for row in rows:
        if not row[0].isdecimal():
            raise LogReadError(f"{file}: expected a rank of 0 or more, got {row[0][:40]!r}")
        parts.setdefault((int(row[0]), row[1]), []).append(row[2:])
    return [RankReport.of_rows(rank, name, part) for (rank, name), part in parts.items()]


def _rank_of(file: Path) -> int:
    found = _RANK.findall(file.stem)
    if len(set(found)) != 1:
        raise LogReadError(
            f"{file}: the name tells no rank; name it like precision_rank0.csv, or give ranks"
        )
    return int(found[0])


def _scenario_of(file: Path) -> str:
    words = re.split(r"[._-]+", _RANK.sub("", file.stem))
    return "_".join(word for word in words if word.lower() not in _COMMON_WORDS) or SCENARIO
