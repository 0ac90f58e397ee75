"""The commands that read logs: options, exit status, streams, time to start."""

from __future__ import annotations

import csv
import io
import json
import os
import pty
import select
import subprocess
import sys
from pathlib import Path

import pytest

from opcheck.cli import main
from tests import log_samples as logs
from tests.hanging import HANGS_S

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def log(tmp_path):
    return str(logs.write_log(tmp_path / "precision.jsonl", logs.run_lines(logs.TWO_FAULTS)))


@pytest.fixture
def clean(tmp_path):
    records = [logs.passing(i) for i in range(6)]
    return str(logs.write_log(tmp_path / "clean.jsonl", logs.run_lines(records)))


def command(*arguments, env=None, **options):
    return subprocess.run(
        [sys.executable, "-m", "opcheck", *arguments],
        capture_output=True, cwd=ROOT, timeout=HANGS_S, check=False,
        env={**os.environ, **(env or {})}, **options,
    )  # fmt: skip


# ---- exit status --------------------------------------------------------------------------------


def test_review_status(log, clean, tmp_path, capsys):
    assert main(["review", clean]) == 0
    assert main(["review", log]) == 1
    assert main(["review", str(tmp_path / "none.jsonl")]) == 2
    empty = logs.write_log(tmp_path / "empty.jsonl", [])
    assert main(["review", str(empty)]) == 3
    assert "empty.jsonl is empty" in " ".join(capsys.readouterr().out.split()).replace("- ", "")


@pytest.mark.parametrize(
    "arguments",
    [[], ["dance"], ["review"], ["review", "x", "--step", "-1"], ["review", "x", "--phase", "y"],
     ["review", "x", "--json", "--markdown"], ["merge", "x"], ["diff", "x"]],
    ids=" ".join,
)  # fmt: skip
def test_usage_is_2(arguments, capsys):
    assert main(arguments) == 2
    assert "usage: opcheck" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["review", "diff", "merge", "export", "demo", "run"])
def test_every_command_has_help(name, capsys):
    assert main([name, "--help"]) == 0
    assert "Exit status" in capsys.readouterr().out


def test_an_unreadable_log_is_named_without_a_traceback(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"\x1b[31mjunk\n")
    done = command("review", str(path))
    assert done.returncode == 2
    assert done.stdout == b""
    assert b"x.jsonl:1: " in done.stderr
    assert b"\x1b" not in done.stderr
    assert b"Traceback" not in done.stderr


# ---- review -------------------------------------------------------------------------------------


def test_review_shows_the_earlier_fault_first_and_both_in_the_tree(log, capsys):
    main(["review", log, "--tree"])
    out = capsys.readouterr().out
    assert out.index("blocks.3.mlp.fc1") < out.index("blocks.1.attn")
    assert "forward ← first" in out
    assert "backward" in out.split("numbers include the children")[1]


