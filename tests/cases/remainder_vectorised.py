"""Inductor's vectorised remainder is wrong for infinite periods and large quotients."""

import math

import torch
from torch import Tensor, nn

from tests.cases.case import Case, Inputs


class Wrap(nn.Module):
    def forward(self, time: Tensor, period: Tensor) -> Tensor:
        return torch.remainder(time, period)


class Net(nn.Module):
    """Phase of a clock; an infinite period means that it is not periodic."""

    def __init__(self) -> None:
        super().__init__()
        self.wrap = Wrap()

    def forward(self, time: Tensor, period: Tensor) -> dict[str, Tensor]:
        return {"phase": self.wrap(time, period)}


def build() -> Inputs:
    time = torch.tensor([2.5, -2.5, 0.0, 3e19, 4294967296.0, 9.0, 1.0, 12.25]).repeat(4)
    period = torch.tensor([math.inf, -math.inf, math.inf, 7.0, 3.0, 0.9, 0.1, 5.0]).repeat(4)
    return Net(), (time, period), {}


CASE = Case(
    title="Compiled float remainder gives NaN for an infinite period and 0 for large quotients",
    source="pytorch/pytorch#198057",
    kind="compile",
    expect=(
        "FAIL, forward: 'wrap' (aten.remainder.Tensor) has NaN and wrong values in the compiled"
        " run only; eager agrees with float64"
    ),
    build=build,
)
