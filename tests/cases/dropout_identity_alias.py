"""Inductor drops a mutation made through the identity that inactive dropout returns."""

import torch
from torch import Tensor, nn

from tests.cases.case import Case, Inputs


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.3)

    def forward(self, hidden: Tensor) -> Tensor:
        same = self.dropout(hidden)  # in eval mode this is `hidden` itself
        same += 1.25
        return same * 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Residual()

    def forward(self, hidden: Tensor) -> Tensor:
        return self.block(hidden)


def build() -> Inputs:
    hidden = torch.linspace(-1, 1, 12).reshape(3, 4)
    return Net().eval(), (hidden,), {}


CASE = Case(
    title="In-place update through the identity return of inactive dropout is lost for the caller",
    source="pytorch/pytorch#195422",
    kind="compile",
    expect="FAIL, forward: argument 0 differs after the call though the output is equal",
    build=build,
)
