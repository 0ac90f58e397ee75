"""A full disk, a folder that goes away or may not be written: said, and never half a file."""

from __future__ import annotations

import contextlib
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from loguru import logger
from torch import nn

import opcheck
from modulecheck import (
    CompareResult,
    DumpMode,
    PrecisionChecker,
    TensorChecker,
)
from modulecheck.graphs import GraphDump
from modulecheck.tensor_dump import load_dump
from opcheck.cli import main
from tests import log_samples as logs
from tests.faults import gelu_off_by

X = torch.linspace(-2, 2, 24).reshape(4, 6)


@contextlib.contextmanager
def room_for(num_bytes: int) -> Iterator[None]:
    """No file may become larger; Python gets an OSError, as from a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# ---- files that are there whole or not at all ---------------------------------------------------


def save_result(folder: Path) -> None:
    checker = PrecisionChecker()
    result = CompareResult(loss_eager=1.0, loss_compiled=1.0)
    checker.save(result, folder / "result.mc")


def save_report(folder: Path) -> None:
    result = CompareResult(loss_eager=1.0, loss_compiled=1.0)
    PrecisionChecker().report(result, csv_path=str(folder / "report.csv"))


def filled() -> TensorChecker:
    checker = TensorChecker(quiet=True)
    for side, value in (("a", X), ("b", X + 1)):
        checker.register_tensor("x", value, side=side)
    return checker


def save_tensors(folder: Path) -> None:
    filled().save(folder / "side.tensors")


def dump_tensors(folder: Path) -> None:
    filled().check_equal(dump_mode=DumpMode.ALL, dump_path=folder)


def log_of(folder: Path) -> Path:
    lines = logs.run_lines([logs.passing(i) for i in range(20)])
    return logs.write_log(folder.parent / "precision.jsonl", lines)


def export(folder: Path) -> None:
    status = main(["export", str(log_of(folder)), "--format", "csv", "-o", str(folder / "x.csv")])
    if status:
        raise OSError(f"status {status}")


def merge(folder: Path) -> None:
    paths = [
        logs.write_log(folder.parent / f"r{rank}.jsonl", logs.run_lines(
            [logs.passing(i, rank=rank) for i in range(9)], rank=rank)) for rank in range(2)
    ]  # fmt: skip
    status = main(["merge", *map(str, paths), "-o", str(folder / "all.jsonl")])
    if status:
        raise OSError(f"status {status}")


def make_repro(folder: Path) -> None:
    with gelu_off_by(), opcheck.check(
        log_dir=folder.parent / "logs", quiet=True, repro_dir=folder, repro_seconds=0.0
    ) as session:  # fmt: skip
        nn.functional.gelu(X)
    if not session.repros:
        raise OSError(session.report())


def record(folder: Path) -> None:
    with opcheck.check(
        log_dir=folder.parent / "logs", quiet=True, record="all", record_dir=folder
    ) as session:
        X.exp()
    report = session.report()
    if "recorded: 1 calls in" not in report:
        assert "cannot be written" in report
        raise OSError(report)


def dump_graph(folder: Path) -> None:
    dump = GraphDump(folder)
    dump._write("Captured", "x = 1\n" * 100)
    if dump._problem:
        assert "cannot be written" in dump.notes()[0]
        raise OSError(dump.notes()[0])


def plot(folder: Path) -> None:
    log_dir = folder.parent / "blamed"
    with opcheck.check(log_dir=log_dir, quiet=True, blame=True):
        X.exp().sum()
    status = main(["review", str(log_dir), "--blame", "--plot", str(folder / "growth.svg")])
    if status == 2:
        raise OSError("refused")


WRITERS: dict[str, Callable[[Path], None]] = {
    "saved result": save_result, "CSV report": save_report, "saved tensors": save_tensors,
    "dumped tensors": dump_tensors, "export": export, "merge": merge, "reproducer": make_repro,
    "recorded call": record, "graph dump": dump_graph, "plot": plot,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_leaves_the_whole_file_or_none(name, tmp_path, capsys) -> None:
    write = WRITERS[name]
    whole = tmp_path / "whole" / "folder"
    whole.mkdir(parents=True)
    write(whole)
    sizes = sorted({path.stat().st_size for path in whole.iterdir()})
    assert sizes[-1] > 10
    complete = {path.name.rpartition(".")[2] for path in whole.iterdir()}
    # the text in some of them has another length each time
    for room in sorted({0, 1, sizes[0] - 1, sizes[-1] // 2, sizes[-1] - 100}):
        folder = tmp_path / f"room{room}" / "folder"
        folder.mkdir(parents=True)
        real = write

        def limited(target: Path, room: int = room, real: Any = real) -> None:
            with room_for(room):
                real(target)

        with pytest.raises((OSError, opcheck.OpcheckError)):
            limited(folder)
        left = list(folder.iterdir())
        if len(sizes) == 1:
            assert left == [], room
        assert all(path.stat().st_size in sizes for path in left), (room, left)
        assert {path.name.rpartition(".")[2] for path in left} <= complete, (room, left)
        assert not [path for path in left if ".tmp" in path.name or ".partial" in path.name]
    capsys.readouterr()


def test_a_dump_that_could_not_be_finished_is_none(tmp_path) -> None:
    filled().check_equal(dump_mode=DumpMode.ALL, dump_path=tmp_path)
    assert load_dump(tmp_path)
    with pytest.raises(OSError, match="large"), room_for(100):
        filled().check_equal(dump_mode=DumpMode.ALL, dump_path=tmp_path)
    with pytest.raises(opcheck.OpcheckError, match="no index of a dump"):
        load_dump(tmp_path)


# ---- logs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("room", [0, 1, 500, 1500, 2500, 4000])
def test_a_log_that_a_full_disk_cut_is_no_pass(room, tmp_path) -> None:
    session = opcheck.check(log_dir=tmp_path, quiet=True, max_checks=None)
    with room_for(room):
        with session:
            for _ in range(10):
                X.exp()
    assert session.coverage.checked == 10
    assert "the log is incomplete" in session.report()
    try:
        run = opcheck.load_run(tmp_path)
    except opcheck.OpcheckError:
        assert room < 2000
    else:
        assert run.verdict == "INCONCLUSIVE"
        assert not run.finished


@pytest.mark.filterwarnings("ignore")
def test_registered_kernels_go_on_when_the_disk_is_full(tmp_path) -> None:
    from opcheck.kernelcheck import find_op, wrap_kernel
    from opcheck.switch import SWITCH

    said: list[str] = []
    sink = logger.add(said.append, format="{message}")
    kernel = wrap_kernel(find_op("exp"), lambda x: x * 2, SWITCH)
    opcheck.enable_precision_check(path=tmp_path / "kernels.log", max_checks=None, log_once=False)
    try:
        with room_for(1000):
            for _ in range(5):
                assert torch.equal(kernel(X), X * 2)
            opcheck.disable_precision_check()
    finally:
        opcheck.disable_precision_check()
        SWITCH.has_kernels = False
        logger.remove(sink)
    assert any("the log is incomplete" in line for line in said)
    assert opcheck.coverage().failed == 5


# ---- folders that go away -----------------------------------------------------------------------


@pytest.mark.parametrize("how", ["removed", "replaced by a file"])
def test_folders_that_go_away_meanwhile_do_not_reach_the_step(how, tmp_path) -> None:
    places = {name: tmp_path / name for name in ("logs", "records", "repro")}
    net = nn.Sequential(nn.Linear(6, 6), nn.GELU())
    with gelu_off_by():
        with opcheck.check(
            net, log_dir=places["logs"], quiet=True, record="all", record_dir=places["records"],
            repro_dir=places["repro"], repro_seconds=0.0,
        ) as session:  # fmt: skip
            net(X)
            for folder in places.values():
                if folder.exists():
                    shutil.rmtree(folder)
                if how != "removed":
                    folder.write_text("in the way")
            net(X).sum().backward()
    assert session.verdict == "FAIL"
    report = session.report()
    assert "the log is incomplete" in report
    if how != "removed":  # else the folders are made again
        assert "cannot be written" in report
        assert session.repros == []
        assert all(folder.read_text() == "in the way" for folder in places.values())
    else:
        assert all(path.exists() for path in session.repros)


def test_a_graph_folder_that_goes_away_is_said(tmp_path) -> None:
    dump = GraphDump(tmp_path / "graphs")
    with dump.written():
        shutil.rmtree(tmp_path / "graphs")
        dump._write("Captured", "x = 1")
    assert "cannot be written: FileNotFoundError" in dump.notes()[0]
