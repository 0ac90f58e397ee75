"""The models of the document's examples, and what their reports look like."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from modulecheck import CompareResult, PrecisionChecker

HEAD = [
    "module_name", "check_type", "tensor_index", "status", "max_abs_diff", "mean_abs_diff",
    "max_rel_diff", "shape", "note",
]  # fmt: skip
NUMBER = r"\d\.\d{3}e[+-]\d\d"
ROW = re.compile(
    rf"  (pass|FAIL|WARN)  (\S+) +\[(OK|!!)\] max_abs={NUMBER}  mean_abs={NUMBER}"
    rf"  max_rel={NUMBER}  shape=\(.*\)"
)
WIDE = "=" * 72
THIN = "  " + "-" * 68


class ToyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 16),
            nn.ReLU(),
            nn.Linear(16, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Qwen2Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, -1)
        return self.out(torch.softmax(query @ key.transpose(-2, -1), -1) @ value)


class Qwen2MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(torch.relu(self.up(x))))


class Qwen2Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = Qwen2Attention()
        self.mlp = Qwen2MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(x)
        return x + self.mlp(x)


class BlockModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.layers = nn.ModuleList(Qwen2Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x


def run_step(model: nn.Module) -> Tensor:
    model.zero_grad()
    loss = model(torch.ones(2, 3, 4)).square().mean()
    loss.backward()
    return loss


def shown(checker: PrecisionChecker, result: CompareResult, capsys: Any, **options: Any) -> str:
    capsys.readouterr()
    checker.report(result, **options)
    return str(capsys.readouterr().out)


def rows_of(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows[0] == HEAD
    assert {len(row) for row in rows} == {9}
    return rows[1:]


def names_in(text: str) -> set[str]:
    return {match[2] for match in map(ROW.fullmatch, text.splitlines()) if match}
