"""`opcheck.check` as a user meets it: arguments, steps, logs, what is said and when."""

from __future__ import annotations

import inspect
import json
import math
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from loguru import logger
from torch import nn

import opcheck
from opcheck import ArgumentError, ArgumentTypeError, LogWriteError, PrecisionError, Verdict
from opcheck.cli import main
from opcheck.settings import Settings
from tests.faults import planted
from tests.hanging import HANGS_S

X = torch.linspace(-2, 2, 24).reshape(4, 6)


def wrong_gelu():
    def make_wrong(original):
        return lambda *args, **kwargs: original(*args, **kwargs) * 1.001

    return planted("aten.gelu.default", make_wrong)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 1))


# ---- arguments ----


@pytest.mark.parametrize(
    ("field", "value", "error", "says"),
    [
        ("rtol", -1.0, ArgumentError, "-1.0"),
        ("rtol", math.nan, ArgumentError, "nan"),
        ("atol", math.inf, ArgumentError, "inf"),
        ("atol", "1e-3", ArgumentTypeError, "'1e-3'"),
        ("rtol", True, ArgumentTypeError, "True"),
        ("criterion", "close", ArgumentError, "calibrated"),
        ("criterion", 3, ArgumentTypeError, "calibrated"),
        ("max_checks", -1, ArgumentError, ">= 0"),
        ("max_checks", 1.5, ArgumentTypeError, "1.5"),
        ("max_overhead", -0.1, ArgumentError, "-0.1"),
        ("max_overhead", math.inf, ArgumentError, "inf"),
        ("max_overhead", "half", ArgumentError, "'half'"),
        ("max_overhead", "50 % of it", ArgumentError, "percentage"),
        ("max_overhead", True, ArgumentTypeError, "True"),
        ("max_numel", None, ArgumentTypeError, "None"),
        ("large", "some", ArgumentError, "'skip'"),
        ("large", None, ArgumentTypeError, "None"),
        ("include", 7, ArgumentTypeError, "7"),
        ("exclude", ["add", 3], ArgumentTypeError, "3"),
        ("modules", [None], ArgumentTypeError, "None"),
        ("start_step", -2, ArgumentError, "-2"),
        ("num_steps", "two", ArgumentTypeError, "'two'"),
        ("on_failure", "explode", ArgumentError, "'raise'"),
        ("on_failure", 5, ArgumentTypeError, "function"),
        ("quiet", 1, ArgumentTypeError, "True or False"),
        ("log_once", None, ArgumentTypeError, "None"),
        ("seed", -1, ArgumentError, "-1"),
        ("log_dir", 3, ArgumentTypeError, "path"),
        ("model", "gpt2", ArgumentTypeError, "torch.nn.Module"),
    ],
)
def test_bad_argument_names_field_value_and_what_is_allowed(field, value, error, says):
    with pytest.raises(error) as caught:
        opcheck.check(**{field: value})
    assert field in str(caught.value)
    assert says in str(caught.value)
    assert isinstance(caught.value, (ValueError, TypeError))


def test_the_defaults_of_check_are_those_of_its_settings():
    parameters = dict(inspect.signature(opcheck.check).parameters)
    del parameters["model"]
    assert set(parameters) == set(Settings.__dataclass_fields__)
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    assert Settings.from_arguments(**defaults) == Settings() == Settings.from_arguments()


@pytest.mark.parametrize("asks", [{"blame": True}, {"max_overhead": 0.5}], ids=str)
def test_what_asks_for_every_call_does_so_whether_or_not_max_checks_is_spelled(asks):
    assert Settings.from_arguments(**asks).max_checks is None
    assert Settings.from_arguments(max_checks=10, **asks).max_checks is None
    assert Settings.from_arguments(max_checks=3, **asks).max_checks == 3


