"""A difference between two implementations as a file that runs with torch alone."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from modulecheck import TensorChecker, module_register_tensor_checker, tensor_repro
from modulecheck.graph_limits import loaded
from modulecheck.tensor_compare import Criterion, compare
from modulecheck.tensor_limits import limit_for
from modulecheck.tensor_values import Snapshot
from opcheck import repro_tensors
from opcheck.errors import ArgumentTypeError
from opcheck.replaying import write_pytest
from opcheck.repro_judge import verdict
from tests.compiled import DYNAMO_WARNS
from tests.reproducers import run_file

pytestmark = DYNAMO_WARNS

MARK = "    # --- compute the tensor from the inputs here"


class Act(nn.Module):
    def __init__(self, approximate: str, dim: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)
        self.approximate = approximate

    def forward(self, hidden: Tensor, *, scale: float = 1.0) -> Tensor:
        out = nn.functional.gelu(self.linear(hidden), approximate=self.approximate)
        return out * scale


class Broken(Act):
    def forward(self, hidden: Tensor, *, scale: float = 1.0) -> Tensor:
        torch._dynamo.graph_break()
        return torch.relu(super().forward(hidden)) + float(hidden.sum() > 1e9)


class Net(nn.Module):
    def __init__(self, approximate: str, kind: type[Act] = Act) -> None:
        super().__init__()
        self.first = Act("none")
        self.second = kind(approximate)
        self.head = nn.Linear(8, 2)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.head(self.second(self.first(hidden), scale=2.0))


def net(approximate: str, kind: type[Act] = Act) -> Net:
    torch.manual_seed(0)
    return Net(approximate, kind)


def batch() -> Tensor:
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(1))


def run_both(checker: TensorChecker, kind: type[Act] = Act, other: str = "tanh") -> list[Net]:
    models = [net("none", kind), net(other, kind)]
    for model in models:
        module_register_tensor_checker(model, checker)
        model(batch())
    return models


@pytest.fixture
def checker(tmp_path: Path) -> TensorChecker:
    return TensorChecker(quiet=True, repro_dir=tmp_path / "repros")


def only(checker: TensorChecker) -> Path:
    result = checker.result
    assert not result.repro_notes, result.repro_notes
    (path,) = result.repros
    assert path in str(result)
    return Path(path)


# ---- both sides as code -------------------------------------------------------------------------


def test_file_runs_both_sides_until_they_agree(checker: TensorChecker) -> None:
    models = run_both(checker)
    assert not checker.check()
    path = only(checker)
    assert path.name == "tensors_second.py"
    found = run_file(path)
    assert found.returncode == 1, found.stdout + found.stderr
    assert "actual" in found.stdout
    assert "max_abs" in found.stdout
    text = path.read_text()
    assert "class ExpectedSide" in text
    assert "second: its inputs agree and its outputs differ" in text
    assert text.count("put(torch.tensor(") == 3  # weight, bias and input, alike on both sides
    assert text.count("approximate = 'tanh'") == 1
    path.write_text(text.replace("approximate = 'tanh'", "approximate = 'none'"))
    repaired = run_file(path, "--device", "cpu")
    assert repaired.returncode == 0, repaired.stdout + repaired.stderr
    assert all(model.second.linear.weight.grad is None for model in models)


def test_sides_that_agree_leave_no_folder(checker: TensorChecker) -> None:
    run_both(checker, other="none")
    assert checker.check_equal()
    assert checker.result.repros == ()
    assert checker.repro_dir is not None
    assert not Path(checker.repro_dir).exists()


def test_each_origin_has_a_file(tmp_path: Path) -> None:
    checker = TensorChecker(quiet=True, repro_dir=tmp_path)
    first, second = nn.Sequential(Act("none"), Act("none")), nn.Sequential(Act("none"), Act("tanh"))
    second.load_state_dict(first.state_dict())
    with torch.no_grad():
        second[0].linear.bias += 1.0
    for model in (first, second):
        module_register_tensor_checker(model, checker)
        model(batch())
    checker.check_equal()
    assert checker.result.origins == ["0.linear"]  # what follows got other inputs
    assert "its checker_0.linear.bias differs" in only(checker).read_text()


def test_the_step_and_the_generators_are_left_alone(checker: TensorChecker) -> None:
    plain = net("none")
    torch.manual_seed(3)
    out = plain(batch())
    out.sum().backward()
    after = torch.rand(3)
    watched, other = net("none"), net("tanh")
    module_register_tensor_checker([watched, other], checker)
    torch.manual_seed(3)
    same = watched(batch())
    same.sum().backward()
    torch.manual_seed(3)
    other(batch())
    checker.check_equal()
    assert torch.equal(after, torch.rand(3))
    assert torch.equal(out, same)
    pairs = zip(plain.parameters(), watched.parameters(), strict=True)
    assert all(torch.equal(one.grad, other.grad) for one, other in pairs)
    assert Path(checker.result.repros[0]).exists()


def test_a_registered_model_can_be_copied_and_the_copy_is_not_watched(
    checker: TensorChecker,
) -> None:
    model = net("none")
    module_register_tensor_checker(model, checker)
    twin = copy.deepcopy(model)
    twin(batch())
    checker.check_equal()
    assert checker.result.records == ()
    assert checker.result.problems == ()


# ---- what was recorded --------------------------------------------------------------------------


def test_of_two_files_the_tensors_are_kept(checker: TensorChecker, tmp_path: Path) -> None:
    run_both(checker)
    checker.save(tmp_path / "both.npz")
    again = TensorChecker.load(tmp_path / "both.npz", quiet=True, repro_dir=tmp_path / "loaded")
    again.check_allclose()
    path = only(again)
    found = run_file(path)
    assert found.returncode == 1, found.stdout + found.stderr
    text = path.read_text()
    assert text.startswith('"""Recorded tensors of two implementations that differ; no code')
    assert "was not kept as it ran" in text
    assert text.count(MARK) == 1
    state = net("none").second.linear.state_dict()
    code = f"""\
    w, b = torch.tensor({state["weight"].tolist()}), torch.tensor({state["bias"].tolist()})
    hidden = torch.nn.functional.linear(inputs["checker_second_input_0"], w, b)
    return 2.0 * torch.nn.functional.gelu(hidden)
"""
    path.write_text(text.replace(MARK, code + MARK))
    repaired = run_file(path)
    assert repaired.returncode == 0, repaired.stdout + repaired.stderr