def test_review_call(log, capsys):
    assert main(["review", log, "--call", "9"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("call 9: FAIL")
    assert "actual 0.8413, expected 0.82" in out
    assert "model.py:77 in forward" in out
    assert main(["review", log, "--call", "8"]) == 2
    assert "no record of call 8" in capsys.readouterr().err
    assert main(["review", log, "--call", "9", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["calls"][0]["index"] == 9


def test_review_json_is_strict(log, capsys):
    assert main(["review", log, "--json", "--op", "mm"]) == 1
    data = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert data["verdict"] == "FAIL"
    assert [item["name"] for item in data["by_op"]] == ["aten.mm.default"]
    assert data["filter"] == "op mm"


def test_review_json_with_nan_in_the_header(tmp_path, capsys):
    lines = logs.run_lines(logs.TWO_FAULTS)
    lines[0] = lines[0].replace('"rtol":0.0001', '"rtol":NaN,"atol":-Infinity')
    main(["review", str(logs.write_log(tmp_path / "x.jsonl", lines)), "--json"])
    data = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert data["header"]["settings"] == {"rtol": "NaN", "atol": "-Infinity"}


def test_review_markdown(log, capsys):
    main(["review", log, "--markdown"])
    out = capsys.readouterr().out
    assert out.startswith("**opcheck: FAIL**")
    assert "| `gelu` | `blocks.3.mlp.fc1` | `forward` |" in out


def test_review_filters(log, capsys):
    main(["review", log, "--phase", "backward", "--module", "blocks.1", "--step", "0"])
    out = capsys.readouterr().out
    assert "call 9" in out
    assert "gelu" not in out
    assert "only module blocks.1, phase backward, step 0" in out


@pytest.mark.parametrize("sort", ["first", "q", "failed", "checked", "seen", "name"])
def test_review_sorts(log, capsys, sort):
    assert main(["review", log, "--sort", sort]) == 1
    table = capsys.readouterr().out.split("by op")[1].splitlines()[2:5]
    names = [line.split()[0] for line in table]
    if sort == "name":
        assert names == sorted(names)
    else:
        assert set(names[:2]) <= {"gelu", "mm"} or sort in ("checked", "seen")


def test_review_lists_other_runs_and_shows_the_last(tmp_path, capsys):
    a = logs.run_lines([logs.passing(0, run_id="first")], run_id="first")
    b = logs.run_lines([logs.failing(0, run_id="second")], run_id="second")
    path = str(logs.write_log(tmp_path / "x.jsonl", a + b))
    assert main(["review", path]) == 1
    assert "first  1 records" in capsys.readouterr().out
    assert main(["review", path, "--run", "first"]) == 0
    main(["review", path, "--run", "second"])
    assert f"opcheck review {path} --run second --call 0" in capsys.readouterr().out
    assert main(["review", path, "--run", "third"]) == 2
    assert "no run 'third'; it has: first, second" in capsys.readouterr().err


def test_review_of_a_text_log(tmp_path, capsys):
    from opcheck.logfile import format_text_line

    lines = [f"2025-05-19 10:00:01 [WARNING] {format_text_line(r)}" for r in logs.TWO_FAULTS[2:5:2]]
    assert main(["review", str(logs.write_log(tmp_path / "precision.log", lines)), "--tree"]) == 1
    assert "blocks.3.mlp.fc1" in capsys.readouterr().out


# ---- diff, merge, export ------------------------------------------------------------------------


def test_diff_status(log, clean, capsys):
    assert main(["diff", log, log]) == 0
    assert main(["diff", log, clean]) == 3
    assert main(["diff", clean, log]) == 1
    out = capsys.readouterr().out
    assert "opcheck diff: FAIL: 2 calls fail in B that did not in A" in out
    assert main(["diff", clean, log, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["verdict"] == "FAIL"
    assert main(["diff", clean, log, "--markdown"]) == 1
    assert main(["diff", clean, "nowhere"]) == 2


def test_merge(tmp_path, capsys):
    for rank in range(2):
        records = [
            logs.passing(0, rank=rank),
            (logs.failing if rank else logs.passing)(1, rank=rank),
        ]
        lines = logs.run_lines(records, rank=rank, world_size=2)
        logs.write_log(tmp_path / f"precision.rank{rank}.jsonl", lines)
    out = str(tmp_path / "all.jsonl")
    parts = sorted(str(path) for path in tmp_path.glob("*.jsonl"))
    assert main(["merge", *parts, "-o", out]) == 1
    assert "on only rank 1; not on 0" in capsys.readouterr().out
    assert main(["review", out]) == 1
    assert "ranks 0-1" in capsys.readouterr().out
    assert main(["merge", *parts, "-o", out]) == 2
    assert "is there already" in capsys.readouterr().err


def test_export(log, tmp_path, capsys):
    assert main(["export", log, "--format", "csv", "--op", "gelu"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert {row["op"] for row in rows} == {"aten.gelu.default"}
    out = tmp_path / "x.csv"
    assert main(["export", log, "-o", str(out)]) == 0
    assert len(out.read_text().splitlines()) == 7
    assert main(["export", log, "-o", str(out)]) == 2


# ---- streams ------------------------------------------------------------------------------------


def test_no_color_and_no_progress_in_a_pipe(log):
    done = command("review", log)
    assert b"\x1b" not in done.stdout
    assert done.stderr == b""


def test_ascii_when_the_stream_is_ascii(log):
    done = command("review", log, "--tree", env={"PYTHONIOENCODING": "ascii"})
    assert done.stdout.isascii()
    assert b"`- " in done.stdout


def test_a_closed_pipe_is_no_traceback(log):
    code = f"{sys.executable} -m opcheck review {log} | head -1"
    done = subprocess.run(code, shell=True, cwd=ROOT, capture_output=True, check=True)
    assert done.stdout.startswith(b"opcheck: FAIL")
    assert done.stderr == b""


def on_a_terminal(arguments, env):
    """Output and exit status of a command whose stdout and stderr are a terminal."""
    parent, child = pty.openpty()
    process = subprocess.Popen(
        arguments, stdout=child, stderr=child, stdin=child, cwd=ROOT, env={**os.environ, **env}
    )
    os.close(child)
    data = b""
    while process.poll() is None or select.select([parent], [], [], 0)[0]:
        if select.select([parent], [], [], 0.1)[0]:
            try:
                data += os.read(parent, 65536)
            except OSError:
                break
    os.close(parent)
    return data.decode(), process.wait()


@pytest.mark.parametrize(
    ("env", "colored"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)], ids=str
)
def test_color_on_a_terminal(log, env, colored):
    env = {"TERM": "xterm", "NO_COLOR": "", "COLUMNS": "80", **env}
    text, status = on_a_terminal([sys.executable, "-m", "opcheck", "review", log], env)
    assert status == 1
    assert ("\x1b[31m" in text) is colored


def test_progress_after_a_second_on_a_terminal(tmp_path):
    path = logs.write_log(tmp_path / "x.jsonl", logs.run_lines(logs.TWO_FAULTS))
    slow = (
        "import sys, time, opcheck.logfile as f; f.CHUNK_BYTES = 400\n"
        "from opcheck.scan import _Scanner\n"
        "take = _Scanner.take\n"
        "def slow(self, *a, **k): time.sleep(0.2); take(self, *a, **k)\n"
        "_Scanner.take = slow\n"
        "from opcheck.cli import main; main(sys.argv[1:])"
    )
    text, _ = on_a_terminal([sys.executable, "-c", slow, "review", str(path)], {"COLUMNS": "80"})
    assert "reading " in text
    piped = subprocess.run(
        [sys.executable, "-c", slow, "review", str(path)],
        cwd=ROOT, capture_output=True, check=True,
    )  # fmt: skip
    assert piped.stderr == b""


# ---- what starting costs ------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--help"], ["review", "LOG"], ["diff", "LOG", "LOG"]])
def test_reading_imports_nothing_heavy(log, arguments):
    arguments = [log if part == "LOG" else part for part in arguments]
    code = (
        "import sys; from opcheck.cli import main; main(sys.argv[1:]);"
        "heavy = {'torch', 'numpy', 'loguru', 'rich'} & set(sys.modules); sys.exit(str(heavy))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, check=False
    )
    assert done.stderr == b"set()\n"


def test_ten_thousand_records_in_bounded_memory(tmp_path):
    lines = [logs.header_line()]
    lines += [logs.record_line(logs.passing(i)) for i in range(10_000)]
    path = logs.write_log(tmp_path / "x.jsonl", lines)
    code = (
        "import sys; from opcheck.cli import main; main(sys.argv[1:]);"
        # not ru_maxrss: that begins with the size of the process that forked
        "print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "review", str(path)], cwd=ROOT, capture_output=True, check=True
    )
    assert int(done.stdout.split()[-1]) < 100 * 1024


def test_the_options_of_run_reach_the_runner(monkeypatch):
    import types

    seen = []
    runner = types.ModuleType("opcheck.runner")
    runner.run_script = lambda script, args, options: seen.append((script, args, options)) or 7
    monkeypatch.setitem(sys.modules, "opcheck.runner", runner)
    argv = ["run", "--max-checks", "all", "--include", "a", "--include", "b", "x.py", "--rtol", "3"]
    assert main(argv) == 7
    assert seen == [
        ("x.py", ["--rtol", "3"], {"log_dir": "logs", "max_checks": None, "include": ["a", "b"]})
    ]
