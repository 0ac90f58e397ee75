"""Whatever goes wrong around a session, nothing of it stays and the step goes on."""

from __future__ import annotations

import asyncio
import copy
import gc
import os
import pickle
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import opcheck
from opcheck import Verdict
from tests.faults import gelu_off_by
from tests.hanging import HANGS_S
from tests.step_equality import active_modes

X = torch.linspace(-2, 2, 24).reshape(4, 6)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 1))


def run_python(code, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        env=environment, capture_output=True, text=True, check=False, timeout=HANGS_S,
    )  # fmt: skip


# ---- memory and files ----


def test_a_session_does_not_keep_the_model(tmp_path):
    net = model()
    session = opcheck.check(net, log_dir=tmp_path, quiet=True)
    with session:
        net(X).sum().backward()
    watched = weakref.ref(net)
    del net
    assert watched() is None
    assert session.coverage.checked


def test_no_file_and_no_thread_stays_open(tmp_path):
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()  # noqa: PTH208
    with gelu_off_by(), opcheck.check(log_dir=tmp_path, quiet=True):
        nn.functional.gelu(X)
    assert len(os.listdir("/proc/self/fd")) == files  # noqa: PTH208
    assert threading.active_count() == threads


def test_tensors_die_with_the_step(tmp_path):
    net = model()
    gc.disable()
    try:
        with opcheck.check(net, log_dir=tmp_path, quiet=True, max_checks=None):
            out = net(X)
            out.sum().backward()
            watched = [weakref.ref(out), weakref.ref(net[0].weight.grad)]
            del out
            net.zero_grad()
            assert [ref() for ref in watched] == [None, None]
    finally:
        gc.enable()


def test_a_log_folder_that_is_deleted_meanwhile_is_said(tmp_path):
    folder = tmp_path / "logs"
    with opcheck.check(log_dir=folder, quiet=True) as session:
        torch.exp(X)
        shutil.rmtree(folder)
        torch.exp(X)
    assert session.verdict is Verdict.PASS
    assert "the log is incomplete" in session.report()
    assert "removed" in session.report()


FULL = """
import resource, signal, sys, torch, opcheck
from tests.faults import gelu_off_by
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)
with gelu_off_by(), opcheck.check(log_dir=sys.argv[1], quiet=True, max_checks=None) as session:
    for _ in range(10):
        torch.nn.functional.gelu(torch.ones(3))
print(session.verdict, len(session.failures), "incomplete" in session.report())
"""


@pytest.mark.slow
@pytest.mark.parametrize("room", [10, 3000])
def test_a_full_disk_does_not_reach_the_step(room, tmp_path):
    done = run_python(FULL, tmp_path, room)
    assert done.stdout == "FAIL 10 True\n", done.stderr


# ---- processes, threads, tasks ----


