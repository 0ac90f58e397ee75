"""Work does not grow faster than what is checked. Work is counted here, time is not looked at."""

from __future__ import annotations

import cProfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import opcheck
from modulecheck import PrecisionChecker
from opcheck.golden import contents_kept
from opcheck.groups import Group
from opcheck.mirrors import Mirrors
from opcheck.waiting import FIRST, LEAST, RARE, REST, Waiting
from tests.compiled import DYNAMO_WARNS
from tests.models import ResidualBlock, ResidualBlocks

FEW, MANY = 8, 64
WIDTH = 4
ALLOWED = 1.5
"""Of the ratio of work to the ratio of sizes; what looks at everything each time has 4 and more."""


class Growing(nn.Module):
    """Makes its blocks as it runs."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.num_blocks = num_blocks
        self.blocks = nn.ModuleList()

    def forward(self, hidden: Tensor) -> Tensor:
        while len(self.blocks) < self.num_blocks:
            self.blocks.append(ResidualBlock(WIDTH))
            hidden = self.blocks[-1](hidden)
        return hidden


class OwnOptimizer(torch.optim.Optimizer):
    """Makes the state of each parameter when its turn comes, as many optimizers do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["mean"] = torch.zeros_like(parameter)
                state["mean"].mul_(0.9).add_(parameter.grad)
                parameter.add_(state["mean"], alpha=-1e-3)


class AllStateFirst(OwnOptimizer):
    """Makes an entry for each parameter, then fills them, then uses them."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = [item for group in self.param_groups for item in group["params"]]
        for parameter in parameters:
            self.state[parameter] = {}
        for parameter in parameters:
            self.state[parameter]["mean"] = parameter.grad.clone()
        for parameter in parameters:
            self.state[parameter]["mean"].sqrt_()


@pytest.fixture
def walked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many modules were come by in walks through models."""
    count, original = [0], nn.Module.named_modules

    def named_modules(self: nn.Module, *args: Any, **kwargs: Any) -> Iterator[Any]:
        for item in original(self, *args, **kwargs):
            count[0] += 1
            yield item

    monkeypatch.setattr(nn.Module, "named_modules", named_modules)
    return count


def backward(output: Tensor) -> None:
    output.square().mean().backward()


def with_optimizer(make: Callable[..., torch.optim.Optimizer], num: int, log_dir: Path) -> None:
    model = ResidualBlocks(num, width=WIDTH)
    optimizer = make(model.parameters())
    with opcheck.check(model, log_dir=log_dir, max_checks=0, quiet=True):
        backward(model(torch.ones(2, 4)))
        optimizer.step()


def leaves_of_no_module(num: int, log_dir: Path) -> None:
    leaves = [torch.ones(4, requires_grad=True) for _ in range(num)]
    with opcheck.check(ResidualBlocks(num, width=WIDTH), log_dir=log_dir, max_checks=0, quiet=True):
        sum(leaves, torch.zeros(4)).sum().backward()  # gradients that have to be copied


def blocks_made_in_the_step(num: int, log_dir: Path) -> None:
    model = Growing(num)
    with opcheck.check(model, log_dir=log_dir, max_checks=0, quiet=True):
        backward(model(torch.ones(2, 4)))


WAYS: dict[str, Callable[[int, Path], None]] = {
    "AdamW": lambda num, path: with_optimizer(torch.optim.AdamW, num, path),
    "SGD": lambda num, path: with_optimizer(
        lambda items: torch.optim.SGD(items, lr=0.1, momentum=0.9), num, path
    ),
    "own optimizer": lambda num, path: with_optimizer(
        lambda items: OwnOptimizer(items, {}), num, path
    ),
    "leaves of no module": leaves_of_no_module,
    "blocks made in the step": blocks_made_in_the_step,
}


