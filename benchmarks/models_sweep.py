"""Do whole models pass, and is their step left alone? Architectures by ways to run them.

The steps of each run twice from the same seed: under an empty dispatch mode and under
`opcheck.check`; then compiled alone and compiled under `PrecisionChecker`. Wanted: PASS, nothing
that differs bit for bit, every call accounted for, every wrapped block compared.

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
from contextlib import AbstractContextManager, chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from loguru import logger
from torch import Tensor, nn

import opcheck
from modulecheck import CompareResult, PrecisionChecker, trees
from tests import models
from tests.architectures import ARCHITECTURES, Architecture
from tests.compiled import compile_in_place
from tests.models import Batch, Workload
from tests.step_equality import (
    OptimizerFactory,
    StepState,
    TensorState,
    capture,
    differences,
    empty_mode,
)

__all__ = ["CHECKERS", "MODELS", "WAYS", "Outcome", "Subject", "in_context", "measure"]

NUM_STEPS = 3
"""Of training: BatchNorm, the optimizer and the scaler carry something from one to the next."""
BACKEND = "aot_eager"

# ---- what is run, and how -----------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """A model, how it is built, and the blocks that are compiled."""

    kind: str
    build: Callable[..., Workload]
    blocks: Callable[[nn.Module], list[nn.Module]]
    can_checkpoint: bool = True
    static: bool = False
    ways: tuple[str, ...] = ()
    """Those that it is run in, where it is not all."""


def _of_library(architecture: Architecture) -> Subject:
    return Subject(
        architecture.kind, architecture.build, architecture.blocks, architecture.can_checkpoint,
        architecture.static,
    )  # fmt: skip


def _of_class(*names: str) -> Callable[[nn.Module], list[nn.Module]]:
    def blocks(model: nn.Module) -> list[nn.Module]:
        return [item for item in model.modules() if type(item).__name__ in names]

    return blocks


def _own(kind: str, build: Callable[..., Workload], block: str) -> Subject:
    return Subject(kind, build, _of_class(block), can_checkpoint=False)


MODELS: dict[str, Subject] = {
    **{name: _of_library(item) for name, item in ARCHITECTURES.items()},
    # its block checkpoints itself and breaks the graph in there, so that Dynamo leaves the first
    # block of the decoder to eager: here are the parts of the block, which it does compile
    "t5-parts": replace(
        _of_library(ARCHITECTURES["t5"]),
        ways=("checkpoint",),
        blocks=_of_class("T5LayerSelfAttention", "T5LayerCrossAttention", "T5LayerFF"),
    ),
    "minilm": _own("encoder, real weights", models.minilm, "BertLayer"),
    "resnet": _own("CNN, BatchNorm", models.resnet, "BasicBlock"),
    "unet": _own("diffusion", models.unet, "UNetBlock"),
    # compiled, it cannot be trained with this torch: AOTAutograd fails with an AssertionError
    # in float16 oneDNN has no primitive for it on many CPUs
    "lstm": replace(
        _own("RNN", models.lstm, "Linear"), ways=("train", "fused", "bf16", "eval", "eval-bf16")
    ),
    "gru": _own("RNN", models.gru, "Recurrent"),
}


@dataclass(frozen=True)
class Way:
    """A way to run a step."""

    make_optimizer: OptimizerFactory | None = None
    autocast: torch.dtype | None = None
    checkpointing: bool = False
    train: bool = True
    scaled: bool = False
    """The loss is scaled, as float16 needs it."""


_FOREACH = partial(torch.optim.AdamW, foreach=True)
_FUSED = partial(torch.optim.AdamW, fused=True)
WAYS: dict[str, Way] = {
    "train": Way(_FOREACH),
    "fused": Way(_FUSED),
    "bf16": Way(_FOREACH, autocast=torch.bfloat16),
    "f16": Way(_FUSED, autocast=torch.float16, scaled=True),
    "checkpoint": Way(_FUSED, checkpointing=True),
    "eval": Way(train=False),
    "eval-bf16": Way(train=False, autocast=torch.bfloat16),
}


def runs_in(name: str, way: str) -> bool:
    """False for what a model has no such way of."""
    subject = MODELS[name]
    if WAYS[way].checkpointing and not subject.can_checkpoint:
        return False
    return not subject.ways or way in subject.ways


# ---- the steps ----------------------------------------------------------------------------------


class Training:
    """A workload in steps, with everything that they give."""

    def __init__(self, name: str, way: Way) -> None:
        """Build it: the same for every call."""
        options = {"checkpointing": True} if way.checkpointing else {}
        built = MODELS[name].build(**options)
        self.workload = replace(built, loss_fn=self._keeping(built), autocast_dtype=way.autocast)
        self.model = built.model
        parameters = self.model.parameters()
        self.optimizer = way.make_optimizer(parameters) if way.make_optimizer else None
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0) if way.scaled else None
        self.num_steps, self._train = NUM_STEPS if way.train else 1, way.train
        self.given: list[Tensor] = []
        """Losses, and every tensor that the model returned."""

    def _keeping(self, built: Workload) -> models.LossFunction:
        def loss(model: nn.Module, batch: Batch) -> Tensor:
            def call(*args: Any, **kwargs: Any) -> Any:
                output = model(*args, **kwargs)
                self.given += [item.detach() for item in trees.tensors(output)]
                return output

            return built.loss_fn(call, batch)  # type: ignore[arg-type]

        return loss

    def step(self) -> Tensor:
        """Run one; the loss."""
        loss = self._step()
        self.given.append(loss)
        return loss

    def _step(self) -> Tensor:
        if not self._train:
            return self.workload.evaluate()
        if self.scaler is None or self.optimizer is None:
            return self.workload.step(self.optimizer)
        self.model.zero_grad()
        loss = self.workload.loss()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    def state(self) -> StepState:
        """All that a later step, or the user, could see."""
        found = capture(self.workload, self.given[-1] if self.given else None, self.optimizer)
        for place, tensor in enumerate(self.given):
            found.tensors[f"given {place}"] = TensorState.of(tensor)
        if self.scaler is not None:
            found.flags["scaler"] = self.scaler.state_dict()
        return found


def _seed() -> None:
    torch._dynamo.reset()
    torch.manual_seed(1234)
    np.random.seed(1234)  # noqa: NPY002 - the generator that SpecAugment draws from


@dataclass(frozen=True)
class Ends:
    """What was there after the steps, and after one more without any checker."""

    after: StepState
    later: StepState

    @classmethod
    def of(cls, training: Training) -> Ends:
        """Take them down; runs one more step."""
        after = training.state()
        training.step()
        return cls(after, training.state())

    def differences(self, checked: Ends) -> list[str]:
        """A line for each."""
        later = [f"in the next step: {line}" for line in differences(self.later, checked.later)]
        return differences(self.after, checked.after) + later


# ---- the checkers -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What one model did in one way, under one of the checkers."""

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