def test_a_fork_that_leaves_the_block_says_and_writes_nothing(tmp_path, capfd):
    session = opcheck.check(log_dir=tmp_path, on_failure="raise")
    child = 0
    with gelu_off_by(), pytest.raises(opcheck.PrecisionError), session:
        nn.functional.gelu(X)
        child = os.fork()
        if child == 0:
            try:
                session.__exit__(None, None, None)
            finally:
                os._exit(1 if session._exits.is_pending else 0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (tmp_path / "precision.jsonl").read_text().count('"type":"coverage"') == 1
    assert capfd.readouterr().err.count("opcheck: FAIL") <= 1


def test_leaving_in_another_thread_is_refused_and_changes_nothing(tmp_path):
    errors = []

    def leave():
        try:
            session.__exit__(None, None, None)
        except RuntimeError as error:
            errors.append(str(error))

    session = opcheck.check(log_dir=tmp_path, quiet=True)
    with session:
        thread = threading.Thread(target=leave)
        thread.start()
        thread.join()
        torch.exp(X)
    assert "another thread" in errors[0]
    assert session.coverage.seen == 1


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_session_is_not_copied_but_its_results_are(copied, tmp_path):
    with opcheck.check(log_dir=tmp_path, quiet=True) as session:
        torch.exp(X)
    with pytest.raises(TypeError, match="load_run"):
        copied(session)
    assert pickle.loads(pickle.dumps(session.records)) == session.records
    assert pickle.loads(pickle.dumps(session.coverage)) == session.coverage


def test_sessions_may_be_left_in_any_order(tmp_path):
    first = opcheck.check(log_dir=tmp_path / "a", quiet=True)
    second = opcheck.check(log_dir=tmp_path / "b", quiet=True)
    first.__enter__()
    second.__enter__()
    torch.exp(X)
    first.__exit__(None, None, None)
    torch.exp(X)
    second.__exit__(None, None, None)
    assert (first.coverage.seen, second.coverage.seen) == (1, 2)
    assert active_modes() == []


def test_interleaved_tasks_leave_nothing_on_the_stack(tmp_path):
    async def task(number):
        with opcheck.check(log_dir=tmp_path / str(number), quiet=True) as session:
            torch.exp(X)
            await asyncio.sleep(0.001 * number)
            torch.exp(X)
        return session

    async def main():
        return await asyncio.gather(*(task(number) for number in range(3)))

    sessions = asyncio.run(main())
    assert active_modes() == []
    assert all(session.coverage.checked >= 2 for session in sessions)
    assert all(session.coverage.adds_up for session in sessions)


# ---- crashes and Ctrl-C ----

OURS = [
    "opcheck.admission.describe",
    "opcheck.admission.snapshot",
    "opcheck.call_records.spell_tensor",
    "opcheck.admission.traits_of",
    "opcheck.conclusions.record_of",
    "opcheck.modules.ModuleTracker.locate",
    "opcheck.modules.ModuleTracker.owner",
    "opcheck.owners.Owners._learn_all",
    "opcheck.modules.find_user_frame",
    "opcheck.modules._versions",
    "opcheck.ledger.Ledger.count",
    "opcheck.ledger.Ledger.skip",
    "opcheck.ledger.Ledger.end_step",
]


@pytest.mark.parametrize("broken", OURS)
def test_a_crash_of_ours_anywhere_is_inconclusive_and_adds_up(broken, tmp_path, monkeypatch):
    def crash(*args, **kwargs):
        raise MemoryError("ours")

    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    monkeypatch.setattr(broken, crash)
    with opcheck.check(net, log_dir=tmp_path, quiet=True) as session:
        net(X).sum().backward()
        optimizer.step()
        net(X)
    assert session.verdict is Verdict.INCONCLUSIVE
    assert session.coverage.errors
    assert session.coverage.adds_up
    assert "MemoryError: ours" in next(record.error for record in session.records if record.error)


@pytest.mark.parametrize("broken", ["opcheck.session.one_line", "opcheck.sinks.to_json"])
def test_a_crash_while_telling_is_not_the_users(broken, tmp_path, monkeypatch):
    def crash(*args, **kwargs):
        raise MemoryError("ours")

    monkeypatch.setattr(broken, crash)
    with opcheck.check(log_dir=tmp_path) as session:
        torch.exp(X)
    assert session.coverage.checked == 1


def test_a_guard_that_was_cut_off_is_closed_all_the_same(tmp_path, monkeypatch):
    """Ctrl-C at the first instruction of `__exit__` left autograd off for the whole process."""
    from opcheck.outside import outside_everything

    def cut(self, *exc):
        monkeypatch.undo()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        with opcheck.check(log_dir=tmp_path, quiet=True) as session:
            monkeypatch.setattr(outside_everything, "__exit__", cut)
            torch.exp(X)
    assert (torch.ones(2, requires_grad=True) * 2).requires_grad
    assert session.coverage.adds_up
    assert session.coverage.skipped[opcheck.SkipReason.INTERRUPTED] == 1


INTERRUPTED = """
import random, signal, sys, torch, opcheck
from torch import nn
from opcheck.outside import reference_depth
from tests.step_equality import active_modes, global_hooks

def interrupt(*_):
    raise KeyboardInterrupt

signal.signal(signal.SIGALRM, interrupt)
rng, hooks, cut = random.Random(0), global_hooks(), 0
for number in range(300):
    net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 8))
    optimizer = torch.optim.AdamW(net.parameters(), foreach=False)
    session = opcheck.check(net, log_dir=sys.argv[1], quiet=True, max_checks=None)
    try:
        with session:
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.0005, 0.03))
            for _ in range(3):
                optimizer.zero_grad()
                net(torch.randn(4, 8)).sum().backward()
                optimizer.step()
            signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        cut += 1
    assert active_modes() == [] and global_hooks() == hooks and not reference_depth(), number
    assert torch.ones(2, requires_grad=True).exp().requires_grad, number
    assert session.coverage.adds_up and not session.failures and not session.coverage.errors
print(cut)
"""


@pytest.mark.slow
def test_ctrl_c_at_random_moments_leaves_the_process_as_it_was(tmp_path):
    done = run_python(INTERRUPTED, tmp_path)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 100
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
