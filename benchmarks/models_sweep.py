"""Do whole models pass, and is their step left alone? Architectures by ways to run them.

Each step runs twice from the same seed: under an empty dispatch mode and under `opcheck.check`;
then compiled alone and compiled under `PrecisionChecker`. Wanted: PASS, nothing that differs bit
for bit, every call accounted for, every wrapped block compared.

    OMP_NUM_THREADS=1 python -m benchmarks.models_sweep
    OMP_NUM_THREADS=1 python -m benchmarks.models_sweep --models gpt2,t5 --ways train,bf16
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor, nn

import opcheck
from modulecheck import CompareResult
from tests import models
from tests.architectures import ARCHITECTURES, Architecture
from tests.compiled import checked_step, plain_step
from tests.models import Workload
from tests.step_equality import (
    OptimizerFactory,
    compare_steps,
    differences,
    evaluation,
    training_step,
)

__all__ = ["MODELS", "WAYS", "Outcome", "Subject", "measure"]

# ---- what is run, and how -----------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """A model, how it is built, and the blocks that are compiled."""

    kind: str
    build: Callable[..., Workload]
    blocks: Callable[[nn.Module], list[nn.Module]]
    can_checkpoint: bool = True


def _of_library(architecture: Architecture) -> Subject:
    return Subject(
        architecture.kind, architecture.build, architecture.blocks, architecture.can_checkpoint
    )


def _own(kind: str, build: Callable[..., Workload], block: str) -> Subject:
    def blocks(model: nn.Module) -> list[nn.Module]:
        return [item for item in model.modules() if type(item).__name__ == block]

    return Subject(kind, build, blocks, can_checkpoint=False)


MODELS: dict[str, Subject] = {
    **{name: _of_library(item) for name, item in ARCHITECTURES.items()},
    "minilm": _own("encoder, real weights", models.minilm, "BertLayer"),
    "resnet": _own("CNN, BatchNorm", models.resnet, "BasicBlock"),
    # compiled, it cannot be trained with this torch: AOTAutograd fails with an AssertionError
    "lstm": _own("RNN", models.lstm, "Linear"),
    "gru": _own("RNN", models.gru, "Recurrent"),
}


@dataclass(frozen=True)
class Way:
    """A way to run a step."""

    make_optimizer: OptimizerFactory | None = None
    autocast: torch.dtype | None = None
    checkpointing: bool = False
    train: bool = True


WAYS: dict[str, Way] = {
    "train": Way(partial(torch.optim.AdamW, foreach=True)),
    "fused": Way(partial(torch.optim.AdamW, fused=True)),
    "bf16": Way(partial(torch.optim.AdamW, foreach=True), autocast=torch.bfloat16),
    "checkpoint": Way(partial(torch.optim.AdamW, fused=True), checkpointing=True),
    "eval": Way(train=False),
    "eval-bf16": Way(train=False, autocast=torch.bfloat16),
}


@dataclass(frozen=True)
class Outcome:
    """What one model did in one way, under one of the two checkers."""

    model: str
    way: str
    checker: str
    verdict: str
    coverage: str
    differences: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        """PASS, and the step as without the checker."""
        return self.verdict == "PASS" and not self.differences and not self.failures


def measure(name: str, way: str, log_dir: Path) -> Iterator[Outcome]:
    """Run one model in one way under `opcheck.check`, then under `PrecisionChecker`."""
    subject, chosen = MODELS[name], WAYS[way]
    if chosen.checkpointing and not subject.can_checkpoint:
        return

    def build() -> Workload:
        options = {"checkpointing": True} if chosen.checkpointing else {}
        workload = subject.build(**options)
        return workload.with_autocast(chosen.autocast) if chosen.autocast else workload

    yield _by_op(name, way, build, log_dir)
    with torch._dynamo.config.patch(allow_rnn=True):  # by default Dynamo leaves them to eager
        yield _by_module(name, way, build)


def _by_op(name: str, way: str, build: Callable[[], Workload], log_dir: Path) -> Outcome:
    chosen = WAYS[way]
    changed, session = compare_steps(
        build,
        lambda model: opcheck.check(model, log_dir=log_dir, quiet=True),
        make_optimizer=chosen.make_optimizer,
        step=training_step if chosen.train else evaluation,
    )
    coverage = session.coverage
    failures = [
        f"{record.op} in {record.module or '<root>'}, {record.phase}: {record.reason}"
        for record in session.failures
    ]
    if not coverage.adds_up:
        failures.append("calls that are not accounted for")
    if coverage.errors:
        failures.append(f"{coverage.errors} checks crashed")
    return Outcome(
        name, way, "opcheck", str(session.verdict),
        f"{coverage.checked:,} of {coverage.seen:,} calls", changed, failures,
    )  # fmt: skip


def _by_module(name: str, way: str, build: Callable[[], Workload]) -> Outcome:
    chosen = WAYS[way]

    def step(workload: Workload) -> Tensor:
        if not chosen.train:
            return workload.evaluate()
        make = chosen.make_optimizer
        return workload.step(make(workload.model.parameters()) if make else None)

    workload = build()
    classes = tuple({type(item) for item in MODELS[name].blocks(workload.model)})
    expected = plain_step(workload, classes, "aot_eager", step)
    result, actual = checked_step(build(), classes, "aot_eager", step)
    compared = sum(diff.compared > 0 for diff in result.diffs)
    coverage = f"{compared} of {len(result.diffs)} blocks, {_tensors(result):,} tensors"
    failures = [
        f"{diff.name or '<root>'} {kind}[{place}] {item.name}: {item} {item.reason}"
        for diff in result.diffs
        for kind, place, item in diff.tensors()
        if str(item.judged) != "PASS"
    ]
    failures += [f"{diff.name}: nothing compared: {diff.note}" for diff in result.diffs
                 if not diff.compared]  # fmt: skip
    return Outcome(
        name, way, "PrecisionChecker", str(result.verdict), coverage,
        differences(expected, actual), failures,
    )  # fmt: skip


def _tensors(result: CompareResult) -> int:
    return sum(1 for diff in result.diffs for _ in diff.tensors())


# ---- for a person -------------------------------------------------------------------------------


def _line(outcome: Outcome) -> str:
    kind = MODELS[outcome.model].kind
    unchanged = f"{len(outcome.differences)} differ" if outcome.differences else "same bits"
    return (
        f"{outcome.model:<11} {kind:<22} {outcome.way:<10} {outcome.checker:<16}"
        f" {outcome.verdict:<12} {unchanged:<10} {outcome.coverage}"
    )


def _show(outcome: Outcome) -> None:
    print(_line(outcome), flush=True)
    for line in (*outcome.differences[:5], *outcome.failures[:5]):
        print(f"    {line[:300]}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each model, way and checker; 1 when one of them is not clean."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--ways", default=",".join(WAYS))
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.models.split(","):
            for way in options.ways.split(","):
                for outcome in measure(name, way, Path(folder)):
                    _show(outcome)
                    outcomes.append(outcome)
    _summary(outcomes)
    return 0 if outcomes and all(outcome.clean for outcome in outcomes) else 1


def _summary(outcomes: list[Any]) -> None:
    for checker in ("opcheck", "PrecisionChecker"):
        of_one = [outcome for outcome in outcomes if outcome.checker == checker]
        passed = sum(outcome.verdict == "PASS" for outcome in of_one)
        same = sum(not outcome.differences for outcome in of_one)
        names = {outcome.model for outcome in of_one}
        print(
            f"{checker}: {len(names)} models, {len(of_one)} steps; PASS {passed}; same bits {same}"
        )


if __name__ == "__main__":
    sys.exit(main())
