"""A kernel made wrong is found in the right module and phase, and nothing else is flagged."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opcheck import Verdict, check
from tests import faults, models
from tests.models import Workload

explicit_attention = partial(models.transformer, use_sdpa=False)
sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
foreach_sgd = partial(torch.optim.SGD, lr=0.1, foreach=True)
# a large eps, so that a wrong addition of it can be seen
foreach_adamw = partial(torch.optim.AdamW, lr=0.1, eps=0.1, foreach=True)


class Centred(nn.Module):
    """Subtracts the mean of the features."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden - hidden.mean(-1, keepdim=True)


def centred_mlp() -> Workload:
    """Build a small model with a subtraction in module '1' and nowhere else."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), Centred(), nn.Linear(16, 8))
    inputs = torch.randn(4, 8)

    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return model(batch[0]).square().mean()

    return Workload("centred_mlp", model, (inputs,), loss)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A fault, a step that meets it, and where that is."""

    fault: Callable[[], AbstractContextManager[faults.Planted]]
    workload: Callable[[], Workload]
    phase: str
    modules: frozenset[str] | None
    """Every module in which the op computes something wrong; None: of an optimizer's lists."""
    first: str | None = None
    """The module of the first divergence."""
    make_optimizer: Callable[[Any], torch.optim.Optimizer] | None = None
    num_steps: int = field(default=1)


def each_block(suffix: str) -> frozenset[str]:
    return frozenset({f"blocks.0.{suffix}", f"blocks.1.{suffix}"})


NORMS = each_block("norm1") | each_block("norm2") | {"norm"}

SCENARIOS = {
    "gelu": Scenario(
        fault=faults.gelu_off_by,
        workload=models.transformer,
        phase="forward",
        modules=each_block("mlp.act"),
        first="blocks.0.mlp.act",
    ),
    "layer_norm_eps": Scenario(
        fault=faults.layer_norm_with_eps,
        workload=models.transformer,
        phase="forward",
        modules=NORMS,
        first="blocks.0.norm1",
    ),
    "softmax_strides": Scenario(
        fault=faults.softmax_ignoring_strides,
        workload=explicit_attention,
        phase="forward",
        modules=each_block("attention"),
        first="blocks.0.attention",
    ),
    "softmax_last_column": Scenario(
        fault=faults.softmax_with_last_column_zero,
        workload=explicit_attention,
        phase="forward",
        modules=each_block("attention"),
        first="blocks.0.attention",
    ),
    "sub": Scenario(
        fault=faults.sub_off_by,
        workload=centred_mlp,
        phase="forward",
        modules=frozenset({"1"}),
        first="1",
    ),
    "gelu_backward": Scenario(
        fault=faults.gelu_backward_off_by,
        workload=models.transformer,
        phase="backward",
        modules=each_block("mlp.act"),
        first="blocks.1.mlp.act",
    ),
    "layer_norm_backward": Scenario(
        fault=faults.layer_norm_backward_without_last_row,
        workload=models.transformer,
        phase="backward",
        modules=NORMS,
        first="norm",
    ),
    "threshold_backward": Scenario(
        fault=faults.threshold_backward_with_closed_mask,
        workload=models.resnet,
        phase="backward",
        modules=frozenset({"stem.2", "layers.0.relu", "layers.1.relu"}),
        first="layers.1.relu",
    ),
    "add_": Scenario(
        fault=faults.add_inplace_off_by,
        workload=models.resnet,
        phase="forward",
        modules=frozenset({"layers.0", "layers.1"}),
        first="layers.0",
    ),
    "mul_": Scenario(
        fault=faults.mul_inplace_off_by,
        workload=models.mlp,
        phase="optimizer",
        modules=None,
        make_optimizer=sgd,
        num_steps=2,
    ),
    "foreach_add_list": Scenario(
        fault=faults.foreach_add_without_last_tensor,
        workload=models.mlp,
        phase="optimizer",
        modules=None,
        make_optimizer=foreach_sgd,
    ),
    "foreach_add_scalar": Scenario(
        fault=faults.foreach_add_scalar_off_by,
        workload=models.mlp,
        phase="optimizer",
        modules=None,
        make_optimizer=foreach_adamw,
    ),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_fault_is_found_where_it_is_and_nothing_else(name: str, tmp_path: Path) -> None:
    scenario = SCENARIOS[name]
    workload = scenario.workload()
    optimizer = None
    if scenario.make_optimizer is not None:
        optimizer = scenario.make_optimizer(workload.model.parameters())
    with (
        scenario.fault() as planted,
        check(workload.model, log_dir=tmp_path, quiet=True) as session,
    ):
        for _ in range(scenario.num_steps):
            workload.step(optimizer)
    assert planted.calls > 0
    assert session.verdict == Verdict.FAIL
    assert {record.op for record in session.failures} == {planted.op}
    assert {record.phase for record in session.failures} == {scenario.phase}
    if scenario.modules is not None:
        assert {record.module for record in session.failures} == scenario.modules
        assert session.failures[0].module == scenario.first
    assert session.coverage.errors == 0
    assert session.coverage.adds_up


@pytest.mark.parametrize("name", SCENARIOS)
def test_same_step_passes_without_the_fault(name: str, tmp_path: Path) -> None:
    scenario = SCENARIOS[name]
    workload = scenario.workload()
    optimizer = None
    if scenario.make_optimizer is not None:
        optimizer = scenario.make_optimizer(workload.model.parameters())
    with check(workload.model, log_dir=tmp_path, quiet=True) as session:
        for _ in range(scenario.num_steps):
            workload.step(optimizer)
    assert session.failures == []
    assert session.verdict == Verdict.PASS


def test_inplace_fault_in_an_optimizer_names_the_owner(tmp_path: Path) -> None:
    workload = models.mlp()
    optimizer = sgd(workload.model.parameters())
    owners = {
        name.rpartition(".")[0]
        for name, parameter in workload.model.named_parameters()
        if parameter.requires_grad
    }
    with (
        faults.mul_inplace_off_by(),
        check(workload.model, log_dir=tmp_path, max_checks=None, quiet=True) as session,
    ):
        workload.step(optimizer)
        workload.step(optimizer)
    assert {record.module for record in session.failures} == owners


@pytest.mark.parametrize("size", [16, 1_000_000])
@pytest.mark.parametrize("wrong", [False, True])
def test_a_small_tensor_is_judged_alike_beside_a_large_one_of_its_list(
    size: int, wrong: bool
) -> None:
    make_wrong = faults.spoiled(lambda small: small[3].mul_(1 + 2e-5 * wrong), result=1)
    both = [torch.linspace(1.0, 2.0, size), torch.linspace(1.0, 1.9, 16)]
    with (
        faults.planted("aten._foreach_mul.Scalar", make_wrong),
        check(quiet=True) as session,
    ):
        torch._foreach_mul(both, 3.7)
    assert session.verdict == (Verdict.FAIL if wrong else Verdict.PASS)


LATE_IMPORT = """
import sys
import torch
from tests import faults, models

with faults.gelu_off_by():
    import opcheck
    workload = models.transformer()
    with opcheck.check(workload.model, log_dir=sys.argv[1], quiet=True) as session:
        workload.step()
    print(session.verdict, session.failures[0].op, session.failures[0].reference, sep="|")
"""


@pytest.mark.slow
def test_fault_older_than_the_import_is_found(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LATE_IMPORT, str(tmp_path)],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    verdict, op, reference = done.stdout.strip().splitlines()[-1].split("|")
    assert (verdict, op) == ("FAIL", "aten.gelu.default")
    assert reference != "float64"
