"""NaN carries another sign bit when compiled."""

import torch
from torch import Tensor, nn

from tests.cases.case import Case, Inputs


class Net(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return torch.sqrt(inputs)


def build() -> Inputs:
    return Net(), (torch.linspace(-4, 4, 32),), {}


CASE = Case(
    title="sqrt of negative numbers: NaN carries another sign bit when compiled",
    source="pytorch/pytorch#189808",
    kind="benign",
    expect="PASS: NaN at the same places; its sign and payload are no part of the value",
    build=build,
)
