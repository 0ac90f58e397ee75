"""`workers=`: references beside the step change nothing but the time they take."""

from __future__ import annotations

import dataclasses
import io
import math
import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

import opcheck
from opcheck import SkipReason, Verdict, beside, comparison
from opcheck.calls import Call
from opcheck.comparison import Comparison
from tests import models
from tests.faults import gelu_backward_off_by, gelu_off_by
from tests.hanging import HANGS_S

X = torch.linspace(-2, 2, 24).reshape(4, 6)


@pytest.fixture(autouse=True)
def no_thread_left_behind():
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


def in_workers(monkeypatch, first: Callable[[Call], object]) -> None:
    """Do something before each comparison that a worker makes; those of the step go on as ever."""
    original = Comparison.compare

    def compare(self, call, out):
        if threading.current_thread() is not threading.main_thread():
            first(call)
        return original(self, call, out)

    monkeypatch.setattr(Comparison, "compare", compare)


def handed_over(monkeypatch) -> list[str]:
    """Names of the ops that a worker judged, in the order in which workers began."""
    found: list[str] = []
    in_workers(monkeypatch, lambda call: found.append(call.traits.name))
    return found


def held_up(monkeypatch) -> threading.Event:
    """No worker begins before this is set."""
    gate = threading.Event()

    def wait(call):
        assert gate.wait(HANGS_S)

    in_workers(monkeypatch, wait)
    return gate


def seen(build, tmp_path, *, workers, steps=2, **arguments):
    workload = build()
    torch.manual_seed(3)
    optimizer = torch.optim.AdamW(workload.model.parameters(), lr=1e-3)
    failed: list[opcheck.OpRecord] = []
    session = opcheck.check(
        workload.model, log_dir=tmp_path / str(workers), quiet=True, workers=workers,
        on_failure=failed.append, **arguments,
    )  # fmt: skip
    with session:
        for _ in range(steps):
            optimizer.zero_grad()
            workload.step()
            optimizer.step()
    records = [dataclasses.replace(record, run_id="") for record in session.records]
    logged = [record.index for record in opcheck.load_run(session.log_path).records]
    state = [parameter.detach().clone() for parameter in workload.model.parameters()]
    coverage = dataclasses.replace(session.coverage, check_seconds=0.0, check_peak_bytes=0)
    return {
        "records": list(map(repr, records)), "coverage": coverage, "verdict": session.verdict,
        "logged": logged, "told": [record.index for record in failed],
        "random state": torch.get_rng_state().tolist(), "parameters": [s.tolist() for s in state],
    }  # fmt: skip


SMALL = {
    "transformer": partial(models.transformer),
    "resnet": partial(models.resnet),
    "gpt2": partial(models.gpt2, width=32, layers=2, heads=2, vocabulary=64, length=16),
}


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize(
    "arguments",
    [
        {"max_checks": None, "criterion": "allclose", "rtol": 0.0, "atol": 0.0},
        {"max_checks": 3},
    ],
    ids=["all_fail", "budget"],
)
def test_everything_is_as_without(tmp_path, monkeypatch, name, arguments):
    ran = handed_over(monkeypatch)
    alone = seen(SMALL[name], tmp_path, workers=0, **arguments)
    assert not ran
    together = seen(SMALL[name], tmp_path, workers=2, **arguments)
    assert len(ran) > 20
    assert alone["coverage"].checked > 20
    for key, value in alone.items():
        assert together[key] == value, key
    if "rtol" in arguments:
        assert len(alone["told"]) > 20


@pytest.mark.parametrize("fault", [gelu_off_by, gelu_backward_off_by])
def test_planted_faults_are_found_as_without(tmp_path, monkeypatch, fault):
    ran = handed_over(monkeypatch)
    with fault():
        alone = seen(SMALL["transformer"], tmp_path, workers=0, max_checks=None)
        together = seen(SMALL["transformer"], tmp_path, workers=2, max_checks=None)
    assert ran
    assert alone["verdict"] is Verdict.FAIL
    assert together == alone


