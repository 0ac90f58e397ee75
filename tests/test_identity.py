"""What is known by an address is known while it lives: the next object at that address is another.

CPython and torch give freed memory out again at once, so that a loop of a few rounds meets the
address of what has just died.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import modulecheck
import opcheck
from modulecheck.attributes import Attributes, attribute_tensors
from modulecheck.hooks import CountingBackend
from modulecheck.keeping import Keeper
from modulecheck.recorded_files import _Writer
from modulecheck.region_gradients import RegionGradients
from modulecheck.snapshot import Snapshot, copied_together
from modulecheck.tensor_container import TensorTable
from modulecheck.trees import rebuilt
from opcheck.certificate import Surroundings
from opcheck.exits import Exits
from opcheck.golden import CannotRunAgainError, run_module
from opcheck.own_thread import OwnThread
from opcheck.owners import Owners
from opcheck.source_lines import TORCH_FOLDER, find_user_frame
from opcheck.written import _meeting
from tests.step_equality import EmptyMode

ROUNDS = 12


def in_thread(function: Callable[[], Any]) -> Any:
    """What a function returns in a thread of its own, which has ended."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


# ---- tensors, known by their ids -----------------------------------------------------------------


def trained() -> tuple[nn.Module, torch.optim.Optimizer, Owners]:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    owners = Owners([model], {model: "", model[0]: "0", model[1]: "1"})
    owners.learn(optimizer)
    return model, optimizer, owners


def test_a_leaf_is_not_owned_because_a_freed_gradient_was() -> None:
    _, optimizer, owners = trained()
    optimizer.zero_grad()
    optimizer.state.clear()
    leaves = [torch.ones(2, requires_grad=True) for _ in range(ROUNDS)]
    assert [owners.of_gradient(leaf, 7) for leaf in leaves] == [""] * ROUNDS


def test_a_leaf_is_not_owned_because_a_replaced_parameter_was() -> None:
    model, _, owners = trained()
    for _ in range(ROUNDS):
        del model[0].bias
        leaf = torch.ones(2, requires_grad=True)
        assert owners.of_gradient(leaf, 7) == ""
        model[0].bias = nn.Parameter(torch.ones(2))
        assert owners.of_gradient(model[0].bias, 8) == "0"


def test_a_temporary_of_an_optimizer_is_not_owned_because_freed_state_was() -> None:
    _, optimizer, owners = trained()
    for state in optimizer.state.values():
        state["momentum_buffer"] = None
    temporaries = [torch.ones(2, 2) for _ in range(ROUNDS)]
    assert {owners.of([item]) for item in temporaries} == {""}


def test_gradients_and_state_are_owned_while_the_step_runs_and_parameters_after_it_too() -> None:
    model, optimizer, owners = trained()
    weight = model[1].weight
    known = [weight, weight.grad, optimizer.state[weight]["momentum_buffer"]]
    assert [owners.of([item]) for item in known] == ["1"] * 3
    owners.step_ended()
    assert [owners.of([item]) for item in known] == ["1", "", ""]
    # what a weak reference would prevent
    torch.utils.swap_tensors(weight, nn.Parameter(torch.zeros(2, 2)))


def test_every_optimizer_that_a_step_makes_is_undone() -> None:
    model = nn.Linear(2, 2)
    twin = copy.deepcopy(model)
    others = [nn.Parameter(torch.ones(2)) for _ in range(ROUNDS)]
    keeper = Keeper(model)
    with keeper.one_run(twin):
        for other in others:
            other.grad = torch.ones(2)
            torch.optim.SGD([other], lr=1.0).step()
            gc.collect()
    assert [other.tolist() for other in others] == [[1.0, 1.0]] * ROUNDS