@pytest.mark.parametrize("case", ["graph break", "parameters moved", "stats", "model gone"])
def test_what_cannot_run_again_is_recorded_and_says_why(tmp_path: Path, case: str) -> None:
    keep = "stats" if case == "stats" else "all"
    checker = TensorChecker(quiet=True, repro_dir=tmp_path, keep=keep)
    models = run_both(checker, Broken if case == "graph break" else Act)
    if case == "model gone":
        models.clear()
    if case == "parameters moved":
        with torch.no_grad():
            models[1].second.linear.weight.add_(1.0)
    checker.check_equal()
    text = only(checker).read_text()
    reason = {
        "graph break": "graphs, and a file runs one",
        "parameters moved": "the parameters of second were changed since the call",
        "stats": "was not kept as it ran",
        "model gone": "the module second is gone",
    }[case]
    assert reason in " ".join(text.split())


def test_tensors_of_no_module_are_recorded(tmp_path: Path) -> None:
    checker = TensorChecker(quiet=True, repro_dir=tmp_path)
    for factor in (1.0, 1.5):
        checker.register_tensor("a/../b", torch.arange(700.0) * factor)
    checker.check_equal()
    path = only(checker)
    assert path.parent == tmp_path
    assert path.with_suffix(".pt").exists()
    write_pytest(path, tmp_path / "test_it.py")
    assert "def test_reproducer" in (tmp_path / "test_it.py").read_text()
    file: Any = loaded(tmp_path / "test_it.py")  # with its tensors beside it
    _, expected, actual = file.recorded("cpu", wide=False)
    assert file.verdict(file.limits(), [actual], [expected], [expected]) == 1


