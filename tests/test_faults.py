"""Each planted fault changes the result of its op, and is gone after its block."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests import faults


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def gelu() -> Tensor:
    return functional.gelu(random(4, 6))


def layer_norm() -> Tensor:
    return functional.layer_norm(random(4, 6), (6,))


def softmax_of_transposed() -> Tensor:
    return random(6, 4).t().softmax(-1)


def sub() -> Tensor:
    return random(4, 6) - 0.5


def gelu_gradient() -> Tensor:
    inputs = random(4, 6).requires_grad_()
    functional.gelu(inputs).sum().backward()
    return inputs.grad


def relu_gradient() -> Tensor:
    inputs = random(4, 6).requires_grad_()
    functional.relu(inputs).sum().backward()
    return inputs.grad


def layer_norm_bias_gradient() -> Tensor:
    bias = torch.zeros(6, requires_grad=True)
    functional.layer_norm(random(4, 6), (6,), bias=bias).sum().backward()
    return bias.grad


def add_inplace() -> Tensor:
    return random(4, 6).add_(random(6), alpha=2)


def mul_inplace() -> Tensor:
    return random(4, 6).mul_(2.0)


def foreach_add() -> Tensor:
    targets = [random(3), random(3)]
    torch._foreach_add_(targets, [random(3), random(3)], alpha=2)
    return torch.cat(targets)


def foreach_add_scalar() -> Tensor:
    targets = [random(3), random(3)]
    torch._foreach_add_(targets, 1.0)
    return torch.cat(targets)


CASES = [
    (faults.gelu_off_by, gelu),
    (faults.layer_norm_with_eps, layer_norm),
    (faults.softmax_ignoring_strides, softmax_of_transposed),
    (faults.softmax_with_last_column_zero, softmax_of_transposed),
    (faults.sub_off_by, sub),
    (faults.gelu_backward_off_by, gelu_gradient),
    (faults.threshold_backward_with_closed_mask, relu_gradient),
    (faults.layer_norm_backward_without_last_row, layer_norm_bias_gradient),
    (faults.add_inplace_off_by, add_inplace),
    (faults.mul_inplace_off_by, mul_inplace),
    (faults.foreach_add_without_last_tensor, foreach_add),
    (faults.foreach_add_scalar_off_by, foreach_add_scalar),
]


@pytest.mark.parametrize(("fault", "compute"), CASES, ids=lambda item: item.__name__)
def test_fault_changes_the_result_and_is_undone(fault, compute) -> None:
    right = compute()
    with fault() as planted:
        wrong = compute()
    assert planted.calls > 0
    assert wrong.shape == right.shape
    assert wrong.dtype == right.dtype
    assert not torch.allclose(wrong, right, rtol=1e-5, atol=1e-6)
    assert torch.equal(compute(), right)


def test_fault_is_undone_after_an_exception() -> None:
    right = gelu()
    with pytest.raises(KeyError), faults.gelu_off_by():
        raise KeyError
    assert torch.equal(gelu(), right)


def test_layer_norm_fault_spares_float64() -> None:
    inputs = random(4, 6).double()
    right = functional.layer_norm(inputs, (6,))
    with faults.layer_norm_with_eps():
        assert torch.equal(functional.layer_norm(inputs, (6,)), right)


def test_softmax_fault_spares_contiguous_input() -> None:
    inputs = random(4, 6)
    right = inputs.softmax(-1)
    with faults.softmax_ignoring_strides():
        assert torch.equal(inputs.softmax(-1), right)


def test_inplace_faults_spare_integers() -> None:
    with faults.add_inplace_off_by():
        assert torch.zeros((), dtype=torch.int64).add_(1).item() == 1
    with faults.mul_inplace_off_by():
        assert torch.ones((), dtype=torch.int64).mul_(3).item() == 3