def test_what_the_step_overwrites_was_copied(tmp_path, monkeypatch):
    """Every comparison waits until the step has destroyed what it was given."""
    gate = held_up(monkeypatch)
    wide = torch.linspace(-2, 2, 96).reshape(8, 12)
    with opcheck.check(log_dir=tmp_path, quiet=True, workers=1) as session:
        view = wide[::2, ::3]
        out = nn.functional.gelu(view)
        product = view @ view.T
        view.add_(out)
        for tensor in (wide, out, product):
            tensor.zero_()
        gate.set()
    assert session.verdict is Verdict.PASS
    assert session.coverage.checked >= 3
    assert session.coverage.adds_up


def test_an_exception_in_a_worker_is_an_error_record(tmp_path, monkeypatch):
    original = comparison.choose

    def choose(call, **kwargs):
        if call.traits.base == "gelu":
            raise ZeroDivisionError("in a worker")
        return original(call, **kwargs)

    monkeypatch.setattr(comparison, "choose", choose)
    ran = handed_over(monkeypatch)
    with opcheck.check(log_dir=tmp_path, quiet=True, workers=2) as session:
        nn.functional.gelu(X)
        X @ X.T
    assert "aten.gelu.default" in ran
    (bad,) = [record for record in session.records if record.error]
    assert bad.op == "aten.gelu.default"
    assert "in a worker" in bad.error
    assert session.verdict is Verdict.INCONCLUSIVE
    assert (session.coverage.errors, session.coverage.checked) == (1, 1)
    assert session.coverage.adds_up


def test_beyond_the_limit_a_call_is_judged_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(beside.Beside.__init__, "__kwdefaults__", {"max_bytes": 1000})
    ran = handed_over(monkeypatch)
    big = torch.ones(64, 64) * 0.3
    with opcheck.check(log_dir=tmp_path, quiet=True, workers=1, max_checks=None) as session:
        for _ in range(8):
            nn.functional.gelu(X)
            nn.functional.gelu(big)
    assert 0 < len(ran) <= 8
    assert session.coverage.checked == 16
    assert session._pipeline._beside.peak_bytes <= 1000


def test_memory_of_earlier_copies_is_used_again_and_never_under_somebody_who_holds_it(
    tmp_path, monkeypatch
):
    kept, held = [], []
    original = beside.Beside._conclude_first

    def conclude_first(self):
        first = self._queue[0]
        if first.call.traits.base == "gelu":
            kept.append((first.out, first.out.clone()))
        held.append(self._memory.num_bytes)
        del first
        original(self)

    monkeypatch.setattr(beside.Beside, "_conclude_first", conclude_first)
    x = torch.linspace(-2, 2, 6000).reshape(60, 100)
    session = opcheck.check(log_dir=tmp_path, quiet=True, workers=1, max_checks=None)
    with session:
        for number in range(6):
            torch.sin(nn.functional.gelu(x + number))
            _ = session.coverage  # waits
        memory = session._pipeline._beside._memory
        reused = memory.num_bytes
    assert len(kept) == 6
    for now, then in kept:
        assert torch.equal(now, then)
    assert 0 < reused <= 12 * 24000
    assert max(held) < 18 * 24000  # of 36 copies
    assert memory.num_bytes == 0


