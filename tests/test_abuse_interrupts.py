"""Ctrl-C anywhere in our code: the process, the model and the user's files are as without us."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from loguru import logger
from torch import nn

import opcheck
from modulecheck import PrecisionChecker, TensorChecker, module_register_tensor_checker
from modulecheck.remarks import problem_of
from opcheck.exits import Exits, uncut
from opcheck.kernelcheck import find_op, wrap_kernel
from opcheck.outside import reference_depth
from opcheck.records import Coverage, SkipReason
from opcheck.report import render
from opcheck.review import Run
from opcheck.switch import SWITCH
from tests.cutting import Cut
from tests.hanging import HANGS_S
from tests.step_equality import EmptyMode, active_modes, global_hooks

ROOT = Path(__file__).parents[1]
X = torch.linspace(-1, 1, 32).reshape(4, 8)
NEVER = 1 << 60


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.BatchNorm1d(16)),
        nn.Sequential(nn.Dropout(0.1), nn.Linear(16, 8)),
    )
    return net, torch.optim.SGD(net.parameters(), lr=0.01, foreach=False)


def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    optimizer.zero_grad()
    loss = net(X).sum()
    loss.backward()
    optimizer.step()
    return loss.detach()


def values(net: nn.Module) -> dict[str, bytes]:
    return {name: item.numpy().tobytes() for name, item in net.state_dict().items()}


def test_an_interrupt_that_python_drops_is_known() -> None:
    """It is raised in the generator that `any` has left behind."""
    cut = Cut(NEVER)
    plan = SimpleNamespace(targets=[SimpleNamespace(checked=True)] * 2, skipped=[])
    cut.run(problem_of, plan)
    fates = []
    for at in range(1, cut.count + 1):
        cut = Cut(at)
        try:
            cut.run(problem_of, plan)
        except KeyboardInterrupt:
            fates.append("came")
        else:
            fates.append("dropped" if cut.was_dropped else "lost")
    assert set(fates) == {"came", "dropped"}


def test_ctrl_c_where_a_checker_is_taken_off_leaves_no_hook() -> None:
    """At the first instruction of taking off: the hooks stayed on the user's model."""
    net, _ = make()
    shape, fates = of_module(net), []
    for at in range(1, 400):
        checker = PrecisionChecker(backend="eager")
        checker.wrap_all_children(net, depth=0)
        context = checker.installed(net)
        context.__enter__()
        cut = Cut(at)
        try:
            cut.run(context.__exit__, None, None, None)
        except KeyboardInterrupt:
            fates.append(at)
        assert of_module(net) == shape, cut.where
        if at > cut.count:
            break
    assert len(fates) > 3


def surroundings() -> dict[str, Any]:
    from torch.utils import _python_dispatch as notes  # noqa: TID251 - looked at from outside

    return {
        "modes": active_modes(),
        "notes on modes": (
            notes.is_in_torch_dispatch_mode(),
            notes.is_in_torch_dispatch_mode(include_infra_modes=False),
            notes.is_in_any_mode_without_ignore_compile_internals(),
        ),
        "global hooks": global_hooks(),
        "grad mode": torch.is_grad_enabled(),
        "reference work": reference_depth(),
        "registered kernels": (list(SWITCH._sessions), SWITCH.is_silenced, SWITCH._local.announced),
        "import hooks": list(sys.meta_path),
        "warning filters": list(warnings.filters),
        "open files": len(os.listdir("/proc/self/fd")),  # noqa: PTH208
        "threads": threading.active_count(),
        "log sinks": list(logger._core.handlers),
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "patched": (torch.Tensor.backward, nn.Module.__call__, torch.autograd.grad, torch.compile),
    }


def of_module(net: nn.Module) -> list[Any]:
    tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [
        (sorted(vars(item)), item.training, [len(getattr(item, name)) for name in tables])
        for item in net.modules()
    ]


