"""A GradScaler beside every fused optimizer: checked, step unchanged, and a fault is found."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import Tensor, nn

import opcheck
from opcheck.records import Verdict
from tests import models
from tests.faults import CallOriginal, planted
from tests.models import Workload
from tests.step_equality import assert_same_step

FUSED: dict[str, Any] = {
    "adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
}  # fmt: skip
STEPS = 3


class Scaled:
    """Steps with the loss scaled; the second overflows, so that its update is left out."""

    def __init__(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
        self.num_steps = 0

    def __call__(self, workload: Workload, optimizer: torch.optim.Optimizer | None) -> Tensor:
        assert optimizer is not None
        self.num_steps += 1
        workload.model.zero_grad()
        loss = workload.loss()
        scaled = self.scaler.scale(loss)
        (scaled * float("inf") if self.num_steps == 2 else scaled).backward()
        self.scaler.step(optimizer)
        self.scaler.update()
        return loss.detach()


def _step() -> Any:
    """A scaler for each run, which begins where the steps are counted anew.

    Found by the model itself: the id of a dead one may be that of the next.
    """
    runs: WeakKeyDictionary[nn.Module, Scaled] = WeakKeyDictionary()

    def step(workload: Workload, optimizer: torch.optim.Optimizer | None) -> Tensor:
        return runs.setdefault(workload.model, Scaled())(workload, optimizer)

    return step


@pytest.mark.parametrize("name", FUSED)
def test_scaled_step_passes_and_is_unchanged(name: str, tmp_path: Path) -> None:
    session = assert_same_step(
        models.mlp,
        lambda model: opcheck.check(model, log_dir=tmp_path, quiet=True, max_checks=None),
        make_optimizer=partial(FUSED[name], lr=0.01, fused=True), step=_step(), num_steps=STEPS,
    )  # fmt: skip
    assert session.verdict == Verdict.PASS, session.report()
    updates = [item for item in session.records if item.op.startswith(f"aten._fused_{name}_")]
    assert len(updates) == STEPS


@pytest.mark.parametrize("name", FUSED)
def test_wrong_unscaling_is_found(name: str, tmp_path: Path) -> None:
    def forgets_a_part(original: CallOriginal) -> Any:
        def update(*args: Any, grad_scale: Tensor, **kwargs: Any) -> Any:
            return original(*args, grad_scale=grad_scale * 1.01, **kwargs)

        return update

    workload, step = models.mlp(), Scaled()
    optimizer = FUSED[name](workload.model.parameters(), lr=0.01, fused=True)
    with (
        planted(f"aten._fused_{name}_.default", forgets_a_part),
        opcheck.check(workload.model, log_dir=tmp_path, quiet=True) as session,
    ):
        step(workload, optimizer)
    assert {item.op for item in session.failures} == {f"aten._fused_{name}_.default"}
