"""When every budget is used up the session leaves the dispatch path, and says so."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import opcheck
from opcheck import SkipReason, Verdict
from opcheck.switch import SWITCH
from tests.faults import gelu_off_by
from tests.step_equality import EmptyMode, active_modes

X = torch.linspace(-2, 2, 24).reshape(4, 6)


@pytest.fixture(autouse=True)
def no_registered_kernels(monkeypatch):
    """Other tests of the process may have registered some, and a session with them stays."""
    monkeypatch.setattr(SWITCH, "has_kernels", False)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 1))


class Training:
    """Steps of a small model; notes the modes that each forward runs under."""

    def __init__(self) -> None:
        self.net = model()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.modes: list[int] = []

    def step(self, net: nn.Module | None = None) -> None:
        self.optimizer.zero_grad()
        out = (net or self.net)(X)
        self.modes.append(len(active_modes()))
        out.square().mean().backward()
        self.optimizer.step()


def trained(tmp_path, steps=5, **arguments):
    training = Training()
    check = opcheck.check(training.net, log_dir=tmp_path, quiet=True, **arguments)
    with check as session:
        for _ in range(steps):
            training.step()
    return training, session


def test_used_up_it_leaves_at_the_end_of_a_step_and_says_where(tmp_path):
    training, session = trained(tmp_path, max_checks=1)
    assert training.modes == [1, 1, 0, 0, 0]
    coverage = session.coverage
    assert coverage.steps == 2
    assert coverage.counting_stopped_at == coverage.seen - 1
    assert coverage.adds_up
    assert session.verdict is Verdict.PASS
    head = "\n".join(session.report(width=200).splitlines()[:4])
    assert f"counting stopped after call {coverage.counting_stopped_at}" in head
    run = opcheck.load_run(session.log_path)
    assert run.coverage == coverage
    assert active_modes() == []
    assert session.certificate.holds


def test_the_last_check_of_a_signature_is_not_lost(tmp_path):
    training, session = trained(tmp_path, max_checks=3, steps=8)
    gelu = [record for record in session.records if record.op == "aten.gelu.default"]
    assert len(gelu) == 3
    assert training.modes[:3] == [1, 1, 1]
    assert training.modes[-1] == 0


def test_a_fault_of_the_last_checked_step_is_found(tmp_path):
    with gelu_off_by(1e-3):
        _, session = trained(tmp_path, max_checks=2)
    assert session.verdict is Verdict.FAIL
    assert len(session.failures) >= 2
    assert session.coverage.counting_stopped_at is not None


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_checks": 0},
        {"max_checks": None},
        {"max_checks": 1, "blame": True},
        {"max_checks": 1, "repeat": True},
        {"max_checks": 1, "selftest": True},
        {"max_checks": 1, "record": "all"},
        {"max_checks": 1, "start_step": 20},
        {"max_checks": 1, "include": "aten.nothing"},
    ],
    ids=str,
)
def test_what_has_to_see_every_call_stays(tmp_path, arguments):
    if "record" in arguments:
        arguments = {**arguments, "record_dir": tmp_path / "records"}
    training, session = trained(tmp_path, **arguments)
    assert training.modes == [1] * 5
    assert session.coverage.counting_stopped_at is None
    assert session.coverage.steps == 5


def test_registered_kernels_keep_it(tmp_path, monkeypatch):
    monkeypatch.setattr(SWITCH, "has_kernels", True)
    training, _ = trained(tmp_path, max_checks=1)
    assert training.modes == [1] * 5


def test_the_last_step_asked_for_is_the_last_one_seen(tmp_path):
    training, session = trained(tmp_path, start_step=1, num_steps=2)
    assert training.modes == [1, 1, 1, 0, 0]
    coverage = session.coverage
    assert coverage.steps == 3
    assert coverage.counting_stopped_at == coverage.seen - 1
    assert coverage.skipped[SkipReason.OUTSIDE_STEPS]
    assert {record.step for record in session.records} == {1, 2}


def test_it_leaves_from_the_top_only(tmp_path):
    training = Training()
    with opcheck.check(training.net, log_dir=tmp_path, quiet=True, max_checks=1) as session:
        training.step()
        with EmptyMode() as other:
            for _ in range(3):
                training.step()
            assert training.modes == [1, 2, 2, 2]
            assert active_modes()[-1] is other
        training.step()
        assert active_modes() == []
    assert training.modes == [1, 2, 2, 2, 0]
    assert session.coverage.steps == 4
    assert session.certificate.holds


def test_an_inner_session_leaves_and_the_outer_stays(tmp_path):
    training = Training()
    outer = opcheck.check(training.net, log_dir=tmp_path / "a", quiet=True, max_checks=None)
    inner = opcheck.check(training.net, log_dir=tmp_path / "b", quiet=True, max_checks=1)
    with outer, inner:
        for _ in range(4):
            training.step()
    assert training.modes == [2, 2, 1, 1]
    assert outer.coverage.counting_stopped_at is None
    assert outer.coverage.steps == 4


def test_steps_of_two_kinds_that_take_turns_are_both_checked_to_the_end(tmp_path):
    """The budget of one kind is used up long before that of the other."""
    training = Training()
    rare = nn.Sequential(nn.Linear(6, 6), nn.Softplus(), nn.Linear(6, 1))
    with opcheck.check(training.net, log_dir=tmp_path, quiet=True, max_checks=4) as session:
        for number in range(20):
            training.step(rare if number % 3 == 1 else None)
    softplus = [record for record in session.records if record.op == "aten.softplus.default"]
    assert len(softplus) == 4
    assert training.modes[-1] == 0


def test_steps_by_entering_again_are_not_seen_any_more(tmp_path):
    net = model()
    session = opcheck.check(net, log_dir=tmp_path, quiet=True, max_checks=1)
    modes = []
    for _ in range(4):
        with session:
            net(X)
            modes.append(len(active_modes()))
    assert modes == [1, 1, 0, 0]
    assert session.coverage.counting_stopped_at == session.coverage.seen - 1
    assert session.verdict is Verdict.PASS
    assert "counting stopped" in session.report()


def test_next_step_leaves_where_no_optimizer_runs(tmp_path):
    net = model()
    modes = []
    with opcheck.check(net, log_dir=tmp_path, quiet=True, max_checks=1) as session:
        for _ in range(4):
            net(X)
            modes.append(len(active_modes()))
            session.next_step()
    assert modes == [1, 1, 0, 0]


def test_hooks_are_gone_as_well(tmp_path):
    training = Training()
    before = opcheck._torch.global_hook_counts()
    with opcheck.check(training.net, log_dir=tmp_path, quiet=True, max_checks=1):
        for _ in range(3):
            training.step()
        assert opcheck._torch.global_hook_counts() == before


def test_the_step_in_which_it_leaves_is_the_plain_step(tmp_path):
    plain = Training()
    for _ in range(5):
        plain.step()
    training, _ = trained(tmp_path, max_checks=1)
    for ours, theirs in zip(training.net.parameters(), plain.net.parameters(), strict=True):
        assert torch.equal(ours, theirs)