@pytest.mark.parametrize("way", WAYS)
def test_modules_walked_through_per_module_stay_few(way, walked, tmp_path):
    work = []
    for num in (FEW, MANY):
        walked[0] = 0
        WAYS[way](num, tmp_path)
        work.append(walked[0])
    assert work[1] <= ALLOWED * MANY / FEW * work[0], work


@DYNAMO_WARNS
@pytest.mark.parametrize("single_pass", [True, False])
def test_precision_checker_walks_through_the_model_a_few_times(single_pass, walked):
    work = []
    for num in (FEW, MANY):
        torch._dynamo.reset()
        model, inputs = ResidualBlocks(num, width=WIDTH), torch.ones(2, 4)
        checker = PrecisionChecker(backend="aot_eager", single_pass=single_pass)
        checker.wrap_by_policy(model, (ResidualBlock,))

        def step(model: nn.Module, inputs: Tensor = inputs) -> Tensor:
            loss = model(inputs).square().mean()
            loss.backward()
            return loss

        step(model)
        walked[0] = 0
        assert checker.compare(step, model).all_pass
        work.append(walked[0])
    assert work[1] <= ALLOWED * MANY / FEW * work[0], work


# ---- what is no longer asked anew is still known ------------------------------------------------


def owners(model: nn.Module, optimizer: torch.optim.Optimizer, op: str, log_dir: Path) -> list[str]:
    with opcheck.check(model, log_dir=log_dir, max_checks=None, quiet=True) as session:
        backward(model(torch.ones(2, 4)))
        optimizer.step()
    return [r.module for r in session.records if r.op == op and r.phase == "optimizer"]


@pytest.mark.parametrize("kind", [OwnOptimizer, AllStateFirst])
def test_state_made_in_the_step_belongs_to_its_parameter(kind, tmp_path):
    model = ResidualBlocks(3, width=WIDTH)
    op = "aten.mul_.Tensor" if kind is OwnOptimizer else "aten.sqrt_.default"
    found = owners(model, kind(model.parameters(), {}), op, tmp_path)
    assert found == [f"blocks.{place}.linear" for place in (0, 0, 1, 1, 2, 2)]


def test_leaves_of_no_module_have_none_beside_parameters(tmp_path):
    model, leaf = nn.Linear(4, 4), torch.ones(4, requires_grad=True)
    other = torch.ones(4, requires_grad=True)
    with opcheck.check(model, log_dir=tmp_path, max_checks=None, quiet=True) as session:
        for _ in range(2):
            backward(model(leaf * 1.0) + other * 1.0)
    adds = [r for r in session.records if r.op == "aten.add_.Tensor" and r.phase == "backward"]
    assert [r.module for r in adds] == [""] * len(adds)
    assert session.verdict is opcheck.Verdict.PASS


def test_outermost_modules_have_names_of_their_own(tmp_path):
    layers = [nn.Linear(4, 4) for _ in range(4)]
    with opcheck.check(log_dir=tmp_path, max_checks=None, quiet=True) as session:
        for layer in layers:
            layer(torch.ones(2, 4))
        del layers[2:], layer
        again = nn.Linear(4, 4)
        again(torch.ones(2, 4))
    names = [r.module for r in session.records if r.op == "aten.addmm.default"]
    assert names[:4] == ["", "Linear", "Linear#2", "Linear#3"]
    assert names[4] not in names[:2]


# ---- sums that are kept up to date --------------------------------------------------------------

PLACES = [(f"m{number}", "forward", ("op",)) for number in range(4)]
CHANGES = st.one_of(
    st.tuples(
        st.just("add"), st.sampled_from(PLACES), st.sampled_from([FIRST, RARE, LEAST]),
        st.sampled_from([0.25, 0.5, 1.0, 2.0]),
    ),
    st.tuples(st.just("remove"), st.sampled_from(PLACES)),
    st.tuples(st.just("keep"), st.sets(st.sampled_from(PLACES))),
)  # fmt: skip


