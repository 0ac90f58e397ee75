"""Buffers that a forward makes, removes, replaces or shares, in both modes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager

from modulecheck import PrecisionChecker
from modulecheck.report import report_lines
from opcheck.records import Verdict
from tests.compiled import DYNAMO_WARNS, MODES

pytestmark = DYNAMO_WARNS

X = torch.linspace(-1.0, 1.0, 32).reshape(4, 8)


class Keeps(nn.Module):
    """A linear layer that keeps something in buffers; compiled may be told to keep another."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.start()

    def start(self) -> None:
        """Buffers at first."""

    def keep(self, y: Tensor, *, compiled: bool) -> None:
        raise NotImplementedError

    def used(self) -> float:
        """What the result depends on: a run again on another state gives another one."""
        return 1.0

    @torch._dynamo.disable
    def begin(self) -> float:
        return self.used()

    @torch._dynamo.disable
    def end(self, y: Tensor, *, compiled: bool) -> None:
        self.keep(y, compiled=compiled)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) * self.begin()
        self.end(y.detach(), compiled=torch.compiler.is_compiling())
        return y


class MakesLazily(Keeps):
    def keep(self, y: Tensor, *, compiled: bool) -> None:
        if "seen" in self._buffers:
            self.seen.add_(1)
        else:
            self.register_buffer("seen", y * 2, persistent=False)

    def used(self) -> float:
        return 2.0 if "seen" in self._buffers else 1.0


class MakesInTheGraph(MakesLazily):
    """Dynamo sees it."""

    def begin(self) -> float:
        return self.used()

    def end(self, y: Tensor, *, compiled: bool) -> None:
        self.keep(y, compiled=compiled)


class MakesFromNone(Keeps):
    def start(self) -> None:
        self.register_buffer("seen", None)

    def keep(self, y: Tensor, *, compiled: bool) -> None:
        self.seen = y * 2 if self.seen is None else self.seen + 1

    def used(self) -> float:
        return 1.0 if self.seen is None else 2.0


class MakesFromAttribute(MakesFromNone):
    """A name that was a plain attribute becomes a buffer."""

    def start(self) -> None:
        self.seen: Any = None

    def keep(self, y: Tensor, *, compiled: bool) -> None:
        if self.seen is None:
            del self.seen
            self.register_buffer("seen", y * 2)


class Removes(Keeps):
    def start(self) -> None:
        self.register_buffer("seen", torch.ones(3))

    def keep(self, y: Tensor, *, compiled: bool) -> None:
        if "seen" in self._buffers:
            del self.seen

    def used(self) -> float:
        return 2.0 if "seen" in self._buffers else 1.0


class SetsToNone(Removes):
    def keep(self, y: Tensor, *, compiled: bool) -> None:
        self.seen = None

    def used(self) -> float:
        return 1.0 if self.seen is None else 2.0


class Replaces(Removes):
    """By one of another shape and dtype."""

    def keep(self, y: Tensor, *, compiled: bool) -> None:
        self.seen = y.double()


class Shared(Keeps):
    """One inner module under two names, and one buffer under two names of it."""

    def start(self) -> None:
        self.one = nn.Module()
        self.one.register_buffer("a", torch.zeros(8))
        self.one.register_buffer("b", self.one.a)
        self.two = self.one

    def keep(self, y: Tensor, *, compiled: bool) -> None:
        self.two.b.add_(y.sum(0))
        assert self.one.a is self.two.b

    def used(self) -> float:
        return 1.0 + float(self.one.a.sum())


class OneMemory(Keeps):
    """Two buffers that see the same memory."""

    def start(self) -> None:
        self.register_buffer("whole", torch.zeros(8))
        self.register_buffer("part", self.whole[:4])

    def keep(self, y: Tensor, *, compiled: bool) -> None:
        self.part.add_(y.sum(0)[:4])

    def used(self) -> float:
        return 1.0 + float(self.whole.sum())


RIGHT = [
    MakesLazily, MakesInTheGraph, MakesFromNone, MakesFromAttribute, Removes, SetsToNone, Replaces,
    Shared, OneMemory,
]  # fmt: skip


def steps(model: nn.Module) -> Any:
    for _ in range(2):
        loss = model(X).square().mean()
        loss.backward()
    return loss


def checked(model: nn.Module, *, single_pass: bool, backend: Any = "aot_eager") -> Any:
    torch._dynamo.reset()
    checker = PrecisionChecker(backend=backend, single_pass=single_pass)
    checker.wrap(model)
    return checker.compare(steps, model)


def mutated(result: Any, call: int = 0) -> dict[str, Any]:
    diff = result.diffs[0]
    found = (diff.calls or [diff])[call].mutated
    return {item.name: item for item in found or []}


@MODES
@pytest.mark.parametrize("kind", RIGHT)
def test_both_sides_alike_pass(kind: Any, single_pass: bool) -> None:
    torch.manual_seed(0)
    result = checked(kind(), single_pass=single_pass)
    assert result.verdict == Verdict.PASS, list(report_lines(result))


@MODES
@pytest.mark.parametrize("kind", [MakesLazily, MakesFromNone, MakesFromAttribute, Replaces])
def test_what_both_sides_make_is_compared(kind: Any, single_pass: bool) -> None:
    torch.manual_seed(0)
    result = checked(kind(), single_pass=single_pass)
    assert mutated(result)["buffer seen"].judged == Verdict.PASS


@MODES
def test_tied_buffers_are_compared_once(single_pass: bool) -> None:
    torch.manual_seed(0)
    result = checked(Shared(), single_pass=single_pass)
    assert list(mutated(result)) == ["buffer one.a"], list(report_lines(result))


