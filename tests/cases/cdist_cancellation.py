"""cdist takes a formula that cancels for points far from the origin."""

import torch
from torch import Tensor, nn

from tests.cases.case import Case, Culprit, Inputs


class Distance(nn.Module):
    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return torch.cdist(first, second)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.distance = Distance()

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return self.distance(first, second)


def build() -> Inputs:
    torch.manual_seed(13)
    origin_m = torch.tensor([512000.0, 5403000.0])  # map coordinates in metres
    first = (origin_m + torch.randint(0, 100, (32, 2))).float()
    second = (origin_m + torch.randint(0, 100, (40, 2))).float()
    return Net(), (first, second), {}


CASE = Case(
    title="cdist of more than 25 points uses the matrix product formula and loses distances",
    source="pytorch/pytorch#42479",
    kind="op",
    expect=(
        "FAIL at aten._cdist_forward or aten._euclidean_dist in 'distance', forward: distances of"
        " 5 to 150 come out 0 or far off; the formula cancels, the input is well conditioned"
    ),
    build=build,
    culprit=Culprit(
        ops=("aten._cdist_forward.default", "aten._euclidean_dist.default"),
        module="distance",
        phase="forward",
    ),
)
