"""What does checking a training step cost?

Runs forward and backward of a model under several arms, in interleaved rounds, and prints for each
arm the ratio to the plain steps right before and after it. Stored numbers of another machine or
another run mean nothing: compare within one run only. See the README beside this file.

    OMP_NUM_THREADS=1 python -m benchmarks.bench_ops --models gpt2,resnet18 --rounds 5
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import nn

from benchmarks.measuring import Ratios, Spread, timed, timed_between
from benchmarks.wrapper_baseline import WrapperMode
from tests import models
from tests.models import Workload
from tests.step_equality import EmptyMode, capture, differences

MODELS: dict[str, Callable[[], Workload]] = {
    "gpt2": partial(
        models.gpt2, width=256, layers=4, heads=4, vocabulary=1024, length=128, batch_size=4
    ),
    "resnet18": partial(models.resnet18, image_size=64, batch_size=8),
    "mlp": partial(models.mlp, width=256, layers=4, batch_size=512),
    "wide": partial(models.mlp, width=480, layers=6, batch_size=512),
    "minilm": partial(models.minilm, batch_size=4, length=64, dropout=0.0),
}

Arm = Callable[[nn.Module], AbstractContextManager[Any]]


def _check(model: nn.Module, *, log_dir: Path, **options: Any) -> Any:
    import opcheck

    return opcheck.check(model, log_dir=log_dir, quiet=True, **options)


def _not_entered(model: nn.Module, *, log_dir: Path) -> AbstractContextManager[Any]:
    return nullcontext(_check(model, log_dir=log_dir))


class UsedUp:
    """One session a model, entered again for every step, with nothing left that it would check."""

    settling_steps = 3
    """One is checked, in one nothing is left, and from the third on the session has left."""

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._sessions: dict[int, tuple[nn.Module, Any]] = {}

    def __call__(self, model: nn.Module) -> AbstractContextManager[Any]:
        known = self._sessions.get(id(model))
        if known is None:
            known = self._sessions[id(model)] = (
                model,
                _check(model, max_checks=1, log_dir=self._log_dir),
            )
        return known[1]  # type: ignore[no-any-return]


def make_arms(log_dir: Path) -> dict[str, Arm]:
    """Name every way to run a step; each is entered afresh for every step."""
    return {
        "plain": lambda model: nullcontext(),
        "empty_mode": lambda model: EmptyMode(),
        "max_checks=0": partial(_check, max_checks=0, log_dir=log_dir),
        "live": partial(_check, max_checks=10, log_dir=log_dir),
        "used_up": UsedUp(log_dir),
        "not_entered": partial(_not_entered, log_dir=log_dir),
        "num_steps=0": partial(_check, num_steps=0, log_dir=log_dir),
        "blame": partial(_check, blame=True, log_dir=log_dir),
        "every_call": partial(_check, max_checks=None, log_dir=log_dir),
        "wrapper_first_10": lambda model: WrapperMode(10),
        "wrapper_every_call": lambda model: WrapperMode(None),
    }


@dataclass(frozen=True)
class Target:
    """An upper limit for one arm, as a multiple of another arm of the same run."""

    model: str | None
    """None: every model."""
    arm: str
    floor: str
    limit: float

    def applies_to(self, model: str) -> bool:
        return self.model is None or self.model == model

    @property
    def text(self) -> str:
        return f"at most {self.limit:.2f} x {self.floor}"

    def ratio(self, results: Mapping[str, Measured]) -> float | None:
        """CPU time of the arm as a multiple of its floor's; None where one did not run."""
        arm, floor = results.get(self.arm), results.get(self.floor)
        if arm is None or floor is None or not arm.cpu or not floor.cpu:
            return None
        return statistics.median(arm.cpu) / statistics.median(floor.cpu)


TARGETS = (
    Target(model=None, arm="max_checks=0", floor="empty_mode", limit=1.15),
    Target(model="gpt2", arm="every_call", floor="wrapper_first_10", limit=0.40),
    Target(model="resnet18", arm="every_call", floor="wrapper_first_10", limit=1.0),
    Target(model=None, arm="used_up", floor="plain", limit=1.03),
    Target(model=None, arm="not_entered", floor="plain", limit=1.03),
    Target(model=None, arm="num_steps=0", floor="plain", limit=1.03),
    # smaller steps have no call beyond the budget: there the two are the same
    Target(model="gpt2", arm="live", floor="every_call", limit=1.0),
    Target(model="resnet18", arm="live", floor="every_call", limit=1.0),
)


