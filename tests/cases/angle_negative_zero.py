"""Inductor loses the sign of zero in a complex constant."""

import torch
from torch import Tensor, nn

from tests.cases.case import Case, Inputs


class Phase(nn.Module):
    def forward(self, signal: Tensor) -> Tensor:
        signal = signal.clone()
        signal[0] = complex(-0.0, 0.0)
        return torch.angle(signal)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.phase = Phase()

    def forward(self, signal: Tensor) -> Tensor:
        return self.phase(signal)


def build() -> Inputs:
    signal = torch.tensor([3 + 1j, 2 - 1j, -1 - 4j, 0.5 + 0.25j])
    return Net(), (signal,), {}


CASE = Case(
    title="Phase of complex(-0.0, 0.0) written inside the graph is 0 instead of pi when compiled",
    source="pytorch/pytorch#197586",
    kind="compile",
    expect="FAIL, forward: 'phase' (aten.angle on complex64) is 0 instead of pi in one element",
    build=build,
)
