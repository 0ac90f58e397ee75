"""An eps of 1e-9 vanishes in float16, and the step dies though every op is right."""

import torch
from torch import Tensor, nn

from tests.cases.case import Case, Culprit, Inputs


class VarianceNorm(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * torch.rsqrt(inputs.var(dim=-1, keepdim=True) + 1e-9)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = VarianceNorm()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.norm(inputs)


def build() -> Inputs:
    torch.manual_seed(15)
    inputs = torch.randn(3, 8).half()
    inputs[1] = 1e-9  # a silent channel; underflows to 0
    return Net(), (inputs,), {}


CASE = Case(
    title="var + 1e-9 in float16: the eps vanishes in eager and gives 0 * inf = NaN",
    source="pytorch/pytorch#183605",
    kind="op",
    expect=(
        "FAIL at aten.rsqrt in 'norm', forward, where Inf is born; the reason names aten.mul, where"
        " it becomes NaN, and aten.add, where eps was lost. The compiled run agrees with float64"
    ),
    build=build,
    culprit=Culprit(ops=("aten.rsqrt.default",), module="norm", phase="forward"),
)
