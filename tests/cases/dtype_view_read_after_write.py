"""Inductor orders a read through a dtype view after a later write."""

import torch
from torch import Tensor, nn

from tests.cases.case import Case, Inputs


class Packed(nn.Module):
    """Takes a snapshot of an int64 table as int32 halves, then clears part of the table."""

    def forward(self, table: Tensor) -> Tensor:
        snapshot = table.view(torch.int32) * 3
        snapshot.add_(7)
        table[:, 1:4] = 100
        return snapshot.view(torch.int64)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.packed = Packed()

    def forward(self, table: Tensor) -> Tensor:
        return self.packed(table)


def build() -> Inputs:
    table = torch.arange(1, 31, dtype=torch.int64).reshape(5, 6)
    return Net(), (table,), {}


CASE = Case(
    title="Read through a dtype view is scheduled after a later write to the same input",
    source="pytorch/pytorch#198101",
    kind="compile",
    expect="FAIL, forward: output of 'packed' differs from eager (integers, compare exactly)",
    build=build,
)
