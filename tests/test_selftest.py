"""Faults planted into the user's own step: what is found, what is missed, and nothing changed."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import opcheck
from opcheck.planting import FAULTS
from tests.models import gpt2, resnet18
from tests.step_equality import assert_same_step

GROSS = [fault.kind for fault in FAULTS if fault.gross]


def session_of(model: nn.Module, batch: torch.Tensor, folder: Any, **options: Any) -> Any:
    session = opcheck.check(model, log_dir=folder, quiet=True, selftest=True, **options)
    with session:
        model(batch).float().square().mean().backward()
    return session


def make_model(dtype: torch.dtype) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8))
    for module in model:
        if isinstance(module, nn.LayerNorm):
            nn.init.normal_(module.bias)
    return model.to(dtype), torch.randn(16, 32, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_gross_fault_is_found_at_defaults(dtype, tmp_path):
    result = session_of(*make_model(dtype), tmp_path).selftest()
    missed = [item for item in result.missed if item.gross]
    assert not missed
    assert result.gross == result.gross_found > 50
    kinds = {kind for _, _, kind in result.planted}
    assert {"sign flipped", "other dtype", "bias forgotten", "gradient doubled"} <= kinds
    assert not result.errors


def test_float32_finds_all_that_is_planted(tmp_path):
    result = session_of(*make_model(torch.float32), tmp_path).selftest()
    assert result.all_found, str(result)


def test_loose_tolerances_are_told_what_they_miss(tmp_path):
    model, batch = make_model(torch.float32)
    result = session_of(model, batch, tmp_path, rtol=0.1, atol=0.1).selftest()
    assert not result.all_found
    text = str(result)
    assert "judged by allclose (rtol 0.1, atol 0.1)" in text
    assert "missed, by op" in text
    assert any(item.kind == "all x1.01" for item in result.missed)


def test_ops_that_were_never_checked_are_named(tmp_path):
    model, batch = make_model(torch.float32)
    result = session_of(model, batch, tmp_path, exclude=["gelu"]).selftest()
    assert "aten.gelu.default" in [item.op for item in result.unseen]
    assert "never checked" in str(result)
    assert "aten.gelu.default" not in {op for op, _, _ in result.planted}


@pytest.mark.slow
@pytest.mark.parametrize("build", [gpt2, resnet18])
def test_planting_leaves_the_step_and_the_verdict_alone(build, tmp_path):
    plain = assert_same_step(build, lambda m: opcheck.check(m, log_dir=tmp_path, quiet=True))
    session = assert_same_step(
        build, lambda m: opcheck.check(m, log_dir=tmp_path, quiet=True, selftest=True)
    )
    assert session.verdict == plain.verdict == "PASS"
    assert session.coverage.checked == plain.coverage.checked
    result = session.selftest()
    assert result.gross_found == result.gross > 0
    assert not result.errors


def test_without_selftest_there_is_none(tmp_path):
    session = opcheck.check(log_dir=tmp_path, quiet=True)
    with pytest.raises(RuntimeError, match="selftest=True"):
        session.selftest()


SCRIPT = """
import torch
weight = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
print("sum", float((weight @ weight).sum()))
"""


def test_the_command_prints_the_table(tmp_path):
    script = tmp_path / "step.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "opcheck", "selftest", str(script)],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("sum ")
    assert "planted faults found (100.0%)" in done.stdout
    assert "sign flipped" in done.stdout


def test_an_op_that_returns_another_dtype_fails(tmp_path):
    """Equal values in float16: a float64 reference alone would not see it."""
    from tests.faults import planted

    def make_wrong(original: Any) -> Any:
        return lambda x, **kwargs: original(x, **kwargs).to(torch.float64)

    ones = torch.ones(8)
    with opcheck.check(log_dir=tmp_path, quiet=True) as clean:
        nn.functional.gelu(ones)
    assert clean.verdict == "PASS"
    with (
        planted("aten.gelu.default", make_wrong),
        opcheck.check(log_dir=tmp_path, quiet=True) as session,
    ):
        nn.functional.gelu(ones)
    assert session.verdict == "FAIL"
    assert "dtype torch.float64, expected torch.float32" in session.failures[0].reason


@pytest.mark.parametrize("loss", [nn.functional.mse_loss, nn.functional.smooth_l1_loss])
def test_a_16_bit_input_beside_a_float32_target_passes(loss, tmp_path):
    """The kernel gives its gradient in 16 bit, and declares float32."""
    x = torch.rand(8, dtype=torch.bfloat16, requires_grad=True)
    with opcheck.check(log_dir=tmp_path, quiet=True) as session:
        loss(x, torch.rand(8)).backward()
    assert session.verdict == "PASS", session.failures


@pytest.mark.parametrize("name", ["mul", "sub", "maximum", "div"])
def test_an_op_that_does_not_promote_its_inputs_fails(name, tmp_path):
    """16 bit and float32 give float32, and not the dtype of the first."""
    with opcheck.check(log_dir=tmp_path, quiet=True, selftest=True) as session:
        getattr(torch, name)(torch.ones(8), torch.rand(8, dtype=torch.float16))
    op = "aten.maximum.default" if name == "maximum" else f"aten.{name}.Tensor"
    assert session.selftest().planted[op, "float32", "other dtype"]
    assert not [missed for missed in session.selftest().missed if missed.kind == "other dtype"]


@pytest.mark.parametrize("name", ["threshold_backward", "native_dropout_backward"])
def test_a_backward_formula_may_give_either_of_two_dtypes(name, tmp_path):
    grad, other = torch.rand(8, dtype=torch.bfloat16), torch.rand(8) > 0.5
    with opcheck.check(log_dir=tmp_path, quiet=True) as session:
        if name == "threshold_backward":
            torch.ops.aten.threshold_backward(grad, other.float(), 0.0)
        else:
            torch.ops.aten.native_dropout_backward(grad, other.float(), 2.0)
    assert session.verdict == "PASS", session.failures


def test_a_wrong_result_is_found_where_moved_inputs_are_refused(tmp_path):
    """Flags of 0 and 1 that are no flags any more once they are moved by a rounding."""
    from tests.faults import planted

    x = torch.randn(4, 5, requires_grad=True)
    target = torch.tensor([[1, 3, -1, 0, 0]] * 4)

    def step() -> None:
        nn.functional.multilabel_margin_loss(x, target).backward()

    def make_wrong(original: Any) -> Any:
        return lambda *args: original(*args) * 1.01

    with (
        planted("aten.multilabel_margin_loss_backward.default", make_wrong),
        opcheck.check(log_dir=tmp_path, quiet=True, selftest=True) as session,
    ):
        step()
    assert session.verdict == "FAIL"
    with opcheck.check(log_dir=tmp_path, quiet=True, selftest=True) as clean:
        step()
    assert clean.verdict == "PASS"
    assert not clean.selftest().errors
