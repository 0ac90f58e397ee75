"""Gradients that only a part of a module is asked for, and outputs that the module goes on with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from modulecheck import PrecisionChecker
from opcheck.records import Verdict
from tests.compiled import DYNAMO_WARNS, MODES

pytestmark = DYNAMO_WARNS

X = torch.linspace(-1.0, 1.0, 32).reshape(4, 8)
BACKENDS = pytest.mark.parametrize("backend", ["eager", "aot_eager"])


class InTwoGraphs(nn.Module):
    """Gives what it goes on with, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        hidden = self.first(x)
        torch._dynamo.graph_break()
        return hidden, self.last(torch.tanh(hidden))


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.inner = nn.Linear(8, 8), InTwoGraphs()

    def forward(self, x: Any) -> Any:
        hidden, last = self.inner(self.before(x))
        return hidden * last


def whole(model: Any) -> Any:
    loss = model(X).square().mean()
    loss.backward()
    return loss


def of_the_last_part(model: Any) -> Any:
    loss = model(X).square().mean()
    loss.backward(inputs=list(model.inner.last.parameters()))
    return loss


def of_the_input(model: Any) -> Any:
    x = X.clone().requires_grad_()
    loss = model(x).square().mean()
    torch.autograd.grad(loss, x)
    return loss


def checked(step: Any, *, single_pass: bool, backend: Any) -> Any:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Outer()
    checker = PrecisionChecker(backend=backend, single_pass=single_pass)
    checker.wrap(model.inner)
    return checker.compare(step, model)


@MODES
@BACKENDS
@pytest.mark.parametrize("step", [whole, of_the_last_part, of_the_input])
def test_clean_module_passes(step: Any, backend: str, single_pass: bool) -> None:
    result = checked(step, single_pass=single_pass, backend=backend)
    assert result.verdict == Verdict.PASS, result.judgement


def test_what_was_asked_for_is_compared() -> None:
    result = checked(of_the_last_part, single_pass=True, backend="aot_eager")
    names = [item.name for item in result.diffs[0].param_grads]
    assert {"last.weight", "last.bias"} <= set(names)


def wrong_backward(place: int, change: Any) -> Any:
    """A compiler whose backward of the second graph is wrong in one gradient."""
    graphs: list[Any] = []

    def right(graph: Any, inputs: Any) -> Any:
        return make_boxed_func(graph.forward)

    def wrong(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)

        def run(*args: Any) -> Any:
            out = list(graph(*args))
            if graph is graphs[0]:
                out[place] = change(out[place])
            return out

        return make_boxed_func(run)

    return aot_autograd(fw_compiler=right, bw_compiler=wrong)


@MODES
@pytest.mark.parametrize(
    "change", [lambda grad: grad * 1.01, lambda grad: None], ids=["scaled", "none"]
)
@pytest.mark.parametrize("place", [0, 2])
def test_wrong_gradient_between_two_graphs_is_found(
    place: int, change: Any, single_pass: bool
) -> None:
    def scaled(grad: Any) -> Any:
        return None if grad is None else change(grad)

    backend = wrong_backward(place, scaled)
    result = checked(whole, single_pass=single_pass, backend=backend)
    assert result.suspects == [("inner", "backward")], result.judgement
