"""Every fault is named in the module and phase that made the call."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import opcheck
from tests.faults import gelu_backward_off_by, gelu_off_by, planted

X = torch.linspace(-2, 2, 32).reshape(4, 8)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.act = nn.Linear(8, 8), nn.GELU()

    def forward(self, x):
        return self.act(self.linear(x))


def blocks(number=2):
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(number)])


def checked(model, tmp_path, **arguments):
    return opcheck.check(model, log_dir=tmp_path, quiet=True, max_checks=None, **arguments)


def places(session):
    return [(record.module, record.phase) for record in session.failures]


def exp_off_by():
    def make_wrong(original):
        return lambda x: torch.lerp(torch.zeros_like(x), original(x), 1.01)

    return planted("aten.exp.default", make_wrong)


# ---- forward and backward ----


def test_a_shared_module_is_named_for_each_call(tmp_path):
    block = Block()
    net = nn.Sequential(block, nn.Tanh(), block)
    with gelu_backward_off_by(), checked(net, tmp_path) as session:
        net(X).sum().backward()
    assert places(session) == [("0.act", "backward")] * 2


class CheckpointedFunction(nn.Module):
    def __init__(self, *, use_reentrant):
        super().__init__()
        self.block, self.use_reentrant = Block(), use_reentrant

    def forward(self, x):
        return checkpoint(lambda y: self.block(y).exp(), x, use_reentrant=self.use_reentrant) * 2


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_recomputed_function_belongs_to_the_module_that_called_it(use_reentrant, tmp_path):
    net = nn.Sequential(nn.Linear(8, 8), CheckpointedFunction(use_reentrant=use_reentrant))
    with exp_off_by(), checked(net, tmp_path) as session:
        net(X).sum().backward()
    assert places(session) == [("1", "forward"), ("1", "recompute")]
    assert all("in <lambda>" in record.source for record in session.failures)


def test_backward_of_a_graph_from_an_earlier_step_keeps_its_module(tmp_path):
    """A GAN: the critic's step lies between the generator's forward and backward."""
    generator, critic = blocks(1), nn.Sequential(nn.Linear(8, 1))
    critic_step = torch.optim.SGD(critic.parameters(), lr=0.1)
    with gelu_backward_off_by(), checked(generator, tmp_path) as session:
        fake = generator(X)
        critic(fake.detach()).sum().backward()
        critic_step.step()
        critic(fake).sum().backward()
    assert places(session) == [("0.act", "backward")]
    assert session.failures[0].step == 1


def test_origins_stay_few(tmp_path, monkeypatch):
    monkeypatch.setattr("opcheck.modules._MANY_ORIGINS", 50)
    net = blocks()
    with checked(net, tmp_path) as session:
        for _ in range(100):
            net(X).sum().backward()
        tracker = session._tracker
        assert len(tracker._origins) + len(tracker._older_origins) < 150


# ---- names ----


def test_loss_modules_made_anew_share_a_name_and_are_let_go(tmp_path):
    net = blocks()
    with checked(net, tmp_path) as session:
        for _ in range(3):
            nn.MSELoss()(net(X), X)
    assert {record.module for record in session.records} >= {"MSELoss", "0.act", "1.act"}
    assert not any("#" in record.module for record in session.records)


def test_a_wrapper_has_the_name_of_what_it_wraps(tmp_path):
    net = blocks()
    compiled = torch.compile(net, backend="eager")
    with checked(net, tmp_path) as session:
        compiled(X)
    assert not any("OptimizedModule" in record.module for record in session.records)


def test_a_model_in_another_thread_neither_names_nor_ends_anything(tmp_path):
    def other():
        net = nn.Sequential(nn.Linear(8, 8))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            net(X).sum().backward()
            optimizer.step()

    net = blocks()
    with checked(None, tmp_path) as session:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        net(X)
    assert {record.step for record in session.records} == {0}
    assert "0.act" in {record.module for record in session.records}


# ---- optimizers ----


def foreach_lerp_wrong_in(number):
    def make_wrong(original):
        def lerp_(targets, others, weight):
            original(targets, others, weight)
            targets[number].add_(0.01)

        return lerp_

    return planted("aten._foreach_lerp_.Scalar", make_wrong)


@pytest.mark.parametrize(("number", "owner"), [(1, "0.linear"), (2, "1.linear")])
def test_the_owner_of_a_failing_tensor_in_a_list_is_named(number, owner, tmp_path):
    net = blocks()
    optimizer = torch.optim.AdamW(net.parameters(), foreach=True)
    with foreach_lerp_wrong_in(number), checked(net, tmp_path) as session:
        for _ in range(2):
            optimizer.zero_grad()
            net(X).sum().backward()
            optimizer.step()
    assert places(session) == [(owner, "optimizer")] * 2
    rows = [row for row in session.coverage.calls if row.failed]
    assert [(row.module, row.seen, row.failed) for row in rows] == [(owner, 2, 2)]
    assert sum(row.seen for row in session.coverage.calls) == session.coverage.seen


def test_state_that_the_step_itself_makes_has_an_owner(tmp_path):
    net = blocks()
    optimizer = torch.optim.AdamW(net.parameters(), foreach=False)
    with checked(net, tmp_path) as session:
        net(X).sum().backward()
        optimizer.step()
    owners = [r.module for r in session.records if r.op == "aten.sqrt.default"]
    assert owners == ["0.linear", "0.linear", "1.linear", "1.linear"]


def test_gradients_that_died_lend_their_owner_to_nobody(tmp_path):
    net = blocks()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=0.1, foreach=False)
    with checked(net, tmp_path) as session:
        for _ in range(5):
            optimizer.zero_grad(set_to_none=True)
            net(X).sum().backward()
            optimizer.step()
    owners = [r.module for r in session.records if r.op == "aten.add_.Tensor"]
    assert owners == ["0.linear", "0.linear", "1.linear", "1.linear"] * 5


def test_modules_run_by_a_closure_are_forward(tmp_path):
    net = blocks(1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def closure():
        loss = functional.gelu(net(X)).sum()
        loss.backward()
        return loss

    with gelu_off_by(), checked(net, tmp_path) as session:
        optimizer.step(closure)
    assert places(session) == [("0.act", "forward"), ("", "optimizer")]
