"""Compiled dropout draws from another stream."""

import torch
from torch import Tensor, nn

from tests.cases.case import Case, Inputs


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.dropout = nn.Dropout(0.25)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.dropout(self.linear(inputs))


def build() -> Inputs:
    torch.manual_seed(25)
    return Net().train(), (torch.randn(64, 32),), {}


CASE = Case(
    title="Dropout with the same seed gives another mask when compiled",
    source="pytorch/pytorch#118735",
    kind="benign",
    expect="PASS: another stream by design; `fallback_random=True` makes both equal",
    build=build,
)
