"""The document's examples of two-pass and of autocast, as written there but for the import.

The backend counts executions of compiled code; the printed text and the CSV are looked at.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modulecheck import CompareResult, ModuleDiff, PrecisionChecker, TensorDiff
from modulecheck.hooks import _device_of
from tests.compiled import DYNAMO_WARNS, CountingBackend, assert_pass
from tests.documented import (
    NUMBER,
    ROW,
    THIN,
    WIDE,
    BlockModel,
    Qwen2Block,
    names_in,
    rows_of,
    run_step,
    shown,
)

pytestmark = [DYNAMO_WARNS, pytest.mark.usefixtures("fresh_dynamo")]
EXACT = r"\d\.\d{6}e[+-]\d\d"


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


class TokenModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.5))
        self.head = nn.Linear(16, 20)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(input_ids)))


# ---- inference ----------------------------------------------------------------------------------


def test_quick_start_inference(tmp_path: Path, capsys: Any) -> None:
    model = TokenModel()
    input_ids = torch.arange(6).view(2, 3)

    def infer_step(model: nn.Module) -> Tensor:
        model.eval()
        with torch.no_grad():
            logits = model(input_ids)
            # two-pass requires a scalar as the comparison anchor. Inference has no loss,
            # so a statistic of the output (such as mean) can be used
            return logits.mean()

    backend = CountingBackend()
    checker = PrecisionChecker(backend=backend, single_pass=False)  # use two-pass for inference
    checker.wrap_by_policy(model, (nn.Linear,))

    result = checker.compare(infer_step, model)  # runs both eager and compiled pipelines
    assert_pass(result)
    assert backend.runs == 2
    assert model.training  # only the copies were put into eval mode
    with torch.no_grad():
        expected = model.eval()(input_ids).mean().item()
    assert result.loss_eager == expected
    assert result.loss_diff == 0.0

    path = tmp_path / "precision_report.csv"
    lines = shown(checker, result, capsys, csv_path=path).splitlines()
    assert lines[0] == lines[2] == WIDE
    assert lines[1] == f"  Loss  eager={expected:.6f}  compiled={expected:.6f}  diff=0.000e+00"
    assert f"\n  BACKWARD\n{THIN}\n  None\n" in "\n".join(lines)
    assert names_in("\n".join(lines)) == {"layers.0", "head"}
    assert lines[-1] == f"CSV report saved to: {path}"
    raw = path.read_text().splitlines()
    assert raw[1] == (
        f"LOSS,loss,0,PASS,0.000000e+00,N/A,N/A,eager={expected:.6f} compiled={expected:.6f},"
    )
    assert raw[2] == 'layers.0,fwd_input,0,PASS,0.000000e+00,0.000000e+00,0.000000e+00,"(2, 3, 8)",'
    assert {row[1] for row in rows_of(path)} == {"loss", "fwd_input", "fwd_output"}


def test_inference_of_all_children(capsys: Any) -> None:
    model = TokenModel()
    input_ids = torch.arange(6).view(2, 3)
    backend = CountingBackend()
    checker = PrecisionChecker(backend=backend, single_pass=False)
    checker.wrap_all_children(model)

    def infer_step(model: nn.Module) -> Tensor:
        model.eval()
        with torch.no_grad():
            logits = model(input_ids)
            return logits.mean()

    result = checker.compare(infer_step, model)
    assert result.all_pass
    assert backend.runs == 5
    text = shown(checker, result, capsys)
    assert names_in(text) == {"embed", "layers.0", "layers.1", "layers.2", "head"}
    assert "RESULT: ALL PASS" in text


# ---- training -----------------------------------------------------------------------------------


def test_two_pass_mode(tmp_path: Path, capsys: Any) -> None:
    model = BlockModel()
    checker = PrecisionChecker(single_pass=False)
    checker.wrap_by_policy(model, (Qwen2Block,))

    result = checker.compare(run_step, model)
    assert_pass(result)
    assert all(parameter.grad is None for parameter in model.parameters())
    path = tmp_path / "report.csv"
    text = shown(checker, result, capsys, csv_path=path)
    lines = text.splitlines()
    loss = re.fullmatch(rf"  Loss  eager=(\d\.\d{{6}})  compiled=\1  diff={NUMBER}", lines[1])
    assert loss
    assert "single_pass" not in text
    for title in ("FORWARD INPUT", "FORWARD OUTPUT", "BACKWARD"):
        assert lines[lines.index(f"  {title}") + 1] == THIN
    backward = lines[lines.index("  BACKWARD") + 2 :]
    for place, name in enumerate(("layers.0.grad_input", "layers.0.grad_output")):
        match = ROW.fullmatch(backward[place])
        assert match
        assert match[2] == name
        assert backward[place].index("[OK]") == 61
        assert backward[place].endswith("shape=(2, 3, 8)")
    rows = rows_of(path)
    loss_row = rows[0]
    assert loss_row[:4] == ["LOSS", "loss", "0", "PASS"]
    assert re.fullmatch(EXACT, loss_row[4])
    assert loss_row[5:7] == ["N/A", "N/A"]
    assert re.fullmatch(r"eager=\d\.\d{6} compiled=\d\.\d{6}", loss_row[7])
    assert loss_row[8] == ""
    kinds = [row[1] for row in rows if row[0] == "layers.0"]
    assert list(dict.fromkeys(kinds)) == [
        "fwd_input", "fwd_output", "grad_input", "grad_output", "param_grad",
    ]  # fmt: skip
    for row in rows[1:]:
        assert row[3] == "PASS"
        assert all(re.fullmatch(EXACT, cell) for cell in row[4:7])
        assert row[8] == ("" if row[1] != "param_grad" else row[8])


@pytest.mark.parametrize("capture_input", [True, False])
def test_capture_input(capture_input: bool, tmp_path: Path, capsys: Any) -> None:
    model = BlockModel()
    checker = PrecisionChecker(single_pass=False, capture_input=capture_input)
    checker.wrap_by_policy(model, (Qwen2Block,))
    result = checker.compare(run_step, model)
    assert result.diffs[0].fwd_input  # the capture stays
    path = tmp_path / "report.csv"
    assert ("FORWARD INPUT" in shown(checker, result, capsys, csv_path=path)) == capture_input
    assert ("fwd_input" in {row[1] for row in rows_of(path)}) == capture_input


def test_wrapping_the_entire_model(capsys: Any) -> None:
    model = BlockModel()
    backend = CountingBackend()
    checker = PrecisionChecker(backend=backend, single_pass=False)
    checker.wrap(model)
    result = checker.compare(run_step, model)
    assert_pass(result)
    assert (backend.graphs, backend.runs) == (1, 1)
    assert "  pass  <root> " in shown(checker, result, capsys)


def test_skipping(tmp_path: Path, capsys: Any) -> None:
    model = BlockModel()
    checker = PrecisionChecker(single_pass=False)
    checker.wrap_by_policy(model, (Qwen2Block,))

    # Skip a specified module
    checker.ignore(model.layers[0])

    # Skip modules by type in batch
    checker.ignore_by_policy(model, (torch.nn.Dropout,))

    result = checker.compare(run_step, model)
    assert result.all_pass
    path = tmp_path / "report.csv"
    assert "  skip IGNORED  layers.0\n" in shown(checker, result, capsys, csv_path=path)
    assert "layers.0,note,0,SKIP,,,,,IGNORED" in path.read_text().splitlines()


def test_documented_report_byte_for_byte(tmp_path: Path, capsys: Any) -> None:
    """The numbers of the document's example, put in by hand."""

    def tensor(max_abs: float, mean_abs: float, max_rel: float) -> list[TensorDiff]:
        return [TensorDiff(max_abs, mean_abs, max_rel, True, (2, 128, 4096))]

    block = ModuleDiff(
        "layers.0", tensor(0, 0, 0), tensor(2.3e-07, 1.2e-08, 5.1e-06),
        tensor(1.1e-07, 9e-09, 4.2e-06), tensor(0, 0, 0),
    )  # fmt: skip
    result = CompareResult(6.912340, 6.9123412, [block, ModuleDiff("layers.1", note="IGNORED")])
    result.criterion = "allclose"
    path = tmp_path / "report.csv"
    text = shown(PrecisionChecker(), result, capsys, csv_path=path)
    zeros = "[OK] max_abs=0.000e+00  mean_abs=0.000e+00  max_rel=0.000e+00  shape=(2, 128, 4096)"
    assert text == "\n".join(
        [
            WIDE,
            "  Loss  eager=6.912340  compiled=6.912341  diff=1.200e-06",
            WIDE,
            "",
            "  FORWARD INPUT",
            THIN,
            f"  pass  {'layers.0':52} {zeros}",
            "",
            "  FORWARD OUTPUT",
            THIN,
            f"  pass  {'layers.0':52} [OK] max_abs=2.300e-07  mean_abs=1.200e-08"
            "  max_rel=5.100e-06  shape=(2, 128, 4096)",
            "  skip IGNORED  layers.1",
            "",
            "  BACKWARD",
            THIN,
            f"  pass  {'layers.0.grad_input':52} [OK] max_abs=1.100e-07  mean_abs=9.000e-09"
            "  max_rel=4.200e-06  shape=(2, 128, 4096)",
            f"  pass  {'layers.0.grad_output':52} {zeros}",
            WIDE,
            "  RESULT: ALL PASS  (atol=1e-4 rtol=1e-3)",
            WIDE,
            f"CSV report saved to: {path}\n",
        ]
    )
    assert path.read_text().splitlines() == [
        "module_name,check_type,tensor_index,status,max_abs_diff,mean_abs_diff,max_rel_diff,shape,"
        "note",
        "LOSS,loss,0,PASS,1.200000e-06,N/A,N/A,eager=6.912340 compiled=6.912341,",
        'layers.0,fwd_input,0,PASS,0.000000e+00,0.000000e+00,0.000000e+00,"(2, 128, 4096)",',
        'layers.0,fwd_output,0,PASS,2.300000e-07,1.200000e-08,5.100000e-06,"(2, 128, 4096)",',
        'layers.0,grad_input,0,PASS,1.100000e-07,9.000000e-09,4.200000e-06,"(2, 128, 4096)",',
        'layers.0,grad_output,0,PASS,0.000000e+00,0.000000e+00,0.000000e+00,"(2, 128, 4096)",',
        "layers.1,note,0,SKIP,,,,,IGNORED",
    ]


