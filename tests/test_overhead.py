"""`max_overhead`: what is checked when time is short. No test looks at a real clock."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from torch import nn

import opcheck
from opcheck import SkipReason, Verdict
from opcheck.overhead import OverheadBudget
from opcheck.settings import Settings
from opcheck.stopwatch import Stopwatch
from tests.faults import gelu_off_by

X = torch.linspace(-2, 2, 24).reshape(4, 6)


class Clock:
    """Goes on when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Step:
    """Calls with a cost of their own and a cost of checking, in the order of a real step."""

    def __init__(self, ratio: float, *, counting: float = 0.0, hidden: float = 0.0) -> None:
        self.clock = Clock()
        self.budget = OverheadBudget(ratio, clock=self.clock)
        self.budget.may_rest = True
        self.counting = counting
        self.hidden = hidden
        """Seconds that a look at a call costs, and as many again that no clock sees."""
        self.modes: list[str] = []
        with self.budget.entering():
            pass
        self.checked: Counter[tuple[str, str]] = Counter()
        self.by_step: list[Counter[tuple[str, str]]] = []

    def call(self, module: str, op: str, *, own: float, cost: float) -> bool:
        place = (module, "forward", (op,))
        self.budget.dropped = None
        admitted = self.budget.admits(place, op=op, numel=1000)
        self.clock.now += own + self.counting + self.hidden
        self.budget.spend(self.counting, hidden=self.hidden / 2)  # a bad estimate
        if admitted:
            self.clock.now += cost
            self.budget.spend(cost)
            self.budget.measured(place, cost)
            self.checked[module, op] += 1
            self.by_step[-1][module, op] += 1
        else:
            assert self.budget.dropped == place
            self.budget.op_ran(place, own)
        return admitted

    def run(self, calls, num_steps: int) -> None:
        for _ in range(num_steps):
            self.by_step.append(Counter())
            self.modes.append("rests" if self.budget.wants_rest else "looks")
            if self.modes[-1] == "rests":
                self.clock.now += sum(own for _, _, own, _ in calls)
                self.budget.end_rest()
                continue
            for module, op, own, cost in calls:
                self.call(module, op, own=own, cost=cost)
            self.budget.end_step()

    @property
    def true_share(self) -> float:
        """What everything took beyond the steps alone."""
        own = len(self.modes) * sum(own for _, _, own, _ in layers(12))
        return self.clock.now / own - 1

    @property
    def share(self) -> float:
        summary = self.budget.summary()
        return summary.spent_seconds / summary.own_seconds


def layers(num: int, *, own: float = 0.01, cost: float = 0.05):
    return [
        (f"layer{index}", op, own, cost * factor)
        for index in range(num)
        for op, factor in (("mm", 2.0), ("gelu", 1.0), ("add", 0.5))
    ]


@pytest.mark.parametrize("ratio", [0.05, 0.3, 0.5, 2.0])
def test_the_share_is_kept_from_above_and_used(ratio):
    step = Step(ratio)
    step.run(layers(12), 60)
    assert 0.8 * ratio <= step.share <= 1.1 * ratio


def test_zero_checks_nothing_and_plenty_checks_everything():
    nothing, everything = Step(0.0), Step(1e6)
    nothing.run(layers(4), 5)
    everything.run(layers(4), 5)
    assert not nothing.checked
    assert nothing.budget.summary().steps_left is None
    assert nothing.budget.summary().num_left == 12
    # the very first call finds an empty account
    assert sum(everything.checked.values()) >= 5 * 12 - 1
    assert everything.budget.summary().num_left == 0


def test_every_place_comes_up_before_any_has_many_turns():
    step = Step(0.5)
    step.run(layers(12), 100)
    counts = [step.checked[module, op] for module, op, *_ in layers(12)]
    assert min(counts) >= 1
    assert max(counts) <= 3 * min(counts) + 3
    assert step.budget.summary().steps_left == 0


def test_modules_at_the_end_of_the_step_are_not_starved_by_those_at_the_start():
    step = Step(0.2)
    step.run(layers(20), 40)
    early = sum(step.checked[f"layer{n}", "mm"] for n in range(10))
    late = sum(step.checked[f"layer{n}", "mm"] for n in range(10, 20))
    assert late >= 0.5 * early > 0


def test_an_expensive_first_call_is_saved_for():
    """A check of 40 steps' worth of time, among cheap ones that would eat every second."""
    step = Step(0.1)
    calls = [*layers(8, cost=0.02), ("head", "attention", 0.01, 1.0)]
    step.run(calls, 80)
    assert step.checked["head", "attention"] >= 1
    assert step.share <= 0.1 * 1.5


