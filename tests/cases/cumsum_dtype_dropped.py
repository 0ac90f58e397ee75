"""Inductor returns int64 where `cumsum(dtype=...)` asked for bfloat16."""

import torch
from torch import Tensor, nn

from tests.cases.case import Case, Inputs


class SinePosition(nn.Module):
    """Row and column index maps of a full image mask."""

    def forward(self, features: Tensor) -> dict[str, Tensor]:
        batch_size, _, height, width = features.shape
        full = torch.ones((batch_size, height, width), dtype=torch.bool, device=features.device)
        return {
            "rows": full.cumsum(1, dtype=features.dtype),
            "columns": full.cumsum(2, dtype=features.dtype),
        }


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.position = SinePosition()

    def forward(self, features: Tensor) -> dict[str, Tensor]:
        return self.position(features)


def build() -> Inputs:
    torch.manual_seed(7)
    features = torch.randn(2, 3, 5, 4).bfloat16()
    return Net(), (features,), {}


CASE = Case(
    title="cumsum(dtype=...) over a constant mask loses its dtype when compiled",
    source="pytorch/pytorch#189518",
    kind="compile",
    expect="FAIL, forward: 'rows' of 'position' is int64 instead of bfloat16, values equal",
    build=build,
)
