"""The CPU kernel of layer norm squares float32 values of 1e20."""

import torch
from torch import Tensor, nn

from tests.cases.case import Case, Culprit, Inputs


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(48)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.norm(inputs)


def build() -> Inputs:
    torch.manual_seed(8)
    row_scale = torch.tensor([1.0, 1e6, 3e20])
    return Net(), (torch.randn(3, 48) * row_scale[:, None],), {}


CASE = Case(
    title="LayerNorm of float32 rows around 1e20 is NaN: the variance is kept in float32",
    source="pytorch/pytorch#162489",
    kind="op",
    expect="FAIL at aten.native_layer_norm in 'norm', forward: NaN where float64 is finite",
    build=build,
    culprit=Culprit(ops=("aten.native_layer_norm.default",), module="norm", phase="forward"),
)
