"""The training examples of the document, as written there but for the import.

The backend counts executions of compiled code; the printed text and the CSV are looked at.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modulecheck import PrecisionChecker
from tests.compiled import DYNAMO_WARNS, CountingBackend, assert_pass
from tests.documented import (
    THIN,
    WIDE,
    BlockModel,
    Qwen2Attention,
    Qwen2Block,
    Qwen2MLP,
    ToyModel,
    names_in,
    rows_of,
    run_step,
    shown,
)

pytestmark = [DYNAMO_WARNS, pytest.mark.usefixtures("fresh_dynamo")]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


# ---- quick start --------------------------------------------------------------------------------


def test_quick_start_training(tmp_path: Path, capsys: Any) -> None:
    model = ToyModel()
    x = torch.randn(2, 8)
    target = torch.randn(2, 4)
    loss_fn = nn.MSELoss()

    def run_step(model: nn.Module) -> Tensor:
        model.zero_grad()
        output = model(x)
        loss = loss_fn(output, target)
        loss.backward()
        return loss

    backend = CountingBackend()
    checker = PrecisionChecker(backend=backend)
    checker.wrap_by_policy(model, (nn.Linear,))
    checker.install(model)

    loss = run_step(model)
    result = checker.collect(loss)
    assert_pass(result)
    assert (backend.graphs, backend.runs) == (2, 2)

    path = tmp_path / "precision_report.csv"
    text = shown(checker, result, capsys, csv_path=str(path))
    lines = text.splitlines()
    assert lines[0] == WIDE
    assert lines[1] == f"  Loss  eager=nan  compiled={loss.item():.6f}  diff=nan"
    assert "In single-pass mode, the eager value in the Loss line is shown as nan" in text
    for title in ("FORWARD INPUT", "FORWARD OUTPUT", "BACKWARD"):
        place = lines.index(f"  {title}")
        assert lines[place + 1] == THIN
    place = lines.index("  RESULT: ALL PASS  (atol=1e-4 rtol=1e-3; judged: calibrated)")
    assert lines[place - 1] == lines[place + 1] == WIDE
    assert lines[-1] == f"CSV report saved to: {path}"
    assert names_in(text) == {
        "layers.0", "layers.2", "layers.2.grad_input", "layers.0.weight.grad",
        "layers.0.bias.grad", "layers.2.weight.grad", "layers.2.bias.grad",
    }  # fmt: skip
    row = next(line for line in lines if line.startswith("  pass  layers.0 "))
    assert row.index("[OK]") == 61
    assert row.endswith("shape=(2, 8)")

    raw = path.read_text().splitlines()
    assert raw[1] == (f"LOSS,loss,0,PASS,N/A,N/A,N/A,compiled={loss.item():.6f},single_pass mode")
    assert raw[2] == 'layers.0,fwd_input,0,PASS,0.000000e+00,0.000000e+00,0.000000e+00,"(2, 8)",'
    kinds = [(row[0], row[1]) for row in rows_of(path)[1:]]
    assert ("layers.2", "grad_input") in kinds
    assert ("layers.0", "fwd_output") in kinds


def test_documented_criterion_has_the_documented_result_line(capsys: Any) -> None:
    model = BlockModel()
    checker = PrecisionChecker(criterion="allclose")
    checker.wrap_by_policy(model, (Qwen2Block,))
    text = shown(checker, checker.compare(run_step, model), capsys)
    assert "\n  RESULT: ALL PASS  (atol=1e-4 rtol=1e-3)\n" in text


# ---- constructor --------------------------------------------------------------------------------


def test_constructor_example() -> None:
    checker = PrecisionChecker(
        backend="aot_eager",
        threshold=1e-4,
        dump_graphs=False,
        graph_dir="./graph_dump",
        cast_dtype=None,
        capture_input=True,
        single_pass=True,
    )
    model = BlockModel()
    checker.wrap_all_children(model)
    assert_pass(checker.compare(run_step, model))


# ---- which modules ------------------------------------------------------------------------------

WRAPS: dict[str, tuple[Any, set[str]]] = {
    "manually": (
        lambda checker, model: checker.wrap(model.layers[3].self_attn),
        {"layers.3.self_attn"},
    ),
    "by type": (
        lambda checker, model: checker.wrap_by_policy(model, (Qwen2Block,)),
        {f"layers.{place}" for place in range(4)},
    ),
    "by two types": (
        lambda checker, model: checker.wrap_by_policy(model, (Qwen2Attention, Qwen2MLP)),
        {f"layers.{place}.{part}" for place in range(4) for part in ("self_attn", "mlp")},
    ),
    "children": (
        lambda checker, model: checker.wrap_all_children(model),
        {f"layers.{place}.{part}" for place in range(4) for part in ("self_attn", "mlp")}
        | {"embed"},
    ),
    "direct children": (
        lambda checker, model: checker.wrap_all_children(model, depth=0),
        {f"layers.{place}" for place in range(4)} | {"embed"},
    ),
    "deeper": (
        lambda checker, model: checker.wrap_all_children(model, depth=2),
        {
            f"layers.{place}.{part}"
            for place in range(4)
            for part in ("self_attn.qkv", "self_attn.out", "mlp.up", "mlp.down", "mlp.dropout")
        }
        | {"embed"},
    ),
    "the entire model": (lambda checker, model: checker.wrap(model), {""}),
}


@pytest.mark.parametrize("how", WRAPS)
def test_ways_to_wrap(how: str) -> None:
    wrap, expected = WRAPS[how]
    model = BlockModel()
    backend = CountingBackend()
    checker = PrecisionChecker(backend=backend)
    wrap(checker, model)
    checker.install(model)
    result = checker.collect(run_step(model))
    assert_pass(result)
    assert {diff.name for diff in result.diffs} == expected
    assert backend.runs >= len(expected)
    assert backend.graphs <= 6  # equal blocks share one


def test_root_is_printed_as_root(tmp_path: Path, capsys: Any) -> None:
    model = BlockModel()
    checker = PrecisionChecker()
    checker.wrap(model)
    result = checker.compare(run_step, model)
    path = tmp_path / "root.csv"
    assert "  pass  <root> " in shown(checker, result, capsys, csv_path=path)
    assert {row[0] for row in rows_of(path)} == {"LOSS", "<root>"}


# ---- skipping -----------------------------------------------------------------------------------


def test_ignore(tmp_path: Path, capsys: Any) -> None:
    model = BlockModel()
    backend = CountingBackend()
    checker = PrecisionChecker(backend=backend)
    checker.wrap_by_policy(model, (Qwen2Block,))

    # Skip a specified module
    checker.ignore(model.layers[0])

    # Skip modules by type in batch
    checker.ignore_by_policy(model, (torch.nn.Dropout,))

    result = checker.compare(run_step, model)
    assert result.all_pass
    assert backend.runs == 4  # an ignored block still runs, compiled
    path = tmp_path / "ignored.csv"
    text = shown(checker, result, capsys, csv_path=path)
    assert "  skip IGNORED  layers.0\n" in text
    assert "  skip IGNORED  layers.1.mlp.dropout\n" in text
    assert "layers.0,note,0,SKIP,,,,,IGNORED" in path.read_text().splitlines()
    assert not any(row[0] == "layers.0" and row[1] != "note" for row in rows_of(path))


# ---- single-pass --------------------------------------------------------------------------------


def test_single_pass_install_and_collect(capsys: Any) -> None:
    model = BlockModel()
    backend = CountingBackend()
    checker = PrecisionChecker(backend=backend)
    checker.wrap_all_children(model)
    checker.install(model)

    loss = run_step(model)
    result = checker.collect(loss)
    assert_pass(result)
    assert backend.runs == 9
    assert "RESULT: ALL PASS" in shown(checker, result, capsys)


@pytest.mark.parametrize("classes", [(Qwen2Block,), (Qwen2Attention, Qwen2MLP)])
def test_single_pass_compare(classes: Any, capsys: Any) -> None:
    model = BlockModel()
    backend = CountingBackend()
    checker = PrecisionChecker(backend=backend)
    checker.wrap_by_policy(model, classes)

    result = checker.compare(run_step, model)
    assert_pass(result)
    assert backend.runs == 4 * len(classes)
    text = shown(checker, result, capsys)
    assert "eager=nan" in text
    assert "single_pass" in text


def test_autocast(capsys: Any) -> None:
    model = BlockModel()
    keys = list(model.state_dict())
    backend = CountingBackend()
    checker = PrecisionChecker(backend=backend, cast_dtype=torch.bfloat16)
    checker.wrap_by_policy(model, (torch.nn.Linear,))
    checker.install(model)
    assert list(model.state_dict()) == keys
    loss = run_step(model)
    result = checker.collect(loss)
    assert_pass(result)
    assert backend.runs == 17
    assert result.cast_dtype == torch.bfloat16
    assert "cast_dtype=torch.bfloat16" in shown(checker, result, capsys)


# ---- inference ----------------------------------------------------------------------------------


def test_inference_with_install_and_collect(tmp_path: Path, capsys: Any) -> None:
    model = BlockModel()
    input_ids = torch.ones(2, 3, 4)
    backend = CountingBackend()
    checker = PrecisionChecker(backend=backend)
    checker.wrap_all_children(model)
    checker.install(model)

    model.eval()
    with torch.no_grad():
        logits = model(input_ids)
        pseudo_loss = logits.mean()

    result = checker.collect(pseudo_loss)
    assert_pass(result)
    assert backend.runs == 9
    assert not model.training
    path = tmp_path / "inference.csv"
    text = shown(checker, result, capsys, csv_path=path)
    assert "FORWARD INPUT" in text
    assert "FORWARD OUTPUT" in text
    assert f"  BACKWARD\n{THIN}\n  None\n" in text
    assert {row[1] for row in rows_of(path)} == {"loss", "fwd_input", "fwd_output"}
