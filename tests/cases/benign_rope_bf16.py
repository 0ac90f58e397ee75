"""Rotary positions in bfloat16 differ by one rounding."""

import torch
from torch import Tensor, nn

from tests.cases.case import Case, Inputs


class Rope(nn.Module):
    def forward(self, query: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = query.shape[-1] // 2
        rotated = torch.cat((-query[..., half:], query[..., :half]), dim=-1)
        return query * cos + rotated * sin


def build() -> Inputs:
    torch.manual_seed(21)
    query, cos, sin = (torch.randn(2, 3, 9, 16).bfloat16() for _ in range(3))
    return Rope(), (query, cos, sin), {}


CASE = Case(
    title="RoPE in bfloat16: compiled differs from eager by one bfloat16 step",
    source="pytorch/pytorch#182225",
    kind="benign",
    expect="PASS: ordinary rounding; compiled keeps float32 inside the fused kernel",
    build=build,
)
