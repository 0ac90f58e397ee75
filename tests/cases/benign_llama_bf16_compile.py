"""bfloat16 rounding through a few layers of a transformer."""

from typing import Any

import torch
from torch import nn

from tests import models
from tests.cases.case import Case, Inputs

INITIALIZER_RANGE = 0.15


def build() -> Inputs:
    workload = models.llama(width=64, length=10, seed=29)
    model = workload.model.eval()
    torch.manual_seed(29)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=INITIALIZER_RANGE)
    return model.bfloat16(), (), {"input_ids": workload.batch[0]}


def step(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with torch.no_grad():
        return model(*args, **kwargs)


CASE = Case(
    title="A bfloat16 transformer gives slightly other logits after torch.compile",
    source="huggingface/transformers#25155",
    kind="benign",
    expect="PASS: rounding; compiled is as near to float64 as eager. The output is a dataclass",
    build=build,
    step=step,
)