@dataclass
class Measured(Ratios):
    """Ratios to the plain step, one a round."""

    changes: list[str] = field(default_factory=list)
    """What the step left behind otherwise than under an empty mode."""
    error: str = ""


def _changes(build: Callable[[], Workload], arm: Arm) -> list[str]:
    """List where the arm's step is not bit for bit the step under an empty mode."""
    states = []
    for context in (lambda model: EmptyMode(), arm):
        workload = build()
        torch.manual_seed(7)
        with context(workload.model):
            loss = workload.step()
        states.append(capture(workload, loss))
    return differences(*states)


def _warm_up(build: Callable[[], Workload], arms: dict[str, Arm]) -> dict[str, Measured]:
    """Run every arm once, so that nobody pays for first calls, and compare its step."""
    results = {}
    for name, arm in arms.items():
        result = results[name] = Measured()
        try:
            result.changes = [] if name == "plain" else _changes(build, arm)
        except Exception as error:  # noqa: BLE001 - one broken arm must not hide the others
            result.error = f"{type(error).__name__}: {error}"[:100]
    return results


def measure(build: Callable[[], Workload], arms: dict[str, Arm], rounds: int) -> dict[str, Any]:
    """Time every arm in every round, each between two plain steps."""
    results = _warm_up(build, arms)
    workload = build()
    workload.step()

    def run(arm: Arm) -> None:
        with arm(workload.model):
            workload.step()

    for name, arm in arms.items():
        for _ in range(0 if results[name].error else getattr(arm, "settling_steps", 0)):
            run(arm)
    for _ in range(rounds):
        for name, arm in arms.items():
            result = results[name]
            if result.error:
                continue
            timed_between(result, workload.step, partial(run, arm))
    return results


def print_table(model: str, results: dict[str, Measured], num_ops: int, plain_ms: float) -> None:
    """Print one line an arm: median and range of its ratios to the plain step."""
    print(f"\n{model}: {num_ops} ops a step, plain step {plain_ms:.1f} ms")
    print(f"  {'arm':<20} {'CPU clock':^24} {'wall clock':^24}  step unchanged")
    for name, result in results.items():
        if result.error:
            print(f"  {name:<20} {result.error}")
            continue
        unchanged = f"NO: {result.changes[0]}" if result.changes else "yes"
        clocks = f"{Spread.of(result.cpu).text()} {Spread.of(result.wall).text()}"
        print(f"  {name:<20} {clocks}  {unchanged}")


def judge(model: str, results: dict[str, Measured]) -> list[tuple[bool | None, str]]:
    """Hold the results against the targets; None where an arm did not run."""
    verdicts: list[tuple[bool | None, str]] = []
    for target in TARGETS:
        if not target.applies_to(model):
            continue
        wanted, ratio = f"{model}: {target.arm} {target.text}", target.ratio(results)
        if ratio is None:
            verdicts.append((None, f"{wanted}: not measured"))
        else:
            verdicts.append((ratio <= target.limit, f"{wanted}: {ratio:.2f}"))
    return verdicts


def count_ops(workload: Workload) -> int:
    """Count the dispatched ops of one step."""
    with EmptyMode() as mode:
        workload.step()
    return len(mode.ops)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", default="gpt2,resnet18", help=", ".join(MODELS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--arms", default=None, help="all by default; plain is always measured")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return 1 when a target is missed."""
    options = parse_arguments(arguments)
    torch.set_num_threads(options.threads)
    verdicts = []
    with tempfile.TemporaryDirectory() as log_dir:
        arms = make_arms(Path(log_dir))
        if options.arms:
            chosen = ["plain", *(name for name in options.arms.split(",") if name != "plain")]
            arms = {name: arms[name] for name in chosen}
        for name in options.models.split(","):
            build = MODELS[name]
            results = measure(build, arms, options.rounds)
            workload = build()
            num_ops = count_ops(workload)
            plain_ms = 1e3 * statistics.median(timed(workload.step)[0] for _ in range(5))
            print_table(name, results, num_ops, plain_ms)
            verdicts += judge(name, results)
    print("\ntargets (CPU clock)")
    for held, line in verdicts:
        print(f"  {'-' if held is None else 'held' if held else 'MISSED':<7} {line}")
    return int(any(held is False for held, _ in verdicts))


if __name__ == "__main__":
    sys.exit(main())