def test_first_calls_of_a_signature_go_before_second_ones():
    step = Step(0.3)
    step.run(layers(12), 6)
    assert {op for _, op in step.checked} == {"mm", "gelu", "add"}


def test_an_op_that_failed_elsewhere_comes_first_at_its_other_places():
    def first_steps(*, tell: bool) -> int:
        step = Step(0.1)
        step.run(layers(16), 8)
        before = {module for module, op in step.checked if op == "gelu"}
        assert len(before) < 16
        if tell:
            step.budget.failed("gelu")
        step.run(layers(16), 12)
        return len({module for module, op in step.checked if op == "gelu"} - before)

    assert first_steps(tell=True) > first_steps(tell=False)


def test_a_rare_signature_goes_before_a_place_of_a_common_one():
    step = Step(0.1)
    common = layers(16)
    step.run(common, 8)
    step.run([*common, ("head", "softmax", 0.01, 0.05)], 6)
    assert step.checked["head", "softmax"] >= 2


def test_a_wrong_first_estimate_is_paid_back():
    step = Step(0.5)
    calls = [("a", "conv", 0.1, 3.0), *layers(4)]
    step.run(calls, 40)
    assert step.share <= 0.6


def test_what_is_left_is_estimated_and_ends_at_zero():
    step = Step(0.2)
    step.run(layers(12), 2)
    before = step.budget.summary()
    assert before.num_left > 0
    assert before.steps_left >= 1
    step.run(layers(12), before.steps_left * 3)
    after = step.budget.summary()
    assert (after.num_left, after.steps_left) == (0, 0)
    assert after.num_places == 36


def test_who_does_not_come_any_more_is_not_waited_for():
    step = Step(0.1)
    step.run([*layers(4), ("once", "giant", 0.01, 1000.0)], 1)
    step.run(layers(4), 60)
    assert step.share >= 0.08


@pytest.mark.parametrize("ratio", [0.05, 0.15, 0.3])
def test_where_looking_costs_more_than_is_allowed_steps_are_left_alone(ratio):
    """Every look costs 0.3 of the step, half of which no clock sees, and is estimated too low."""
    step = Step(ratio, counting=0.0015, hidden=0.0015)
    step.run(layers(12), 500)
    assert 0.8 * ratio <= step.true_share <= 1.1 * ratio
    assert step.share == pytest.approx(step.true_share, rel=0.1)
    counts = [step.checked[module, op] for module, op, *_ in layers(12)]
    assert min(counts) >= 1
    assert max(counts) <= 3 * min(counts) + 3
    summary = step.budget.summary()
    assert summary.num_left == summary.steps_left == 0
    assert summary.num_rests == step.modes.count("rests") > 0
    assert summary.num_steps == step.modes.count("looks")
    assert 0.3 * ratio <= summary.counting_seconds / summary.own_seconds <= 0.8 * ratio


def test_where_looking_is_cheap_no_step_is_left_alone():
    step = Step(0.3, counting=0.0003, hidden=0.0003)
    step.run([*layers(8), ("head", "attention", 0.01, 5.0)], 100)
    assert set(step.modes) == {"looks"}
    assert step.checked["head", "attention"] >= 1


def turns(num: int, *, cost: float):
    """Steps of several kinds, each with modules of its own, as of two optimizers."""
    return [
        [(f"net{kind}.{module}", op, own, price) for module, op, own, price in layers(6, cost=cost)]
        for kind in range(num)
    ]


@pytest.mark.parametrize("num_kinds", [2, 3, 4])
@pytest.mark.parametrize("ratio", [0.15, 0.2])
def test_steps_that_take_turns_are_looked_at_alike(num_kinds, ratio):
    """Rests of an even rhythm met the same kind for ever: 297 looks at one, 4 at the other."""
    step, looks = Step(ratio, counting=0.0015), Counter()
    kinds = turns(num_kinds, cost=0.004)
    for number in range(400):
        step.run(kinds[number % num_kinds], 1)
        looks[number % num_kinds] += step.modes[-1] == "looks"
    assert min(looks.values()) >= 0.4 * max(looks.values()) > 0
    counts = [step.checked[module, op] for calls in kinds for module, op, *_ in calls]
    assert 3 * min(counts) + 3 >= max(counts)