@pytest.mark.parametrize("kind", RIGHT)
def test_step_and_buffers_are_those_of_the_unchecked_step(kind: Any) -> None:
    torch.manual_seed(0)
    plain = kind()
    model = copy.deepcopy(plain)
    checked(model, single_pass=True)
    torch._dynamo.reset()
    plain.compile(backend="aot_eager")
    steps(plain)
    assert [*model._buffers] == [*plain._buffers]
    assert model._non_persistent_buffers_set == plain._non_persistent_buffers_set
    mine, theirs = (dict(net.named_buffers(remove_duplicate=False)) for net in (model, plain))
    assert [*mine] == [*theirs]
    for name, buffer in mine.items():
        assert torch.equal(buffer, theirs[name]), name
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad)


# ---- one side alone -----------------------------------------------------------------------------


class OnlyCompiledMakes(Keeps):
    def keep(self, y: Tensor, *, compiled: bool) -> None:
        if compiled:
            self.seen = torch.nn.Buffer(y * 2)


class OnlyEagerMakes(Keeps):
    def keep(self, y: Tensor, *, compiled: bool) -> None:
        if not compiled:
            self.register_buffer("seen", y * 2, persistent=False)


class OnlyCompiledSets(OnlyCompiledMakes):
    def start(self) -> None:
        self.register_buffer("seen", None)


class OnlyCompiledRemoves(Removes):
    def keep(self, y: Tensor, *, compiled: bool) -> None:
        if compiled and "seen" in self._buffers:
            del self.seen

    def used(self) -> float:
        return 1.0


class OnlyEagerRemoves(OnlyCompiledRemoves):
    def keep(self, y: Tensor, *, compiled: bool) -> None:
        if not compiled and "seen" in self._buffers:
            del self.seen


class OnlyCompiledUnties(Shared):
    def keep(self, y: Tensor, *, compiled: bool) -> None:
        self.two.a.add_(y.sum(0))
        if compiled:
            self.one.b = self.one.b.clone().mul_(3)

    def used(self) -> float:
        return 1.0


@MODES
@pytest.mark.parametrize(
    ("kind", "has"),
    [
        (OnlyCompiledMakes, "compiled"),
        (OnlyCompiledSets, "compiled"),
        (OnlyEagerRemoves, "compiled"),
        (OnlyEagerMakes, "eager"),
        (OnlyCompiledRemoves, "eager"),
    ],
)
def test_buffer_of_one_side_alone_is_named(kind: Any, has: str, single_pass: bool) -> None:
    torch.manual_seed(0)
    result = checked(kind(), single_pass=single_pass)
    assert result.verdict == Verdict.FAIL
    found = mutated(result)["buffer seen"]
    assert found.judged == Verdict.FAIL
    assert found.reason == f"only {has} has it after the call"


@MODES
def test_buffer_that_compiled_alone_has_untied_fails(single_pass: bool) -> None:
    torch.manual_seed(0)
    found = mutated(checked(OnlyCompiledUnties(), single_pass=single_pass))
    assert {name: item.judged for name, item in found.items()} == {
        "buffer one.a": Verdict.PASS, "buffer one.b": Verdict.FAIL,
    }  # fmt: skip


class OtherShape(Keeps):
    def start(self) -> None:
        self.register_buffer("seen", torch.ones(3))

    def keep(self, y: Tensor, *, compiled: bool) -> None:
        self.seen = torch.ones(4) if compiled else torch.ones(3)


class OtherDtype(OtherShape):
    def keep(self, y: Tensor, *, compiled: bool) -> None:
        self.seen = torch.ones(3, dtype=torch.float64 if compiled else torch.float32)


@MODES
@pytest.mark.parametrize(("kind", "what"), [(OtherShape, "shape"), (OtherDtype, "dtype")])
def test_buffer_of_another_shape_or_dtype_fails(kind: Any, what: str, single_pass: bool) -> None:
    torch.manual_seed(0)
    found = mutated(checked(kind(), single_pass=single_pass))["buffer seen"]
    assert found.judged == Verdict.FAIL
    assert what in found.reason


@MODES
def test_wrong_value_of_a_buffer_that_both_make_fails(single_pass: bool) -> None:
    class Wrong(MakesLazily):
        def keep(self, y: Tensor, *, compiled: bool) -> None:
            if "seen" not in self._buffers:
                self.register_buffer("seen", y * (2.02 if compiled else 2), persistent=False)

        def used(self) -> float:
            return 1.0

    torch.manual_seed(0)
    result = checked(Wrong(), single_pass=single_pass)
    assert mutated(result)["buffer seen"].judged == Verdict.FAIL


@MODES
def test_wrong_write_of_compiled_code_to_a_buffer_fails(single_pass: bool) -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("seen", torch.zeros(4, 8), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            self.seen.add_(y.detach())
            return y

    def spoils(graph: Any, inputs: Any) -> Any:
        run = aot_eager(graph, inputs)
        held = [item for item in inputs if item.shape == (4, 8) and not torch.equal(item, X)]

        def spoilt(*args: Any) -> Any:
            out = run(*args)
            for item in args:
                if item.shape == (4, 8) and not item.requires_grad and not torch.equal(item, X):
                    item.mul_(1.1)
            return out

        assert len(held) <= 1
        return spoilt

    torch.manual_seed(0)
    result = checked(InPlace(), single_pass=single_pass, backend=spoils)
    assert mutated(result)["buffer seen"].judged == Verdict.FAIL
