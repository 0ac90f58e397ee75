"""The first NaN or Inf is named with the values it was made of, whatever the verdict."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import opcheck
from opcheck import Verdict
from opcheck.cli import main
from tests import faults, models
from tests.cases import CASES
from tests.test_cases_op import run_checked

X = torch.tensor([[1.0, 4.0, 0.0], [9.0, 0.0, 2.0]])


def checked(step, tmp_path, model=None, **options: Any):
    with opcheck.check(model, log_dir=tmp_path, quiet=True, **options) as session:
        step()
    assert session.coverage.errors == 0
    assert session.coverage.adds_up
    return session


def test_right_op_is_named_with_module_line_and_values(tmp_path):
    class Inverse(nn.Module):
        def forward(self, x):
            return (x + 0.0).rsqrt().tanh()

    model = nn.Sequential(nn.Identity(), Inverse())
    session = checked(lambda: model(X), tmp_path, model)
    assert session.verdict is Verdict.PASS
    birth = session.coverage.first_nonfinite
    assert (birth.op, birth.module, birth.phase) == ("aten.rsqrt.default", "1", "forward")
    assert (birth.value, birth.place, birth.verdict) == ("inf", (0, 2), "PASS")
    assert birth.inputs == ("self (2, 3):float32 is 0 there, from 0 to 9",)
    assert "in forward" in birth.source
    report = session.report(width=80)
    assert "first NaN or Inf, made of finite inputs" in report
    assert "self (2, 3):float32 is 0 there" in report
    assert "test_births.py" in report


def test_two_inputs_and_a_number(tmp_path):
    session = checked(lambda: torch.add(X * 1e37, torch.full((3,), 3e38), alpha=1.5), tmp_path)
    birth = session.coverage.first_nonfinite
    assert birth.op == "aten.add.Tensor"
    assert birth.place == (0, 0)
    assert birth.inputs[0].startswith("self (2, 3):float32 is 1e+37 there")
    assert birth.inputs[1].startswith("other (3,):float32 is 3e+38 there")
    assert birth.inputs[2] == "alpha = 1.5"


def test_matrix_product_tells_the_ranges(tmp_path):
    session = checked(lambda: (X * 1e30) @ (X.t() * 1e30), tmp_path)
    birth = session.coverage.first_nonfinite
    assert birth.op == "aten.mm.default"
    assert birth.inputs[0] == "self (2, 3):float32, from 0 to 9e+30"
    assert "there" not in " ".join(birth.inputs)


def test_overflow_in_a_cast_to_half_is_seen(tmp_path):
    session = checked(lambda: (X * 3e4).half() * 2, tmp_path)
    birth = session.coverage.first_nonfinite
    assert (birth.op, birth.place, birth.verdict) == ("aten._to_copy.default", (0, 1), "")
    assert birth.inputs == ("self (2, 3):float32 is 120000 there, from 0 to 270000",)
    assert "was not checked" in session.report()


def test_overflow_in_a_copy_into_half_is_seen(tmp_path):
    session = checked(lambda: torch.zeros(2, 3, dtype=torch.half).copy_(X * 3e4), tmp_path)
    birth = session.coverage.first_nonfinite
    assert birth.op == "aten.copy_.default"
    assert birth.inputs == ("src (2, 3):float32 is 120000 there, from 0 to 270000",)


def test_in_place_op_tells_the_value_before(tmp_path):
    session = checked(lambda: (X + 0).log_(), tmp_path)
    birth = session.coverage.first_nonfinite
    assert (birth.op, birth.value) == ("aten.log_.default", "-inf")
    assert birth.inputs[0].startswith("self (2, 3):float32 is 0 there")


def test_mask_of_infinities_is_no_birth(tmp_path):
    workload = models.gpt2()
    session = checked(workload.step, tmp_path, workload.model)
    assert session.coverage.first_nonfinite is None
    scores = torch.randn(3, 3).masked_fill(torch.ones(3, 3).triu(1).bool(), float("-inf"))
    session = checked(lambda: scores.softmax(-1), tmp_path)
    assert session.coverage.first_nonfinite is None
    assert "first NaN" not in session.report()


def test_nan_from_before_the_session_is_said_to_have_arrived(tmp_path):
    bad = X.clone()
    bad[1, 1] = float("nan")
    session = checked(lambda: bad.exp(), tmp_path)
    birth = session.coverage.first_nonfinite
    assert birth.arrived
    assert birth.place == (1, 1)
    assert "first NaN seen: it came with the inputs" in session.report()


def test_wrong_kernel_that_makes_nan_is_both(tmp_path):
    def make_wrong(original):
        def gelu(*args, **kwargs):
            out = original(*args, **kwargs)
            out[1, 2] = float("nan")
            return out

        return gelu

    with faults.planted("aten.gelu.default", make_wrong):
        session = checked(lambda: nn.functional.gelu(X), tmp_path)
    birth = session.coverage.first_nonfinite
    assert session.verdict is Verdict.FAIL
    assert (birth.verdict, birth.value, birth.place) == ("FAIL", "nan", (1, 2))


def test_only_the_first_is_kept(tmp_path):
    session = checked(lambda: [X.rsqrt(), X.log()], tmp_path)
    assert session.coverage.first_nonfinite.op == "aten.rsqrt.default"
    notes = [note for record in session.records for note in record.notes]
    assert sum(note.startswith("the first NaN or Inf of the run") for note in notes) == 1


def test_unchecked_calls_are_looked_at_with_blame(tmp_path):
    def step():
        X.rsqrt()

    assert checked(step, tmp_path, exclude="rsqrt").coverage.first_nonfinite is None
    session = checked(step, tmp_path, exclude="rsqrt", blame=True)
    assert session.coverage.first_nonfinite.op == "aten.rsqrt.default"


@pytest.mark.parametrize(
    ("name", "op", "verdict"),
    [
        ("fp16_eps_underflow", "aten.rsqrt.default", "FAIL"),
        ("fmod_vector_nan", None, "FAIL"),
        ("benign_nan_sign_bit", None, "PASS"),
    ],
)
def test_cases(name, op, verdict, tmp_path):
    session = run_checked(CASES[name], tmp_path)
    birth = session.coverage.first_nonfinite
    assert birth.verdict == verdict
    if op is not None:
        assert birth.op == op
        assert birth.op == session.failures[0].op
        assert "is 0 there" in birth.inputs[0]


def test_review_tells_it_from_the_log(tmp_path, capsys):
    session = checked(lambda: X.rsqrt(), tmp_path)
    assert opcheck.load_run(tmp_path).coverage == session.coverage
    assert main(["review", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "first NaN or Inf, made of finite inputs" in text
    assert "self (2, 3):float32 is 0 there" in text
    main(["review", str(tmp_path), "--markdown"])
    assert "The first NaN or Inf: `aten.rsqrt.default" in capsys.readouterr().out