def test_parameters_that_an_optimizer_is_given_later_are_undone_too() -> None:
    model = nn.Linear(2, 2)
    early, late = (nn.Parameter(torch.ones(2)) for _ in range(2))
    early.grad, late.grad = torch.ones(2), torch.ones(2)
    with Keeper(model).one_run(copy.deepcopy(model)):
        optimizer = torch.optim.SGD([early], lr=1.0)
        optimizer.step()
        optimizer.add_param_group({"params": [late]})
        optimizer.step()
    assert early.tolist() == late.tolist() == [1.0, 1.0]


def test_a_parameter_that_took_the_place_of_another_has_moved() -> None:
    module = nn.Module()
    module.weight = nn.Parameter(torch.ones(2))
    for _ in range(ROUNDS):
        snapshot = Snapshot.take(module, (), {}, cast_dtype=None)
        assert not snapshot.parameters_moved(module)
        assert not snapshot.parameters_gone(module)
        del module.weight
        module.weight = nn.Parameter(torch.ones(2))
        assert snapshot.parameters_moved(module)
        assert snapshot.parameters_gone(module)


class Replacing(nn.Module):
    """Puts a new buffer in the place of the old one, which dies first."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        del self.count
        self.register_buffer("count", torch.ones(3))
        return x


def test_a_buffer_that_took_the_place_of_another_is_registered_again() -> None:
    checker = modulecheck.TensorChecker(quiet=True)
    modules = [Replacing().eval() for _ in range(2)]
    with modulecheck.module_register_tensor_checker(modules, checker):
        for _ in range(ROUNDS):
            for module in modules:
                module(torch.ones(2))
    checker.check_equal()
    found = [record.tag for record in checker.result.records if "count_after" in record.tag]
    assert len(found) == ROUNDS


class Dropping(nn.Module):
    """Drops its parameter, and makes leaves that belong to nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.gone = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        del self.gone
        leaves = [torch.ones(3, requires_grad=True) for _ in range(ROUNDS)]
        return sum((x * leaf for leaf in leaves), start=x)


def test_the_gradient_of_a_new_leaf_is_not_that_of_a_dropped_parameter() -> None:
    module, x = Dropping(), torch.ones(3, requires_grad=True)
    region = RegionGradients(module, (x,), {})
    out = module(x)
    region.attach(out, attribute_tensors(module), on_first=lambda: None, on_done=lambda: None)
    out.sum().backward()
    assert ("parameter", "gone") not in region.found
    assert region.has_unknown_edges


# ---- what a container makes when it is asked -----------------------------------------------------


