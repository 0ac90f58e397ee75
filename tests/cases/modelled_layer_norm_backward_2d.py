"""A backend's backward of layer norm that takes the wrong number of rows."""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from tests.cases.case import Case, Culprit, Inputs
from tests.faults import CallOriginal, Planted, WrongKernel, planted

OP = "aten.native_layer_norm_backward.default"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.linear = nn.Linear(8, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear(self.norm(inputs))


def build() -> Inputs:
    torch.manual_seed(51)
    return Net(), (torch.randn(4, 5, 8, requires_grad=True),), {}


def step(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    loss = model(*args, **kwargs).square().mean()
    loss.backward()
    return loss


def layer_norm_backward(
    grad_output: Tensor,
    inputs: Tensor,
    shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    bias: Tensor,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute all three gradients; `rows` is the fault, right for two dimensions only."""
    del output_mask
    size = math.prod(shape)
    rows = inputs.shape[0]
    columns = inputs.numel() // rows
    grad_rows = grad_output.reshape(rows, columns)
    mean_of_row = mean.reshape(-1)[:rows, None]
    rstd_of_row = rstd.reshape(-1)[:rows, None]
    normalised = (inputs.reshape(rows, columns) - mean_of_row) * rstd_of_row
    grad_normalised = grad_rows * weight.reshape(-1).repeat(columns // size)
    centred = grad_normalised - grad_normalised.mean(1, keepdim=True)
    projected = normalised * (grad_normalised * normalised).mean(1, keepdim=True)
    grad_input = (centred - projected) * rstd_of_row
    grad_weight = (grad_rows * normalised).sum(0)[:size]
    grad_bias = grad_rows.sum(0)[:size]
    return (
        grad_input.reshape(inputs.shape),
        grad_weight.reshape(weight.shape),
        grad_bias.reshape(bias.shape),
    )


def config() -> AbstractContextManager[Planted]:
    """Plant the kernel for float32, the device's dtype; float64 stays right."""

    def make_wrong(original: CallOriginal) -> WrongKernel:
        def run(grad_output: Tensor, inputs: Tensor, *rest: Any) -> Any:
            kernel = layer_norm_backward if inputs.dtype == torch.float32 else original
            return kernel(grad_output, inputs, *rest)

        return run

    return planted(OP, make_wrong)


CASE = Case(
    title="A backend's layer_norm_backward takes rows = input.shape[0], wrong for rank 3 and more",
    source="flagos-ai/FlagGems#5392",
    kind="backward",
    expect=(
        "FAIL at aten.native_layer_norm_backward in 'norm', backward: gradients of weight, bias and"
        " input are wrong, the forward is right"
    ),
    build=build,
    step=step,
    config=config,
    culprit=Culprit(ops=(OP,), module="norm", phase="backward"),
    modelled=True,
)
