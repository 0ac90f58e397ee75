"""With `max_overhead`, steps that would cost too much are left alone. No test looks at a clock."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import opcheck
from opcheck import Verdict
from opcheck.overhead import OverheadBudget
from opcheck.steptimes import StepTimes
from opcheck.switch import SWITCH
from tests.step_equality import EmptyMode, active_modes
from tests.test_leaving import Training, X, model

LOOK, REST = False, True


@pytest.fixture(autouse=True)
def no_registered_kernels(monkeypatch):
    """Other tests of the process may have registered some, and a session with them stays."""
    monkeypatch.setattr(SWITCH, "has_kernels", False)


@pytest.fixture
def plan(monkeypatch):
    """What is decided for the second step, the third, and so on; afterwards every step is seen."""
    decisions: list[bool] = []

    def wants_rest(self: OverheadBudget) -> bool:
        decided = decisions.pop(0) if decisions and self._step else LOOK
        return decided and self.may_rest

    monkeypatch.setattr(OverheadBudget, "wants_rest", property(wants_rest))
    return decisions


def check(net: nn.Module, tmp_path, **arguments):
    arguments = {"max_overhead": 1e9, **arguments}
    return opcheck.check(net, log_dir=tmp_path, quiet=True, **arguments)


def trained(tmp_path, steps, **arguments):
    training = Training()
    with check(training.net, tmp_path, **arguments) as session:
        for _ in range(steps):
            training.step()
    return training, session


def test_a_step_is_left_alone_and_the_next_ones_are_seen(tmp_path, plan):
    plan += [REST, LOOK, REST, REST, LOOK]
    before = opcheck._torch.global_hook_counts()
    training, session = trained(tmp_path, steps=7)
    assert training.modes == [1, 0, 1, 0, 0, 1, 1]
    coverage = session.coverage
    assert {record.step for record in session.records} == {0, 2, 5, 6}
    assert {record.module for record in session.records if record.op == "aten.gelu.default"} == {
        "1"
    }
    assert coverage.adds_up
    assert coverage.counting_stopped_at is None
    assert coverage.steps == 4
    share = coverage.overhead
    assert (share.num_rests, share.num_steps) == (3, 3)
    assert session.verdict is Verdict.PASS
    assert session.certificate.holds
    assert opcheck._torch.global_hook_counts() == before
    assert active_modes() == []
    assert opcheck.load_run(session.log_path).coverage == coverage
    text = " ".join(session.report(width=200).split())
    assert "3 of 6 steps left alone and not counted here" in text


def test_every_seen_step_is_counted_alike(tmp_path, plan):
    """Also the first module after a rest, whose hooks came while it was called."""
    plan += [LOOK, REST, LOOK]
    _, session = trained(tmp_path, steps=4)
    by_step: dict[int, list[tuple[str, str, str]]] = {}
    for record in session.records:
        by_step.setdefault(record.step, []).append((record.op, record.module, record.phase))
    assert sorted(by_step) == [0, 1, 3]
    assert by_step[1] == by_step[3]


def test_modules_have_no_hooks_in_a_step_that_is_left_alone(tmp_path, plan):
    plan += [REST, LOOK]
    training = Training()
    counts = []
    training.net[1].register_forward_hook(
        lambda *_: counts.append(len(torch.nn.modules.module._global_forward_hooks))
    )
    with check(training.net, tmp_path):
        for _ in range(3):
            training.step()
    assert counts[0] > counts[1]
    assert counts[2] == counts[0]


def test_by_entering_again(tmp_path, plan):
    plan += [REST, LOOK, REST]
    training = Training()
    session = check(training.net, tmp_path)
    for _ in range(5):
        with session:
            training.step()
    assert training.modes == [1, 0, 1, 0, 1]
    assert {record.step for record in session.records} == {0, 2, 4}
    assert session.coverage.overhead.num_rests == 2
    assert opcheck.load_run(session.log_path).coverage == session.coverage
    assert session.certificate.holds


def test_a_rest_at_the_end_is_in_the_log(tmp_path, plan):
    plan += [REST]
    training = Training()
    session = check(training.net, tmp_path)
    for _ in range(2):
        with session:
            training.step()
    assert opcheck.load_run(session.log_path).coverage == session.coverage


def test_it_wakes_up_within_a_context_that_began_with_a_rest(tmp_path, plan):
    plan += [REST, LOOK]
    training = Training()
    session = check(training.net, tmp_path)
    with session:
        training.step()
    with session:
        training.step()
        training.step()
    assert training.modes == [1, 0, 1]
    assert {record.step for record in session.records} == {0, 2}
    assert active_modes() == []


def test_next_step_ends_a_rest_once(tmp_path, plan):
    plan += [REST, LOOK]
    training = Training()
    with check(training.net, tmp_path) as session:
        for _ in range(4):
            training.step()
            session.next_step()
    assert training.modes == [1, 0, 1, 1]
    assert {record.step for record in session.records} == {0, 2, 3}
    assert session.coverage.overhead.num_rests == 1


def test_it_rests_from_the_top_only_and_comes_back_to_its_place_only(tmp_path, plan):
    training = Training()
    with check(training.net, tmp_path) as session:
        training.step()
        plan += [REST]
        with EmptyMode() as other:
            training.step()
            assert active_modes()[-1] is other
        plan += [REST]
        training.step()
        with EmptyMode():
            training.step()  # its place was not below this one
        training.step()
    assert training.modes == [1, 2, 0, 1, 1]
    assert session.coverage.overhead.num_rests == 2
    assert session.certificate.holds
    assert active_modes() == []


def evaluated_first(training: Training, steps: int, *, mode: bool) -> None:
    for _ in range(steps):
        with torch.inference_mode(mode):
            training.net(X)
        (X + 1).exp()
        training.step()


def test_it_rests_and_comes_back_within_inference_mode_that_began_after_it(tmp_path, plan):
    """Its end puts the dispatch keys back: the next op aborted, or nothing was seen any more."""
    plan += [REST, LOOK, REST, REST, LOOK]
    plain, training = Training(), Training()
    evaluated_first(plain, 7, mode=True)
    with check(training.net, tmp_path) as session:
        evaluated_first(training, 7, mode=True)
    assert session.coverage.adds_up
    assert session.certificate.holds
    assert active_modes() == []
    assert session.coverage.overhead.num_rests == 3
    assert training.modes == [1, 0, 1, 0, 0, 1, 1]
    assert {record.step for record in session.records} == {0, 2, 5, 6}
    for ours, theirs in zip(training.net.parameters(), plain.net.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_rest_ends_at_the_first_module_also_in_inference_mode(tmp_path, plan):
    plan += [REST, LOOK]
    training = Training()
    with check(training.net, tmp_path) as session:
        training.step()
        training.step()
        evaluated_first(training, 2, mode=True)
    assert training.modes == [1, 0, 1, 1]
    seen = [record.op for record in session.records if record.step == 2]
    assert "aten.gelu.default" in seen
    assert session.coverage.adds_up


def test_within_inference_mode_it_rests_and_comes_back(tmp_path, plan):
    plan += [REST, LOOK]
    net, modes = model(), []
    with torch.inference_mode(), check(net, tmp_path) as session:
        for _ in range(3):
            net(X)
            modes.append(len(active_modes()))
            session.next_step()
    assert modes == [1, 0, 1]
    (X + 1).exp()


def test_who_has_nothing_left_to_see_leaves_also_within_inference_mode(tmp_path):
    training = Training()
    with opcheck.check(training.net, log_dir=tmp_path, quiet=True, max_checks=1) as session:
        evaluated_first(training, 6, mode=True)
    assert training.modes[-1] == 0
    assert session.coverage.counting_stopped_at == session.coverage.seen - 1
    assert session.coverage.adds_up
    assert session.certificate.holds
    assert active_modes() == []


@pytest.mark.parametrize(
    "arguments",
    [
        {"blame": True},
        {"repeat": True},
        {"selftest": True},
        {"num_steps": 5},
        {"record": "all"},
    ],
    ids=str,
)
def test_what_has_to_see_every_call_never_rests(tmp_path, plan, arguments):
    if "record" in arguments:
        arguments = {**arguments, "record_dir": tmp_path / "records"}
    plan += [REST] * 3
    training, session = trained(tmp_path, steps=3, **arguments)
    assert training.modes == [1, 1, 1]
    assert session.coverage.overhead.num_rests == 0


def test_registered_kernels_keep_it_awake(tmp_path, plan, monkeypatch):
    monkeypatch.setattr(SWITCH, "has_kernels", True)
    plan += [REST] * 3
    training, _ = trained(tmp_path, steps=3)
    assert training.modes == [1, 1, 1]


def test_it_may_leave_for_good_from_a_rest(tmp_path, plan):
    plan += [LOOK, REST]
    training, session = trained(tmp_path, steps=6, max_checks=1)
    assert training.modes[-1] == 0
    assert session.coverage.counting_stopped_at == session.coverage.seen - 1
    assert active_modes() == []


def test_an_exception_in_a_rest_leaves_nothing_behind(tmp_path, plan):
    plan += [REST]
    training = Training()
    before = opcheck._torch.global_hook_counts()
    with pytest.raises(ValueError, match="mine"), check(training.net, tmp_path) as session:
        training.step()
        training.step()
        raise ValueError("mine")
    assert active_modes() == []
    assert opcheck._torch.global_hook_counts() == before
    assert session.certificate.holds


def test_the_steps_are_the_plain_steps(tmp_path, plan):
    plan += [REST, LOOK, REST, LOOK]
    plain = Training()
    for _ in range(6):
        plain.step()
    training, _ = trained(tmp_path, steps=6)
    for ours, theirs in zip(training.net.parameters(), plain.net.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_model_alone_rests_between_calls_of_next_step(tmp_path, plan):
    plan += [REST, LOOK]
    net = model()
    modes = []
    with check(net, tmp_path) as session:
        for _ in range(3):
            net(X)
            modes.append(len(active_modes()))
            session.next_step()
    assert modes == [1, 0, 1]


# ---- what whole steps tell of the estimates ----


def steps(times: StepTimes, *, own: float, hidden: float, really: float, noise: float = 0.0):
    for number in range(12):
        off = noise * (1 if number % 2 else -1)
        times.observed(seconds=own + really + off, hidden=hidden, counting=hidden)
        times.rested(own - off)


@pytest.mark.parametrize("really", [0.05, 0.1, 0.2])
def test_steps_that_were_left_alone_correct_the_estimates(really):
    times = StepTimes()
    steps(times, own=1.0, hidden=0.1, really=really)
    assert times.scale == pytest.approx(really / 0.1)
    assert times.own == pytest.approx(1.0)


def test_where_steps_scatter_the_estimates_are_believed():
    times = StepTimes()
    steps(times, own=1.0, hidden=0.1, really=0.3, noise=0.5)
    assert 1.0 <= times.scale <= 1.3


def test_no_correction_without_bounds_or_without_both_kinds_of_steps():
    times = StepTimes()
    for _ in range(10):
        times.observed(seconds=2.0, hidden=0.1, counting=0.2)
    assert times.scale == 1.0
    steps(times, own=1.0, hidden=0.01, really=1.0)
    assert times.scale <= 4.0


def test_what_happens_once_does_not_count():
    times = StepTimes()
    times.observed(seconds=100.0, hidden=50.0, counting=70.0)
    assert times.counting is None
    times.observed(seconds=1.0, hidden=0.1, counting=0.2)
    assert times.counting == pytest.approx(0.2)
