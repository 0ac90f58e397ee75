"""No override passes: whatever it breaks, whoever calls it, whenever it was registered."""

from __future__ import annotations

import pytest
import torch

import opcheck
from opcheck import Verdict
from tests.faults import planted

X = torch.linspace(-2, 2, 24).reshape(4, 6)


def checked(tmp_path):
    return opcheck.check(log_dir=tmp_path, quiet=True, max_checks=None)


def doubled_first(original):
    return lambda x: original(x.mul_(2))


def doubled_after(original):
    def exp(x):
        out = original(x)
        x.mul_(2)
        return out

    return exp


@pytest.mark.parametrize("make_wrong", [doubled_first, doubled_after])
def test_an_override_that_changes_its_input_fails(make_wrong, tmp_path):
    with planted("aten.exp.default", make_wrong), checked(tmp_path) as session:
        torch.exp(X.clone())
    assert [record.op for record in session.failures] == ["aten.exp.default"]


def test_an_override_that_gives_its_input_back_fails(tmp_path):
    with planted("aten.relu.default", lambda _: lambda x: x), checked(tmp_path) as session:
        torch.relu(X.abs())
    assert "shares memory" in session.failures[0].reason


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (lambda out: out.double(), "dtype"),
        (lambda out: out[:2], "shape"),
        (lambda out: out * float("nan"), "nan"),
    ],
    ids=["dtype", "shape", "nan"],
)
def test_an_override_with_another_kind_of_result_fails(result, says, tmp_path):
    with planted("aten.exp.default", lambda original: lambda x: result(original(x))):
        with checked(tmp_path) as session:
            torch.exp(X)
    assert says in session.failures[0].reason


@pytest.mark.parametrize("returned", ["argument", "result"])
def test_an_in_place_override_must_be_right_in_both_places(returned, tmp_path):
    def make_wrong(original):
        if returned == "argument":
            return lambda x: original(x.clone())  # right result, the argument as it was
        return lambda x: (original(x), x * 2)[1]

    with planted("aten.exp_.default", make_wrong), checked(tmp_path) as session:
        X.clone().exp_()
    assert [record.op for record in session.failures] == ["aten.exp_.default"]


def mul_off():
    def make_wrong(original):
        def mul(a, b):
            out = original(a, b)
            return torch.lerp(torch.zeros_like(out), out, 1.01) if out.is_floating_point() else out

        return mul

    return planted("aten.mul.Tensor", make_wrong)


def test_an_override_does_not_judge_the_op_that_calls_it(tmp_path):
    """`_foreach_mul` goes through `mul`; so would its reference."""
    with mul_off(), checked(tmp_path) as session:
        torch._foreach_mul([X], [X])
    assert [record.op for record in session.failures] == ["aten._foreach_mul.List"]


def test_overrides_come_and_go_within_a_session(tmp_path):
    with checked(tmp_path) as session:
        torch.exp(X)
        with planted("aten.exp.default", lambda original: lambda x: original(x) * 1.01):
            torch.exp(X)
        torch.exp(X)
        with planted("aten.sin.default", lambda original: lambda x: original(x.mul_(2))):
            torch.sin(X.clone())
    exps = [record.verdict for record in session.records if record.op == "aten.exp.default"]
    assert exps == [Verdict.PASS, Verdict.FAIL, Verdict.PASS]
    assert session.failures[-1].op == "aten.sin.default"
