"""Results of all ranks on rank 0, through the store: no collective, nobody waits for the dead."""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from loguru import logger

from modulecheck.ranks import Finding, MergedReport, RankReport, write_merged
from modulecheck.report import csv_rows, reason_of
from modulecheck.results import CompareResult
from modulecheck.sidechannel import SideChannel
from opcheck.errors import ArgumentError
from opcheck.printing import visible
from opcheck.records import Verdict

__all__ = ["gathered", "report_of", "report_ranks"]

_counts: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
"""Reports of this process by scenario: the n-th belongs to the n-th of the other ranks."""


def report_of(result: CompareResult, rank: int, scenario: str) -> RankReport:
    """What one rank has to tell."""
    verdict, reason = result.judgement
    first = None
    if result.suspects:
        name, phase = result.suspects[0]
        first = Finding(name or "<root>", phase, reason_of(result, name, phase))
    rows = tuple(tuple(visible(cell) for cell in row) for row in csv_rows(result))
    return RankReport(rank, scenario, rows, verdict, reason, first)


def gathered(
    result: CompareResult, *, scenario: str, timeout_s: float
) -> tuple[int, MergedReport | None]:
    """This process's rank, and on rank 0 the reports of all.

    Args:
        result: of this rank.
        scenario: a name for what was run.
        timeout_s: how long rank 0 waits for the others, which do not wait.

    Raises:
        ArgumentError: the scenario is no name.
    """
    if not scenario:
        raise ArgumentError("scenario: expected a name, got ''")
    number = next(_counts[scenario])
    channel = SideChannel.of_default_group(f"report/{scenario}/{number}", timeout_s=timeout_s)
    if channel is None:
        return 0, MergedReport.of([report_of(result, 0, scenario)])
    own = report_of(result, channel.rank, scenario)
    if channel.rank:
        _send(channel, own)
        return channel.rank, None
    others = range(1, channel.world_size)
    came = _received(channel, others)
    why = f"nothing came within {timeout_s:g} s; did it die, or not call report(gather=True)?"
    reports = [came.get(rank) or RankReport.missing(rank, scenario, why) for rank in others]
    return 0, MergedReport.of([own, *reports])


def report_ranks(merged: MergedReport, path: Path | None) -> None:
    """Print a line for each rank, and write the rows of all where a path is given.

    Raises:
        LogWriteError: they cannot be written.
    """
    print("\n".join(["", *merged.lines()]))  # noqa: T201 - the report
    if path is not None:
        write_merged(merged, path)
        print(f"CSV report saved to: {path}")  # noqa: T201 - documented


def _send(channel: SideChannel, report: RankReport) -> None:
    try:
        channel.send("rows", dataclasses.asdict(report))
    except RuntimeError as error:  # the rank that keeps the store is gone; this one goes on
        logger.warning("the report could not be sent to rank 0: {}", error)


def _received(channel: SideChannel, ranks: range) -> dict[int, RankReport]:
    try:
        return {rank: _unpacked(data) for rank, data in channel.receive("rows", ranks).items()}
    except RuntimeError as error:
        logger.warning("the reports of the other ranks could not be read: {}", error)
        return {}


def _unpacked(data: dict[str, Any]) -> RankReport:
    first = data["first"]
    return RankReport(
        data["rank"],
        data["scenario"],
        tuple(tuple(row) for row in data["rows"]),
        Verdict(data["verdict"]),
        data["reason"],
        None if first is None else Finding(**first),
    )