# ---- autocast -----------------------------------------------------------------------------------


class GraphBackend(CountingBackend):
    """Keeps the dtypes that the captured graphs give."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __call__(self, graph: Any, inputs: Any) -> Any:
        for node in graph.graph.nodes:
            value = node.meta.get("example_value")
            if isinstance(value, Tensor) and node.op != "placeholder":
                self.dtypes.add(value.dtype)
        return super().__call__(graph, inputs)


@pytest.mark.parametrize("single_pass", [True, False])
def test_autocast(single_pass: bool, capsys: Any) -> None:
    model = BlockModel()
    keys = list(model.state_dict())
    backend = GraphBackend()
    checker = PrecisionChecker(backend=backend, cast_dtype=torch.bfloat16, single_pass=single_pass)
    checker.wrap_by_policy(model, (torch.nn.Linear,))

    def step(model: nn.Module) -> Tensor:
        assert list(model.state_dict()) == keys
        return run_step(model)

    result = checker.compare(step, model)
    assert_pass(result)
    assert backend.runs == 17
    assert torch.bfloat16 in backend.dtypes  # the casts are inside what is compiled
    assert list(model.state_dict()) == keys
    assert result.cast_dtype == torch.bfloat16
    assert "cast_dtype=torch.bfloat16" in shown(checker, result, capsys)


class Product(nn.Module):
    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return left @ right


@pytest.mark.parametrize("single_pass", [True, False])
def test_autocast_of_a_module_without_parameters(single_pass: bool) -> None:
    model = nn.ModuleDict({"product": Product()})
    seen: list[torch.dtype] = []

    def step(model: nn.Module) -> Tensor:
        out = model["product"](torch.ones(3, 4), torch.ones(4, 5))
        seen.append(out.dtype)
        return out.sum()

    checker = PrecisionChecker(cast_dtype=torch.bfloat16, single_pass=single_pass)
    checker.wrap(model["product"])
    assert_pass(checker.compare(step, model))
    assert set(seen) == {torch.bfloat16}


@pytest.mark.parametrize(
    ("module", "args", "device"),
    [
        (nn.Linear(2, 2, device="meta"), (torch.ones(1),), "meta"),
        (nn.BatchNorm1d(2, affine=False, device="meta"), (torch.ones(1),), "meta"),
        (Product(), (1, [torch.ones(1, device="meta")]), "meta"),
        (Product(), (torch.ones(1),), "cpu"),
        (Product(), (), "cpu"),
    ],
    ids=["parameters", "buffers", "inputs", "inputs on cpu", "nothing"],
)
def test_autocast_takes_the_device_of_the_tensors(module: Any, args: Any, device: str) -> None:
    assert _device_of(module, args, {}) == device


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator")
@pytest.mark.parametrize("single_pass", [True, False])
def test_autocast_on_an_accelerator(single_pass: bool) -> None:
    device = torch.accelerator.current_accelerator()
    model = BlockModel().to(device)
    checker = PrecisionChecker(cast_dtype=torch.bfloat16, single_pass=single_pass)
    checker.wrap_by_policy(model, (Qwen2Block,))
    inputs = torch.ones(2, 3, 4, device=device)

    def step(model: nn.Module) -> Tensor:
        loss = model(inputs).float().square().mean()
        loss.backward()
        return loss

    assert_pass(checker.compare(step, model))