def trajectory(steps: int) -> tuple[dict[str, set[bytes]], set[bytes]]:
    """What each tensor of the model, and the generator, hold before and after every step."""
    net, optimizer = make()
    torch.manual_seed(5)
    known: dict[str, set[bytes]] = {name: {value} for name, value in values(net).items()}
    states = {torch.get_rng_state().numpy().tobytes()}
    with EmptyMode():
        for _ in range(steps):
            step(net, optimizer)
            states.add(torch.get_rng_state().numpy().tobytes())
            for name, value in values(net).items():
                known[name].add(value)
    return known, states


OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "workers": {"workers": 2},
    "bounded": {"max_overhead": 10.0},
    "everything": {
        "blame": True, "repeat": True, "selftest": True, "max_numel": 64, "record": "all",
        "record_dir": "records", "repro_dir": "repro",
    },
}  # fmt: skip


def run_cut(
    at: int, options: dict[str, Any], where: str, folder: Path
) -> tuple[Cut, nn.Module, Any, bool]:
    net, optimizer = make()
    torch.manual_seed(5)
    placed = {
        name: folder / value if name.endswith("_dir") else value for name, value in options.items()
    }
    session = opcheck.check(net, log_dir=folder, quiet=True, max_checks=None, **placed)
    cut = Cut(at)
    came = False
    try:
        if where == "entering":
            cut.run(session.__enter__)
            session.__exit__(None, None, None)
        elif where == "leaving":
            session.__enter__()
            step(net, optimizer)
            cut.run(session.__exit__, None, None, None)
        elif where == "certifying":
            cut.run(lambda: session.certify(lambda: step(net, optimizer), optimizers=[optimizer]))
        else:
            with session:
                cut.run(step, net, optimizer)
    except KeyboardInterrupt:
        came = True
    return cut, net, session, came


def places(count: int, wanted: int) -> list[int]:
    if count <= wanted:
        return list(range(1, count + 1))
    return sorted(random.Random(count).sample(range(1, count + 1), wanted))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("where", "options", "wanted"),
    [
        ("entering", "everything", 50),
        ("leaving", "defaults", 40),
        ("leaving", "everything", 15),
        ("certifying", "defaults", 25),
        ("in the step", "defaults", 40),
        ("in the step", "everything", 20),
        ("in the step", "bounded", 20),
        ("in the step", "workers", 40),
    ],
)
def test_ctrl_c_anywhere_in_a_session(where, options, wanted, tmp_path) -> None:
    known, states = trajectory(1)
    for _ in range(2):  # what torch and the checker do once a process
        cut, *_ = run_cut(NEVER, OPTIONS[options], where, tmp_path)
    before, shape = surroundings(), of_module(make()[0])
    first = None
    for at in places(cut.count, wanted):
        cut, net, session, came = run_cut(at, OPTIONS[options], where, tmp_path)
        if at == 1 and where == "leaving":  # the very first instruction: nothing can be done there
            session.__exit__(None, None, None)
        said = f"{at}: {cut.where}"
        assert surroundings() == before, said
        assert of_module(net) == shape, said
        assert torch.get_rng_state().numpy().tobytes() in states, said
        now = values(net)
        assert all(value in known[name] for name, value in now.items()), said
        if where == "certifying" and came:
            first = first or values(make()[0])
            assert now == first, said
        coverage = session.coverage
        assert coverage.adds_up, said
        assert coverage.errors == coverage.failed == 0, said
        report = session.report()
        if came and where == "in the step":
            assert "cut short by KeyboardInterrupt in step 0" in report, said
        net(X).sum().backward()


def checked_modules(net: nn.Module, *, single_pass: bool) -> str:
    checker = PrecisionChecker(backend="aot_eager", single_pass=single_pass)
    checker.wrap_all_children(net, depth=0)

    def run(model: nn.Module) -> torch.Tensor:
        loss = model(X).sum()
        loss.backward()
        return loss

    return str(checker.compare(run, net).verdict)