def test_unwritable_log_is_an_error_at_entry_and_leaves_nothing(tmp_path):
    (tmp_path / "file").write_text("in the way")
    session = opcheck.check(log_dir=tmp_path / "file" / "logs")
    with pytest.raises(LogWriteError, match="log_dir"):
        session.__enter__()
    torch.relu(X)
    assert session.coverage.seen == 0


def test_a_session_cannot_be_entered_twice_at_once(tmp_path):
    session = opcheck.check(log_dir=tmp_path, quiet=True)
    with session, pytest.raises(RuntimeError, match="entered already"):
        session.__enter__()


@pytest.mark.parametrize(
    ("arguments", "criterion"),
    [
        ({}, "calibrated"),
        ({"rtol": 1e-3}, "allclose"),
        ({"atol": 1e-3}, "allclose"),
        ({"rtol": 1e-3, "criterion": "calibrated"}, "calibrated"),
        ({"criterion": "allclose"}, "allclose"),
    ],
)
def test_changed_tolerances_mean_allclose(arguments, criterion, tmp_path):
    with opcheck.check(log_dir=tmp_path, quiet=True, **arguments) as session:
        torch.exp(X)
    assert {record.criterion for record in session.records} == {criterion}


def test_half_tolerances_are_widened_in_the_record(tmp_path):
    with opcheck.check(log_dir=tmp_path, quiet=True, criterion="allclose") as session:
        torch.exp(X.bfloat16())
        torch.exp(X)
    assert [(r.rtol, r.atol) for r in session.records] == [(1e-2, 1e-2), (1e-4, 1e-5)]


# ---- selection and budget ----


@pytest.mark.parametrize("glob", ["aten.exp.*", "exp", "exp.default", "aten.exp.default", "ex?"])
def test_include_takes_every_spelling(glob, tmp_path):
    with opcheck.check(log_dir=tmp_path, quiet=True, include=glob) as session:
        torch.exp(X) + torch.sin(X)
    assert [record.op for record in session.records] == ["aten.exp.default"]
    assert session.coverage.skipped[opcheck.SkipReason.EXCLUDED] == 2


def test_exclude_wins_over_include(tmp_path):
    arguments = {"include": ["exp", "sin"], "exclude": ["sin"]}
    with opcheck.check(log_dir=tmp_path, quiet=True, **arguments) as session:
        torch.exp(X) + torch.sin(X)
    assert [record.op for record in session.records] == ["aten.exp.default"]


def test_modules_include_their_children(tmp_path):
    outer = nn.ModuleDict({"a": model(), "b": model()})
    net = nn.Module()
    net.parts = outer
    net.forward = lambda x: outer["a"](x) + outer["b"](x)
    with opcheck.check(net, log_dir=tmp_path, quiet=True, modules="parts.a") as session:
        net(X)
    assert {record.module for record in session.records} == {
        "parts.a.0",
        "parts.a.1",
        "parts.a.2",
    }
    assert session.coverage.skipped[opcheck.SkipReason.OUTSIDE_MODULES]


def test_budget_is_per_signature(tmp_path):
    with opcheck.check(log_dir=tmp_path, quiet=True, max_checks=2) as session:
        for _ in range(5):
            torch.exp(X)
        torch.exp(X.double().float().t())
        torch.exp(X.bfloat16())
    assert session.coverage.checked == 4
    assert session.coverage.skipped[opcheck.SkipReason.BUDGET_USED_UP] == 3
    assert session.coverage.check_seconds > 0


def test_a_large_call_is_skipped_and_does_not_consume_the_budget(tmp_path):
    with opcheck.check(
        log_dir=tmp_path, quiet=True, max_checks=1, max_numel=24, large="skip"
    ) as session:
        for _ in range(3):
            torch.exp(X.repeat(2, 1))
        torch.exp(X)
    assert session.coverage.skipped[opcheck.SkipReason.TOO_LARGE] == 6
    assert session.coverage.checked == 1


