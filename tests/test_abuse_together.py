"""Threads, worker processes, checkers in checkers, exceptions: no wrong verdict, no trace."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import opcheck
from modulecheck import PrecisionChecker, TensorChecker, module_register_tensor_checker
from tests.faults import gelu_off_by
from tests.hanging import HANGS_S
from tests.test_abuse_interrupts import of_module, surroundings

pytestmark = pytest.mark.filterwarnings("ignore")  # what torch says is its own

X = torch.linspace(-1, 1, 32).reshape(4, 8)
EVERYTHING: dict[str, Any] = {"blame": True, "repeat": True, "selftest": True}
OPTIONS = {
    "defaults": {}, "everything": EVERYTHING, "workers": {"workers": 2}, "bounded": {
        "max_overhead": 10.0}, "sampled": {"max_numel": 16},
}  # fmt: skip


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Linear(8, 16), nn.GELU()),
        nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 8)),
    )


def step(net: nn.Module) -> torch.Tensor:
    loss = net(X).square().mean()
    loss.backward()
    return loss.detach()


def in_threads(*functions: Callable[[], None]) -> None:
    """Run them at once; an exception in one of them is that of the test."""
    errors: list[BaseException] = []

    def guarded(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(item,)) for item in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANGS_S)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


# ---- threads ------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS)
def test_threads_of_the_step_are_not_seen_and_harm_nothing(options, tmp_path) -> None:
    alone = opcheck.check(log_dir=tmp_path / "alone", quiet=True, **OPTIONS[options])
    with alone:
        step(make())
    before = surroundings()
    session = opcheck.check(log_dir=tmp_path / "busy", quiet=True, **OPTIONS[options])
    stop = threading.Event()
    others = [make() for _ in range(2)]
    expected = step(make())

    def busy(net: nn.Module) -> Callable[[], None]:
        def run() -> None:
            while not stop.is_set():
                net.zero_grad()
                assert torch.equal(step(net), expected)

        return run

    def checked() -> None:
        try:
            with session:
                losses = [step(make()) for _ in range(3)]
        finally:
            stop.set()
        assert all(torch.equal(loss, expected) for loss in losses)

    in_threads(checked, *map(busy, others))
    assert surroundings() == before
    assert session.failures == []
    assert session.coverage.errors == 0
    assert session.coverage.adds_up
    assert session.coverage.seen == 3 * alone.coverage.seen
    if options != "bounded":
        assert {record.module for record in session.records} == {
            record.module for record in alone.records
        }


@pytest.mark.parametrize("options", OPTIONS)
def test_a_session_in_each_of_two_threads(options, tmp_path) -> None:
    before = surroundings()
    sessions = [
        opcheck.check(log_dir=tmp_path / str(number), quiet=True, **OPTIONS[options])
        for number in range(2)
    ]
    barrier = threading.Barrier(2)

    def checked(number: int) -> Callable[[], None]:
        def run() -> None:
            net = make()
            barrier.wait()
            with sessions[number]:
                for _ in range(2):
                    step(net)

        return run

    in_threads(checked(0), checked(1))
    assert surroundings() == before
    for session in sessions:
        assert session.failures == []
        assert session.coverage.errors == 0
        assert session.coverage.adds_up
        assert session.coverage.seen == sessions[0].coverage.seen > 20
        if options != "bounded":
            assert "0.1" in {record.module for record in session.records}
    if options == "everything":
        assert all(session.selftest().num_planted for session in sessions)


def test_a_fault_is_told_by_the_session_of_its_thread_alone(tmp_path) -> None:
    sessions = [opcheck.check(log_dir=tmp_path / str(n), quiet=True) for n in range(2)]
    both_in = threading.Barrier(2)

    def with_gelu() -> None:
        with sessions[0]:
            both_in.wait()
            nn.functional.gelu(X)
            both_in.wait()

    def without() -> None:
        with sessions[1]:
            both_in.wait()
            X.exp()
            both_in.wait()

    with gelu_off_by():
        in_threads(with_gelu, without)
    assert [session.verdict for session in sessions] == ["FAIL", "PASS"]


@pytest.mark.slow
@pytest.mark.parametrize("single_pass", [True, False])
def test_a_module_checker_in_each_of_two_threads(single_pass) -> None:
    """Dynamo compiles for one thread at a time; the results are each thread's own."""
    verdicts: dict[int, str] = {}
    lock = threading.Lock()

    def checked(number: int) -> Callable[[], None]:
        def run() -> None:
            net = make()
            checker = PrecisionChecker(backend="aot_eager", single_pass=single_pass)
            checker.wrap_all_children(net, depth=0)
            with lock:
                verdicts[number] = str(checker.compare(step, net).verdict)

        return run

    in_threads(checked(0), checked(1))
    assert verdicts == {0: "PASS", 1: "PASS"}


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((8,), float(index)).exp().log() / 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("context", "options"),
    [("fork", "defaults"), ("fork", "everything"), ("fork", "workers"), ("spawn", "everything")],
)
def test_worker_processes_of_a_data_loader(context, options, tmp_path) -> None:
    net = make()
    plain = [batch.clone() for batch in DataLoader(Numbers(), batch_size=4)]
    before = surroundings()
    with opcheck.check(net, log_dir=tmp_path, quiet=True, **OPTIONS[options]) as session:
        loader = DataLoader(Numbers(), batch_size=4, num_workers=1, multiprocessing_context=context)
        for batch, expected in zip(loader, plain, strict=True):
            assert torch.equal(batch, expected)
            net(batch).sum().backward()
        del loader
    assert session.failures == []
    assert session.coverage.errors == 0
    assert session.coverage.adds_up
    ops = {record.op for record in session.records}
    assert "aten.addmm.default" in ops
    assert "aten.exp.default" not in ops  # the worker's
    assert opcheck.load_run(tmp_path).finished
    after = surroundings()
    assert {**after, "open files": 0, "threads": 0} == {**before, "open files": 0, "threads": 0}


