"""What the checker proves to have left alone, and how a change would be named."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import opcheck
from opcheck.certificate import certify


def make_step(*, random: bool = True) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5 if random else 0.0), nn.Linear(16, 4)
    )
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(8, 8)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, optimizer, step


def state_of(model: nn.Module) -> dict[str, Any]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_a_training_step_is_certified_and_has_run_once(tmp_path):
    model, optimizer, step = make_step()
    random_before = torch.get_rng_state()
    session = opcheck.check(model, log_dir=tmp_path, quiet=True)
    certificate = session.certify(step, optimizers=[optimizer])
    assert certificate.holds, str(certificate)
    assert certificate.runs == 2
    assert session.certificate is certificate
    compared = "\n".join(certificate.unchanged)
    kinds = (
        "parameters", "buffers", "gradients", "versions", "optimizer state",
        "random state", "train/eval mode", "global hooks", "results of the step",
    )  # fmt: skip
    assert [kind for kind in kinds if kind not in compared] == []
    after = state_of(model)
    twin, _, twin_step = make_step()
    torch.set_rng_state(random_before)
    twin_step()
    assert all(torch.equal(after[name], value) for name, value in twin.state_dict().items())
    assert session.coverage.checked > 0
    assert all(item.untyped_storage().resizable() for item in model.state_dict().values())


@pytest.mark.parametrize("what", ["buffer", "gradient", "random", "mode", "hook", "attribute"])
def test_a_context_that_changes_the_step_is_named(what):
    model, optimizer, step = make_step()

    @contextmanager
    def meddling():
        yield
        if what == "buffer":
            model[1].running_mean.add_(1.0)
        elif what == "gradient":
            model[0].weight.grad.mul_(1.5)
        elif what == "random":
            torch.rand(1)
        elif what == "mode":
            model[1].eval()
        elif what == "hook":
            model[0].register_forward_hook(lambda *_: None)
        else:
            model[0].bias.data = model[0].bias.data * 2

    certificate = certify(step, model, meddling, optimizers=[optimizer])
    assert not certificate.holds
    named = "\n".join(certificate.differences)
    expected = {
        "buffer": "buffers of 1.running_mean", "gradient": "gradients of 0.weight",
        "random": "random state of torch", "mode": "train/eval mode of 1",
        "hook": "hooks of 0", "attribute": "parameters of 0.bias",
    }[what]  # fmt: skip
    assert expected in named
    assert not certificate.unrepeatable


def test_a_step_that_does_not_repeat_itself_is_no_fault_of_the_checker(tmp_path):
    model, optimizer, step = make_step()
    calls = iter(range(100))

    def restless() -> torch.Tensor:
        return step() + next(calls)

    certificate = opcheck.check(model, log_dir=tmp_path, quiet=True).certify(
        restless, optimizers=[optimizer]
    )
    assert not certificate.holds
    assert certificate.unrepeatable == ("results of the step of 0",)
    assert not certificate.differences
    assert "does not repeat itself" in str(certificate)


def test_an_exception_in_the_step_puts_everything_back(tmp_path):
    model, optimizer, step = make_step()
    before, random_before = state_of(model), torch.get_rng_state()

    def broken() -> None:
        step()
        raise KeyError("the user's own")

    session = opcheck.check(model, log_dir=tmp_path, quiet=True)
    with pytest.raises(KeyError, match="the user's own"):
        session.certify(broken, optimizers=[optimizer])
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(random_before, torch.get_rng_state())
    assert not optimizer.state


def test_one_run_compares_what_surrounds_the_step(tmp_path):
    model, _, step = make_step()
    with opcheck.check(model, log_dir=tmp_path, quiet=True) as session:
        step()
    assert session.certificate.holds
    assert session.certificate.runs == 1
    assert any("dispatch modes" in item for item in session.certificate.unchanged)


def test_one_run_names_a_changed_mode(tmp_path):
    model, _, step = make_step()
    with opcheck.check(model, log_dir=tmp_path, quiet=True) as session:
        step()
        model.eval()
    assert not session.certificate.holds
    assert any("train/eval mode of 1" in item for item in session.certificate.differences)


def test_nothing_is_certified_before_a_run_or_without_a_model(tmp_path):
    session = opcheck.check(log_dir=tmp_path, quiet=True)
    assert not session.certificate.holds
    with pytest.raises(opcheck.ArgumentError, match="needs opcheck"):
        session.certify(lambda: None)


def test_a_result_with_a_strided_dimension_of_one_element_is_compared(tmp_path):
    model, optimizer, step = make_step()
    session = opcheck.check(model, log_dir=tmp_path, quiet=True)
    certificate = session.certify(lambda: step().expand(2).clone()[::2], optimizers=[optimizer])
    assert certificate.holds, str(certificate)