def test_a_large_tensor_inside_a_list_counts(tmp_path):
    with opcheck.check(log_dir=tmp_path, quiet=True, max_numel=24, large="skip") as session:
        torch._foreach_add([X, X.repeat(2, 1)], 1.0)
    assert session.coverage.skipped[opcheck.SkipReason.TOO_LARGE] == 2


def test_max_checks_zero_counts_everything_and_is_inconclusive(tmp_path):
    seen = []
    for max_checks in (0, 10, None):
        net = model()
        with opcheck.check(net, log_dir=tmp_path, quiet=True, max_checks=max_checks) as session:
            net(X).sum().backward()
        seen.append(session.coverage.seen)
        assert session.coverage.adds_up
    assert len(set(seen)) == 1
    with opcheck.check(log_dir=tmp_path, quiet=True, max_checks=0) as session:
        torch.exp(X)
    assert session.verdict is Verdict.INCONCLUSIVE
    assert session.coverage.unchecked_signatures[0].op == "aten.exp.default"


# ---- steps ----


def train(net, optimizer, times):
    for _ in range(times):
        optimizer.zero_grad()
        net(X).sum().backward()
        optimizer.step()


def test_a_step_ends_at_the_first_forward_after_the_optimizer(tmp_path):
    net = model()
    with opcheck.check(net, log_dir=tmp_path, quiet=True, max_checks=None) as session:
        train(net, torch.optim.SGD(net.parameters(), lr=0.1), 3)
    assert {record.step for record in session.records} == {0, 1, 2}
    assert session.coverage.steps == 3


def test_gradient_accumulation_is_one_step(tmp_path):
    net = model()
    with opcheck.check(net, log_dir=tmp_path, quiet=True) as session:
        net(X).sum().backward()
        net(X).sum().backward()
    assert {record.step for record in session.records} == {0}


def test_reentry_and_next_step_go_on_with_the_next_step(tmp_path):
    session = opcheck.check(log_dir=tmp_path, quiet=True)
    with session:
        torch.exp(X)
        session.next_step()
        torch.exp(X)
    with session:
        torch.exp(X)
    assert [record.step for record in session.records] == [0, 1, 2]
    run = opcheck.load_run(tmp_path / "precision.jsonl")
    assert len(run.records) == 3
    assert run.verdict is Verdict.PASS


def test_steps_outside_are_counted_as_such(tmp_path):
    net = model()
    arguments = {"start_step": 1, "num_steps": 1, "max_checks": None}
    with opcheck.check(net, log_dir=tmp_path, quiet=True, **arguments) as session:
        train(net, torch.optim.SGD(net.parameters(), lr=0.1), 3)
    assert {record.step for record in session.records} == {1}
    assert session.coverage.skipped[opcheck.SkipReason.OUTSIDE_STEPS]


# ---- failures ----


def test_raise_comes_on_leaving_and_carries_the_record(tmp_path):
    done = []
    with wrong_gelu(), pytest.raises(PrecisionError, match="gelu") as caught:
        with opcheck.check(log_dir=tmp_path, quiet=True, on_failure="raise"):
            nn.functional.gelu(X)
            done.append(True)
    assert done == [True]
    assert caught.value.record.op == "aten.gelu.default"


def test_a_callable_is_given_every_failure(tmp_path):
    found = []
    with wrong_gelu(), opcheck.check(log_dir=tmp_path, quiet=True, on_failure=found.append):
        nn.functional.gelu(X)
        nn.functional.gelu(X)
    assert [record.op for record in found] == ["aten.gelu.default"] * 2


def test_what_a_callable_raises_comes_on_leaving(tmp_path):
    def complain(record):
        raise KeyError(record.op)

    with wrong_gelu(), pytest.raises(KeyError, match="gelu"):
        with opcheck.check(log_dir=tmp_path, quiet=True, on_failure=complain) as session:
            nn.functional.gelu(X)
            torch.exp(X)
    assert session.coverage.checked == 2