def registered_tensors(net: nn.Module) -> str:
    checker = TensorChecker(quiet=True)
    other = make()[0]
    with (
        module_register_tensor_checker(net, checker, side="first"),
        module_register_tensor_checker(other, checker, side="second"),
    ):
        torch.manual_seed(5)
        net(X)
        torch.manual_seed(5)
        other(X)
    return "PASS" if checker.check_equal() else "FAIL"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("check", "wanted"),
    [
        (lambda net: checked_modules(net, single_pass=True), 40),
        (lambda net: checked_modules(net, single_pass=False), 25),
        (registered_tensors, 50),
    ],
    ids=["single pass", "two passes", "tensors"],
)
def test_ctrl_c_anywhere_in_modulecheck(check: Callable[[nn.Module], str], wanted: int) -> None:
    torch._dynamo.reset()
    for _ in range(2):
        cut = Cut(NEVER)
        cut.run(check, make()[0])
    before, shape = surroundings(), of_module(make()[0])
    for number, at in enumerate(places(cut.count, wanted)):
        net, _ = make()
        cut, came = Cut(at), False
        try:
            cut.run(check, net)
        except KeyboardInterrupt:
            came = True
        # an interrupt inside Dynamo's comparison of backends is dropped by its C++ code
        # code that is compiled already has fewer places
        reached = cut.where and not cut.was_dropped
        assert came or not reached or "hooks.py" in cut.where, cut.where
        assert surroundings() == before, cut.where
        assert of_module(net) == shape, cut.where
        net(X).sum().backward()
        if number % 20 == 0:  # the next one sees compiled code, and not what was left of this one
            assert check(make()[0]) == "PASS", cut.where


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_ctrl_c_anywhere_while_registered_kernels_are_checked(tmp_path) -> None:
    kernel = wrap_kernel(find_op("exp"), lambda x: x.double().exp().to(x.dtype), SWITCH)

    def work() -> None:
        opcheck.enable_precision_check(path=tmp_path / "kernels.log", max_checks=None)
        kernel(X)
        kernel(X)
        opcheck.disable_precision_check()

    try:
        for _ in range(2):
            cut = Cut(NEVER)
            cut.run(work)
        before = surroundings()
        for at in places(cut.count, 80):
            cut = Cut(at)
            with contextlib.suppress(KeyboardInterrupt):
                cut.run(work)
            opcheck.disable_precision_check()
            assert surroundings() == before, cut.where
            assert opcheck.coverage().adds_up, cut.where
            assert not opcheck.coverage().failed, cut.where
    finally:
        opcheck.disable_precision_check()
        SWITCH.has_kernels = False


SIGNALLED = """
import os, random, signal, sys, warnings
warnings.simplefilter("ignore")
import torch
import opcheck
from tests.test_abuse_interrupts import make, of_module, step, surroundings, trajectory, values

def interrupt(*_):
    raise KeyboardInterrupt

signal.signal(signal.SIGALRM, interrupt)
folder, rng, cut = sys.argv[1], random.Random(0), 0
known, states = trajectory(2)
before, shape = None, of_module(make()[0])
for number in range(90):
    options = [
        {"blame": True, "repeat": True, "selftest": True, "record": "all",
         "record_dir": folder + "/records", "repro_dir": folder + "/repro"},
        {"workers": 2}, {"record": "all", "record_dir": folder + "/records"},
    ][number % 3]
    net, optimizer = make()
    session = opcheck.check(net, log_dir=folder, quiet=True, max_checks=None, **options)
    before = before or surroundings()
    torch.manual_seed(5)
    try:
        with session:
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.0005, 0.05))
            for _ in range(2):
                step(net, optimizer)
            signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        cut += 1
        assert "cut short by KeyboardInterrupt" in session.report()
    assert surroundings() == before, (number, before, surroundings())
    assert of_module(net) == shape, number
    assert all(value in known[name] for name, value in values(net).items()), number
    assert torch.get_rng_state().numpy().tobytes() in states, number
    assert session.coverage.adds_up and not session.failures and not session.coverage.errors
print(cut)
"""