Entered = Callable[[nn.Module], AbstractContextManager[Any]]
Checked = Callable[[str, str], Outcome]


def in_context(name: str, way: str, enter: Entered) -> tuple[Ends, Any]:
    training = Training(name, WAYS[way])
    _seed()
    with enter(training.model) as session:
        for _ in range(training.num_steps):
            training.step()
    return Ends.of(training), session


def by_op(
    name: str, way: str, *, checker: str = "opcheck", enter: Entered | None = None
) -> Outcome:
    """Under `opcheck.check(model)` against an empty mode, by which ATen takes other formulas."""
    expected, _ = in_context(name, way, empty_mode)
    actual, session = in_context(name, way, enter or opcheck.check)
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
        name, way, checker, str(session.verdict),
        f"{coverage.checked:,} of {coverage.seen:,} calls", expected.differences(actual), failures,
    )  # fmt: skip


def _compiled_alone(name: str, way: str) -> Ends:
    training = Training(name, WAYS[way])
    _seed()
    blocks = MODELS[name].blocks(training.model)
    for block in blocks:
        compile_in_place(block, BACKEND)
    for _ in range(training.num_steps):
        training.step()
    for block in blocks:
        block.__dict__.pop("_compiled_call_impl")
    return Ends.of(training)


def by_module(name: str, way: str, *, checker: str = "PrecisionChecker") -> Outcome:
    """Under `PrecisionChecker` against the same blocks compiled."""
    with _compiling(MODELS[name]):
        expected = _compiled_alone(name, way)
        training = Training(name, WAYS[way])
        _seed()
        precision = _wrapped(name, training.model)
        precision.install(training.model)
        results = []
        for step in range(1, training.num_steps + 1):
            loss = training.step()
            results.append(precision.collect(loss, keep_installed=step < training.num_steps))
        actual = Ends.of(training)
    return _outcome(name, way, checker, results, expected.differences(actual))


def by_copies(name: str, way: str) -> Outcome:
    """Two-pass, which must leave the original as if it had not run."""
    with _compiling(MODELS[name]):
        training = Training(name, WAYS[way])
        _seed()
        before, workload = training.state(), training.workload

        def run_step(model: nn.Module) -> Tensor:
            return replace(workload, model=model).step()

        precision = _wrapped(name, training.model, single_pass=False)
        result = precision.compare(run_step, training.model)
        training.given.clear()
    return _outcome(name, way, "two-pass", [result], differences(before, training.state()))


def _compiling(subject: Subject) -> AbstractContextManager[Any]:
    """Recurrent networks too, which Dynamo leaves to eager by default."""
    patched: AbstractContextManager[Any] = torch._dynamo.config.patch(
        allow_rnn=True, automatic_dynamic_shapes=not subject.static
    )
    return patched