def test_the_users_exception_passes_through_unchanged(tmp_path):
    net = model()
    session = opcheck.check(net, log_dir=tmp_path, quiet=True, on_failure="raise")
    with pytest.raises(ZeroDivisionError), session:
        net(X)
        raise ZeroDivisionError
    assert session.coverage.adds_up
    assert session.verdict is Verdict.PASS


def test_an_exception_inside_a_module_leaves_no_module_open(tmp_path):
    class Bad(nn.Module):
        def forward(self, x):
            raise ValueError("no")

    net = nn.Sequential(nn.Linear(6, 6), Bad())
    with opcheck.check(net, log_dir=tmp_path, quiet=True) as session:
        with pytest.raises(ValueError, match="no"):
            net(X)
        torch.exp(X)
    assert session.records[-1].module == ""
    assert session.records[-1].phase == "other"


def test_an_optimizer_that_raises_does_not_keep_the_phase(tmp_path):
    class Bad(torch.optim.SGD):
        def step(self, closure=None):
            raise ValueError("no")

    net = model()
    optimizer = Bad(net.parameters(), lr=0.1)
    with opcheck.check(net, log_dir=tmp_path, quiet=True) as session:
        net(X).sum().backward()
        with pytest.raises(ValueError, match="no"):
            optimizer.step()
        torch.exp(X)
    assert session.records[-1].phase == "other"


def test_a_crash_of_ours_is_a_record_and_the_step_is_unharmed(tmp_path, monkeypatch):
    def crash(*args, **kwargs):
        raise AssertionError("ours")

    monkeypatch.setattr("opcheck.comparison.judge", crash)
    with opcheck.check(log_dir=tmp_path, quiet=True) as session:
        out = torch.exp(X)
    assert torch.equal(out, torch.exp(X))
    assert session.verdict is Verdict.INCONCLUSIVE
    assert session.coverage.errors == 1
    assert session.coverage.adds_up
    assert "AssertionError: ours" in session.records[0].error


def test_a_crash_of_ours_beside_a_random_op_leaves_the_generators(tmp_path, monkeypatch):
    def crash(*args, **kwargs):
        torch.rand(1)
        raise AssertionError("ours")

    def drawn():
        torch.manual_seed(0)
        return [torch.native_dropout(X, 0.5, True)[0], torch.rand(3)]

    expected = drawn()
    monkeypatch.setattr("opcheck.shadow.Shadow.follow", crash)
    with opcheck.check(log_dir=tmp_path, quiet=True, blame=True) as session:
        found = drawn()
    assert all(map(torch.equal, found, expected))
    assert session.verdict is Verdict.INCONCLUSIVE
    assert "AssertionError: ours" in session.report()


def test_ctrl_c_inside_a_check_reaches_the_user_and_is_counted(tmp_path, monkeypatch):
    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("opcheck.comparison.judge", stop)
    session = opcheck.check(log_dir=tmp_path, quiet=True)
    with pytest.raises(KeyboardInterrupt), session:
        torch.exp(X)
    assert session.coverage.adds_up
    assert session.coverage.skipped[opcheck.SkipReason.INTERRUPTED] == 1


# ---- what is said ----


@pytest.fixture
def said():
    lines = []
    sink = logger.add(lambda message: lines.append(message.record), level="DEBUG")
    yield lines
    logger.remove(sink)


def test_passing_step_says_one_line_on_leaving_and_nothing_before(tmp_path, said, capsys):
    with opcheck.check(log_dir=tmp_path):
        torch.exp(X)
        assert said == []
    assert [record["level"].name for record in said] == ["INFO"]
    assert "PASS" in said[0]["message"]
    assert "opcheck review" in said[0]["message"]
    assert said[0]["extra"]["opcheck"]
    assert capsys.readouterr().out == ""


