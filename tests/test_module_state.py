"""What modules keep in plain attributes and in the objects that they are given."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

from modulecheck import PrecisionChecker
from modulecheck.attributes import Attributes
from modulecheck.outer_state import MAX_VALUES
from modulecheck.undisturbed import undisturbed
from opcheck.records import Verdict
from tests.compiled import DYNAMO_WARNS, MODES

X = torch.linspace(-1.0, 1.0, 32).reshape(4, 8)


class Counts:
    def __init__(self) -> None:
        self.calls = 0


class Keeps(nn.Module):
    """A linear layer scaled by what the module remembers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.start()

    def start(self) -> None:
        raise NotImplementedError

    def scale(self, x: Any) -> Any:
        raise NotImplementedError

    def forward(self, x: Any) -> Any:
        return self.linear(x) * self.scale(x)


class InCounter(Keeps):
    def start(self) -> None:
        self.calls = 0

    def scale(self, x: Any) -> Any:
        self.calls += 1
        return self.calls


class InList(Keeps):
    def start(self) -> None:
        self.seen: list[int] = []

    def scale(self, x: Any) -> Any:
        self.seen.append(1)
        return len(self.seen)


class InObject(Keeps):
    def start(self) -> None:
        self.counts = Counts()

    def scale(self, x: Any) -> Any:
        self.counts.calls += 1
        return self.counts.calls


class InTensorInPlace(Keeps):
    def start(self) -> None:
        self.sum = torch.ones(4, 8)

    def forward(self, x: Any) -> Any:
        self.sum.add_(x)
        return self.linear(self.sum + 0)


class InNewTensor(Keeps):
    def start(self) -> None:
        self.cache: Any = None

    def scale(self, x: Any) -> Any:
        self.cache = x if self.cache is None else torch.cat([self.cache, x])
        return self.cache.sum() / len(self.cache)


class LeavesTensorBehind(nn.Module):
    """The loss is made of a tensor that the call put into an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.left = nn.Linear(8, 8), None

    def forward(self, x: Any) -> Any:
        y = self.linear(x)
        self.left = y * 3
        return y


class FillsArgument(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Any, into: Any) -> Any:
        into.append(self.linear(x))
        return into[0] * len(into)


class Giving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = FillsArgument()

    def forward(self, x: Any) -> Any:
        into: list[Any] = []
        return self.inner(x, into) + into[0]


class TakingFromAttribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = LeavesTensorBehind()

    def forward(self, x: Any) -> Any:
        return self.inner(x) + self.inner.left


KEEPERS = [InCounter, InList, InObject, InTensorInPlace, InNewTensor]


def three_steps(model: nn.Module) -> Any:
    for _ in range(3):
        loss = model(X).square().mean()
        loss.backward()
    return loss


def checked(model: Any, run: Any, module: Any, *, single_pass: bool, backend: Any) -> Any:
    torch._dynamo.reset()
    checker = PrecisionChecker(backend=backend, single_pass=single_pass)
    checker.wrap(module)
    return checker.compare(run, model)


@MODES
@pytest.mark.parametrize("kind", KEEPERS)
def test_state_of_a_module_is_what_the_call_found(kind: Any, single_pass: bool) -> None:
    model = kind()
    result = checked(model, three_steps, model, single_pass=single_pass, backend="aot_eager")
    assert result.verdict == Verdict.PASS, result.judgement


@pytest.mark.parametrize("kind", KEEPERS)
def test_step_and_state_are_those_of_the_unchecked_step(kind: Any) -> None:
    torch.manual_seed(0)
    plain = kind()
    model = copy.deepcopy(plain)
    checked(model, three_steps, model, single_pass=True, backend="aot_eager")
    torch._dynamo.reset()
    plain.compile(backend="aot_eager")
    three_steps(plain)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
    for name in ("calls", "seen"):
        assert model.__dict__.get(name) == plain.__dict__.get(name)
    for name in ("sum", "cache"):
        if name in model.__dict__:
            assert torch.equal(getattr(model, name), getattr(plain, name))
    if kind is InObject:
        assert model.counts.calls == plain.counts.calls == 3


@MODES
def test_wrong_write_to_a_plain_tensor_is_found(single_pass: bool) -> None:
    def spoils(graph: Any, inputs: Any) -> Any:
        run = aot_eager(graph, inputs)

        def spoilt(*args: Any) -> Any:
            out = run(*args)
            for item in args:
                if item.shape == (4, 8) and not torch.equal(item, X):
                    item.mul_(1.1)
            return out

        return spoilt

    model = InTensorInPlace()

    def step(model: Any) -> Any:
        with torch.no_grad():
            return model(X).mean()

    result = checked(model, step, model, single_pass=single_pass, backend=spoils)
    assert result.suspects == [("", "forward")]
    assert any("attribute sum" in item.name for item in result.diffs[0].mutated)


@MODES
@pytest.mark.parametrize("kind", [Giving, TakingFromAttribute])
def test_gradient_through_what_the_call_left_behind(kind: Any, single_pass: bool) -> None:
    model = kind()
    result = checked(model, three_steps, model.inner, single_pass=single_pass, backend="aot_eager")
    assert result.verdict == Verdict.PASS, result.judgement
    assert result.diffs[0].param_grads


@DYNAMO_WARNS
def test_cache_that_is_empty_at_the_call() -> None:
    config = Qwen2Config(
        vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    model, ids = Qwen2ForCausalLM(config), torch.arange(8)[None]
    torch._dynamo.reset()
    checker = PrecisionChecker()
    checker.wrap_by_policy(model, (Qwen2DecoderLayer,))
    result = checker.compare(lambda model: model(ids, labels=ids).loss, model)
    assert result.verdict == Verdict.PASS, result.judgement
    assert [item.name for item in result.diffs[0].mutated] != []


class KeepsContainers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen, self.by_name, self.names = [1, 2], {"a": 1}, {"a"}

    def forward(self, x: Any) -> Any:
        self.seen.append(3)
        self.seen[0] = 7
        self.by_name["b"] = self.by_name.pop("a")
        self.names.symmetric_difference_update({"a", "b"})
        self.later = x
        return x


@pytest.mark.parametrize("raises", [False, True])
def test_containers_of_a_module_that_ran_undisturbed_are_as_before(raises: bool) -> None:
    root = nn.Sequential(KeepsContainers())
    inner = root[0]
    before = (inner.seen, inner.by_name, inner.names)
    with contextlib.suppress(ZeroDivisionError), undisturbed(root):
        root(X)
        assert (inner.seen, inner.by_name, inner.names) == ([7, 2, 3], {"b": 1}, {"b"})
        if raises:
            raise ZeroDivisionError
    for kept, now in zip(before, (inner.seen, inner.by_name, inner.names), strict=True):
        assert now is kept
    assert before == ([1, 2], {"a": 1}, {"a"})
    assert not hasattr(inner, "later")


def test_what_is_around_a_module_is_left_alone() -> None:
    class Trainer:
        def __init__(self, model: nn.Module) -> None:
            self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    model = nn.Linear(2, 2)
    model.trainer, model.words = Trainer(model), [str(n) for n in range(MAX_VALUES + 1)]
    model.lock, model.own = open, [model.weight]  # type: ignore[assignment]
    trainer, words = model.trainer, model.words
    taken = Attributes.take(model, {}, lambda tensors: [item.clone() for item in tensors])
    assert taken.tensors() == {}
    taken.put(model, {"weight": torch.ones(2, 2)}, lambda tensors: tensors)
    assert model.trainer is trainer
    assert model.words is words
    assert torch.equal(model.own[0], torch.ones(2, 2))
