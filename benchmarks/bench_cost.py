"""What does checking cost? One table: step, memory, compile, drill-down, growth.

    OMP_NUM_THREADS=1 python -m benchmarks.bench_cost
    OMP_NUM_THREADS=1 python -m benchmarks.bench_cost --parts step,memory --json cost.json

Steps are multiples of the plain step right beside them. The exit status is 1 when a target is
missed or something grows faster than what is checked. See the README beside this file.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from benchmarks import bench_compile, cost_growth, cost_parts
from benchmarks.bench_ops import MODELS
from benchmarks.cost_table import Row, Table, rows_as_json

PARTS = ("step", "registrar", "memory", "compile", "drilldown", "growth")
COMPILED = ("mlp", "gpt2", "resnet18")
"""Models whose blocks `bench_compile` knows."""
TOOLS = ("none", "own", "msprobe", "none2", "own2", "msprobe2")
OVERHEAD_STEPS = 20


def rows_of(part: str, options: argparse.Namespace) -> Iterator[Row]:
    """The rows of one part, as they are measured."""
    models: list[str] = options.models.split(",")
    if part == "step":
        for name in models:
            yield from cost_parts.step_rows(name, options.rounds)
            yield from cost_parts.overhead_rows(name, 2 if options.short else OVERHEAD_STEPS)
    elif part == "registrar":
        yield from cost_parts.registrar_rows(
            options.rounds, 20 if options.short else cost_parts.CALLS
        )
    elif part == "memory":
        for name in [item for item in models if item in cost_parts.WRAPPED_MODELS] or models:
            arms = ("plain", "live") if options.short else cost_parts.MEMORY_ARMS
            yield from cost_parts.memory_rows(name, arms)
    elif part == "compile":
        tools = bench_compile.available(list(TOOLS))
        for name in [item for item in models if item in COMPILED]:
            yield from cost_parts.compile_rows(
                name, min(options.rounds, 3), tools=tools, with_memory=not options.short
            )
    elif part == "drilldown":
        faults = ("aot_eager",) if options.short else ("aot_eager", "inductor")
        yield from cost_parts.drilldown_rows(faults)
        yield from cost_parts.reproducer_rows()
    else:
        short = (cost_growth.SMALL_SIZES, 1)
        yield from cost_growth.growth_rows(*(short if options.short else (cost_growth.SIZES,)))


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, default=None, help="write the rows to this file")
    parser.add_argument(
        "--short", action="store_true", help="smallest sizes: shows that it runs, measures nothing"
    )
    options = parser.parse_args(arguments)
    for name, known in (("parts", PARTS), ("models", tuple(MODELS))):
        unknown = sorted(set(getattr(options, name).split(",")) - set(known))
        if unknown:
            parser.error(f"--{name}: unknown: {', '.join(unknown)}; known: {', '.join(known)}")
    if options.rounds < 1:
        parser.error(f"--rounds: expected at least 1, got {options.rounds}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return 1 when a target is missed."""
    options = parse_arguments(arguments)
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    table, start = Table(), time.perf_counter()
    table.head()
    for part in options.parts.split(","):
        for row in rows_of(part, options):
            table.add(row)
    missed = [row for row in table.rows if row.held is False]
    minutes = (time.perf_counter() - start) / 60
    print(f"\n{len(table.rows)} rows in {minutes:.1f} minutes; targets missed: {len(missed)}")
    for row in missed:
        print(f"  {row.text}")
    if options.json is not None:
        command = shlex.join(
            ["python", "-m", "benchmarks.bench_cost", *(arguments or sys.argv[1:])]
        )
        rows_as_json(table.rows, options.json, command=command)
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
