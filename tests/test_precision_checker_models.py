"""Correct compiled models pass, with rows compared, and train exactly as without the checker."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.compiled import (
    DYNAMO_WARNS,
    INDUCTOR,
    KINDS,
    Kind,
    assert_clean,
    block_class,
    model_output_block,
    needs_compiler,
    real_model,
    stack,
)

pytestmark = DYNAMO_WARNS
BACKENDS = ["aot_eager", INDUCTOR]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_every_kind_pass(kind: str, backend: Any) -> None:
    result = assert_clean(lambda: stack(kind), block_class(kind), backend)
    assert len(result.diffs) == 3
    for diff in result.diffs:
        assert diff.fwd_output
        assert diff.grad_input
        assert diff.param_grads


@pytest.mark.parametrize("backend", BACKENDS)
def test_model_output_blocks_pass(backend: Any) -> None:
    block = model_output_block()
    kind = Kind(block, lambda module, x: module(x).last_hidden_state)
    assert_clean(lambda: stack(kind), block, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_other_dtypes_pass(dtype: torch.dtype, backend: Any) -> None:
    assert_clean(lambda: stack("plain", dtype=dtype), block_class("plain"), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["gpt2", "resnet"])
def test_small_real_models_pass(name: str, backend: Any) -> None:
    build, block = real_model(name)
    assert_clean(build, block, backend)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["llama", "qwen2", "bert", "minilm"])
def test_real_models_pass(name: str, backend: Any) -> None:
    build, block = real_model(name)
    assert_clean(build, block, backend)


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("dtype", [torch.bfloat16], ids=str)
def test_real_models_pass_under_autocast(name: str, dtype: torch.dtype) -> None:
    build, block = real_model(name)
    assert_clean(lambda: build().with_autocast(dtype), block, "inductor")


@pytest.mark.slow
@needs_compiler
def test_resnet18_with_a_kink_passes() -> None:
    build, block = real_model("resnet18")
    assert_clean(build, block, "inductor")
