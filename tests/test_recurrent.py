"""LSTMs on the CPU are judged by the formula of a layer: whole, or some sequences of a batch."""

from __future__ import annotations

import pytest
import torch

import opcheck
from opcheck.records import Verdict
from tests.faults import planted, spoiled

OPS = ["mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"]
KINDS = [{}, {"bidirectional": True}, {"batch_first": True}, {"bias": False}, {"num_layers": 2}]


def step(dtype=torch.float32, **kinds):
    torch.manual_seed(0)
    layer = torch.nn.LSTM(6, 4, **kinds).to(dtype)
    x = torch.randn(7, 30, 6).to(dtype).requires_grad_()
    output, (h, c) = layer(x)
    (output.square().sum() + h.sum() + c.square().sum()).backward()


def records(tmp_path, max_numel, **kinds):
    with opcheck.check(
        log_dir=tmp_path, quiet=True, max_numel=max_numel, max_checks=None
    ) as session:
        step(**kinds)
    found = [item for item in session.records if item.op.split(".")[1] in OPS]
    assert all(item.error is None for item in found), found[0].error
    return found


@pytest.mark.parametrize("max_numel", [1_000_000, 500], ids=["whole", "sampled"])
@pytest.mark.parametrize("kinds", KINDS, ids=str)
def test_correct_layers_pass(tmp_path, kinds, max_numel):
    found = records(tmp_path, max_numel, **kinds)
    assert {item.op.split(".")[1] for item in found} == set(OPS)
    for record in found:
        assert record.verdict is Verdict.PASS, record.reason
        assert record.reference == "formula"
        assert (record.sample is not None) == (max_numel == 500)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("max_numel", [1_000_000, 500], ids=["whole", "sampled"])
def test_inference_which_has_no_workspace_passes(tmp_path, max_numel, dtype):
    layer = torch.nn.LSTM(6, 4, bidirectional=True).to(dtype)
    x = torch.randn(7, 30, 6).to(dtype)
    with (
        torch.no_grad(),
        opcheck.check(
            log_dir=tmp_path, quiet=True, max_numel=max_numel, max_checks=None
        ) as session,
    ):
        layer(x)
    found = [item for item in session.records if OPS[0] in item.op]
    assert len(found) == 2
    assert [item.reason for item in found if item.verdict is not Verdict.PASS] == []


@pytest.mark.parametrize("factor", [1.0, 2.0])
@pytest.mark.parametrize("kinds", KINDS, ids=str)
def test_gradients_in_float32_of_gates_in_bfloat16(tmp_path, kinds, factor):
    with (
        planted(f"aten.{OPS[1]}.default", spoiled(lambda y: y.mul_(factor), result=0)),
        torch.autocast("cpu", torch.bfloat16),
    ):
        found = records(tmp_path, 1_000_000, **kinds)
    backward = [item for item in found if "backward" in item.op]
    assert "float32" in backward[0].outputs[0]
    for record in backward:
        assert record.verdict is (Verdict.PASS if factor == 1.0 else Verdict.FAIL), record.reason


@pytest.mark.parametrize("max_numel", [1_000_000, 500], ids=["whole", "sampled"])
@pytest.mark.parametrize(
    ("op", "number"), [(OPS[0], 0), (OPS[0], 1), (OPS[0], 2), (OPS[1], 0), (OPS[1], 5)]
)
def test_faults_are_found(tmp_path, op, number, max_numel):
    with planted(f"aten.{op}.default", spoiled(lambda y: y.mul_(1.01), result=number)):
        found = records(tmp_path, max_numel)
    (record,) = [item for item in found if item.op == f"aten.{op}.default"]
    assert record.verdict is Verdict.FAIL


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_gradients_of_weights_are_judged_where_all_sequences_are(tmp_path, number):
    with planted(f"aten.{OPS[1]}.default", spoiled(lambda y: y.mul_(1.01), result=number)):
        found = records(tmp_path, 1_000_000)
    assert [item.op for item in found if item.verdict is Verdict.FAIL] == [f"aten.{OPS[1]}.default"]
