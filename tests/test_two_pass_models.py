"""Two-pass on models of every kind: correct ones pass, a planted fault is found in its block."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.compiled import (
    DYNAMO_WARNS,
    INDUCTOR,
    KINDS,
    Kind,
    add_to_one,
    assert_pass,
    block_class,
    mark,
    model_output_block,
    real_model,
    stack,
    wrong_backend,
)
from tests.two_pass import two_pass

pytestmark = [DYNAMO_WARNS, pytest.mark.usefixtures("fresh_dynamo")]
BACKENDS = ["aot_eager", INDUCTOR]


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_every_kind_pass(kind: str) -> None:
    result = two_pass(stack(kind), block_class(kind))
    assert_pass(result)
    assert len(result.diffs) == 3
    for diff in result.diffs:
        assert diff.fwd_output
        assert diff.grad_input
        assert diff.grad_output
        assert diff.param_grads
    assert result.loss_diff == 0.0


# one model of these each: they share most of what they compile
@pytest.mark.parametrize("backend", [INDUCTOR])
@pytest.mark.parametrize("kind", ["dropout", "batch_norm", "twice", "tuple"])
def test_blocks_pass_under_inductor(kind: str, backend: str) -> None:
    result = two_pass(stack(kind), block_class(kind), backend)
    assert_pass(result)
    assert result.loss_diff < 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
def test_model_output_blocks_pass(backend: str) -> None:
    block = model_output_block()
    kind = Kind(block, lambda module, x: module(x).last_hidden_state)
    assert_pass(two_pass(stack(kind), block, backend))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_other_dtypes_pass(dtype: torch.dtype, backend: str) -> None:
    assert_pass(two_pass(stack(dtype=dtype), block_class("plain"), backend))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["gpt2", "resnet"])
def test_small_real_models_pass(name: str, backend: str) -> None:
    build, block = real_model(name)
    assert_pass(two_pass(build(), block, backend))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen2", "bert", "minilm"])
def test_real_models_pass(name: str) -> None:
    build, block = real_model(name)
    assert_pass(two_pass(build(), block, "inductor"))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_real_models_pass_under_autocast(name: str, backend: str) -> None:
    build, block = real_model(name)
    assert_pass(two_pass(build().with_autocast(torch.bfloat16), block, backend))


@pytest.mark.slow
def test_resnet_under_autocast_passes() -> None:
    build, block = real_model("resnet")
    assert_pass(two_pass(build().with_autocast(torch.bfloat16), block, "inductor"))


# ---- planted faults -----------------------------------------------------------------------------

FAULTS: dict[str, Any] = {
    "forward": {"forward": add_to_one(1e-2)},
    "forward x1.001": {"forward": lambda out: out * 1.001},
    "backward": {"backward": lambda grad: grad * 2},
    "parameter gradient": {"backward": {0: add_to_one(1e-2)}},
    "nan": {"forward": add_to_one(float("nan"))},
    "zeros": {"forward": torch.zeros_like},
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("kind", "place"), [("plain", 2), ("twice", 1)])
def test_fault_is_found_in_exactly_its_block(fault: str, kind: str, place: int) -> None:
    """In the last block, and in one that is called twice."""
    workload = stack(kind)
    where = mark(workload.model, place)
    result = two_pass(workload, block_class(kind), wrong_backend(**FAULTS[fault]))
    assert str(result.verdict) == "FAIL"
    assert {name for name, _ in result.suspects} == {where}
    in_forward = "forward" in FAULTS[fault]
    assert result.suspects[0] == (where, "forward" if in_forward else "backward")
    if in_forward:
        assert result.loss_diff > 0 or result.loss_compiled != result.loss_compiled
    else:
        assert result.loss_diff == 0.0
