"""Inductor's gradients of a where over a convolution and its max-pool are wrong."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.cases.case import Case, Inputs


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, images: Tensor, keep: Tensor) -> Tensor:
        features = self.conv(images)
        return torch.where(keep, features, functional.max_pool2d(features, 3, 1, 1))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = Head()

    def forward(self, images: Tensor, keep: Tensor) -> Tensor:
        return self.head(images, keep)


def build() -> Inputs:
    torch.manual_seed(11)
    model = Net()
    images = torch.randn(2, 3, 6, 7, requires_grad=True)
    keep = torch.rand(2, 4, 6, 7) > 0.5
    return model, (images, keep), {}


def step(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    loss = model(*args, **kwargs).sum()
    loss.backward()
    return loss


CASE = Case(
    title="Gradients of where(mask, conv, max_pool(conv)) are wrong when compiled",
    source="pytorch/pytorch#185509",
    kind="backward",
    expect=(
        "FAIL, backward: gradients of 'head.conv.weight', 'head.conv.bias' and the input differ;"
        " loss and forward are equal"
    ),
    build=build,
    step=step,
    min_threads=2,
)
