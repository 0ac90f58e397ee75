"""Born, inherited or amplified: the errors of a run with `blame=True`, along one step.

All figures are rms errors as shares of the expected size, see `records.Blame`. Of a module they
are: `inherited`, the error of the inputs of its first call; `born`, the largest of any call in it;
`total`, the error of the result of its last call.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from opcheck.groups import order_of
from opcheck.records import PHASES, Blame, OpRecord, Verdict
from opcheck.review import Run

__all__ = [
    "MARKS",
    "BlameStep",
    "Point",
    "Unit",
    "blame_json",
    "blame_step",
    "decades",
    "largest",
    "units",
]

MAX_ROWS = 30
"""Bars of the picture."""
MARKS = ("born", "amplified")


@dataclass(frozen=True, slots=True)
class Point:
    """One call."""

    index: int
    phase: str
    module: str
    op: str
    source: str
    blame: Blame

    @property
    def gain(self) -> float:
        """How many times the error of its inputs the call hands on."""
        return self.blame.inherited / self.blame.inputs if self.blame.inputs else math.inf


@dataclass(frozen=True, slots=True)
class Unit:
    """A row of the picture: consecutive modules of a step."""

    label: str
    first: int
    """Index of the first call in it."""
    born: float
    total: float
    marks: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class BlameStep:
    """The figures of one step of one rank."""

    step: int
    rank: int
    num_steps: int
    points: Sequence[Point]

    def of(self, phase: str) -> list[Point]:
        """The calls of a phase in order."""
        return [point for point in self.points if point.phase == phase]

    @property
    def origins(self) -> list[Point]:
        """Calls that computed something wrong, the first first."""
        return [point for point in self.points if point.blame.word == "born"]

    @property
    def amplifiers(self) -> list[Point]:
        """Calls that magnified what they inherited, the first first."""
        return [point for point in self.points if point.blame.word == "amplified"]


def blame_step(run: Run) -> BlameStep | None:
    """The figures of the first step with a FAIL, else of the first; None: the run has none."""
    by_step: dict[tuple[int, int], list[OpRecord]] = {}
    for record in run.records:
        if record.blame is not None:
            by_step.setdefault((record.step, record.rank), []).append(record)
    if not by_step:
        return None
    failing = [key for key, records in by_step.items() if any(map(_failed, records))]
    step, rank = min(failing or by_step)
    points = [
        Point(r.index, r.phase, r.module, r.op, r.source, r.blame)
        for r in sorted(by_step[step, rank], key=order_of)
        if r.blame is not None
    ]
    return BlameStep(step, rank, len({key[0] for key in by_step}), points)


def _failed(record: OpRecord) -> bool:
    return record.verdict is Verdict.FAIL


def units(points: Sequence[Point]) -> list[Unit]:
    """At most `MAX_ROWS` pieces of a phase in the order in which they ran."""
    if not points:
        return []
    deepest = max(point.module.count(".") for point in points) + 1
    pieces = _pieces(points, 1)
    for depth in range(2, deepest + 1):
        if max(len(part) for _, part in pieces) <= len(points) / 3:
            break  # no module holds most of it any more
        finer = _pieces(points, depth)
        if len(finer) > 4 * MAX_ROWS:
            break
        pieces = finer
    each = math.ceil(len(pieces) / MAX_ROWS)
    return [_unit(pieces[at : at + each]) for at in range(0, len(pieces), each)]


def _pieces(points: Sequence[Point], depth: int) -> list[tuple[str, list[Point]]]:
    found: dict[str, list[Point]] = {}
    for point in points:
        name = ".".join(point.module.split(".")[:depth])
        found.setdefault(name, []).append(point)
    return list(found.items())


def _unit(pieces: Sequence[tuple[str, list[Point]]]) -> Unit:
    names = [name or "<root>" for name, _ in pieces]
    points = [point for _, part in pieces for point in part]
    return Unit(
        label=names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}",
        first=points[0].index,
        born=max(point.blame.born for point in points),
        total=pieces[-1][1][-1].blame.total,
        marks=tuple(point for point in points if point.blame.word in MARKS),
    )


def decades(values: Iterable[float]) -> tuple[int, int]:
    """Powers of ten around what is not 0, two apart at least; the upper one is 1 at most."""
    logs = [min(math.log10(value), 0.0) for value in values if 0 < value < math.inf]
    low = math.floor(min(logs, default=-8))
    high = max(math.ceil(max(logs, default=-6)), low + 2)
    return (low, high) if high <= 0 else (-2, 0)


def largest(points: Iterable[Point], name: str) -> float:
    """The largest of one figure."""
    values: list[float] = [getattr(point.blame, name) for point in points]
    return max(values)


def blame_json(run: Run) -> dict[str, object] | None:
    """For programs: the origins, the amplifiers and the modules of each phase."""
    found = blame_step(run)
    if found is None:
        return None
    return {
        "step": found.step,
        "rank": found.rank,
        "origins": [_point_json(point) for point in found.origins],
        "amplified": [_point_json(point) for point in found.amplifiers],
        "modules": [
            {
                "module": name,
                "phase": phase,
                "inherited": points[0].blame.inputs,
                "born": largest(points, "born"),
                "total": points[-1].blame.total,
            }
            for phase in PHASES
            for name, points in _pieces(found.of(phase), 1 << 10)
        ],
    }


def _point_json(point: Point) -> dict[str, object]:
    blame = point.blame
    return {
        "op": point.op,
        "module": point.module,
        "phase": point.phase,
        "index": point.index,
        "source": point.source,
        "born": blame.born,
        "inherited": blame.inherited,
        "total": blame.total,
        "inputs": blame.inputs,
    }
