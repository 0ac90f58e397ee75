"""Blocks that share code and differ in a number are all compiled; what is not says why."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from modulecheck import CompareResult, PrecisionChecker
from opcheck.records import Verdict
from tests.compiled import DYNAMO_WARNS, assert_pass, explain

pytestmark = DYNAMO_WARNS

WIDTH = 8
LIMIT = 3
BOTH = pytest.mark.parametrize("single_pass", [True, False], ids=["single", "two"])


@pytest.fixture(autouse=True)
def _fresh_caches() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=LIMIT):
        yield
    torch._dynamo.reset()


class Numbered(nn.Module):
    """Knows its place, as the layers of most decoders do for their cache."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(self.linear(hidden)) / (1 + self.index)


class Again(nn.Module):
    """Is compiled again for every number that it is called with."""

    def forward(self, hidden: Tensor, times: int) -> Tensor:
        return hidden * times


class Breaks(nn.Module):
    """The graph cannot be broken inside a checkpoint, so that all of it is left to eager."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return checkpoint(self._inner, hidden, use_reentrant=False)

    def _inner(self, hidden: Tensor) -> Tensor:
        bias = torch.zeros(1)
        bias.requires_grad = True
        return self.linear(hidden) + bias


def numbered(num_blocks: int = 2 * LIMIT) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Numbered(index) for index in range(num_blocks)])


def step(model: nn.Module) -> Tensor:
    loss = model(torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)).square().mean()
    loss.backward()
    return loss


def check(
    model: nn.Module, run: Any = step, *, single_pass: bool = True, **options: Any
) -> CompareResult:
    checker = PrecisionChecker(single_pass=single_pass, **options)
    for block in model:
        checker.wrap(block)
    return checker.compare(run, model)


@BOTH
def test_every_block_is_compiled_though_each_has_a_number_of_its_own(single_pass: bool) -> None:
    result = check(numbered(), single_pass=single_pass)
    assert_pass(result)
    assert len(result.diffs) == 2 * LIMIT
    assert torch._dynamo.config.recompile_limit == LIMIT
    (note,) = (note for note in result.notes if "recompile_limit" in note)
    assert f"{2 * LIMIT} versions of forward (test_recompile_limit.py:" in note
    assert f"`self.index == {2 * LIMIT - 2}` did not hold" in note
    assert f"recompile_limit = {LIMIT}, and 3, 4, 5 would run in eager" in note


@BOTH
@pytest.mark.parametrize("how", ["config", "stance"])
def test_recompilations_that_the_user_forbade_are_not_ours(how: str, single_pass: bool) -> None:
    """Blocks of one class share their code, so that the second one was an exception in the step."""
    own = torch.compile(numbered(1), backend="aot_eager")
    step(own)
    with contextlib.ExitStack() as stack:
        if how == "config":
            stack.enter_context(torch._dynamo.config.patch(error_on_recompile=True))
        else:
            stack.enter_context(torch.compiler.set_stance("fail_on_recompile"))
        assert_pass(check(numbered(), single_pass=single_pass, backend="aot_eager"))
        step(own)
        with pytest.raises((RuntimeError, torch._dynamo.exc.RecompileError), match="ecompil"):
            own(torch.ones(2, WIDTH, dtype=torch.float64))  # his own are still forbidden


def test_within_the_limit_there_is_no_note() -> None:
    result = check(numbered(LIMIT))
    assert_pass(result)
    assert not [note for note in result.notes if "recompile_limit" in note]


@BOTH
def test_fault_in_a_block_past_the_limit_is_found(single_pass: bool) -> None:
    def wrong_last(graph: Any, inputs: Any) -> Any:
        divides = any(2 * LIMIT in node.args for node in graph.graph.nodes)
        run = graph.forward
        return (lambda *args: tuple(item * 1.01 for item in run(*args))) if divides else run

    result = check(numbered(), single_pass=single_pass, backend=wrong_last)
    assert result.verdict == Verdict.FAIL
    assert {name for name, _ in result.suspects} == {str(2 * LIMIT - 1)}


class Counting:
    """What the user compiles with, which has nothing to do with the checker."""

    def __init__(self) -> None:
        self.graphs = 0
        self.symbols = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        self.symbols += sum(isinstance(item, torch.SymInt) for item in inputs)
        return graph.forward


def test_checked_blocks_do_not_use_up_the_limit_of_the_user() -> None:
    model, backend = numbered(), Counting()
    assert_pass(check(model))
    for block in model[-LIMIT:]:
        block.compile(backend=backend)
    step(model)
    assert backend.graphs == LIMIT


def test_the_user_who_has_reached_the_limit_can_check_all_the_same() -> None:
    model, backend = numbered(), Counting()
    for block in model:
        block.compile(backend=backend)
    step(model)
    assert backend.graphs == LIMIT
    assert_pass(check(numbered()))


@BOTH
def test_sizes_of_the_checked_step_make_none_of_the_users_dynamic(single_pass: bool) -> None:
    model, backend = numbered(1), Counting()
    assert_pass(check(model, single_pass=single_pass))
    model[0].compile(backend=backend)
    model(torch.ones(5, WIDTH))
    assert (backend.graphs, backend.symbols) == (1, 0)


def test_sizes_that_change_in_the_checked_step_are_dynamic_as_without_it() -> None:
    model, checked, plain = numbered(1), Counting(), Counting()

    def run(model: nn.Module) -> Tensor:
        return sum(model(torch.ones(size, WIDTH)).sum() for size in (2, 3, 5))

    assert_pass(check(model, run, backend=checked))
    assert_pass(check(model, lambda model: run(model) * 2, backend=checked))
    model[0].compile(backend=plain)
    run(model)
    assert (checked.graphs, checked.symbols) == (plain.graphs, plain.symbols) == (2, 1)


def test_a_second_check_reuses_what_the_first_has_compiled() -> None:
    model, backend = numbered(), Counting()
    for _ in range(2):
        assert_pass(check(model, lambda model: model(torch.ones(2, WIDTH)).sum(), backend=backend))
        assert backend.graphs == 2 * LIMIT


def test_other_models_before_do_not_use_up_the_limit() -> None:
    for width in (3, 5, 7):
        model = numbered()
        for block in model:
            block.linear = nn.Linear(width, width)
        run = lambda model: model(torch.ones(2, width)).sum()  # noqa: E731, B023
        assert_pass(check(model, run))


@BOTH
def test_one_block_that_reaches_the_limit_alone_is_named_with_the_guard(single_pass: bool) -> None:
    def run(model: nn.Module) -> Tensor:
        return sum(model[0](torch.ones(2), times).sum() for times in range(2, 4 + LIMIT))

    model = nn.Sequential(Again())
    with torch._dynamo.config.patch(specialize_int=True):
        result = check(model, run, single_pass=single_pass)
    assert result.verdict == Verdict.INCONCLUSIVE
    told = explain(result)
    assert f"recompile_limit = {LIMIT} for forward (test_recompile_limit.py:" in told
    assert f"(last because `times == {1 + LIMIT}` did not hold); raise it" in told


@BOTH
def test_block_that_dynamo_left_to_eager_says_why(single_pass: bool) -> None:
    """Also in a second call, of which Dynamo says nothing."""
    model = nn.Sequential(Breaks(), Breaks(), Numbered(0))
    result = check(model, single_pass=single_pass)
    assert result.verdict == Verdict.INCONCLUSIVE
    assert result.diffs[2].compared
    for diff in result.diffs[:2]:
        assert not diff.compared
        assert "Dynamo broke the graph of forward (test_recompile_limit.py:" in diff.note
        assert "setattr() on Tensor.requires_grad" in diff.note
        assert "wrap the modules inside" in diff.note


def test_wrapping_the_modules_inside_of_it_helps() -> None:
    model = nn.Sequential(Breaks(), Breaks())
    checker = PrecisionChecker()
    checker.wrap_by_policy(model, nn.Linear)
    assert_pass(checker.compare(step, model))