# ---- checkers inside of checkers ----------------------------------------------------------------


@pytest.mark.parametrize("inner", OPTIONS)
@pytest.mark.parametrize("outer", ["defaults", "everything", "workers"])
def test_a_session_in_a_session(outer, inner, tmp_path) -> None:
    net = make()
    before = surroundings()
    first = opcheck.check(net, log_dir=tmp_path / "first", quiet=True, **OPTIONS[outer])
    second = opcheck.check(net, log_dir=tmp_path / "second", quiet=True, **OPTIONS[inner])
    with first, second:
        step(net)
    assert surroundings() == before
    for session in (first, second):
        assert session.failures == []
        assert session.coverage.errors == 0
        assert session.coverage.adds_up
    assert first.coverage.seen == second.coverage.seen


def test_two_sessions_over_each_other_both_tell_a_fault(tmp_path) -> None:
    first = opcheck.check(log_dir=tmp_path / "first", quiet=True, **EVERYTHING)
    second = opcheck.check(log_dir=tmp_path / "second", quiet=True, **EVERYTHING)
    with gelu_off_by(), first, second:
        step(make())
    for session in (first, second):
        assert {record.op for record in session.failures} == {"aten.gelu.default"}


def checked_modules(net: nn.Module, *, single_pass: bool) -> Any:
    checker = PrecisionChecker(backend="aot_eager", single_pass=single_pass)
    checker.wrap_all_children(net, depth=0)
    return checker.compare(step, net)


