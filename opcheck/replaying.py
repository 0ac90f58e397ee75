"""`opcheck replay`: a reproducer run, a recorded folder judged. The first needs no torch here."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opcheck.errors import ReproError
from opcheck.printing import number, style_for
from opcheck.records import EXIT_STATUS, OpRecord, Verdict
from opcheck.whole_files import write_new

__all__ = ["replay_file", "replay_folder", "write_pytest"]

MARK = "Exit status: 1 the fault is there, 0 it is not, 3 it cannot be told."
"""In the head of every reproducer."""
_INCONCLUSIVE = EXIT_STATUS[Verdict.INCONCLUSIVE]
_MAIN = '\nif __name__ == "__main__":\n'
_TEST = '''
def test_reproducer():
    """Passes once the fault is gone; in a process of its own, so that no setting is left behind."""
    import subprocess

    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

'''


def _text_of(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ReproError(f"{path}: cannot be read: {error}") from error
    if MARK not in text or _MAIN not in text:
        raise ReproError(f"{path}: no reproducer; `python {path}` runs any other script")
    return text


def replay_file(path: Path, *, device: str | None, load: Sequence[str]) -> int:
    """Run a reproducer in a process of its own.

    Args:
        path: the Python file.
        device: where to run the op; None: where it was recorded.
        load: modules, Python files or shared libraries with kernels, loaded at the marked place.

    Returns:
        1 the fault is there, 0 it is not, 3 it cannot be told.

    Raises:
        ReproError: it is none.
    """
    _text_of(path)
    environment = dict(os.environ)
    if load:
        environment["REPRO_LOAD"] = os.pathsep.join(_absolute(name) for name in load)
    command = [sys.executable, str(path), *([] if device is None else ["--device", device])]
    status = subprocess.run(command, env=environment, check=False).returncode
    if status in (0, 1):
        return status
    if status != _INCONCLUSIVE:
        sys.stderr.write(f"opcheck: {path}: ended with status {status}\n")
    return _INCONCLUSIVE


def _absolute(name: str) -> str:
    return str(Path(name).resolve()) if re.search(r"\.(py|so|dylib|dll)$", name) else name


def write_pytest(path: Path, out: Path) -> None:
    """Write a reproducer as a test, its tensors beside it.

    Raises:
        ReproError: it is none, or `out` is there already or cannot be written.
    """
    text = _text_of(path)
    head, main, tail = text.rpartition(_MAIN)
    tensors = path.with_suffix(".pt")
    try:
        if tensors.exists():
            data = tensors.read_bytes()
            write_new(out.with_suffix(".pt"), lambda file: file.write(data))
        try:
            write_new(out, lambda file: file.write((head + _TEST + main + tail).encode()))
        except OSError:
            if tensors.exists():
                out.with_suffix(".pt").unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ReproError(f"{out}: cannot be written: {error.strerror or error}") from error


# ---- a folder of recorded calls -----------------------------------------------------------------


def replay_folder(folder: Path, *, load: Sequence[str]) -> int:
    """Judge the calls that another machine recorded, here.

    Args:
        folder: with the files of `record_dir=`.
        load: as in `replay_file`, for ops that a library defines.

    Returns:
        1 a call fails, 3 one cannot be judged or there is none, 0 otherwise.

    Raises:
        ReproError: a library cannot be loaded.
    """
    from opcheck.drift import Drift
    from opcheck.kernel_table import kernels
    from opcheck.recorded_calls import read_call, recorded_files

    kernels()  # torch's own are known before any other is loaded
    _load(load)
    drift = Drift()
    counts: Counter[str] = Counter()
    machines: set[str] = set()
    for path in recorded_files(folder):
        try:
            call = read_call(path)
        except ReproError as error:
            counts["unreadable"] += 1
            sys.stdout.write(f"unreadable    {style_for(sys.stdout).text(error)}\n")
            continue
        machines.add(call.machine)
        counts[_judge(call, drift)] += 1
    total = sum(counts.values())
    parts = ", ".join(f"{count} {word}" for word, count in counts.items())
    sys.stdout.write(f"{total} recorded calls of {folder}: {parts or 'nothing to judge'}\n")
    for text in sorted(machines):
        sys.stdout.write(f"recorded with {style_for(sys.stdout).text(text)}\n")
    if counts["FAIL"]:
        return EXIT_STATUS[Verdict.FAIL]
    return EXIT_STATUS[Verdict.PASS] if total and total == counts["PASS"] else _INCONCLUSIVE


def _load(names: Sequence[str]) -> None:
    for name in names:
        _load_one(name)


def _load_one(name: str) -> None:
    import torch

    try:
        if re.search(r"\.(so|dylib|dll)$", name):
            torch.ops.load_library(name)
            return
        if not name.endswith(".py"):
            importlib.import_module(name)
            return
        spec = importlib.util.spec_from_file_location(Path(name).stem, name)
        if spec is None or spec.loader is None:
            raise ImportError(name)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    except Exception as error:
        raise ReproError(f"--load {name}: {type(error).__name__}: {error}") from error


def _judge(call: Any, drift: Any) -> str:
    """Print a line and say which verdict it has."""
    from opcheck.rerun import NotJudged, judge_results

    record: OpRecord = call.kept.record
    try:
        found = judge_results(call.kept, call.results).found
    except NotJudged as reason:
        word, why = "not judged", str(reason)
    except Exception as error:  # noqa: BLE001 - one call that cannot run here costs no other
        word, why = "not judged", f"{type(error).__name__}: {error}"
    else:
        word, why = ("PASS", "") if found.passed else ("FAIL", found.reason)
        if found.passed and found.shift is not None:
            tipped = drift.add(record.op, record.module, record.phase, found.shift)
            word, why = (word, why) if tipped is None else ("FAIL", tipped.reason)
        why = f"q {number(found.metrics.q)}" + (f"; {why}" if why else "")
    if word == "PASS" and record.verdict is Verdict.FAIL:
        why += f"; it was recorded as FAIL: {record.reason}"
    style = style_for(sys.stdout)
    where = f"{record.op}  {record.module or '<root>'}  {record.phase}  call {record.index}"
    sys.stdout.write(f"{word:<12}  {style.text(where)}  {style.text(why)}\n")
    return word
