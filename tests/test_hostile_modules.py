"""Modules that do what nobody expects: PrecisionChecker neither lies about them nor interferes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modulecheck import CompareResult, PrecisionChecker
from opcheck import ArgumentError, Verdict
from tests.compiled import (
    DYNAMO_WARNS,
    WIDTH,
    Block,
    Kind,
    add_to_one,
    assert_clean,
    assert_pass,
    checked_step,
    explain,
    mark,
    plain_step,
    stack,
    wrong_backend,
)
from tests.step_equality import differences

pytestmark = [DYNAMO_WARNS, pytest.mark.usefixtures("fresh_dynamo")]


def clean(kind: Kind, **options: Any) -> CompareResult:
    return assert_clean(lambda: stack(kind), type(kind.make()), "aot_eager", **options)


def faulty(kind: Kind, **fault: Any) -> CompareResult:
    """The second block is compiled wrong."""
    workload = stack(kind)
    mark(workload.model)
    return checked_step(workload, type(kind.make()), wrong_backend(**fault))[0]


# ---- torch.func ---------------------------------------------------------------------------------


class FunctionalBlock(Block):
    def forward(self, hidden: Tensor) -> Tensor:
        slope = torch.func.grad(lambda x: torch.tanh(self.down(self.up(x))).sum())(hidden)
        return slope + torch.func.vmap(super().forward)(hidden)


def test_functional_transforms_in_a_forward_are_compared() -> None:
    clean(Kind(FunctionalBlock))
    result = faulty(Kind(FunctionalBlock), forward=add_to_one(0.1))
    assert result.suspects == [("blocks.1", "forward")], explain(result)


def test_hooks_on_what_autograd_saves_see_nothing_of_a_run_again() -> None:
    saved: list[int] = []

    def step(workload: Any) -> Tensor:
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(
            lambda kept: (saved.append(kept.numel()), kept)[1], lambda kept: kept
        ):
            return workload.step()

    plain_step(stack(), Block, "aot_eager", step=step)
    expected = len(saved)
    result, _ = checked_step(stack(), Block, step=step)
    assert_pass(result)
    assert len(saved) == expected > 0


# ---- iterators ----------------------------------------------------------------------------------


class GivesGenerator(Block):
    def forward(self, hidden: Tensor) -> Any:
        return (super(GivesGenerator, self).forward(hidden) * place for place in range(2))


class TakesIterator(Block):
    def forward(self, parts: Iterator[Tensor]) -> Tensor:
        return super().forward(torch.cat(list(parts)))


ITERATORS = {
    "given": Kind(GivesGenerator, lambda block, x: sum(block(x))),
    "taken": Kind(TakesIterator, lambda block, x: block(part for part in x.split(2))),
    "in a list": Kind(TakesIterator, lambda block, x: block(parts=map(torch.clone, x.split(3)))),
}


@pytest.mark.parametrize("kind", ITERATORS.values(), ids=ITERATORS)
def test_what_can_be_read_once_is_left_to_the_step_and_no_verdict(kind: Kind) -> None:
    classes = type(kind.make())
    expected = plain_step(stack(kind), classes, "aot_eager")
    result, actual = checked_step(stack(kind), classes)
    assert not differences(expected, actual)
    assert result.verdict == Verdict.INCONCLUSIVE, explain(result)
    assert "iterator" in explain(result)


# ---- a backward that raises ---------------------------------------------------------------------


@torch.compiler.disable
def fragile(x: Tensor, armed: list[str]) -> Tensor:
    """Raises in backward as long as `armed` is not empty."""

    def hook(grad: Tensor) -> None:
        if armed:
            raise MemoryError(armed.pop())

    x = x.clone()
    x.register_hook(hook)
    return x


def test_gradients_that_an_exception_cut_off_are_no_fault() -> None:
    """A batch that does not fit is taken again, in two halves."""
    armed = ["no memory"]

    class Inner(Block):
        def forward(self, hidden: Tensor) -> Tensor:
            hidden = hidden + self.down(torch.tanh(self.up(hidden)))
            hidden = fragile(hidden, armed)
            return hidden + self.down(torch.tanh(self.up(hidden)))

    def step(workload: Any) -> Tensor:
        with pytest.raises(MemoryError):
            workload.step()
        return workload.step()

    result, _ = checked_step(stack(Kind(Inner), num_blocks=2), Inner, step=step)
    first = [diff.calls[0] for diff in result.diffs]
    assert "cut short" in first[1].note, first
    assert first[1].verdict == Verdict.INCONCLUSIVE, explain(result)
    for diff in result.diffs:
        assert diff.calls[1].verdict == Verdict.PASS, explain(result)


# ---- parameters without values ------------------------------------------------------------------


class LazyBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.LazyLinear(WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.tanh(self.linear(hidden))


def test_a_lazy_module_is_compared_from_its_second_batch_on() -> None:
    workload = stack(Kind(LazyBlock))
    checker = PrecisionChecker()
    checker.wrap_by_policy(workload.model, LazyBlock)
    checker.install(workload.model)
    first = checker.collect(workload.step(), keep_installed=True)
    second = checker.collect(workload.step())
    assert first.verdict == Verdict.INCONCLUSIVE
    assert "lazy: linear.weight gets its shape in this call" in explain(first)
    assert "crashed" not in explain(first)
    assert_pass(second)


@pytest.mark.parametrize("kind", ["lazy", "meta"])
def test_a_comparison_of_copies_says_that_there_are_no_values(kind: str) -> None:
    workload = stack(Kind(LazyBlock)) if kind == "lazy" else stack()
    if kind == "meta":
        workload.model.to("meta")
    checker = PrecisionChecker(single_pass=False)
    checker.wrap_all_children(workload.model)
    with pytest.raises(ArgumentError, match=f"^model: .*{kind}"):
        checker.compare(lambda model: workload.step(), workload.model)


# ---- calls inside of calls ----------------------------------------------------------------------


class Recursive(Block):
    def forward(self, hidden: Tensor, depth: int = 2) -> Tensor:
        hidden = super().forward(hidden)
        return hidden if not depth else hidden + 0.5 * self(hidden, depth - 1)


@pytest.mark.parametrize("single_pass", [True, False])
@pytest.mark.parametrize("wrong", [False, True])
def test_a_module_that_calls_itself(single_pass: bool, wrong: bool) -> None:
    workload = stack(Kind(Recursive))
    mark(workload.model)
    backend = wrong_backend(forward=add_to_one(0.1)) if wrong else "aot_eager"
    checker = PrecisionChecker(backend=backend, single_pass=single_pass)
    checker.wrap_by_policy(workload.model, Recursive)

    def step(model: nn.Module) -> Tensor:
        return workload.loss_fn(model, workload.batch)

    result = checker.compare(step, workload.model)
    if wrong:
        assert result.suspects == [("blocks.1", "forward")], explain(result)
    else:
        assert_pass(result)