@pytest.mark.parametrize(
    ("value", "goes"), [(6e4, True), (math.inf, False), (-math.inf, False), (math.nan, False)]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_only_what_is_finite_goes_to_a_worker(tmp_path, monkeypatch, value, goes, dtype):
    """Also where the sum of finite values is none."""
    ran = handed_over(monkeypatch)
    x = torch.full((3000,), torch.finfo(dtype).max if value == 6e4 else 1.0, dtype=dtype)
    x[17] = value
    with opcheck.check(log_dir=tmp_path, quiet=True, workers=1) as session:
        torch.neg(x)
    assert ("aten.neg.default" in ran) is goes
    assert session.coverage.checked == 1


@pytest.mark.parametrize("workers", [1, 2])
def test_what_workers_do_is_charged_to_the_bound(tmp_path, monkeypatch, workers):
    ran = handed_over(monkeypatch)
    original = beside.Beside._work

    def slow(self, item):
        try:
            return original(self, item)
        finally:
            item.seconds = 10.0

    monkeypatch.setattr(beside.Beside, "_work", slow)
    with opcheck.check(log_dir=tmp_path, quiet=True, workers=workers, max_overhead=1e9) as session:
        for _ in range(3):
            nn.functional.gelu(X)
    assert len(ran) >= 2
    spent = session.coverage.overhead.spent_seconds
    assert 10 * len(ran) - 1 < spent < 10 * len(ran) + 5


def test_callbacks_come_in_the_thread_of_the_step(tmp_path, monkeypatch):
    threads = []
    ran = handed_over(monkeypatch)
    arguments = {"criterion": "allclose", "rtol": 0.0, "atol": 0.0}
    with opcheck.check(
        log_dir=tmp_path, quiet=True, workers=2, **arguments,
        on_failure=lambda record: threads.append(threading.get_ident()),
    ):  # fmt: skip
        torch.softmax(X.sin() * 3, -1)
    assert ran
    assert threads
    assert set(threads) == {threading.get_ident()}


def test_nan_and_random_and_blame_are_judged_in_the_step(tmp_path, monkeypatch):
    ran = handed_over(monkeypatch)
    with opcheck.check(log_dir=tmp_path / "a", quiet=True, workers=2) as session:
        torch.log(X)  # NaN of negative values
        nn.functional.dropout(X, 0.5)
    assert "aten.log.default" not in ran
    assert "aten.log.default" in {record.op for record in session.records}
    ran.clear()
    with opcheck.check(log_dir=tmp_path / "b", quiet=True, workers=2, blame=True):
        nn.functional.gelu(X)
    assert not ran


def test_ctrl_c_while_waiting_is_honoured_and_accounted_for(tmp_path, monkeypatch):
    gate = held_up(monkeypatch)

    def interrupted(*args, **kwargs):
        gate.set()
        raise KeyboardInterrupt

    session = opcheck.check(log_dir=tmp_path, quiet=True, workers=1)
    with pytest.raises(KeyboardInterrupt), session:
        for _ in range(3):
            nn.functional.gelu(X)
        monkeypatch.setattr(beside, "wait", interrupted)
    assert session.coverage.skipped[SkipReason.INTERRUPTED] == 3
    assert session.coverage.adds_up
    assert session.verdict is Verdict.INCONCLUSIVE
    assert opcheck.load_run(session.log_path).coverage.skipped[SkipReason.INTERRUPTED] == 3


def test_waiting_is_shown_on_a_terminal_only(tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> int:
            gate.set()  # the worker goes on once something was shown
            return super().write(text)

    gate = held_up(monkeypatch)
    monkeypatch.setattr(beside, "_QUIET_SECONDS", -1.0)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with opcheck.check(log_dir=tmp_path, quiet=True, workers=1) as session:
        nn.functional.gelu(X)
    assert "1 calls are still being checked" in terminal.getvalue()
    assert session.verdict is Verdict.PASS


def test_an_exception_of_the_step_passes_and_what_was_seen_is_kept(tmp_path):
    session = opcheck.check(log_dir=tmp_path, quiet=True, workers=2)
    with pytest.raises(ValueError, match="mine"), session:
        nn.functional.gelu(X)
        raise ValueError("mine")
    assert session.coverage.checked == 1
    with session:
        nn.functional.gelu(X)
    assert session.coverage.checked == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_does_not_wait_for_its_parents_threads(tmp_path, monkeypatch):
    gate = held_up(monkeypatch)
    with opcheck.check(log_dir=tmp_path, quiet=True, workers=1) as session:
        nn.functional.gelu(X)
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            session.__exit__(None, None, None)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        gate.set()
    assert session.coverage.checked == 1
    assert session.coverage.adds_up


def test_inside_the_context_nothing_seems_lost(tmp_path):
    with opcheck.check(log_dir=tmp_path, quiet=True, workers=2) as session:
        nn.functional.gelu(X)
        assert session.coverage.checked == 1
        nn.functional.gelu(X)
        assert len(session.records) == 2
        assert SkipReason.INTERRUPTED not in session.coverage.skipped


def test_inference_mode(tmp_path, monkeypatch):
    ran = handed_over(monkeypatch)
    with torch.inference_mode(), opcheck.check(log_dir=tmp_path, quiet=True, workers=2) as session:
        out = nn.functional.gelu(X)
        out.add_(1)
    assert "aten.add_.Tensor" in ran
    assert session.verdict is Verdict.PASS
    assert session.coverage.checked == 2
