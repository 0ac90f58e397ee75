"""What a forward keeps outside of its module: globals, class attributes, closures, iterators."""

from __future__ import annotations

import collections
import gc
import itertools
import random
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from modulecheck.outer_state import OuterState
from modulecheck.snapshot import copied_together
from opcheck import Verdict
from tests.compiled import (
    DYNAMO_WARNS,
    WIDTH,
    Block,
    Kind,
    add_to_one,
    assert_pass,
    checked_step,
    explain,
    mark,
    plain_step,
    stack,
    wrong_backend,
)
from tests.step_equality import differences
from tests.two_pass import two_pass

pytestmark = [DYNAMO_WARNS, pytest.mark.usefixtures("fresh_dynamo")]

CALLS = 0
LOSSES: list[Tensor] = []
STATS: dict[str, Any] = {}
SETTINGS = types.SimpleNamespace(calls=0, seen=collections.deque(maxlen=3))


class InGlobal(Block):
    def forward(self, hidden: Tensor) -> Tensor:
        global CALLS
        CALLS += 1
        return super().forward(hidden) * CALLS


class InGlobalList(Block):
    def forward(self, hidden: Tensor) -> Tensor:
        hidden = super().forward(hidden)
        LOSSES.append(hidden.square().mean())
        return hidden


def note(value: int) -> int:
    STATS["calls"] = STATS.get("calls", 0) + value
    return STATS["calls"]


class InHelper(Block):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) * note(1)


class InObject(Block):
    def forward(self, hidden: Tensor) -> Tensor:
        SETTINGS.calls += 1
        SETTINGS.seen.append(SETTINGS.calls)
        return super().forward(hidden) * SETTINGS.calls


class InClass(Block):
    calls = 0

    def forward(self, hidden: Tensor) -> Tensor:
        type(self).calls += 1
        return super().forward(hidden) * InClass.calls


class Store:
    losses: list[Tensor] = []  # noqa: RUF012 - that is the point

    @classmethod
    def add(cls, loss: Tensor) -> None:
        cls.losses.append(loss)


class InStore(Block):
    def forward(self, hidden: Tensor) -> Tensor:
        hidden = super().forward(hidden)
        Store.add(hidden.square().mean())
        return hidden


def in_closure() -> type[Block]:
    calls, seen = 0, []

    class InClosure(Block):
        def forward(self, hidden: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            seen.append(calls)
            return super().forward(hidden) * len(seen) * calls

        @staticmethod
        def reset() -> None:
            nonlocal calls
            calls = 0
            seen.clear()

    return InClosure


TOTAL = torch.zeros(2)
HELD = {"pair": (torch.zeros(2), "name")}
COUNTS = np.zeros(2)


class InTensor(Block):
    """Its product keeps the tensor for its backward, after which others have written to it."""

    def forward(self, hidden: Tensor) -> Tensor:
        TOTAL.add_(1.0)
        return super().forward(hidden) * TOTAL[0]


class InHeldTensor(Block):
    def forward(self, hidden: Tensor) -> Tensor:
        HELD["pair"][0].add_(1.0)
        return super().forward(hidden) * HELD["pair"][0][1]


class InClassTensor(Block):
    seen = torch.zeros(1)

    def forward(self, hidden: Tensor) -> Tensor:
        self.seen += 1.0
        return super().forward(hidden) + self.seen


class InArray(Block):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) * self.count()

    @torch.compiler.disable
    def count(self) -> float:
        COUNTS[0] += 1.0
        return float(COUNTS[0])


NORM = nn.BatchNorm1d(WIDTH)
HIDDEN = nn.BatchNorm1d(WIDTH)
NORMS = (NORM, HIDDEN)


class InGlobalModule(Block):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(NORM(hidden))


class InHiddenModule(Block):
    """As one does to keep a module out of the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = [HIDDEN]

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(self.hidden[0](hidden))


class Slotted:
    __slots__ = ("calls",)


SLOTTED = Slotted()


class InSlots(Block):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) * self.count()

    @torch.compiler.disable
    def count(self) -> int:
        SLOTTED.calls += 1
        return SLOTTED.calls


class InNewOfClass(Block):
    """The class has no such attribute before the first call."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) * self.count()

    @torch.compiler.disable
    def count(self) -> int:
        type(self).made = vars(type(self)).get("made", 0) + 1
        return int(vars(type(self))["made"])


def start(kind: type[Block]) -> None:
    global CALLS
    CALLS = SLOTTED.calls = 0
    for written in (TOTAL, HELD["pair"][0], InClassTensor.seen):
        written.zero_()
    COUNTS[:] = 0.0
    for norm in NORMS:
        norm.reset_running_stats()
        norm.zero_grad()
    if "made" in vars(InNewOfClass):
        del InNewOfClass.made
    for container in (LOSSES, STATS, SETTINGS.seen, Store.losses):
        container.clear()
    SETTINGS.calls = InClass.calls = 0
    getattr(kind, "reset", lambda: None)()


