"""Reported faults of eager ops are found where they are; what is no fault stays silent."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from opcheck import Verdict, check
from tests.cases import CASES, Case, of_kind
from tests.faults import planted
from tests.reproducers import run_file

NAMED = [name for name, case in CASES.items() if case.culprit is not None]
RIGHT_IN_EAGER = [name for name in CASES if name not in NAMED]


def leaves(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from leaves(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves(item)


def run_checked(case: Case, log_dir: Path) -> Any:
    """Run the step of a case with every call checked; return the session."""
    model, args, kwargs = case.build()
    torch.manual_seed(0)
    with (
        case.config(),
        check(model, log_dir=log_dir, max_checks=None, quiet=True) as session,
    ):
        case.step(model, args, kwargs)
    return session


@pytest.mark.parametrize("name", CASES)
def test_case_builds_equal_copies_and_runs(name: str) -> None:
    case = CASES[name]
    outputs = []
    for _ in range(2):
        torch.manual_seed(0)
        outputs.append(list(leaves(case.run())))
    assert outputs[0]
    for first, second in zip(*outputs, strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", NAMED)
def test_fault_is_found_and_nothing_else_is(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    session = run_checked(case, tmp_path)
    assert session.verdict == Verdict.FAIL
    first = session.failures[0]
    assert first.op in case.culprit.ops
    assert (first.module, first.phase) == (case.culprit.module, case.culprit.phase)
    assert len(session.failures) == 1
    assert session.coverage.errors == 0
    assert session.coverage.adds_up


def test_lost_eps_is_explained(tmp_path: Path) -> None:
    session = run_checked(CASES["fp16_eps_underflow"], tmp_path)
    reason = session.failures[0].reason
    assert "aten.mul" in reason
    assert "aten.add" in reason
    assert "norm" in reason


def test_fmod_counts_the_elements_of_the_vectorised_part(tmp_path: Path) -> None:
    session = run_checked(CASES["fmod_vector_nan"], tmp_path)
    metrics = session.failures[0].metrics
    assert metrics.num_nonfinite == 16
    assert metrics.num_elements == 20


def test_layer_norm_is_nan_where_float64_is_finite(tmp_path: Path) -> None:
    session = run_checked(CASES["layer_norm_large_inputs"], tmp_path)
    metrics = session.failures[0].metrics
    assert metrics.num_nonfinite >= 48
    assert math.isnan(metrics.actual_at)
    assert math.isfinite(metrics.expected_at)


def test_kernel_that_is_wrong_where_the_original_dies_is_found(tmp_path: Path) -> None:
    def zeros_for_nan(original: Any) -> Any:
        def layer_norm(*args: Any) -> Any:
            out, mean, rstd = original(*args)
            return torch.nan_to_num(out, nan=0.0), mean, rstd

        return layer_norm

    case = CASES["layer_norm_large_inputs"]
    with planted("aten.native_layer_norm.default", zeros_for_nan):
        session = run_checked(case, tmp_path)
    assert session.verdict == Verdict.FAIL
    first = session.failures[0]
    assert (first.op, first.module) == ("aten.native_layer_norm.default", "norm")
    assert first.metrics.actual_at == 0.0
    assert "is 0, expected" in first.reason


IN_FLOAT64 = """
import torch
from tests.faults import planted

LAST_ROW = torch.tensor([[1.0], [1.0], [1.0001]])

def in_float64(original):
    def layer_norm(x, shape, weight, bias, eps):
        results = original(x.double(), shape, weight.double(), bias.double(), eps)
        return tuple(item.float() for item in results)

    return layer_norm

kernel = planted("aten.native_layer_norm.default", in_float64)
kernel.__enter__()
"""


def test_reproducer_tells_right_from_wrong_where_the_original_dies(tmp_path: Path) -> None:
    def last_row_zero(original: Any) -> Any:
        def layer_norm(*args: Any) -> Any:
            out, mean, rstd = original(*args)
            out[-1] = 0.0
            return out, mean, rstd

        return layer_norm

    model, args, _ = CASES["layer_norm_large_inputs"].build()
    with (
        planted("aten.native_layer_norm.default", last_row_zero),
        check(model, log_dir=tmp_path, quiet=True, repro_dir=tmp_path, repro_seconds=0) as session,
    ):
        model(*args)
    (path,) = session.repros
    for name, text, status in (
        ("right.py", IN_FLOAT64.replace("item.float()", "item.float() * 1.0000002"), 0),
        ("wrong.py", IN_FLOAT64.replace("item.float()", "item.float() * LAST_ROW"), 1),
    ):
        (tmp_path / name).write_text(text)
        done = run_file(path, load=tmp_path / name)
        assert done.returncode == status, done.stdout + done.stderr


def test_distances_of_far_off_points_are_off_by_much(tmp_path: Path) -> None:
    session = run_checked(CASES["cdist_cancellation"], tmp_path)
    metrics = session.failures[0].metrics
    assert metrics.num_out > 0.9 * metrics.num_elements
    assert 5 <= metrics.expected_at <= 150


def test_input_gradient_of_the_modelled_kernel_is_out_everywhere(tmp_path: Path) -> None:
    session = run_checked(CASES["modelled_layer_norm_backward_2d"], tmp_path)
    metrics = session.failures[0].metrics
    assert (metrics.worst_output, metrics.num_elements) == (0, 160)
    assert metrics.num_out >= 158


@pytest.mark.parametrize("name", of_kind("benign"))
def test_benign_case_passes(name: str, tmp_path: Path) -> None:
    session = run_checked(CASES[name], tmp_path)
    assert session.failures == []
    assert session.verdict == Verdict.PASS
    assert session.coverage.adds_up


@pytest.mark.parametrize("name", [name for name in RIGHT_IN_EAGER if name not in of_kind("benign")])
def test_fault_of_the_compiler_is_not_blamed_on_eager(name: str, tmp_path: Path) -> None:
    # where all of it is on integers nothing independent may be left to compare: no PASS asked for
    session = run_checked(CASES[name], tmp_path)
    assert session.failures == []
    assert session.coverage.errors == 0
