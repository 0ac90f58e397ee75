"""Names that mean something to a terminal, a spreadsheet, a log or a file system; damaged files."""

from __future__ import annotations

import csv
import io
import json
import os
import pickle
import random
import xml.dom.minidom
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from loguru import logger
from torch import nn

import opcheck
from modulecheck import CompareResult, PrecisionChecker, merge_reports
from opcheck.cli import main
from opcheck.errors import ReproError
from opcheck.recorded_calls import read_call, recorded_files
from tests.faults import gelu_off_by

pytestmark = pytest.mark.filterwarnings("ignore")  # what torch says is its own

HOSTILE = (
    "a\nb", "\x1b[31mred", "[red]x[/red]", "nul\0l", "\ud800", "\u202eRTL", "=cmd|' /C calc'!A0",
    "{0} {} {x}", "<red>x</red>", "x" * 200_000, "../../etc/passwd", 'a,b"c', "CON", "\u4f60" * 200,
    "%s %n", "`rm`$(x)", "-rf", "\r\nOp: x | FAIL", "+1", "@SUM(A1)", "\U000e0001",
)  # fmt: skip


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name in HOSTILE:
            self._modules[name] = nn.Sequential(nn.Linear(4, 4), nn.GELU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self._modules.values():
            x = x + part(x)
        return x


X = torch.linspace(-1, 1, 12).reshape(3, 4)


def is_plain(text: str) -> bool:
    return all(line.isprintable() for line in text.split("\n"))


def rows_of(path: Path) -> list[list[str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


@pytest.fixture(scope="module")
def failed(tmp_path_factory: Any) -> tuple[Any, Path, list[str]]:
    """A session with a fault in every module, all its files, and what the user's sinks got."""
    folder = tmp_path_factory.mktemp("hostile")
    said: list[str] = []
    sink = logger.add(lambda message: said.append(str(message)), colorize=False, format="{message}")
    net = Named()
    try:
        with gelu_off_by(), opcheck.check(
            net, log_dir=folder / "logs", blame=True, repeat=True, selftest=True, record="all",
            record_dir=folder / "records", repro_dir=folder / "repro", repro_seconds=0.0,
            max_repros=100, max_checks=None,
        ) as session:  # fmt: skip
            net(X).sum().backward()
    finally:
        logger.remove(sink)
    return session, folder, said


def test_reports_print_no_control_characters_and_stay_short(failed, tmp_path) -> None:
    session, _, said = failed
    net = Named()
    certificate = opcheck.check(net, log_dir=tmp_path, quiet=True).certify(lambda: net(X))
    texts = [session.report(), str(session.selftest()), str(session.certificate), str(certificate)]
    assert all(map(is_plain, texts))
    assert max(map(len, texts)) < 50_000
    assert said
    assert all(is_plain(line.rstrip("\n")) for line in said)


def test_every_module_is_there_under_its_own_name(failed) -> None:
    session, folder, _ = failed
    expected = {f"{name}.1" for name in HOSTILE}
    assert {record.module for record in session.failures} == expected
    run = opcheck.load_run(folder / "logs")
    assert {record.module for record in run.failures} == expected
    text = opcheck.load_run(folder / "logs" / "precision.log")
    assert {record.module for record in text.failures} == expected


@pytest.mark.parametrize(
    "command",
    [["review"], ["review", "--tree"], ["review", "--blame", "--plot", "growth.svg"],
     ["review", "--markdown"], ["review", "--json"], ["export", "--format", "csv", "-o", "x.csv"]],
    ids=lambda command: command[-1],
)  # fmt: skip
def test_every_command_reads_its_log(command, failed, tmp_path, monkeypatch, capsys) -> None:
    _, folder, _ = failed
    monkeypatch.chdir(tmp_path)
    status = main([command[0], str(folder / "logs"), *command[1:]])
    said = capsys.readouterr()
    assert status == (0 if command[0] == "export" else 1), said.err
    assert is_plain(said.out)
    if "--json" in command:
        json.loads(said.out)
    if "--plot" in command:
        xml.dom.minidom.parse("growth.svg")
    if command[0] == "export":
        rows = rows_of(Path("x.csv"))
        assert not any(cell.lstrip()[:1] in ("=", "+", "@") for row in rows for cell in row if cell)


def test_reproducers_and_recorded_calls_have_safe_names(failed, capsys) -> None:
    session, folder, _ = failed
    assert len(session.repros) == len(HOSTILE), session._saved()[-3:]
    for path in session.repros:
        assert path.parent == folder / "repro"
        assert len(os.fsencode(path.name)) < 200
        compile(path.read_text(encoding="utf-8"), str(path), "exec")
    assert all(path.resolve().is_relative_to(folder.resolve()) for path in folder.rglob("*"))
    assert main(["replay", str(folder / "records")]) == 1
    assert is_plain(capsys.readouterr().out)


def test_a_module_report_with_such_names(tmp_path, capsys) -> None:
    net = Named()
    checker = PrecisionChecker(backend="aot_eager", dump_graphs=True, graph_dir=str(tmp_path / "g"))
    for name in HOSTILE[:8]:
        checker.wrap(net._modules[name])
    checker.wrap(net._modules[HOSTILE[9]], "=1+" + "x" * 200_000)
    result = checker.compare(lambda model: model(X).sum(), net)
    checker.report(result, csv_path=str(tmp_path / "report_rank0.csv"))
    assert is_plain(capsys.readouterr().out)
    rows = rows_of(tmp_path / "report_rank0.csv")
    assert not any(cell[:1] in ("=", "+", "@", "\t", "\r") for row in rows for cell in row if cell)
    assert any(row[0].startswith("'=cmd") for row in rows)
    merge_reports([str(tmp_path / "report_rank0.csv")], str(tmp_path / "merged.csv"))
    merged = rows_of(tmp_path / "merged.csv")
    assert {row[2] for row in merged[1:]} >= {row[0] for row in rows[1:]}
    checker.save(result, tmp_path / "result.mc")
    loaded = CompareResult.load(tmp_path / "result.mc")
    assert [diff.name for diff in loaded.diffs] == [diff.name for diff in result.diffs]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_an_exception_with_such_a_text_is_shown_plainly(text, tmp_path, monkeypatch) -> None:
    def crash(*_: Any, **__: Any) -> None:
        raise ValueError(text)

    monkeypatch.setattr("opcheck.comparison.Comparison.compare", crash)
    with opcheck.check(log_dir=tmp_path, quiet=True) as session:
        X.exp()
    monkeypatch.undo()
    assert session.verdict == "INCONCLUSIVE"
    assert is_plain(session.report())
    assert opcheck.load_run(tmp_path).verdict == "INCONCLUSIVE"


# ---- damaged and hostile files of recorded calls ------------------------------------------------


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: Any) -> bytes:
    folder = tmp_path_factory.mktemp("recorded")
    with opcheck.check(
        log_dir=folder / "logs", quiet=True, record="all", record_dir=folder / "calls"
    ):
        X.exp()
    (path,) = recorded_files(folder / "calls")
    assert read_call(path).kept.record.op == "aten.exp.default"
    return path.read_bytes()


def test_a_recorded_call_cut_anywhere_is_refused(recorded, tmp_path) -> None:
    path = tmp_path / "call.pt"
    for end in [*range(0, len(recorded), 37), len(recorded) - 1]:
        path.write_bytes(recorded[:end])
        with pytest.raises(ReproError, match=r"call\.pt"):
            read_call(path)


def test_a_recorded_call_with_flipped_bits_is_refused_or_read(recorded, tmp_path) -> None:
    rng = random.Random(0)
    path = tmp_path / "call.pt"
    refused = 0
    for _ in range(200):
        data = bytearray(recorded)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        try:
            read_call(path)
        except ReproError:
            refused += 1
    assert refused > 50


class Payload:
    def __reduce__(self) -> Any:
        return os.mkdir, ("payload-ran",)


@pytest.mark.parametrize("kind", ["pickle", "torch.save", "in the archive"])
def test_code_in_a_recorded_call_never_runs(kind, recorded, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "call.pt"
    if kind == "pickle":
        path.write_bytes(pickle.dumps(Payload()))
    elif kind == "torch.save":
        torch.save({"about": Payload(), "arguments": [], "results": []}, path)
    else:
        with zipfile.ZipFile(io.BytesIO(recorded)) as old, zipfile.ZipFile(path, "w") as new:
            for name in old.namelist():
                is_pickle = name.endswith("data.pkl")
                new.writestr(name, pickle.dumps(Payload()) if is_pickle else old.read(name))
    with pytest.raises(ReproError, match=r"call\.pt"):
        read_call(path)
    assert not Path("payload-ran").exists()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda about: about.update(version=99), "version 99"),
        (lambda about: about.update(format="other"), "other version"),
        (lambda about: about.update(op="os.system"), "there is no op"),
        (lambda about: about.update(op="aten.exp.__globals__"), ""),
        (lambda about: about.update(out_dtype="nn"), "no recorded call"),
        (lambda about: about["record"].update(index="x" * 9), ""),
        (lambda about: about.update(state=None), "no recorded call"),
        (lambda about: about.pop("arguments"), "no recorded call"),
    ],
)
def test_an_index_that_lies_is_refused_or_not_judged(
    change, says, recorded, tmp_path, capsys
) -> None:
    data = torch.load(io.BytesIO(recorded), weights_only=True)
    about = json.loads(data["about"])
    change(about)
    torch.save({**data, "about": json.dumps(about)}, tmp_path / "call.pt")
    assert main(["replay", str(tmp_path)]) in ((3,) if says else (0, 3))
    out = capsys.readouterr().out
    assert says in out
    assert "Traceback" not in out


def test_a_view_beyond_its_memory_is_not_read(recorded, tmp_path, capsys) -> None:
    """A size of terabytes costs no memory, and nothing outside of the file's bytes is shown."""
    data = torch.load(io.BytesIO(recorded), weights_only=True)
    for size in ([1 << 40, 4], [4, 4], [-1, 4]):
        text = data["about"].replace('"size": [3, 4]', f'"size": {size}')
        assert text != data["about"]
        torch.save({**data, "about": text}, tmp_path / "call.pt")
        assert main(["replay", str(tmp_path)]) == 3
        assert "unreadable" in (out := capsys.readouterr().out) or "not judged" in out
