"""`opcheck replay`, and what happens when a reproducer cannot be written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import opcheck
from opcheck.cli import main
from opcheck.errors import ReproError
from opcheck.repro_files import free_stem, write_repro
from tests import faults, models
from tests.reproducers import ROOT, plant_file


def failing(folder: Path, **options: Any) -> opcheck.Session:
    """A session of a step with a wrong gelu."""
    options = {"repro_dir": folder / "repros", **options}
    workload = models.mlp()
    session = opcheck.check(workload.model, log_dir=folder / "logs", quiet=True, **options)
    with faults.gelu_off_by(), session:
        workload.step()
    assert session.verdict == opcheck.Verdict.FAIL
    return session


# ---- a reproducer -------------------------------------------------------------------------------


@pytest.mark.slow
def test_exit_status_of_replay(tmp_path: Path, monkeypatch: Any, capfd: Any) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    script = str(failing(tmp_path).repros[0])
    assert main(["replay", script, "--load", str(plant_file(tmp_path, "gelu_off_by"))]) == 1
    assert "the fault is there" in capfd.readouterr().out
    assert main(["replay", script, "--device", "nowhere"]) == 3


def test_usage_errors_of_replay(tmp_path: Path, capsys: Any) -> None:
    other = tmp_path / "script.py"
    other.write_text("print('hello')\n")
    assert main(["replay", str(other)]) == 2
    assert "no reproducer" in capsys.readouterr().err
    assert main(["replay", str(tmp_path / "nowhere.py")]) == 2
    assert main(["replay", str(tmp_path), "--device", "cpu"]) == 2
    assert main(["replay", str(tmp_path)]) == 3
    assert "nothing to judge" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("repro_seconds", [0.0, 20.0], ids=["with_tensors", "shrunk"])
def test_reproducer_as_a_test(repro_seconds: float, tmp_path: Path) -> None:
    script = failing(tmp_path, repro_seconds=repro_seconds).repros[0]
    out = tmp_path / "tests" / "test_gelu.py"
    out.parent.mkdir()
    assert main(["replay", str(script), "--pytest", str(out)]) == 0
    assert out.with_suffix(".pt").exists() == (repro_seconds == 0.0)
    assert main(["replay", str(script), "--pytest", str(out)]) == 2
    is_wrong = repro_seconds == 0.0
    load = str(plant_file(tmp_path, "gelu_off_by")) if is_wrong else ""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(out)],
        cwd=out.parent, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "REPRO_LOAD": load},
    )  # fmt: skip
    assert done.returncode == is_wrong, done.stdout
    assert ("1 failed" if is_wrong else "1 passed") in done.stdout


# ---- size, disk, names --------------------------------------------------------------------------


def test_what_is_too_large_is_said_and_not_saved(tmp_path: Path) -> None:
    session = failing(tmp_path, max_repro_bytes=100)
    assert session.repros == []
    assert "max_repro_bytes=100" in session.report()
    assert not (tmp_path / "repros").exists()


def test_no_more_than_asked_for_are_saved(tmp_path: Path) -> None:
    session = failing(tmp_path, max_repros=1)
    assert len(session.repros) == 1
    assert len(session.failures) == 2
    assert "1 failing calls: not saved, max_repros=1 are" in session.report()


class DiskFull:
    """Raises at the n-th of all writes to the disk."""

    def __init__(self, monkeypatch: Any, at: int) -> None:
        self.left = at
        for owner, name in ((os, "fsync"), (torch, "save"), (Path, "replace"), (Path, "open")):
            monkeypatch.setattr(owner, name, self.counted(getattr(owner, name), owner is torch))

    def counted(self, real: Any, is_torch: bool) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                if is_torch:  # half of it is written
                    args[1].write(b"PK")
                raise (RuntimeError if is_torch else OSError)(28, "No space left on device")
            return real(*args, **kwargs)

        return call


@pytest.mark.parametrize("at", range(1, 8))
def test_nothing_partial_stays_when_the_disk_is_full(at: int, tmp_path: Path, monkeypatch) -> None:
    folder = tmp_path / "repros"
    with monkeypatch.context() as patch:
        disk = DiskFull(patch, at)
        with pytest.raises(ReproError, match="No space left"):
            write_repro(folder, "gelu", "text", {"x": torch.ones(3)}, max_bytes=1000)
        assert disk.left == 0
    assert list(folder.iterdir()) == []


def test_full_disk_does_not_reach_the_step(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(torch, "save", lambda *_: (_ for _ in ()).throw(OSError(28, "disk full")))
    session = failing(tmp_path, repro_seconds=0.0, record="all", record_dir=tmp_path / "records")
    assert session.repros == []
    assert "disk full" in session.report()
    assert [*(tmp_path / "repros").iterdir(), *(tmp_path / "records").iterdir()] == []


def test_names_are_safe_and_nothing_is_overwritten(tmp_path: Path) -> None:
    stem = free_stem(tmp_path, "aten.gelu", "../../etc/pass wd", "forward")
    assert "/" not in stem
    assert " " not in stem
    (tmp_path / f"{stem}.pt").touch()
    assert free_stem(tmp_path, "aten.gelu", "../../etc/pass wd", "forward") != stem


def test_repeated_steps_add_and_never_replace(tmp_path: Path) -> None:
    first = failing(tmp_path).repros
    second = failing(tmp_path).repros
    assert not set(first) & set(second)
    assert all(path.exists() for path in [*first, *second])


# ---- recorded calls -----------------------------------------------------------------------------


def test_recorded_calls_are_judged_as_in_the_step(tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "records"
    session = failing(tmp_path, repro_dir=None, record="all", record_dir=folder)
    assert len(list(folder.iterdir())) == session.coverage.checked
    assert main(["replay", str(folder)]) == 1
    lines = capsys.readouterr().out.splitlines()
    words = [line.split()[0] for line in lines[:-2]]
    assert words.count("PASS") == session.coverage.checked - 2
    for record, line in zip(
        session.failures, (x for x in lines if x.startswith("FAIL")), strict=True
    ):
        assert record.reason in line


OVERRIDE = """
import torch
import warnings
warnings.simplefilter("ignore")
library = torch.library.Library("aten", "IMPL")
wrong = lambda x, approximate="none": x * 0.5005 * (1 + torch.erf(x / 2**0.5))
library.impl("gelu", wrong, "CPU", allow_override=True)
"""


def test_a_library_that_is_loaded_is_not_the_reference_of_recorded_calls(tmp_path: Path) -> None:
    folder = tmp_path / "records"
    failing(tmp_path, repro_dir=None, record="failures", record_dir=folder)
    (tmp_path / "library.py").write_text(OVERRIDE)
    done = subprocess.run(
        [sys.executable, "-m", "opcheck", "replay", str(folder), "--load", "library.py"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert "2 FAIL" in done.stdout


def test_in_place_and_list_results_come_back(tmp_path: Path, capsys: Any) -> None:
    workload = models.mlp()
    optimizer = torch.optim.AdamW(workload.model.parameters(), lr=0.1, foreach=True)
    folder = tmp_path / "records"
    with opcheck.check(
        workload.model, log_dir=tmp_path, quiet=True, record="all", record_dir=folder
    ) as session:
        workload.step(optimizer)
    assert session.verdict == opcheck.Verdict.PASS
    assert main(["replay", str(folder)]) == 0
    assert f"{session.coverage.checked} PASS" in capsys.readouterr().out


def test_large_calls_that_write_in_place_are_kept_as_they_were_before(
    tmp_path: Path, capsys: Any
) -> None:
    target, other = torch.randn(1000, 64), torch.randn(1000, 64)
    with (
        faults.add_inplace_off_by(),
        opcheck.check(
            log_dir=tmp_path, quiet=True, max_numel=1000, repro_dir=tmp_path / "repros",
            record="failures", record_dir=tmp_path / "records", repro_seconds=5.0,
        ) as session,
    ):  # fmt: skip
        target.add_(other)
    assert session.failures
    (path,) = session.repros
    text = path.read_text()
    assert "(1000, 64)" in text
    assert not path.with_suffix(".pt").exists()  # it was made small
    planted = plant_file(tmp_path, "add_inplace_off_by")
    assert main(["replay", str(path), "--load", str(planted)]) == 1
    assert main(["replay", str(path)]) == 0
    assert main(["replay", str(tmp_path / "records")]) == 1
    assert "1 recorded calls" in capsys.readouterr().out


def test_large_calls_of_which_no_copy_fits_are_named(tmp_path: Path) -> None:
    target = torch.randn(1000, 64)
    with (
        faults.add_inplace_off_by(),
        opcheck.check(
            log_dir=tmp_path, quiet=True, max_numel=1000, repro_dir=tmp_path / "repros",
            max_repro_bytes=1000,
        ) as session,
    ):  # fmt: skip
        target.add_(torch.ones(1000, 64))
    assert session.failures
    assert session.repros == []
    assert "max_repro_bytes=1000" in session.report()


def test_only_failures_are_recorded_where_that_is_asked_for(tmp_path: Path) -> None:
    folder = tmp_path / "records"
    session = failing(tmp_path, repro_dir=None, record="failures", record_dir=folder)
    assert len(list(folder.iterdir())) == 2
    assert "recorded: 2 calls" in session.report()


def test_recording_is_bounded_and_says_so(tmp_path: Path) -> None:
    session = failing(
        tmp_path, repro_dir=None, record="all", record_dir=tmp_path / "a", max_recorded=3
    )
    assert len(list((tmp_path / "a").iterdir())) == 3
    left = session.coverage.checked - 3
    assert f"{left} calls not recorded: max_recorded=3 are" in session.report()
    session = failing(
        tmp_path, repro_dir=None, record="all", record_dir=tmp_path / "b", max_record_bytes=50_000
    )
    written = sum(path.stat().st_size for path in (tmp_path / "b").iterdir())
    assert 0 < written < 200_000
    assert "max_record_bytes=50000" in session.report()


def test_unreadable_recorded_call_is_inconclusive(tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "records"
    layer = nn.Linear(3, 2)
    with opcheck.check(log_dir=tmp_path, quiet=True, record="all", record_dir=folder):
        layer(torch.randn(4, 3))
    assert main(["replay", str(folder)]) == 0
    (folder / "zzz.pt").write_bytes(b"not a file of tensors")
    assert main(["replay", str(folder)]) == 3
    assert "1 unreadable" in capsys.readouterr().out


def test_wrong_values_of_record_are_refused(tmp_path: Path) -> None:
    with pytest.raises(opcheck.ArgumentError, match="record"):
        opcheck.check(log_dir=tmp_path, record="some")
    with pytest.raises(opcheck.ArgumentTypeError, match="repro_dir"):
        opcheck.check(log_dir=tmp_path, repro_dir=3)