@pytest.mark.parametrize("num_kinds", [2, 3])
@pytest.mark.parametrize("ratio", [0.15, 0.3])
def test_no_place_of_steps_that_take_turns_is_starved(num_kinds, ratio):
    """What waited was forgotten in every other step, or kept a value that it had no more."""
    step = Step(ratio, counting=0.0015)
    kinds = turns(num_kinds, cost=0.05)
    for number in range(400):
        step.run(kinds[number % num_kinds], 1)
    counts = [step.checked[module, op] for calls in kinds for module, op, *_ in calls]
    assert min(counts) >= 1
    assert 3 * min(counts) + 3 >= max(counts)
    assert step.share <= 1.1 * ratio


def test_an_expensive_first_call_is_saved_for_in_steps_left_alone():
    step = Step(0.1, counting=0.001)
    step.run([*layers(8, cost=0.02), ("head", "attention", 0.01, 1.0)], 200)
    assert step.checked["head", "attention"] >= 1
    assert step.checked["layer7", "mm"] >= 1
    assert step.share <= 0.1 * 1.2


def test_who_may_not_rest_counts_every_step():
    step = Step(0.1, counting=0.0015)
    step.budget.may_rest = False
    step.run(layers(12), 60)
    assert set(step.modes) == {"looks"}
    assert step.budget.summary().steps_left is None


def test_what_entering_and_leaving_take_is_charged_but_for_the_first_time():
    clock = Clock()
    budget = OverheadBudget(0.5, clock=clock)
    for _ in range(3):
        with budget.entering():
            clock.now += 2.0
        clock.now += 10.0
        with budget.charged():
            clock.now += 0.5
        budget.left()
        clock.now += 0.25
        budget.gone()
        clock.now += 1000.0
    summary = budget.summary()
    assert summary.setup_seconds == 2.0
    assert summary.own_seconds == pytest.approx(30.0)
    assert summary.spent_seconds == pytest.approx(2 * 2.0 + 3 * 0.5 + 2 * 0.25)


def test_what_workers_do_counts_and_waiting_for_them_does_not_count_twice():
    clock = Clock()
    budget = OverheadBudget(0.5, clock=clock)
    with budget.entering():
        pass
    place = ("a", "forward", ("mm",))
    clock.now += 100.0
    assert budget.admits(place, op="mm", numel=10)
    clock.now += 1.0
    budget.spend(1.0)  # the copy
    budget.measured(place, 1.0, is_all=False)
    clock.now += 3.0
    budget.spend(3.0)  # the step's thread waits, in the time of somebody
    budget.beside(place, 5.0, waited=3.0)
    summary = budget.summary()
    assert summary.spent_seconds == pytest.approx(1.0 + 5.0)
    assert summary.counting_seconds == pytest.approx(0.0)
    assert budget.waited == 3.0
    assert not budget.admits(place, op="mm", numel=10) or budget.balance > 5.0


def test_whom_max_checks_keeps_out_is_not_waited_for():
    step = Step(0.01)
    step.run(layers(4), 1)
    assert step.budget.summary().num_left > 0
    for op in ("mm", "gelu", "add"):
        step.budget.capped((op,))
    summary = step.budget.summary()
    assert (summary.num_left, summary.steps_left) == (0, 0)


def test_what_a_small_call_cost_says_little_of_a_large_one():
    clock = Clock()
    budget = OverheadBudget(1.0, clock=clock)
    with budget.entering():
        pass
    small, large = (("a", "forward", ("mm", size)) for size in (1, 2))
    clock.now += 1.0
    assert budget.admits(small, op="mm", numel=200)
    budget.measured(small, 5e-4)
    clock.now = 0.01  # which allows 20 times the small one
    assert budget.admits(large, op="mm", numel=131_072)


def test_time_outside_of_the_context_does_not_count():
    step = Step(0.5)
    step.run(layers(2), 2)
    step.budget.left()
    own = step.budget.own_seconds
    step.clock.now += 1000.0
    assert step.budget.own_seconds == own
    with step.budget.entering():
        pass
    assert step.budget.own_seconds == own


# ---- in a session ----


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 1))


@pytest.mark.parametrize(
    ("given", "kept"), [(0.5, 0.5), ("50%", 0.5), (" 7.5 % ", 0.075), ("0.5", 0.5), (3, 3.0)]
)
def test_a_percentage_is_a_share(given, kept):
    assert opcheck.check(max_overhead=given).settings.max_overhead == kept


@pytest.mark.parametrize(
    "given",
    [0, 0.0, -1, math.nan, math.inf, 10**400, "0%", "-5%", "abc", "nan", "", "%", "50%%", "5%0"],
    ids=lambda value: repr(value)[:10],
)
def test_what_is_no_share_is_refused(given):
    with pytest.raises(opcheck.ArgumentError, match=r"max_overhead: .*> 0.*\(\"50%\"\)") as caught:
        opcheck.check(max_overhead=given)
    assert repr(given) in str(caught.value)
    if given in (0, "0%"):
        assert "max_checks=0" in str(caught.value)