def test_failing_step_warns_with_the_documented_line(tmp_path, said):
    with wrong_gelu(), opcheck.check(log_dir=tmp_path):
        nn.functional.gelu(X)
        nn.functional.gelu(X)
    assert [record["level"].name for record in said] == ["WARNING", "WARNING"]
    assert said[0]["message"].startswith("Op: gelu | FAIL | in: [(4, 6):torch.float32] | out: ")
    assert "gelu" in said[1]["message"]


def test_quiet_says_nothing_and_writes_the_same_file(tmp_path, said):
    with wrong_gelu(), opcheck.check(log_dir=tmp_path, quiet=True):
        nn.functional.gelu(X)
    assert said == []
    text = (tmp_path / "precision.log").read_text()
    assert " [WARNING] Op: gelu | FAIL | in: [(4, 6):torch.float32]" in text
    assert text.count("\n") == 1


def test_the_users_sinks_stay(tmp_path, said):
    with wrong_gelu(), opcheck.check(log_dir=tmp_path, quiet=True):
        nn.functional.gelu(X)
    logger.warning("still there")
    assert said[-1]["message"] == "still there"
    assert "still there" not in (tmp_path / "precision.log").read_text()


def test_log_once_false_writes_a_line_a_failure(tmp_path):
    with wrong_gelu(), opcheck.check(log_dir=tmp_path, quiet=True, log_once=False) as session:
        nn.functional.gelu(X)
        nn.functional.gelu(X)
    assert (tmp_path / "precision.log").read_text().count("Op: gelu") == 2
    assert len(session.failures) == 2


def test_report_leads_with_verdict_then_first_divergence(tmp_path):
    net = model()
    with wrong_gelu(), opcheck.check(net, log_dir=tmp_path, quiet=True) as session:
        net(X)
    text = session.report()
    assert text.startswith("opcheck: FAIL")
    assert text.index("first divergence") < text.index("coverage")
    assert "aten.gelu.default" in text
    assert "test_session.py" in text


# ---- logs ----


def test_json_lines_hold_header_records_and_coverage(tmp_path):
    with opcheck.check(log_dir=tmp_path, quiet=True) as session:
        torch.exp(X)
    lines = [json.loads(line) for line in (tmp_path / "precision.jsonl").read_text().splitlines()]
    assert [line["type"] for line in lines] == ["header", "record", "coverage"]
    assert lines[0]["schema"] == "opcheck.log"
    assert lines[0]["version"] == 1
    assert lines[0]["settings"]["max_checks"] == 10
    assert {line["run_id"] for line in lines} == {session.run_id}


def test_a_log_is_appended_to_and_loaded_runs_equal_live_ones(tmp_path):
    sessions = []
    for _ in range(2):
        with wrong_gelu(), opcheck.check(log_dir=tmp_path, quiet=True) as session:
            nn.functional.gelu(X)
            torch.log(-X)
        sessions.append(session)
    run = opcheck.load_run(tmp_path / "precision.jsonl")
    assert run.run_id == sessions[1].run_id
    assert list(run.records) == sessions[1].records
    assert run.coverage == sessions[1].coverage
    assert run.verdict is sessions[1].verdict


def test_each_rank_has_its_own_files(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with opcheck.check(log_dir=tmp_path, quiet=True) as session:
        torch.exp(X)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "precision.rank1.jsonl",
        "precision.rank1.log",
    ]
    assert session.records[0].rank == 1


def test_a_log_that_can_no_longer_be_written_does_not_disturb_the_step(tmp_path, said):
    session = opcheck.check(log_dir=tmp_path)
    with session:
        session._files._json.close()
        out = torch.exp(X)
    assert torch.equal(out, torch.exp(X))
    assert session.coverage.checked == 1
    assert "incomplete" in said[-1]["message"]


