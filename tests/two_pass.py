"""A comparison of copies, and a look at what it must leave alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from modulecheck import CompareResult, PrecisionChecker
from tests.models import Workload
from tests.step_equality import capture, differences

Step = Callable[[nn.Module], Any]


def step_of(workload: Workload) -> Step:
    """A training step on whatever model it is given."""
    dtype = workload.autocast_dtype

    def run_step(model: nn.Module) -> Tensor:
        model.zero_grad()
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            loss = workload.loss_fn(model, workload.batch)
        loss.backward()
        return loss

    return run_step


def two_pass(
    workload: Workload,
    classes: Any,
    backend: Any = "aot_eager",
    *,
    step: Step | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    writes: bool = False,
    **options: Any,
) -> CompareResult:
    """Compare, and fail where anything of the user's is another than before.

    A step that `writes` to it cannot be undone without a count in the tensors' versions.
    """
    checker = PrecisionChecker(backend=backend, single_pass=False, **options)
    checker.wrap_by_policy(workload.model, classes)
    torch._dynamo.reset()
    torch.manual_seed(1234)
    before = capture(workload, None, optimizer)
    try:
        return checker.compare(step or step_of(workload), workload.model)
    finally:
        found = differences(before, capture(workload, None, optimizer))
        found = [line for line in found if not (writes and ": version " in line)]
        assert not found, "the comparison left behind:\n" + "\n".join(found)