class Making(Mapping):  # type: ignore[type-arg]
    """Gives a new list each time."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.held = values

    def __getitem__(self, key: str) -> list[Any]:
        return [self.held[key]]

    def __iter__(self) -> Any:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)


class Item:
    """An object with one attribute."""

    def __init__(self, value: int) -> None:
        self.value = value


class _Made:
    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return 0 if owner is None else Item(owner.number)

    def __set__(self, owner: Any, value: Any) -> None:
        """The default of the dataclass."""


@dataclasses.dataclass
class Numbered:
    """Makes an item each time it is asked for it."""

    number: int
    item: Any = _Made()


def test_objects_that_are_made_anew_are_not_written_as_one() -> None:
    tree = _Writer(TensorTable(), {}).tree([Numbered(number) for number in range(ROUNDS)])
    written = [part["attributes"]["item"]["attributes"]["value"] for part in tree["list"]]
    assert written == list(range(ROUNDS))


class WithState(nn.Module):
    """Holds tensors in a mapping that makes its lists anew."""

    def __init__(self) -> None:
        super().__init__()
        self.state = [Making({"x": torch.full((1,), float(n))}) for n in range(ROUNDS)]


def test_no_tensor_is_passed_over_because_a_list_before_it_has_died() -> None:
    module = WithState()
    taken = Attributes.take(module, {}, lambda tensors: [item.clone() for item in tensors])
    assert len(taken.all_tensors()) == ROUNDS
    assert len(attribute_tensors(module)) == ROUNDS


class Fresh(Mapping):  # type: ignore[type-arg]
    """Gives new tensors each time, and is copied by what `__reduce__` makes."""

    def __init__(self, values: list[float]) -> None:
        self.held = values

    def __getitem__(self, key: int) -> Tensor:
        return torch.full((1,), self.held[key])

    def __iter__(self) -> Any:
        return iter(range(len(self.held)))

    def __len__(self) -> int:
        return len(self.held)

    def __reduce__(self) -> Any:
        return Fresh, ([*self.held],)


def test_a_copy_is_made_of_the_values_and_not_of_tensors_that_have_died() -> None:
    for _ in range(ROUNDS):
        twin = rebuilt(Fresh([1.0, 2.0, 3.0]), lambda tensor: tensor + 1)
        assert twin.held == [1.0, 2.0, 3.0]


# ---- memory, known by its address ----------------------------------------------------------------


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_arrays_that_begin_at_one_address_are_copied_whole(order) -> None:
    numbers = np.arange(8.0)
    pieces = [torch.from_numpy(numbers[:4]), torch.from_numpy(numbers)]
    copies = copied_together([pieces[place] for place in order])
    for place, made in zip(order, copies, strict=True):
        assert torch.equal(made, pieces[place])
    copies[0][0] = 77.0
    assert copies[1][0] == 77.0
    assert numbers[0] == 0.0


STEPS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "all of it": (lambda a: torch.from_numpy(a).mul_(torch.from_numpy(a)), "checked"),
    "from dlpack": (
        lambda a: torch.from_numpy(a).mul_(torch.from_dlpack(torch.from_numpy(a))),
        "checked",
    ),
    "where it begins": (
        lambda a: torch.from_numpy(a[:4]).mul_(torch.from_numpy(a)[:4]),
        "checked",
    ),
    "in its middle": (lambda a: torch.from_numpy(a[2:6]).mul_(torch.from_numpy(a)[2:6]), "checked"),
    "another part": (lambda a: torch.from_numpy(a[:4]).mul_(torch.from_numpy(a)[4:]), "checked"),
    "out=": (lambda a: torch.mul(torch.from_numpy(a), 2, out=torch.from_numpy(a)), "out_variant"),
    "in a list": (
        lambda a: torch._foreach_mul_([torch.from_numpy(a[:4])], [torch.from_numpy(a)[:4]]),
        "overlapping",
    ),
    "one element further": (
        lambda a: torch.from_numpy(a[1:5]).mul_(torch.from_numpy(a)[:4]),
        "overlapping",
    ),
    "not pointwise": (
        lambda a: torch.from_numpy(a).view(2, 4).index_add_(
            0, torch.tensor([0, 1]), torch.from_numpy(a).view(2, 4)
        ),
        "overlapping",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "options", [{}, {"repeat": True, "blame": True}, {"max_numel": 2}], ids=str
)
@pytest.mark.parametrize("step", STEPS)
def test_two_storages_of_the_same_memory_are_one(step, options, tmp_path) -> None:
    run, outcome = STEPS[step]
    numbers = np.arange(1, 9, dtype=np.float32)
    plain = numbers.copy()
    run(plain)
    with opcheck.check(log_dir=tmp_path, quiet=True, max_checks=None, **options) as session:
        run(numbers)
    assert numbers.tolist() == plain.tolist()
    assert session.failures == []
    assert session.coverage.errors == 0
    assert session.coverage.adds_up
    is_large = "max_numel" in options
    if outcome == "checked":
        assert session.coverage.checked == 1
    elif not is_large:
        assert session.coverage.checked == 0
        assert session.coverage.skipped[outcome] == 1


def test_of_many_storages_only_those_that_span_what_is_written_meet_it() -> None:
    numbers = np.arange(4000.0)
    written = {n: torch.from_numpy(numbers[n : n + 1]).untyped_storage() for n in range(0, 4000, 2)}
    others = {n: torch.from_numpy(numbers[n : n + 1]).untyped_storage() for n in range(1, 4000, 2)}
    others[-1] = torch.from_numpy(numbers[10:12]).untyped_storage()
    assert _meeting(written, others) == {-1}


class Counting(nn.Module):
    """Writes to memory outside, through tensors whose storages are new each time."""

    def __init__(self, counts: Any) -> None:
        super().__init__()
        self.counts = counts

    def forward(self, x: Tensor) -> Tensor:
        for number in range(ROUNDS):
            inner = x + number
            del inner
            torch.from_numpy(self.counts).add_(1)
        return x


def test_a_second_run_does_not_write_outside_where_its_own_memory_was() -> None:
    counts = np.zeros(2)
    with pytest.raises(CannotRunAgainError):
        run_module(Counting(counts), (torch.ones(2),), {})
    assert counts.tolist() == [0.0, 0.0]


# ---- code, modes, threads ------------------------------------------------------------------------


def functions_of_two_files(names: tuple[str, str], body: str, name: str) -> list[Any]:
    """The same text in two files: their code is equal."""
    found = []
    for file in names:
        space: dict[str, Any] = {}
        exec(compile(body, file, "exec"), space)
        found.append(space[name])
    assert found[0].__code__ == found[1].__code__
    return found


def test_equal_code_of_two_files_is_told_apart(tmp_path) -> None:
    body = "def act(x):\n    return x.exp()\n"
    files = str(tmp_path / "one.py"), str(tmp_path / "two.py")
    with opcheck.check(log_dir=tmp_path, quiet=True) as session:
        for function in functions_of_two_files(files, body, "act"):
            function(torch.ones(3, requires_grad=True)).sum().backward()
    found: dict[str, list[str]] = {}
    for record in session.records:
        found.setdefault(record.op, []).append(record.source)
    lines = ["one.py:2 in act", "two.py:2 in act"]
    assert found["aten.exp.default"] == lines  # forward
    assert found["aten.mul.Tensor"] == lines  # backward


def test_code_of_a_user_that_is_equal_to_code_of_torch_is_the_user_s() -> None:
    body = "import sys\ndef frame():\n    return sys._getframe()\n"
    known: dict[str, bool] = {}
    users = "/home/me/own.py"
    files = f"{TORCH_FOLDER}nn/theirs.py", users
    frames = [function() for function in functions_of_two_files(files, body, "frame")]
    found = [find_user_frame(frame, known) for frame in frames]
    assert found[1] is frames[1]
    assert found[0] is not frames[0]


def test_a_mode_that_took_the_place_of_another_is_another() -> None:
    def now() -> Surroundings:
        with EmptyMode():
            return Surroundings.now(None)

    first = now()
    for _ in range(ROUNDS):
        assert "dispatch modes: [EmptyMode] became [EmptyMode]" in str(first.beside(now()))
    assert first.beside(first).holds


def test_a_thread_is_not_one_that_has_ended() -> None:
    exits = in_thread(Exits)
    assert all(in_thread(lambda: exits.is_elsewhere) for _ in range(ROUNDS))
    assert not Exits().is_elsewhere


def test_a_thread_is_the_one_that_claimed_it_last() -> None:
    own = OwnThread()
    assert not own.is_current
    own.claim()
    own.claim()
    assert own.is_current
    assert not in_thread(lambda: own.is_current)
    in_thread(own.claim)
    assert not own.is_current


class Backend:
    """A backend that is a bound method: a new object each time, and equal."""

    def run(self, graph: Any, inputs: Any) -> Any:
        return graph


@dataclasses.dataclass
class Settable:
    """Equal by value, and without a hash."""

    level: int

    def __call__(self, graph: Any, inputs: Any) -> Any:
        return graph


def test_equal_backends_have_equal_hashes() -> None:
    module, backend = nn.Linear(1, 1), Backend()
    for make in (lambda: backend.run, lambda: Settable(1), lambda: "inductor"):
        left, right = CountingBackend(make(), module), CountingBackend(make(), module)
        assert left == right
        assert hash(left) == hash(right)