def test_two_sessions_nested_both_see_the_step(tmp_path):
    with opcheck.check(log_dir=tmp_path / "a", quiet=True) as outer:
        with opcheck.check(log_dir=tmp_path / "b", quiet=True) as inner:
            torch.exp(X)
    assert outer.coverage.checked == inner.coverage.checked == 1
    assert outer.coverage.seen == inner.coverage.seen


def test_two_threads_with_a_session_each(tmp_path):
    sessions = {}

    def work(name):
        net = model()
        with opcheck.check(net, log_dir=tmp_path / name, quiet=True, max_checks=None) as session:
            for _ in range(5):
                net(X).sum().backward()
        sessions[name] = session

    threads = [threading.Thread(target=work, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {session.verdict for session in sessions.values()} == {Verdict.PASS}
    assert len({session.coverage.seen for session in sessions.values()}) == 1
    assert all({r.module for r in s.records} == {"", "0", "1", "2"} for s in sessions.values())


def test_nothing_is_kept_alive_after_the_context(tmp_path):
    import weakref

    net = model()
    watched = weakref.ref(net)
    with opcheck.check(net, log_dir=tmp_path, quiet=True) as session:
        out = net(X)
        kept = weakref.ref(out)
        del out
    assert kept() is None
    del net
    session._tracker._model = None
    assert watched() is None


# ---- from outside ----


SCRIPT = """
import sys, torch
x = torch.ones(3)
torch.exp(x)
print("args", sys.argv[1:], __name__)
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize(("own", "status"), [(0, 0), (7, 7)])
def test_run_keeps_the_scripts_status(own, status, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = run_cli(tmp_path, "run", str(script), str(own))
    assert done.returncode == status
    assert f"args ['{own}'] __main__" in done.stdout
    assert "opcheck: PASS" in done.stdout
    assert (tmp_path / "logs" / "precision.jsonl").exists()


@pytest.mark.parametrize(
    ("script", "status"),
    [
        ("torch.nn.functional.gelu(torch.ones(3))", 1),
        ("torch.nn.functional.gelu(torch.ones(3)); sys.exit(7)", 7),
        ("torch.exp(torch.ones(3))", 0),
        ("torch.empty(3)", 3),
    ],
    ids=["a wrong kernel", "the script's own", "nothing wrong", "nothing compared"],
)
def test_run_ends_with_the_status_of_the_verdict(script, status, tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text(f"import sys, torch\n{script}\n")
    with wrong_gelu():
        assert main(["run", "--log-dir", str(tmp_path / "logs"), str(path)]) == status
    verdict = {0: "PASS", 3: "INCONCLUSIVE"}.get(status, "FAIL")
    assert f"opcheck: {verdict}" in capsys.readouterr().out


def test_run_shows_the_scripts_own_traceback(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import torch\ntorch.exp(torch.ones(2))\nraise ValueError('mine')\n")
    done = run_cli(tmp_path, "run", str(script))
    assert done.returncode == 1
    assert "ValueError: mine" in done.stderr
    assert "runner.py" not in done.stderr
    assert "opcheck: PASS" in done.stdout


def test_run_without_the_script_is_usage(tmp_path):
    done = run_cli(tmp_path, "run", "nothing.py")
    assert done.returncode == 2
    assert "nothing.py" in done.stderr


def test_demo_finds_its_fault_and_clean_passes(tmp_path):
    done = run_cli(tmp_path, "demo")
    assert done.returncode == 0, done.stderr
    assert "blocks.0.mlp.act" in done.stdout
    assert "demo.py" in done.stdout
    assert "opcheck review logs/precision.jsonl" in done.stdout
    assert (tmp_path / "logs" / "precision.log").read_text().count("Op: gelu") == 3
    clean = run_cli(tmp_path, "demo", "--clean")
    assert clean.returncode == 0
    assert "opcheck: PASS" in clean.stdout


def run_cli(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    return subprocess.run(
        [sys.executable, "-m", "opcheck", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANGS_S,
        check=False,
    )


KILLED = """
import json, os, random, signal, sys, torch, opcheck

def endless(folder, pipe):
    with opcheck.check(log_dir=folder, quiet=True, max_checks=None) as session:
        while True:
            torch.exp(torch.ones(8))
            os.write(pipe, len(session.records).to_bytes(4, "little"))

with opcheck.check(log_dir=f"{sys.argv[1]}/warm", quiet=True):  # what a process does once
    torch.exp(torch.ones(8))
rng, told = random.Random(0), []
for number in range(int(sys.argv[2])):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        endless(f"{sys.argv[1]}/{number}", write)
    os.close(write)
    last, wanted = os.read(read, 4), rng.randrange(1, 30)
    while int.from_bytes(last, "little") < wanted:
        last = os.read(read, 4)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while chunk := os.read(read, 4):
        last = chunk
    os.close(read)
    told.append(int.from_bytes(last, "little"))
print(json.dumps(told))
"""


@pytest.mark.slow
def test_a_process_killed_a_hundred_times_leaves_every_flushed_record(tmp_path):
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), "100"],
        env=environment, capture_output=True, text=True, check=True, timeout=HANGS_S,
    )  # fmt: skip
    told = json.loads(done.stdout)
    assert len(told) == 100
    assert len(set(told)) > 5  # the moments differed
    for number, records in enumerate(told):
        run = opcheck.load_run(tmp_path / str(number) / "precision.jsonl")
        assert len(run.records) >= records
        assert run.verdict is Verdict.INCONCLUSIVE


WRITER = """
import sys, torch, opcheck
session = opcheck.check(log_dir=sys.argv[1], quiet=True, max_checks=None)
for _ in range(3):  # entered three times: three coverage lines
    with session:
        for _ in range(100):
            torch.exp(torch.ones(300)).sin()
print(session.run_id)
"""


@pytest.mark.slow
def test_two_processes_may_append_to_one_log(tmp_path):
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
    }
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)],
            env=environment, stdout=subprocess.PIPE, text=True,
        )
        for _ in range(2)
    ]  # fmt: skip
    run_ids = [writer.communicate(timeout=HANGS_S)[0].strip() for writer in writers]
    assert len(set(run_ids)) == 2
    for run_id in run_ids:
        run = opcheck.load_run(tmp_path / "precision.jsonl", run=run_id)
        assert len(run.records) == 900
        assert run.coverage.checked == 900
        assert run.verdict is Verdict.PASS


def test_review_prints_what_the_session_reports(tmp_path):
    net = model()
    session = opcheck.check(net, log_dir=tmp_path, quiet=True)
    with wrong_gelu():
        for _ in range(2):
            with session:
                net(X).sum().backward()
    done = run_cli(tmp_path, "review", str(tmp_path / "precision.jsonl"))
    report, review = (text.partition("\nnext\n")[0] for text in (session.report(), done.stdout))
    before, _, rest = review.partition("by op\n")  # the one table that review has beside it
    assert report == before + rest[rest.index("coverage\n") :]


@pytest.mark.parametrize(
    ("make_wrong", "says"),
    [
        (lambda original: lambda x: original(x).t().contiguous().t(), "strides (1, 4)"),
        (lambda original: lambda x: original(x).copysign(torch.tensor(-1.0)), "12 zeros"),
        (lambda original: lambda x: original(x), ""),
    ],
    ids=["strides", "sign_of_zero", "equal"],
)
def test_strides_and_the_sign_of_zero_are_notes_and_no_fault(make_wrong, says, tmp_path):
    x = torch.zeros(4, 3)
    with planted("aten.sin.default", make_wrong):
        with opcheck.check(log_dir=tmp_path, quiet=True, include="sin") as session:
            torch.sin(x)
    assert session.verdict is Verdict.PASS
    (record,) = session.records
    assert bool(record.notes) == bool(says)
    assert says in " ".join(record.notes)