@pytest.mark.parametrize("given", [True, [0.5], b"50%"], ids=repr)
def test_what_is_no_number_is_refused(given):
    with pytest.raises(opcheck.ArgumentTypeError, match="max_overhead"):
        opcheck.check(max_overhead=given)


def test_max_checks_at_its_default_makes_way_and_another_number_stays():
    checks = [
        opcheck.check(max_overhead=0.5, **given).settings.max_checks
        for given in ({}, {"max_checks": 3}, {"max_checks": None})
    ]
    assert checks == [None, 3, None]
    assert Settings().max_overhead is None


def trained(tmp_path, steps=3, **arguments):
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with opcheck.check(net, log_dir=tmp_path, quiet=True, **arguments) as session:
        for _ in range(steps):
            optimizer.zero_grad()
            net(X).square().mean().backward()
            optimizer.step()
    return net, session


def test_no_time_at_all_is_counted_and_said(tmp_path):
    _, session = trained(tmp_path, max_overhead=1e-9, num_steps=9)  # so that it does not rest
    coverage = session.coverage
    assert coverage.checked == 0
    assert coverage.skipped[SkipReason.OUT_OF_TIME] > 0
    assert coverage.adds_up
    assert coverage.counting_stopped_at is None
    assert session.verdict is Verdict.INCONCLUSIVE
    text = " ".join(session.report(width=200).split())
    assert "out_of_time" in text
    assert "max_overhead 1e-09)" in text
    assert "none will be" in text


def test_with_time_for_all_it_checks_what_a_session_without_a_bound_does(tmp_path, monkeypatch):
    monkeypatch.setattr("opcheck.stopwatch.dispatch_seconds", lambda: 0.0)
    _, free = trained(tmp_path / "a", max_checks=None)
    _, bound = trained(tmp_path / "b", max_overhead=1e9)
    missing = bound.coverage.skipped.get(SkipReason.OUT_OF_TIME, 0)
    assert missing <= 1
    by_index = {record.index: record for record in free.records}
    assert len(bound.records) == len(free.records) - missing
    for record in bound.records:
        other = by_index[record.index]
        assert (record.op, record.verdict, record.metrics) == (
            other.op, other.verdict, other.metrics,
        )  # fmt: skip
    assert bound.coverage.overhead.num_left == 0
    assert "nothing was left out" in " ".join(bound.report(width=200).split())


def test_hooks_entering_and_leaving_are_charged(tmp_path, monkeypatch):
    charged: Counter[str] = Counter()
    for owner, name in [
        (Stopwatch, "hook_ran"), (OverheadBudget, "gone"), (OverheadBudget, "entering"),
    ]:  # fmt: skip
        original = getattr(owner, name)

        def noted(self, *args, original=original, name=name):
            charged[name] += 1
            return original(self, *args)

        monkeypatch.setattr(owner, name, noted)
    net = model()
    session = opcheck.check(net, log_dir=tmp_path, quiet=True, max_overhead=1e9)
    for _ in range(2):
        with session:
            net(X)
    assert charged == {
        "hook_ran": 2 * 2 * 4,
        "gone": 2,
        "entering": 2,
    }  # before and after 4 modules


def test_max_checks_still_caps(tmp_path):
    _, session = trained(tmp_path, max_overhead=1e9, max_checks=2, steps=4)
    counts = Counter(record.op for record in session.records)
    assert counts["aten.gelu.default"] == 2
    assert session.coverage.skipped[SkipReason.BUDGET_USED_UP]


def test_a_fault_is_found_within_the_bound(tmp_path):
    with gelu_off_by(1e-3):
        _, session = trained(tmp_path, max_overhead="100000%")
    assert session.verdict is Verdict.FAIL
    assert session.failures[0].op == "aten.gelu.default"


def test_the_log_tells_of_it(tmp_path):
    _, session = trained(tmp_path, max_overhead=0.5)
    run = opcheck.load_run(session.log_path)
    assert run.coverage == session.coverage
    assert run.coverage.overhead.num_places > 0
    assert run.header["settings"]["max_overhead"] == 0.5


def test_the_step_is_the_plain_step(tmp_path):
    net, _ = trained(tmp_path, max_overhead=0.5)
    plain = model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        plain(X).square().mean().backward()
        optimizer.step()
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