def _wrapped(name: str, model: nn.Module, **options: Any) -> PrecisionChecker:
    precision = PrecisionChecker(backend=BACKEND, **options)
    for block in MODELS[name].blocks(model):
        precision.wrap(block)
    return precision


def _outcome(
    name: str, way: str, checker: str, results: list[CompareResult], changed: list[str]
) -> Outcome:
    diffs = [diff for result in results for diff in result.diffs]
    compared = sum(diff.compared > 0 for diff in diffs)
    tensors = [(diff, item) for diff in diffs for item in diff.tensors()]
    failures = [
        f"{diff.name or '<root>'} {kind}[{place}] {item.name}: {item} {item.reason}"
        for diff, (kind, place, item) in tensors
        if str(item.judged) != "PASS"
    ]
    failures += [f"{diff.name}: nothing compared: {diff.note}" for diff in diffs
                 if not diff.compared]  # fmt: skip
    verdicts = [str(result.verdict) for result in results]
    worst = next((item for item in ("FAIL", "INCONCLUSIVE") if item in verdicts), "PASS")
    if set(verdicts) - {"FAIL", "INCONCLUSIVE", "PASS"}:
        worst = " ".join(sorted(set(verdicts)))
    return Outcome(
        name, way, checker, worst,
        f"{compared} of {len(diffs)} block steps, {len(tensors):,} tensors", changed, failures,
    )  # fmt: skip


CHECKERS: dict[str, Checked] = {
    "opcheck": by_op,
    "PrecisionChecker": by_module,
    "all calls": partial(by_op, checker="all calls", enter=partial(opcheck.check, max_checks=None)),
    "blame": partial(by_op, checker="blame", enter=partial(opcheck.check, blame=True)),
    "two-pass": by_copies,
}
MAIN = ("opcheck", "PrecisionChecker")
MORE_FOR = {
    "gpt2": "train", "t5": "train", "mixtral": "bf16", "mamba": "train", "clip": "train",
    "minilm": "f16", "resnet": "train", "unet": "bf16",
}  # fmt: skip
"""What the other checkers run."""


def measure(name: str, way: str, folder: Path, checkers: Sequence[str] = MAIN) -> Iterator[Outcome]:
    """Run one model in one way under each checker; logs go to the folder."""
    if not runs_in(name, way):
        return
    for checker in checkers:
        yield _outcome_of(name, way, folder, checker)


def _outcome_of(name: str, way: str, folder: Path, checker: str) -> Outcome:
    """Defaults and all: what a session prints and writes goes where nobody sees it."""
    try:
        with chdir(folder), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            return CHECKERS[checker](name, way)
    except Exception as error:  # noqa: BLE001 - of torch or of ours: it is shown, the rest goes on
        failures = [f"{type(error).__name__}: {error}"]
        return Outcome(name, way, checker, "ERROR", "nothing", [], failures)


# ---- for a person -------------------------------------------------------------------------------


def _show(outcome: Outcome) -> None:
    kind = MODELS[outcome.model].kind
    unchanged = f"{len(outcome.differences)} differ" if outcome.differences else "same bits"
    print(
        f"{outcome.model:<11} {kind:<22} {outcome.way:<10} {outcome.checker:<16}"
        f" {outcome.verdict:<12} {unchanged:<10} {outcome.coverage}",
        flush=True,
    )
    for line in (*outcome.differences[:5], *outcome.failures[:5]):
        print(f"    {line[:300]}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each model, way and checker; 1 when a step differs or one fails."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--checkers", default="", help="default: all, on the models they are for")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    logger.remove()  # sessions say their verdict
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.models.split(","):
            for way in options.ways.split(","):
                wanted = options.checkers.split(",") if options.checkers else _wanted(name, way)
                for outcome in measure(name, way, Path(folder), wanted):
                    _show(outcome)
                    outcomes.append(outcome)
    _summary(outcomes)
    wrong = [item for item in outcomes if item.differences or item.verdict in ("FAIL", "ERROR")]
    return 1 if wrong or not outcomes else 0


def _wanted(name: str, way: str) -> Sequence[str]:
    return tuple(CHECKERS) if MORE_FOR.get(name) == way else MAIN


def _summary(outcomes: list[Outcome]) -> None:
    for checker in CHECKERS:
        of_one = [outcome for outcome in outcomes if outcome.checker == checker]
        passed = sum(outcome.verdict == "PASS" for outcome in of_one)
        same = sum(not outcome.differences for outcome in of_one)
        names = {outcome.model for outcome in of_one}
        print(
            f"{checker}: {len(names)} models, {len(of_one)} ways; PASS {passed}; same bits {same}"
        )


if __name__ == "__main__":
    sys.exit(main())
