"""The CPU kernel of fmod overflows in its vectorised part."""

import torch
from torch import Tensor, nn

from tests.cases.case import Case, Culprit, Inputs


class Wrap(nn.Module):
    def forward(self, dividend: Tensor, divisor: Tensor) -> Tensor:
        return torch.fmod(dividend, divisor)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wrap = Wrap()

    def forward(self, dividend: Tensor, divisor: Tensor) -> Tensor:
        return self.wrap(dividend, divisor)


def build() -> Inputs:
    dividend = torch.full((20,), 3e38)
    divisor = torch.full((20,), 0.25) * torch.tensor([1.0, -1.0]).repeat(10)
    return Net(), (dividend, divisor), {}


CASE = Case(
    title="Eager CPU fmod gives NaN when the quotient overflows, but only in the vectorised part",
    source="pytorch/pytorch#193753",
    kind="op",
    expect=(
        "FAIL at aten.fmod.Tensor in 'wrap', forward: 16 of 20 elements NaN, the last 4 (scalar"
        " tail) right; float64 is finite"
    ),
    build=build,
    culprit=Culprit(ops=("aten.fmod.Tensor",), module="wrap", phase="forward"),
)