def test_what_no_file_shows_is_said(tmp_path: Path) -> None:
    checker = TensorChecker(quiet=True, repro_dir=tmp_path)
    for _ in range(2):
        checker.register_tensor("t", torch.tensor([1.0, float("nan")]))
    assert not checker.check_equal()  # NaN is no NaN; in a reproducer it is
    assert checker.result.repros == ()
    assert "does not show the difference" in str(checker.result)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("MAX_ELEMENTS", 20, "24 elements, and a file compares at most 20; dump_mode= saves"),
        ("DEFAULT_REPRO_BYTES", 250, "its tensors take 0.0 MiB, and a reproducer may have"),
    ],
)
def test_what_is_too_large_is_said_and_nothing_is_left(
    tmp_path: Path, monkeypatch: Any, name: str, value: int, reason: str
) -> None:
    monkeypatch.setattr(tensor_repro, name, value)
    monkeypatch.setattr(repro_tensors, "MAX_INLINE", 5)
    checker = TensorChecker(quiet=True, repro_dir=tmp_path / "repros")
    run_both(checker)
    assert not checker.check_equal()
    assert checker.result.repros == ()
    assert reason in " ".join(str(checker.result).split())
    assert not (tmp_path / "repros").exists()


def test_a_large_module_is_not_copied_and_its_tensors_are_saved(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(tensor_repro, "DEFAULT_REPRO_BYTES", 280)  # weights alone take 288
    checker = TensorChecker(quiet=True, repro_dir=tmp_path)
    models = run_both(checker)
    checker.check_equal()
    assert models
    assert "the parameters of second take" in " ".join(only(checker).read_text().split())


def test_a_folder_has_to_be_a_path() -> None:
    with pytest.raises(ArgumentTypeError, match="repro_dir"):
        TensorChecker(repro_dir=True)  # type: ignore[arg-type]


def test_a_folder_that_cannot_be_written_costs_no_result(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    checker = TensorChecker(quiet=True, repro_dir=tmp_path / "file" / "inside")
    run_both(checker)
    assert not checker.check_equal()
    assert "cannot be written" in checker.result.repro_notes[0]


# ---- limits -------------------------------------------------------------------------------------

FAULTS = {
    "none": lambda x: x.clone(),
    "rounding": lambda x: x * (1 + torch.finfo(x.dtype).eps),
    "scale": lambda x: x * (1 + 14 * torch.finfo(x.dtype).eps),
    "small scale": lambda x: x * (1 + 1.5 * torch.finfo(x.dtype).eps),
    "scattered": lambda x: x * (1 + 30 * torch.finfo(x.dtype).eps * torch.sign(torch.sin(9e3 * x))),
    "element": lambda x: x.index_fill(0, torch.tensor([3]), 7.0),
    "nan": lambda x: x.index_fill(0, torch.tensor([3]), float("nan")),
    "inf": lambda x: x.index_fill(0, torch.tensor([3]), float("inf")),
    "shape": lambda x: x[None],
    "narrow": lambda x: x.to(torch.bfloat16),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["equal", "allclose", "calibrated"])
def test_file_judges_as_the_checker_does(name: str, dtype: torch.dtype, fault: str) -> None:
    values = torch.randn(4096, generator=torch.Generator().manual_seed(2)).to(dtype)
    sides = Snapshot(values), Snapshot(FAULTS[fault](values))
    is_calibrated = name == "calibrated"
    criterion = Criterion(name=name, equal_nan=True, check_dtype=not is_calibrated)
    wanted = compare(*sides, criterion).passed
    limit: dict[str, Any] = {
        key: value.tolist() if isinstance(value, np.ndarray) else value
        for key, value in limit_for("x", *sides, criterion, None).items()
    }
    expected, actual = [sides[0].tensor], [sides[1].tensor]
    assert (verdict([limit], actual, expected, expected) == 0) == wanted