@pytest.mark.slow
@pytest.mark.parametrize("options", ["defaults", "everything", "workers"])
@pytest.mark.parametrize("single_pass", [True, False])
def test_a_module_checker_in_a_session(single_pass, options, tmp_path) -> None:
    torch._dynamo.reset()
    net = make()
    before, shape = surroundings(), of_module(net)
    with opcheck.check(net, log_dir=tmp_path, quiet=True, **OPTIONS[options]) as session:
        result = checked_modules(net, single_pass=single_pass)
    assert surroundings() == before
    assert of_module(net) == shape
    assert str(result.verdict) == "PASS", result.problem
    assert session.failures == []
    assert session.coverage.errors == 0
    assert session.coverage.adds_up


@pytest.mark.slow
@pytest.mark.parametrize("single_pass", [True, False])
def test_a_session_in_the_step_of_a_module_checker(single_pass, tmp_path) -> None:
    torch._dynamo.reset()
    net = make()
    before, shape = surroundings(), of_module(net)
    sessions = []

    def run(model: nn.Module) -> torch.Tensor:
        session = opcheck.check(model, log_dir=tmp_path, quiet=True)
        sessions.append(session)
        with session:
            return step(model)

    checker = PrecisionChecker(backend="aot_eager", single_pass=single_pass)
    checker.wrap_all_children(net, depth=0)
    result = checker.compare(run, net)
    assert surroundings() == before
    assert of_module(net) == shape
    assert str(result.verdict) == "PASS", result.problem
    assert all(session.failures == [] for session in sessions)
    assert all(session.coverage.errors == 0 for session in sessions)


def test_two_module_checkers_on_modules_inside_of_each_other() -> None:
    """The inner ones are compiled with the outer, which is said; the model is left as it was."""
    torch._dynamo.reset()
    net = make()
    shape = of_module(net)
    outer, inner = (PrecisionChecker(backend="aot_eager") for _ in range(2))
    outer.wrap(net[0])
    inner.wrap(net[0][0])
    with outer.installed(net), inner.installed(net):
        step(net)
    results = [checker.collect() for checker in (outer, inner)]
    assert of_module(net) == shape
    assert str(results[0].verdict) == "PASS"
    assert str(results[1].verdict) == "INCONCLUSIVE"
    assert not results[1].all_pass


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_module_checkers_on_one_module_left_in_any_order(order) -> None:
    torch._dynamo.reset()
    net = make()
    shape = of_module(net)
    checkers = [PrecisionChecker(backend="aot_eager") for _ in range(2)]
    for checker in checkers:
        checker.wrap(net[0])
        checker.install(net)
    step(net)
    results = [checkers[number].collect() for number in order]
    assert of_module(net) == shape
    assert net[0]._compiled_call_impl is None
    assert "FAIL" not in [str(result.verdict) for result in results]
    torch.testing.assert_close(net(X), make()(X))


def test_registered_tensors_beside_a_session_and_a_module_checker(tmp_path) -> None:
    torch._dynamo.reset()
    checked_modules(make(), single_pass=True)  # torch starts a thread, once a process
    net, other = make(), make()
    before = surroundings()
    tensors = TensorChecker(quiet=True)
    with (
        opcheck.check(net, log_dir=tmp_path, quiet=True) as session,
        module_register_tensor_checker(net, tensors, side="first"),
        module_register_tensor_checker(other, tensors, side="second"),
    ):
        checker = PrecisionChecker(backend="aot_eager")
        checker.wrap_all_children(net, depth=0)
        with checker.installed(net):
            step(net)
        step(other)
    assert surroundings() == before
    assert str(checker.collect().verdict) == "PASS"
    assert session.failures == []
    # what runs inside of compiled code has no hooks: it is missing, which is no difference
    assert not tensors.check_allclose()
    assert tensors.result.verdict == "INCONCLUSIVE", tensors.result


# ---- exceptions ---------------------------------------------------------------------------------


class OfTheUserError(Exception):
    pass


def raise_it(*_: Any) -> None:
    raise OfTheUserError


