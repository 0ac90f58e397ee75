"""The first op with which a backend goes wrong, none where it rounds in its own way."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from modulecheck import dynamo
from modulecheck.bisecting import FirstBad, first_bad_node
from modulecheck.budget import Budget
from modulecheck.graph_capture import Capture, Given
from tests.compiled import DYNAMO_WARNS

pytestmark = [DYNAMO_WARNS, pytest.mark.usefixtures("fresh_dynamo")]


def cancelling(x: Tensor, weight: Tensor) -> Tensor:
    """What is rounded in front of the subtraction is most of what is left behind it."""
    wide = (x @ weight + 1e4) - 1e4
    return torch.sin(wide) * weight.sum()


def dropping(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.dropout(x @ weight, 0.5).sin()


def captured(dtype: torch.dtype = torch.float32, function: Any = cancelling) -> Given:
    torch.manual_seed(0)
    x, weight = torch.randn(8, 6, dtype=dtype), torch.randn(6, 6, dtype=dtype, requires_grad=True)
    capture = Capture()
    with dynamo.isolated():
        backend = capture.around(lambda graph, inputs: graph.forward)
        dynamo.compiled_alone(function, backend, dynamic=None)(x, weight)
    (given,) = capture.given
    return given


class Noisy(fx.Interpreter):
    """Every op is rounded once more; `sin` is off by a share."""

    def __init__(self, graph: fx.GraphModule, error: float) -> None:
        super().__init__(graph)
        self._error = error

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op in ("placeholder", "output") or not isinstance(result, Tensor):
            return result
        signs = torch.ones_like(result.detach()).flatten()
        signs[::2] = -1.0
        noise = torch.finfo(result.dtype).eps * signs.reshape(result.shape)
        return result * (1 + noise + (self._error if "sin" in str(n.target) else 0.0))


def noisy(error: float) -> Any:
    return lambda graph, inputs: Noisy(graph, error).run


def wider(graph: fx.GraphModule, inputs: Any) -> Any:
    """Computes in float32 what is given in bfloat16, and rounds once."""

    def run(*args: Tensor) -> list[Tensor]:
        return [item.bfloat16() for item in graph(*(item.float() for item in args))]

    return run


def found(
    backend: Any, phase: str, dtype: torch.dtype = torch.float32, function: Any = cancelling
) -> FirstBad | None:
    return first_bad_node(
        captured(dtype, function),
        backend,
        phases=[phase],
        ambient=contextlib.nullcontext,
        budget=Budget(compiles=60),
    )


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_backend_that_rounds_more_often_has_no_wrong_op(phase: str) -> None:
    assert found(noisy(0.0), phase) is None


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_backend_that_rounds_less_often_has_no_wrong_op(phase: str) -> None:
    assert found(wider, phase, torch.bfloat16) is None


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_wrong_op_of_a_noisy_backend_is_found(phase: str) -> None:
    bad = found(noisy(0.05), phase)
    assert bad is not None
    assert "sin" in str(bad.node.target)
    assert bad.phase == phase
    assert bad.compared.metrics.q > 1.0


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_random_numbers_are_drawn_again_for_the_backend(phase: str) -> None:
    assert found(noisy(0.0), phase, function=dropping) is None
    bad = found(noisy(0.05), phase, function=dropping)
    assert bad is not None
    assert "sin" in str(bad.node.target)
