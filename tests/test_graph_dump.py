"""Captured graphs as files: names as documented, readable Python, off again afterwards."""

from __future__ import annotations

import ast
import hashlib
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from modulecheck import PrecisionChecker
from tests.compiled import DYNAMO_WARNS, INDUCTOR, Block, assert_pass, stack
from tests.documented import BlockModel, Qwen2Block, run_step

pytestmark = [DYNAMO_WARNS, pytest.mark.usefixtures("fresh_dynamo")]
NAME = re.compile(r"__compiled_fn_(\d+)\.(Captured|Forward|Backward|Post_Grad)_Graph\.(\w{8})\.py")


def files_in(folder: Path) -> dict[str, list[str]]:
    """Texts by stage, after a look at the names."""
    found: dict[str, list[str]] = {}
    numbers = []
    for path in folder.iterdir():
        match = NAME.fullmatch(path.name)
        assert match, path.name
        text = path.read_text(encoding="utf-8")
        assert match[3] == hashlib.sha256(text.encode()).hexdigest()[:8]
        (module,) = ast.parse(text).body
        assert isinstance(module, ast.ClassDef)
        numbers.append(int(match[1]))
        found.setdefault(match[2], []).append(text)
    assert sorted(numbers) == list(range(len(numbers)))
    return found


def trace_handlers() -> list[logging.Handler]:
    return [
        handler
        for handler in logging.getLogger("torch.__trace").handlers
        if type(handler).__module__.startswith("modulecheck")
    ]


@pytest.mark.parametrize("single_pass", [True, False])
def test_documented_example(
    single_pass: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    model = BlockModel()
    checker = PrecisionChecker(
        backend="aot_eager",
        dump_graphs=True,
        graph_dir="./graph_dump",
        single_pass=single_pass,
    )
    checker.wrap_all_children(model)

    result = checker.compare(run_step, model)
    checker.report(result)
    assert_pass(result)
    stages = files_in(tmp_path / "graph_dump")
    # three kinds of modules are wrapped; of each one graph a stage
    assert {stage: len(texts) for stage, texts in stages.items()} == {
        "Captured": 3, "Forward": 3, "Backward": 3,
    }  # fmt: skip
    assert any("torch._C._nn.linear" in text for text in stages["Captured"])
    assert all("torch.ops.aten" in text for text in stages["Forward"] + stages["Backward"])
    assert "Note: 9 graphs were written to graph_dump\n" in capsys.readouterr().out
    assert trace_handlers() == []


@pytest.mark.parametrize("backend", [INDUCTOR])
def test_inductor_shows_the_graph_after_its_passes_too(backend: str, tmp_path: Path) -> None:
    checker = PrecisionChecker(backend=backend, dump_graphs=True, graph_dir=str(tmp_path))
    model = BlockModel()
    checker.wrap_by_policy(model, (Qwen2Block,))
    assert_pass(checker.compare(run_step, model))
    assert {stage: len(texts) for stage, texts in files_in(tmp_path).items()} == {
        "Captured": 1, "Forward": 1, "Backward": 1, "Post_Grad": 2,
    }  # fmt: skip


def test_inference_has_no_backward_graph(tmp_path: Path) -> None:
    checker = PrecisionChecker(dump_graphs=True, graph_dir=str(tmp_path))
    model = stack().model
    checker.wrap(model.head)
    with torch.no_grad(), checker.installed(model):
        model(torch.ones(2, 16))
    assert set(files_in(tmp_path)) == {"Captured", "Forward"}


@pytest.mark.parametrize("single_pass", [True, False])
def test_it_is_off_after_an_exception(single_pass: bool, tmp_path: Path) -> None:
    def raises(model: torch.nn.Module) -> None:
        model(torch.ones(2, 16))
        raise KeyError("mine")

    model = stack().model
    checker = PrecisionChecker(
        dump_graphs=True, graph_dir=str(tmp_path / "one"), single_pass=single_pass
    )
    checker.wrap_by_policy(model, (Block,))
    with pytest.raises(KeyError, match="mine"):
        checker.compare(raises, model)
    assert trace_handlers() == []
    before = sorted(tmp_path.rglob("*.py"))
    torch.compile(model, backend="aot_eager")(torch.ones(3, 16))
    assert sorted(tmp_path.rglob("*.py")) == before


@pytest.mark.parametrize("single_pass", [True, False])
def test_folder_that_cannot_be_written_is_said_and_not_raised(
    single_pass: bool, tmp_path: Path, capsys: Any
) -> None:
    taken = tmp_path / "taken"
    taken.write_text("a file, not a folder")
    checker = PrecisionChecker(dump_graphs=True, graph_dir=str(taken), single_pass=single_pass)
    model = BlockModel()
    checker.wrap_by_policy(model, (Qwen2Block,))
    result = checker.compare(run_step, model)
    assert_pass(result)
    checker.report(result)
    assert f"Note: graph_dir={str(taken)!r} cannot be written" in capsys.readouterr().out


def test_nothing_is_written_unless_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    checker = PrecisionChecker(graph_dir=str(tmp_path / "graphs"))
    model = BlockModel()
    checker.wrap(model.embed)
    assert_pass(checker.compare(run_step, model))
    assert list(tmp_path.iterdir()) == []


def test_nothing_compiled_anew_is_said(tmp_path: Path) -> None:
    model = BlockModel()
    for folder in ("first", "second"):
        checker = PrecisionChecker(dump_graphs=True, graph_dir=str(tmp_path / folder))
        checker.wrap_by_policy(model, (Qwen2Block,))
        result = checker.compare(run_step, model)
    assert any("torch._dynamo.reset()" in note for note in result.notes)
    assert files_in(tmp_path / "first")
    assert not files_in(tmp_path / "second")


def test_each_of_several_ranks_has_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("modulecheck.graphs.rank_of_several", lambda: 1)
    checker = PrecisionChecker(dump_graphs=True, graph_dir=str(tmp_path))
    model = BlockModel()
    checker.wrap(model.embed)
    assert_pass(checker.compare(run_step, model))
    assert files_in(tmp_path / "rank1")
