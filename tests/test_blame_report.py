"""What `report()` and `opcheck review --blame` say of born, inherited and amplified errors."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch  # noqa: F401 - before opcheck, which then notes its kernels

from opcheck.blame import blame_step, units
from opcheck.blame_text import render_blame
from opcheck.cli import main
from opcheck.printing import Style
from opcheck.records import Blame, Coverage, OpRecord, Verdict
from opcheck.review import Run
from tests import log_samples

LAYERS = 12
WRONG = 7


def call(index: int, module: str, phase: str = "forward", **figures) -> OpRecord:
    word = figures.pop("word", "inherited")
    verdict = Verdict.FAIL if word == "born" else Verdict.PASS
    return OpRecord(
        op="aten.gelu.default", module=module, phase=phase, index=index, verdict=verdict,
        source="model.py:7 in forward", blame=Blame(word=word, **figures), run_id="run1",
    )  # fmt: skip


def deep_run(layers: int = LAYERS) -> Run:
    """A fault in one layer, and another layer that magnifies what it inherits."""
    records = []
    total = 1e-7
    for layer in range(layers):
        for part in ("norm", "mlp.act"):
            inputs, word, born = total, "inherited", 2e-8
            if layer == WRONG and part == "mlp.act":
                total, word, born = 1e-3, "born", 1e-3
            if layer == WRONG + 2 and part == "norm":
                total, word = 5e-2, "amplified"
            name = f"blocks.{layer}.{part}"
            records.append(
                call(
                    2 * layer + (part == "mlp.act"), name, word=word, born=born,
                    inherited=total, total=total, inputs=inputs,
                )
            )  # fmt: skip
    records.append(call(500, "blocks.0.norm", "backward", born=1e-7, total=0.5, inherited=0.5))
    records.append(call(501, "", "optimizer", born=1e-9, total=float("inf")))
    coverage = Coverage(
        seen=600, checked=len(records), failed=1,
        shadow={"followed": 600, "restarted: random": 3, "peak bytes": 5 << 20,
                "limit bytes": 1 << 30},
    )  # fmt: skip
    return Run(records=records, coverage=coverage)


def text_of(run: Run, **style) -> str:
    return "\n\n".join("\n".join(block) for block in render_blame(run, Style(**style)))


def test_origin_amplifier_and_growth_are_told():
    text = text_of(deep_run(), width=80)
    assert "origin     gelu in blocks.7.mlp.act, forward, call 15 at model.py:7" in text
    assert "amplified  gelu in blocks.9.norm, forward, call 18" in text
    assert "1.0e-03 in the inputs became 5.0e-02 (x 50)" in text.replace("\n" + " " * 13, " ")
    assert "1.0e-07 before the origin, 5.0e-02 at the end of the forward" in text.replace(
        "\n" + " " * 13, " "
    )
    assert "600 calls in float64, with at most 5 MiB of 1 GiB" in text
    assert "chain began again" in text
    assert "random 3" in text
    assert "born: gelu" in text
    assert "5.0e-02  amplified" in text


@pytest.mark.parametrize("layers", [WRONG + 3, LAYERS, 100])
@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("unicode", [True, False])
def test_width_and_length_are_bounded(layers, width, unicode):
    text = text_of(deep_run(layers), width=width, unicode=unicode)
    assert max(map(len, text.splitlines())) <= width
    assert text.isascii() is not unicode
    assert len(text.splitlines()) < 120
    assert "act" in text  # the origin is drawn however deep it lies


def test_picture_shows_the_jump_where_it_is():
    text = text_of(deep_run(), width=80)
    bars = {
        line.split()[0]: line.count("█") + line.count("●")
        for line in text[text.index("growth along the forward") :].splitlines()
        if line.startswith("  blocks.")
    }
    assert list(bars)[:LAYERS] == [f"blocks.{layer}" for layer in range(LAYERS)]
    assert bars["blocks.6"] < bars["blocks.7"] < bars["blocks.9"]


def test_many_layers_share_bars():
    found = units(blame_step(deep_run(100)).of("forward"))
    assert len(found) <= 30
    assert found[0].label == "blocks.0 to blocks.3"
    assert [unit.label for unit in found if unit.marks] == [
        "blocks.4 to blocks.7",
        "blocks.8 to blocks.11",
    ]


def test_run_without_fault_names_no_origin():
    run = Run(records=[call(0, "a", born=1e-8, total=1e-8, word="rounding")])
    text = text_of(run, width=80)
    assert "origin     none" in text
    assert "born:" not in text


def test_step_of_the_first_failure_is_shown():
    records = [call(0, "a", total=1e-7), call(9, "b", total=1e-3, word="born")]
    records[1] = OpRecord(**{**_fields(records[1]), "step": 4})
    found = blame_step(Run(records=records))
    assert (found.step, found.num_steps) == (4, 2)


def _fields(record: OpRecord) -> dict:
    return {name: getattr(record, name) for name in OpRecord.__dataclass_fields__}


def test_what_is_lost_is_not_measured_further():
    records = [
        call(0, "a", total=1e-7, inputs=1e-8),
        call(1, "b", total=3e15, inherited=3e15, inputs=1e-6, word="amplified"),
        call(2, "c", total=float("inf"), inherited=float("inf"), inputs=3e15),
    ]
    text = text_of(Run(records=records), width=80)
    assert "1.0e-06 in the inputs became lost" in text.replace("\n" + " " * 13, " ")
    assert "e+15" not in text
    assert "to 1e+0" in text


# ---- the command ----


@pytest.fixture
def log(tmp_path) -> Path:
    run = deep_run()
    path = tmp_path / "precision.jsonl"
    lines = [log_samples.header_line(), *map(log_samples.record_line, run.records)]
    path.write_text("\n".join([*lines, log_samples.coverage_line(run.coverage)]) + "\n")
    return path


def test_review_with_blame(log, capsys):
    assert main(["review", str(log), "--blame"]) == 1
    text = capsys.readouterr().out
    assert "errors by module, forward" in text
    assert "growth along the backward" in text
    assert "--blame --plot growth.svg" in text


def test_json_has_origins(log, capsys):
    main(["review", str(log), "--blame", "--json"])
    data = json.loads(capsys.readouterr().out)["blame"]
    assert [origin["module"] for origin in data["origins"]] == ["blocks.7.mlp.act"]
    assert data["modules"][0]["module"] == "blocks.0.norm"
    assert data["modules"][-1]["total"] == "Infinity"


def test_log_without_blame_says_how_to_get_it(tmp_path, capsys):
    path = tmp_path / "precision.jsonl"
    record = log_samples.record_line(OpRecord(op="a.b.c", run_id="run1"))
    path.write_text(f"{log_samples.header_line()}\n{record}\n")
    assert main(["review", str(path), "--blame"]) == 2
    assert "blame=True" in capsys.readouterr().err


def test_pictures_are_what_they_say(log, tmp_path, capsys):
    svg, png = tmp_path / "growth.svg", tmp_path / "growth.png"
    for file in (svg, png):
        assert main(["review", str(log), "--blame", "--plot", str(file)]) == 1
    root = ET.fromstring(svg.read_text())
    words = {text.strip() for element in root.iter() for text in element.itertext()}
    assert {"blocks.7.mlp.act", "gelu", "amplified", "blocks.0"} <= words
    data = png.read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", data[16:24])
    assert width > 1000
    assert height > 500


def test_same_run_gives_the_same_svg(log, tmp_path, capsys):
    files = [tmp_path / "a.svg", tmp_path / "b.svg"]
    for file in files:
        main(["review", str(log), "--blame", "--plot", str(file)])
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--plot", "x.svg"], "--blame"),
        (["--blame", "--plot", "x.bmp"], ".png, .svg, .pdf"),
        (["--blame", "--plot", "there.svg"], "exists"),
        (["--blame", "--plot", "no/folder.svg"], "No such file"),
    ],
)
def test_refused_pictures(log, tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    Path("there.svg").write_text("mine")
    assert main(["review", str(log), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert Path("there.svg").read_text() == "mine"


def test_missing_matplotlib_names_the_extra(log, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["review", str(log), "--blame", "--plot", str(tmp_path / "x.svg")]) == 2
    assert "pip install 'opcheck[plot]'" in capsys.readouterr().err
    assert not (tmp_path / "x.svg").exists()


def test_review_with_blame_loads_neither_torch_nor_matplotlib(log):
    code = (
        "import sys; from opcheck.cli import main;"
        f" main(['review', {str(log)!r}, '--blame']);"
        " print(sorted({'torch', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        cwd=Path(__file__).parents[1],
    )  # fmt: skip
    assert done.stdout.strip().splitlines()[-1] == "[]"