def run_python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False, timeout=HANGS_S,
    )  # fmt: skip


@pytest.mark.slow
def test_signals_at_random_moments_with_every_option(tmp_path) -> None:
    """A signal while torch wrote to a Python file aborted the process (`terminate called`)."""
    done = run_python(SIGNALLED, tmp_path)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 30
    assert not list((tmp_path / "records").glob("*.tmp"))


# ---- what is said -------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", SkipReason)
def test_the_report_has_words_for_every_reason(reason: SkipReason) -> None:
    text = render(Run(coverage=Coverage(seen=2, checked=1, skipped={reason: 1})), width=200)
    line = next(line for line in text.splitlines() if f" {reason.value} " in line)
    assert line.split(reason.value)[1].strip()


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, GeneratorExit])
def test_a_step_that_was_cut_short_is_said_and_stays_in_the_log(error, tmp_path) -> None:
    session = opcheck.check(log_dir=tmp_path, quiet=True)
    with pytest.raises(error), session:
        X.exp()
        raise error
    expected = f"{error.__name__} in step 0, after call 0"
    assert session.coverage.left_by == expected
    assert f"cut short by {expected}; what follows did not run" in " ".join(
        session.report().split()
    )
    assert opcheck.load_run(tmp_path).coverage.left_by == expected


def test_a_step_that_ended_is_not_said_to_be_cut_short(tmp_path) -> None:
    with opcheck.check(log_dir=tmp_path, quiet=True) as session:
        X.exp()
    assert session.coverage.left_by == ""
    assert "cut short" not in session.report()


WAITING = """
import signal, time, torch
signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background ignore it
for _ in range(1000):
    torch.ones(3).exp()
    print("ready", flush=True)
    time.sleep(0.05)
"""


@pytest.mark.slow
def test_ctrl_c_on_the_command_line(tmp_path) -> None:
    script = tmp_path / "waiting.py"
    script.write_text(WAITING)
    child = subprocess.Popen(
        [sys.executable, "-m", "opcheck", "run", str(script)], cwd=tmp_path, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    time.sleep(0.1)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=HANGS_S)
    assert child.returncode == 130, err
    assert "cut short by KeyboardInterrupt in step 0" in out
    assert "Traceback" not in err
    run = opcheck.load_run(tmp_path / "logs")
    assert run.finished
    assert run.coverage.left_by.startswith("KeyboardInterrupt")


# ---- undoing ------------------------------------------------------------------------------------


def test_what_is_cut_is_undone_again_and_the_rest_too() -> None:
    done: list[str] = []

    def cut_once() -> None:
        done.append("cut")
        if done.count("cut") == 1:
            raise KeyboardInterrupt

    exits = Exits()
    exits.add(lambda: done.append("first"))
    exits.add(cut_once)
    exits.add(lambda: done.append("last"))
    with pytest.raises(KeyboardInterrupt):
        exits.run()
    assert done == ["last", "cut", "cut", "first"]
    assert not exits.is_pending
    exits.run()
    assert len(done) == 4


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_what_always_raises_does_not_keep_the_rest_from_being_undone(error) -> None:
    def broken() -> None:
        raise error

    done: list[str] = []
    exits = Exits()
    exits.add(lambda: done.append("first"))
    exits.add(broken)
    with pytest.raises(error):
        exits.run()
    assert done == ["first"]


def test_another_thread_undoes_nothing() -> None:
    done: list[str] = []
    exits = Exits()
    exits.add(lambda: done.append("undone"))
    thread = threading.Thread(target=exits.run)
    thread.start()
    thread.join()
    assert exits.is_pending
    assert done == []
    exits.run()
    assert done == ["undone"]


def test_uncut_runs_to_the_end_and_raises() -> None:
    runs: list[int] = []

    def function() -> None:
        runs.append(1)
        if len(runs) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        uncut(function)
    assert len(runs) == 2
