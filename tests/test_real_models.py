"""Real models pass, and their step is the unchecked step bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from opcheck import Verdict, check
from tests import models
from tests.models import Workload
from tests.step_equality import assert_same_step, evaluation

adamw = torch.optim.AdamW
adamw_foreach = partial(torch.optim.AdamW, foreach=True)
adamw_fused = partial(torch.optim.AdamW, fused=True)
sgd_momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def bf16(build: Callable[[], Workload]) -> Callable[[], Workload]:
    return lambda: build().with_autocast(torch.bfloat16)


def checked(log_dir: Path) -> Callable[[nn.Module], AbstractContextManager[Any]]:
    return lambda model: check(model, log_dir=log_dir, quiet=True)


def assert_everything_passed(session: Any) -> None:
    assert session.failures == []
    assert session.verdict == Verdict.PASS
    assert session.coverage.checked > 0
    assert session.coverage.errors == 0
    assert session.coverage.adds_up


STEPS = {
    "gpt2": (models.gpt2, adamw_foreach),
    "gpt2-bf16": (bf16(models.gpt2), adamw_foreach),
    "gpt2-dropout": (partial(models.gpt2, dropout=0.1), adamw),
    "llama": (models.llama, adamw_fused),
    "llama-bf16": (bf16(models.llama), adamw_fused),
    "qwen2": (models.qwen2, sgd_momentum),
    "qwen2-bf16": (bf16(models.qwen2), sgd_momentum),
    "bert": (models.bert, adamw),
    "resnet": (models.resnet, sgd_momentum),
    "resnet-bf16": (bf16(models.resnet), sgd_momentum),
    "checkpointed": (models.checkpointed, adamw_foreach),
    "checkpointed-reentrant": (partial(models.checkpointed, use_reentrant=True), adamw_foreach),
    "lstm": (models.lstm, adamw),
    "gru": (models.gru, adamw),
    "transformer": (partial(models.transformer, dropout=0.1), adamw_fused),
    "transformer-softmax": (partial(models.transformer, use_sdpa=False), None),
    "mlp-bf16": (partial(models.mlp, dtype=torch.bfloat16), sgd_momentum),
}


@pytest.mark.parametrize("name", STEPS)
def test_training_step_passes_and_is_unchanged(name: str, tmp_path: Path) -> None:
    build, make_optimizer = STEPS[name]
    session = assert_same_step(build, checked(tmp_path), make_optimizer=make_optimizer)
    assert_everything_passed(session)


def test_several_steps_pass_and_are_unchanged(tmp_path: Path) -> None:
    session = assert_same_step(
        models.resnet, checked(tmp_path), make_optimizer=sgd_momentum, num_steps=3
    )
    assert_everything_passed(session)
    assert session.coverage.steps == 3


def test_every_call_checked_leaves_the_step_unchanged(tmp_path: Path) -> None:
    session = assert_same_step(
        partial(models.transformer, dropout=0.1),
        lambda model: check(model, log_dir=tmp_path, max_checks=None, quiet=True),
        make_optimizer=adamw_foreach,
    )
    assert_everything_passed(session)


def test_number_of_checks_does_not_change_what_is_seen(tmp_path: Path) -> None:
    seen = set()
    for max_checks in (0, 10, None):
        workload = models.transformer()
        with check(workload.model, log_dir=tmp_path, max_checks=max_checks, quiet=True) as session:
            workload.step()
        assert session.coverage.adds_up
        seen.add(session.coverage.seen)
    assert len(seen) == 1


RECOMPUTED = [partial(models.checkpointed, use_reentrant=reentrant) for reentrant in (False, True)]


@pytest.mark.parametrize("build", RECOMPUTED, ids=["non-reentrant", "reentrant"])
def test_checkpointed_blocks_are_recomputed_in_their_own_phase(build, tmp_path: Path) -> None:
    workload = build()
    with check(workload.model, log_dir=tmp_path, max_checks=None, quiet=True) as session:
        workload.step()
    recomputed = {record.module for record in session.records if record.phase == "recompute"}
    assert "blocks.0.mlp.act" in recomputed
    assert all(module.startswith("blocks.") for module in recomputed)


MINILM = {"float32": models.minilm, "bf16": bf16(models.minilm)}


@pytest.mark.parametrize("name", MINILM)
def test_minilm_forward_passes_and_is_unchanged(name: str, tmp_path: Path) -> None:
    session = assert_same_step(MINILM[name], checked(tmp_path), step=evaluation)
    assert_everything_passed(session)


@pytest.mark.slow
@pytest.mark.parametrize("name", MINILM)
def test_minilm_training_step_passes_and_is_unchanged(name: str, tmp_path: Path) -> None:
    session = assert_same_step(MINILM[name], checked(tmp_path), make_optimizer=adamw_foreach)
    assert_everything_passed(session)


@pytest.mark.slow
def test_resnet18_training_step_passes_and_is_unchanged(tmp_path: Path) -> None:
    build = partial(models.resnet18, batch_size=2)
    session = assert_same_step(build, checked(tmp_path), make_optimizer=sgd_momentum)
    assert_everything_passed(session)
