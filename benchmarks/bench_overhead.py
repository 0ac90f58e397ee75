"""Is `max_overhead` kept?

Trains a model, a plain step and a checked one in turn, for several values of `max_overhead`, and
prints what the checked steps took beside the plain ones. Exit status 1 when one is more than 20% of
its value above it.

    OMP_NUM_THREADS=1 python -m benchmarks.bench_overhead --models gpt2,resnet18 --steps 20

`--workers 0,1,2` asks instead how much sooner a step with every call checked is through with
references in threads beside it. Exit status 1 when records differ from those without.

    OMP_NUM_THREADS=1 python -m benchmarks.bench_overhead --workers 0,1,2 --models wide --steps 5

It also says how many cores threads of nothing but products get here: where two get no more than
one, no step is through sooner by workers, whatever they do.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import torch

import opcheck
from benchmarks.bench_ops import MODELS
from benchmarks.measuring import timed

TOLERANCE = 0.2


@dataclass(frozen=True)
class Measured:
    """Of one model and value."""

    wall: float
    """Time of the checked steps beyond that of the plain ones, as a share of the plain."""
    cpu: float
    own_account: float
    """What the session says."""
    num_checked: int
    num_seen: int
    num_left: int
    num_places: int
    num_rests: int


def measure(name: str, allowed: float, num_steps: int, log_dir: Path) -> Measured:
    """Train with `max_overhead=allowed`, every second step in the session."""
    torch.manual_seed(0)
    workload = MODELS[name]()
    optimizer = torch.optim.SGD(workload.model.parameters(), lr=1e-3, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        workload.step()
        optimizer.step()

    session = opcheck.check(workload.model, log_dir=log_dir, quiet=True, max_overhead=allowed)

    def checked_step() -> None:
        with session:
            step()

    step()
    with opcheck.check(workload.model, log_dir=log_dir, quiet=True, max_overhead=allowed):
        step()  # imports and the first look at every op are paid once a process
    times = [(timed(step), timed(checked_step)) for _ in range(num_steps)]
    plain, checked = zip(*times, strict=True)

    def beyond(clock: int) -> float:
        return sum(pair[clock] for pair in checked) / sum(pair[clock] for pair in plain) - 1

    coverage = session.coverage
    share = coverage.overhead
    if share is None:
        raise RuntimeError("the session kept no account")
    return Measured(
        wall=beyond(0),
        cpu=beyond(1),
        own_account=share.spent_seconds / share.own_seconds,
        num_checked=coverage.checked,
        num_seen=coverage.seen,
        num_left=share.num_left,
        num_places=share.num_places,
        num_rests=share.num_rests,
    )


@dataclass
class Beside:
    """Of one number of workers; seconds of each step."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    main_cpu: list[float] = field(default_factory=list)
    """Of the step's own thread."""
    records: list[str] = field(default_factory=list)


def measure_workers(
    name: str, workers: Sequence[int], num_steps: int, log_dir: Path
) -> dict[int | None, Beside]:
    """Run plain steps (None) and steps with every call checked in turn, a session a step."""
    workload = MODELS[name]()
    found: dict[int | None, Beside] = {number: Beside() for number in (None, *workers)}
    for number_of_step in range(num_steps + 1):
        for number, result in found.items():
            session = opcheck.check(
                workload.model, log_dir=log_dir, quiet=True, max_checks=None, workers=number or 0
            )
            torch.manual_seed(0)
            workload.model.zero_grad()
            main_cpu = time.thread_time()
            with nullcontext() if number is None else session:
                wall, cpu = timed(workload.step)
                begin = time.perf_counter(), time.process_time()
            if number_of_step:  # the first pays for what happens once
                result.wall.append(wall + time.perf_counter() - begin[0])
                result.cpu.append(cpu + time.process_time() - begin[1])
                result.main_cpu.append(time.thread_time() - main_cpu)
            result.records = [repr(replace(item, run_id="")) for item in session.records]
    return found


def print_workers(name: str, found: dict[int | None, Beside]) -> bool:
    """Print medians; True when records are the same for every number of workers."""
    plain = median(found[None].wall)
    checked = [result for number, result in found.items() if number is not None]
    same = all(result.records == checked[0].records for result in checked)
    for number, result in found.items():
        if number is None:
            print(f"  {name:<10} plain step {1e3 * plain:.0f} ms")
            continue
        gain = median(checked[0].wall) / median(result.wall)
        print(
            f"  {name:<10} {number:7} {1e3 * median(result.wall):9.0f} {gain:10.2f}"
            f" {1e3 * median(result.cpu):9.0f} {1e3 * median(result.main_cpu):12.0f}"
            f"   {'same' if same else 'DIFFERENT'}",
            flush=True,
        )
    return same


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", default="gpt2,resnet18", help=", ".join(MODELS))
    parser.add_argument("--values", default="0.25,0.5,1.0")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--workers", default="", help="numbers of workers to compare, 0,1,2")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return 1 when a bound is not kept."""
    options = parse_arguments(arguments)
    torch.set_num_threads(options.threads)
    models: list[str] = options.models.split(",")
    if options.workers:
        return compare_workers(models, [int(n) for n in options.workers.split(",")], options.steps)
    return compare_bounds(models, [float(v) for v in options.values.split(",")], options.steps)


def cores_for(num_threads: int) -> float:
    """CPU seconds a second that so many threads get, which need nothing of each other."""
    matrix = torch.randn(512, 512, dtype=torch.float64)

    def multiply() -> None:
        for _ in range(60):
            torch.mm(matrix, matrix)

    def all_of_them() -> None:
        threads = [threading.Thread(target=multiply) for _ in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    wall, cpu = timed(all_of_them)
    return cpu / wall


def compare_workers(models: Sequence[str], workers: Sequence[int], num_steps: int) -> int:
    """Print a line for each model and number of workers; 1 when records differ."""
    print(f"{num_steps} steps with every call checked, in turn with plain ones; ms, medians")
    print("  model      workers wall clock  times faster  cpu clock  step's thread  records")
    differ = 0
    for name in models:
        with tempfile.TemporaryDirectory() as log_dir:
            found = measure_workers(name, workers, num_steps, Path(log_dir))
        differ += not print_workers(name, found)
    shares = [f"{number}: {cores_for(number):.2f}" for number in (1, 1 + max(workers))]
    print(f"  cores that threads of nothing but products got, by their number: {', '.join(shares)}")
    return int(differ > 0)


def compare_bounds(models: Sequence[str], values: Sequence[float], num_steps: int) -> int:
    """Print a line for each model and bound; 1 when one is not kept."""
    missed = 0
    print(f"{num_steps} checked steps in turn with plain ones")
    print(
        "  model      allowed   cpu clock  wall clock  own account  checked        places left"
        "   left alone"
    )
    for name in models:
        for allowed in values:
            with tempfile.TemporaryDirectory() as log_dir:
                found = measure(name, allowed, num_steps, Path(log_dir))
            held = found.cpu <= allowed * (1 + TOLERANCE)
            missed += not held
            calls = f"{found.num_checked} of {found.num_seen}"
            places = f"{found.num_left} of {found.num_places}"
            print(
                f"  {name:<10} {allowed:7.2f} {found.cpu:11.3f} {found.wall:11.3f}"
                f" {found.own_account:12.3f}  {calls:<14} {places:<13} {found.num_rests:<10}"
                f"  {'held' if held else 'MISSED'}",
                flush=True,
            )
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