@given(st.lists(CHANGES, max_size=60))
def test_reserve_is_that_of_all_that_wait(changes):
    waiting, kept = Waiting(), {}
    for kind, *rest in changes:
        if kind == "add":
            waiting.add(*rest)
            kept[rest[0]] = tuple(rest[1:])
        elif kind == "remove":
            waiting.remove(*rest)
            kept.pop(rest[0], None)
        else:
            waiting.keep(rest[0].__contains__)
            kept = {place: item for place, item in kept.items() if place in rest[0]}
        for value in (FIRST, RARE, LEAST):
            more = [estimate for other, estimate in kept.values() if other < value]
            assert waiting.reserve(value) == max(more, default=0.0)
        assert waiting.reserve(REST) == sum(estimate for _, estimate in kept.values())


def test_a_session_counts_a_record_once_however_often_it_is_asked(tmp_path, monkeypatch):
    count, original = [0], Group.add

    def add(self: Group, record: Any) -> None:
        count[0] += 1
        original(self, record)

    monkeypatch.setattr(Group, "add", add)
    session = opcheck.check(log_dir=tmp_path, max_checks=None, on_failure="raise")
    for _ in range(5):
        with session:
            torch.ones(3).exp()
        assert session.verdict is opcheck.Verdict.PASS
    assert count[0] == len(session.records) > 0


def test_dead_mirrors_are_looked_for_now_and_then(monkeypatch):
    looked, mirrors = [0], Mirrors(1 << 20)
    sweep = mirrors._sweep

    def counted() -> None:
        looked[0] += len(mirrors)
        sweep()

    monkeypatch.setattr(mirrors, "_sweep", counted)
    alive = [torch.ones(2) for _ in range(4000)]
    for tensor in alive:
        assert mirrors.write(tensor, torch.zeros(2, dtype=torch.float64))
    assert len(mirrors) == len(alive)
    assert looked[0] < 12 * len(alive)
    del alive, tensor
    kept = [torch.ones(2) for _ in range(2000)]
    for item in kept:
        mirrors.write(item, torch.zeros(2, dtype=torch.float64))
    assert len(mirrors) < 4000
    assert mirrors.evicted == 0


def test_where_there_is_no_room_the_dead_go_first():
    mirrors = Mirrors(8 * 2 * 100)
    alive = [torch.ones(2) for _ in range(60)]
    for tensor in alive:
        mirrors.write(tensor, torch.zeros(2, dtype=torch.float64))
    for _ in range(400):
        mirrors.write(torch.ones(2), torch.zeros(2, dtype=torch.float64))
    assert mirrors.num_bytes <= mirrors.limit_bytes
    assert mirrors.evicted == 0
    assert all(mirrors.get(tensor) is not None for tensor in alive)


def test_contents_of_models_of_thousands_of_modules_can_be_put_back():
    model = nn.ModuleList(nn.Identity() for _ in range(3000))
    with contents_kept([vars(item) for item in model.modules()]):
        model[0].extra = 1
    assert not hasattr(model[0], "extra")


# ---- lists of tensors ---------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}], ids=["foreach", "fused"])
@pytest.mark.parametrize("criterion", ["calibrated", "allclose"])
def test_a_step_on_lists_is_checked_in_proportion_to_their_length(
    options: dict[str, bool], criterion: Any
) -> None:
    counts = []
    for number in (50, 400):
        parameters = [nn.Parameter(torch.ones(WIDTH)) for _ in range(number)]
        for parameter in parameters:
            parameter.grad = torch.ones(WIDTH)
        optimizer = torch.optim.AdamW(parameters, **options)
        profile = cProfile.Profile()
        with opcheck.check(quiet=True, criterion=criterion) as session:
            profile.runcall(optimizer.step)
        assert session.coverage.checked > 0
        counts.append(sum(entry.callcount for entry in profile.getstats()))
    assert counts[1] / counts[0] <= ALLOWED * 400 / 50