def outside() -> dict[str, Any]:
    """What is there now."""
    return {
        "global": CALLS,
        "losses": [float(loss.detach()) for loss in LOSSES],
        "stats": dict(STATS),
        "object": (SETTINGS.calls, list(SETTINGS.seen)),
        "class": InClass.calls,
        "store": [float(loss.detach()) for loss in Store.losses],
        "tensors": [TOTAL.tolist(), HELD["pair"][0].tolist(), InClassTensor.seen.tolist()],
        "array": COUNTS.tolist(),
        "slots": SLOTTED.calls,
        "buffers": [item.tolist() for norm in NORMS for item in norm.buffers()],
        "gradients": [
            None if item.grad is None else item.grad.tolist()
            for norm in NORMS
            for item in norm.parameters()
        ],
        "made": vars(InNewOfClass).get("made"),
    }


def step_with_losses(workload: Any) -> Tensor:
    """The loss has a term from each block, as that of a mixture of experts."""
    workload.model.zero_grad()
    loss = workload.loss()
    for own in [*LOSSES, *Store.losses]:
        loss = loss + 0.1 * own
    loss.backward()
    return loss.detach()


KINDS = [
    InGlobal, InGlobalList, InHelper, InObject, InClass, InStore, in_closure(), InTensor,
    InHeldTensor, InClassTensor, InArray, InSlots, InNewOfClass, InHiddenModule, InGlobalModule,
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS, ids=[kind.__name__ for kind in KINDS])
def test_a_forward_that_writes_outside_is_compared_and_writes_once(kind: type[Block]) -> None:
    start(kind)
    expected = plain_step(stack(Kind(kind)), kind, "aot_eager", step=step_with_losses)
    there = outside()
    start(kind)
    result, actual = checked_step(stack(Kind(kind)), kind, step=step_with_losses)
    assert outside() == there
    assert not differences(expected, actual)
    assert_pass(result)


@pytest.mark.parametrize("kind", KINDS, ids=[kind.__name__ for kind in KINDS])
def test_a_fault_in_such_a_forward_is_found(kind: type[Block]) -> None:
    start(kind)
    workload = stack(Kind(kind))
    mark(workload.model)
    backend = wrong_backend(forward=add_to_one(0.01))
    result, _ = checked_step(workload, kind, backend, step=step_with_losses)
    assert result.suspects == [("blocks.1", "forward")], explain(result)


@pytest.mark.parametrize("kind", [InClass, InTensor, InArray, InSlots])
@pytest.mark.parametrize("wrong", [False, True])
def test_copies_begin_with_what_was_there(wrong: bool, kind: type[Block]) -> None:
    start(kind)
    there = outside()
    workload = stack(Kind(kind))
    mark(workload.model)
    backend = wrong_backend(forward=add_to_one(0.01)) if wrong else "aot_eager"
    step = lambda model: workload.loss_fn(model, workload.batch)  # noqa: E731
    result = two_pass(workload, kind, backend, step=step)
    assert outside() == there
    if wrong:
        assert result.suspects == [("blocks.1", "forward")], explain(result)
    else:
        assert_pass(result)


# ---- what cannot be put back --------------------------------------------------------------------


class FromIterator(Block):
    def __init__(self, steps: Iterator[int]) -> None:
        super().__init__()
        self.steps = steps

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = super().forward(hidden)
        return hidden + self.draw()

    @torch.compiler.disable
    def draw(self) -> int:
        return next(self.steps)


@pytest.mark.parametrize("error", [0.0, 0.01, 5.0])
def test_a_module_that_gives_something_else_each_time_gets_no_verdict(error: float) -> None:
    workload = stack(Kind(lambda: FromIterator(i for i in range(1000))))
    mark(workload.model)
    backend = wrong_backend(forward=add_to_one(error)) if error else "aot_eager"
    result, _ = checked_step(workload, FromIterator, backend)
    assert result.verdict == Verdict.INCONCLUSIVE, explain(result)
    assert "something else each time" in explain(result)


# ---- what is reached ----------------------------------------------------------------------------


def test_bindings_and_contents_are_put_back_in_place() -> None:
    start(InGlobal)
    seen, stats = SETTINGS.seen, STATS
    state = OuterState.of(
        [InGlobal(), InHelper(), InObject(), InClass(), InStore()], copied_together
    )
    before = outside()
    for kind in (InGlobal, InHelper, InObject, InClass, InStore):
        kind()(torch.ones(2, 16))
    assert outside() != before
    state.put_back()
    assert outside() == before
    assert SETTINGS.seen is seen
    assert STATS is stats


