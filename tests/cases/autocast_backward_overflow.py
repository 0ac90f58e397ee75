"""A compiled backward runs in float16 where eager uses float32."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.cases.case import Case, Inputs

LOSS_SCALE = 16384.0


class Float32Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.linear(hidden.float())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mix", torch.ones(6, 6))
        self.out = Float32Head()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.out(inputs @ self.mix)


def build() -> Inputs:
    torch.manual_seed(2)
    return Net(), (torch.full((1, 6), 1.5),), {}


def step(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    with torch.autocast("cpu", dtype=torch.float16):
        output = model(*args, **kwargs)
    loss = (output * LOSS_SCALE).sum()
    loss.backward()
    return loss


CASE = Case(
    title="Compiled backward runs in float16 where an inner region had autocast disabled",
    source="pytorch/pytorch#153044",
    kind="backward",
    expect="FAIL, backward: gradient of 'out.linear.weight' is Inf when compiled; loss is equal",
    build=build,
    step=step,
    has_float64_truth=False,
)
