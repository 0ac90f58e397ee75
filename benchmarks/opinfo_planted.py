"""Of every way to be wrong that `opcheck selftest` knows, what is found on the samples of OpInfo?

Each sample runs once under `opcheck.check(selftest=True)`: the results of every checked call are
spoiled, one fault at a time, and judged again by the same rule and reference. The table says by
dtype, kind of fault and criterion what share is found.

    OMP_NUM_THREADS=1 python -m benchmarks.opinfo_planted --dtypes float32,bfloat16,float16
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch

import opcheck
from benchmarks.opinfo_sweep import cases_of, op_infos
from opcheck.planting import FAULTS
from opcheck.selftest import Missed, SelfTest

__all__ = ["GROSS_TARGET", "TARGETS", "Tally", "measure"]

TARGETS = {"float32": 0.99, "float16": 0.88, "bfloat16": 0.82}
"""Share of all planted faults that must be found at defaults."""
GROSS_TARGET = 0.98


@dataclass
class Tally:
    """What was planted in one dtype under one criterion."""

    planted: Counter[str] = field(default_factory=Counter)
    found: Counter[str] = field(default_factory=Counter)
    missed: list[Missed] = field(default_factory=list)
    gross: int = 0
    gross_found: int = 0
    errors: list[str] = field(default_factory=list)
    ops: set[str] = field(default_factory=set)

    def add(self, result: SelfTest) -> None:
        """One session more."""
        for (op, _, kind), count in result.planted.items():
            self.planted[kind] += count
            self.ops.add(op)
        for (_, _, kind), count in result.found.items():
            self.found[kind] += count
        self.missed += result.missed
        self.gross += result.gross
        self.gross_found += result.gross_found
        self.errors += result.errors

    @property
    def share(self) -> float:
        """Found, of all."""
        return self.found.total() / max(self.planted.total(), 1)

    @property
    def gross_share(self) -> float:
        """Found, of the gross ones."""
        return self.gross_found / max(self.gross, 1)


def measure(
    dtype: torch.dtype,
    *,
    ops: tuple[str, ...] = ("*",),
    limit: int | None = None,
    criterion: str | None = None,
    backward: bool = True,
    log_dir: Path,
) -> Tally:
    """Plant into every case of the matching OpInfo entries."""
    tally = Tally()
    for info in op_infos(ops):
        if dtype not in info.supported_dtypes("cpu"):
            continue
        session = opcheck.check(log_dir=log_dir, quiet=True, selftest=True, criterion=criterion)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for case in cases_of(info, dtype, limit=limit, backward=backward):
                # what a sample raises is its own affair: some are made to
                with contextlib.suppress(Exception), session:
                    case.call()
        tally.add(session.selftest())
    return tally


def _print(name: str, criterion: str, tally: Tally, *, details: bool) -> None:
    print(
        f"{name}, {criterion}: {tally.share:.1%} of {tally.planted.total():,} faults in"
        f" {len(tally.ops)} overloads found; gross {tally.gross_share:.1%} of {tally.gross:,};"
        f" {len(tally.errors)} could not be judged"
    )
    for fault in FAULTS:
        if tally.planted[fault.kind]:
            share = tally.found[fault.kind] / tally.planted[fault.kind]
            print(f"    {fault.kind:<28} {share:7.1%} of {tally.planted[fault.kind]:6,}")
    if not details:
        return
    by_op = Counter((item.op, item.kind) for item in tally.missed if item.gross)
    for (op, kind), count in by_op.most_common():
        print(f"    gross and missed: {op}, {kind} ({count})")
    for error in tally.errors[:5]:
        print("    " + error.replace("\n", "\n    "))


def main() -> int:
    """Plant, print, compare with the targets."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.opinfo_planted")
    parser.add_argument("--dtypes", default="float32,bfloat16,float16")
    parser.add_argument("--ops", default="*", metavar="GLOB[,GLOB]")
    parser.add_argument("--limit-samples", type=int, default=None, metavar="N")
    parser.add_argument("--criteria", default="calibrated,allclose")
    parser.add_argument("--details", action="store_true", help="list gross faults that were missed")
    options = parser.parse_args()
    missed_targets = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in options.dtypes.split(","):
            for criterion in options.criteria.split(","):
                tally = measure(
                    getattr(torch, name),
                    ops=tuple(options.ops.split(",")),
                    limit=options.limit_samples,
                    criterion=criterion,
                    log_dir=Path(folder),
                )
                _print(name, criterion, tally, details=options.details)
                if criterion == "calibrated":
                    missed_targets += tally.share < TARGETS.get(name, 0.0)
                    missed_targets += tally.gross_share < GROSS_TARGET
    print(f"targets missed: {missed_targets}")
    return 1 if missed_targets else 0


if __name__ == "__main__":
    sys.exit(main())
