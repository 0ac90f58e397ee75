"""The comparison of two steps sees what it is there to see."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from tests import models
from tests.step_equality import assert_same_step, empty_mode, no_mode, same_bits


@contextmanager
def drawing_a_number(model: nn.Module) -> Iterator[None]:
    torch.rand(1)
    yield


@contextmanager
def moving_one_weight_by_one_bit(model: nn.Module) -> Iterator[None]:
    yield
    with torch.no_grad():
        weight = next(model.parameters())
        weight.view(-1)[0] = torch.nextafter(weight.view(-1)[0], torch.tensor(9.0))


@contextmanager
def switching_to_eval(model: nn.Module) -> Iterator[None]:
    yield
    model.eval()


@contextmanager
def leaving_a_module_hook(model: nn.Module) -> Iterator[None]:
    model.register_forward_hook(lambda *_: None)
    yield


@contextmanager
def leaving_a_tensor_hook(model: nn.Module) -> Iterator[None]:
    next(model.parameters()).register_hook(lambda _: None)
    yield


@contextmanager
def leaving_an_attribute(model: nn.Module) -> Iterator[None]:
    yield
    model.checked = True


@contextmanager
def replacing_a_gradient(model: nn.Module) -> Iterator[None]:
    yield
    weight = next(parameter for parameter in model.parameters() if parameter.dim() == 2)
    weight.grad = weight.grad.t().contiguous().t()


CHANGES = [
    (drawing_a_number, "RNG state"),
    (moving_one_weight_by_one_bit, "values differ"),
    (switching_to_eval, "training of ''"),
    (leaving_a_module_hook, "_forward_hooks of ''"),
    (leaving_a_tensor_hook, "num_hooks"),
    (leaving_an_attribute, "attributes of ''"),
    (replacing_a_gradient, "strides"),
]


@pytest.mark.parametrize(
    ("context", "message"), CHANGES, ids=lambda item: getattr(item, "__name__", "")
)
def test_change_is_seen(context, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_same_step(models.mlp, context)


def test_global_hook_is_seen() -> None:
    handles = []

    @contextmanager
    def leaving_a_global_hook(model: nn.Module) -> Iterator[None]:
        handles.append(register_module_forward_hook(lambda *_: None))
        yield

    with pytest.raises(AssertionError, match="_global_forward_hooks"):
        assert_same_step(models.mlp, leaving_a_global_hook)
    handles[0].remove()


@pytest.mark.parametrize("context", [no_mode, empty_mode])
def test_doing_nothing_changes_nothing(context) -> None:
    make_optimizer = torch.optim.AdamW
    assert_same_step(models.transformer, context, make_optimizer=make_optimizer, num_steps=2)


def test_bits_of_nan_are_equal_and_zeros_have_a_sign() -> None:
    nan = torch.tensor([float("nan")])
    assert same_bits(nan, nan.clone())
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.float64))