class Raises(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise_it()
        return x


class RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise OfTheUserError


def broken_step(place: str) -> Callable[[nn.Module], Any]:
    def run(net: nn.Module) -> Any:
        out = net(X)
        if place == "after the forward":
            raise_it()
        if place == "in the backward":
            out = RaisesInBackward.apply(out)
        if place == "in a tensor hook":
            out.register_hook(raise_it)
        out.sum().backward()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        if place == "in an optimizer hook":
            optimizer.register_step_pre_hook(raise_it)
        if place == "in the closure":
            return optimizer.step(raise_it)
        optimizer.step()
        raise_it()
        return None

    return run


PLACES = (
    "in the forward", "after the forward", "in the backward", "in a tensor hook",
    "in an optimizer hook", "in the closure", "at the end", "in a module hook",
)  # fmt: skip


def broken_model(place: str) -> nn.Module:
    net = make()
    if place == "in the forward":
        net[1].append(Raises())
    if place == "in a module hook":
        net[1][0].register_forward_hook(raise_it)
    return net


ENTRIES: dict[str, Callable[[Any, nn.Module, Path], Any]] = {
    **{
        name: lambda run, net, folder, options=options: _checked(run, net, folder, options)
        for name, options in OPTIONS.items()
    },
    "recorded": lambda run, net, folder: _checked(
        run, net, folder,
        {"record": "all", "record_dir": folder / "records", "repro_dir": folder / "repro"},
    ),
    "certified": lambda run, net, folder: opcheck.check(
        net, log_dir=folder, quiet=True
    ).certify(lambda: run(net)),
    "single pass": lambda run, net, _: _compared(run, net, single_pass=True),
    "two passes": lambda run, net, _: _compared(run, net, single_pass=False),
    "graph dump": lambda run, net, folder: _compared(
        run, net, single_pass=True, dump_graphs=True, graph_dir=str(folder)
    ),
    "tensors": lambda run, net, _: _registered(run, net),
}  # fmt: skip


def _checked(run: Any, net: nn.Module, folder: Path, options: dict[str, Any]) -> None:
    with opcheck.check(net, log_dir=folder, quiet=True, **options):
        run(net)


def _compared(run: Any, net: nn.Module, **options: Any) -> None:
    checker = PrecisionChecker(backend="aot_eager", **options)
    checker.wrap(net[0])
    checker.compare(run, net)


def _registered(run: Any, net: nn.Module) -> None:
    with module_register_tensor_checker(net, TensorChecker(quiet=True)):
        run(net)


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("entry", ENTRIES)
def test_an_exception_of_the_user_passes_through_and_nothing_stays(entry, place, tmp_path) -> None:
    ENTRIES["single pass"](step, make(), tmp_path)  # what torch does once a process
    net = broken_model(place)
    before, shape = surroundings(), of_module(net)
    with pytest.raises(OfTheUserError):
        ENTRIES[entry](broken_step(place), net, tmp_path)
    assert surroundings() == before
    assert of_module(net) == shape
    if entry in ("two passes", "certified"):
        assert all(item.grad is None for item in net.parameters())
        fresh = broken_model(place)
        assert all(map(torch.equal, net.state_dict().values(), fresh.state_dict().values()))


@pytest.mark.parametrize(
    "broken",
    ["opcheck.ledger.Ledger.judged", "opcheck.session.Session._keep",
     "opcheck.call_records.spell_tensor", "opcheck.births.Births.concluded"],
)  # fmt: skip
def test_a_crash_while_a_crash_is_noted_is_not_the_users(broken, tmp_path, monkeypatch) -> None:
    def crash(*_: Any, **__: Any) -> None:
        raise MemoryError("ours")

    net = make()
    monkeypatch.setattr(broken, crash)
    with opcheck.check(net, log_dir=tmp_path, quiet=True) as session:
        step(net)
    monkeypatch.undo()
    assert session.verdict == "INCONCLUSIVE"
    assert session.coverage.errors
    assert session.coverage.adds_up
    assert "MemoryError: ours" in session.report()