def test_a_forward_that_is_put_in_later_is_looked_at() -> None:
    class Patched(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    def noting(self: nn.Module, x: Tensor) -> Tensor:
        STATS["patched"] = True
        return x

    start(InGlobal)
    own, patched = Patched(), Patched()
    OuterState.of([own, patched], copied_together)
    own.forward = types.MethodType(noting, own)  # type: ignore[method-assign]
    state = OuterState.of([own], copied_together)
    own(torch.ones(1))
    state.put_back()
    assert not STATS
    Patched.forward = noting  # type: ignore[assignment,method-assign]
    state = OuterState.of([patched], copied_together)
    patched(torch.ones(1))
    state.put_back()
    assert not STATS


def test_what_was_forgotten_is_not_written_to_either() -> None:
    start(InTensor)
    there = outside()
    modules = [InTensor(), InHeldTensor(), InClassTensor(), InArray(), InSlots()]
    state = OuterState.of(modules, copied_together).forgotten()
    with state.again(copied_together):
        for module in modules:
            module(torch.ones(2, 16))
        assert outside() != there
    assert outside() == there
    with pytest.raises(KeyboardInterrupt), state.again(copied_together):
        modules[0](torch.ones(2, 16))
        raise KeyboardInterrupt
    assert outside() == there


@pytest.mark.parametrize("kind", ["torch", "python", "numpy"])
def test_generators_draw_the_same_again_and_then_go_on(kind: str) -> None:
    draw: Callable[[], float]
    if kind == "torch":
        of_torch = torch.Generator()
        draw = lambda: float(torch.rand(1, generator=of_torch))  # noqa: E731
    elif kind == "python":
        of_python = random.Random(3)
        draw = lambda: of_python.random()  # noqa: E731 - holds the generator itself
    else:
        of_numpy = np.random.default_rng(3)
        draw = lambda: float(of_numpy.random())  # noqa: E731

    class Draws(nn.Module):
        def forward(self) -> float:
            return draw()

    module = Draws()
    state = OuterState.of([module], copied_together)
    first, second = module(), module()
    assert first != second
    state.put_back()
    assert module() == first
    with state.again(copied_together):
        assert module() == first
    assert module() == second


def test_classes_and_closures_that_were_looked_at_are_let_go() -> None:
    def made() -> tuple[type[nn.Module], Tensor]:
        held = [torch.ones(3)]

        class Local(nn.Module):
            calls = 0

            def forward(self, x: Tensor) -> Tensor:
                Local.calls += 1
                return x * held[0]

        return Local, held[0]

    kind, tensor = made()
    assert len(OuterState.of([kind()], lambda tensors: tensors).values) > 1
    gone = weakref.ref(kind), weakref.ref(tensor)
    del kind, tensor
    gc.collect()
    assert [item() for item in gone] == [None, None]


def test_a_vocabulary_is_left_alone_and_torch_is_not_looked_into() -> None:
    words = {str(number): number for number in range(10_000)}
    count = itertools.count()

    class Looks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            words["new"] = next(count)
            return torch.relu(x)

    state = OuterState.of([Looks(), nn.TransformerEncoderLayer(8, 2)], copied_together)
    Looks()(torch.ones(1))
    state.put_back()
    assert words["new"] == 0
    assert len(state.values) < 20


# ---- what is not run ----------------------------------------------------------------------------


class Settings(dict[str, Any]):
    """Attributes are items, and a wrong name is a KeyError."""

    __getattr__ = dict.__getitem__


class OutsideOfRequest:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{name}: there is no request")


class Loads(Mapping[str, Tensor]):
    """Each value is loaded when it is asked for."""

    num_loaded = 0

    def __getitem__(self, key: str) -> Tensor:
        Loads.num_loaded += 1
        return torch.ones(1)

    def __iter__(self) -> Iterator[str]:
        return iter("abc")

    def __len__(self) -> int:
        return 3


class LoadsItems(dict[str, Any]):
    """As `Loads`, and a dict."""

    def __getitem__(self, key: str) -> Tensor:
        Loads.num_loaded += 1
        return torch.ones(1)

    def items(self) -> Any:
        return [(key, self[key]) for key in self]

    def values(self) -> Any:
        return [self[key] for key in self]

    def __iter__(self) -> Iterator[str]:
        return iter("abc")

    def keys(self) -> Any:
        return list(self)


@pytest.mark.parametrize("kind", [Settings, OutsideOfRequest, Loads, LoadsItems])
def test_objects_beside_a_forward_are_not_asked_for_anything(kind: type) -> None:
    there = kind()

    class Looks(Block):
        def forward(self, hidden: Tensor) -> Tensor:
            self.look()
            return super().forward(hidden)

        @torch.compiler.disable
        def look(self) -> bool:
            return there is None

    Loads.num_loaded = 0
    result, _ = checked_step(stack(Kind(Looks)), Looks)
    assert_pass(result)
    assert Loads.num_loaded == 0
