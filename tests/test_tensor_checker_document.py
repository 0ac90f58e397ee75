"""The three steps of the document on pairs of real implementations."""

from __future__ import annotations

import copy
import math
import os
import re
import subprocess
import sys
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from modulecheck import (
    DumpMode,
    TensorChecker,
    assert_tensor_allclose,
    assert_tensor_equal,
    load_dump,
    module_register_tensor_checker,
    tensor_checker,
)
from opcheck import Verdict
from tests import models
from tests.compact_llama import NAMES, NO_COUNTERPART, CompactLlama
from tests.on_ranks import finished


@pytest.fixture
def checker() -> TensorChecker:
    return TensorChecker(quiet=True)


@pytest.fixture
def shared():
    """The checker of the document's scripts, as it was before."""
    tensor_checker.clear()
    yield tensor_checker
    tensor_checker.clear()


# ---- step 1: which module -----------------------------------------------------------------------


def gpt2(attention: str) -> tuple[nn.Module, torch.Tensor]:
    work = models.gpt2()
    work.model.eval().set_attn_implementation(attention)
    return work.model, work.batch[0]


def test_step_1_as_the_document_writes_it(shared, capsys):
    """GPT-2 with `eager` and `sdpa` attention: attention is where they part."""
    torch_model, torch_input = gpt2("eager")
    dtorch_model, dtorch_input = gpt2("sdpa")
    module_register_tensor_checker(torch_model, tensor_checker)
    module_register_tensor_checker(dtorch_model, tensor_checker)
    torch_model.eval()
    dtorch_model.eval()
    with torch.no_grad():
        torch_model(torch_input, use_cache=False)
        dtorch_model(dtorch_input, use_cache=False)
    assert tensor_checker.check_equal() is False
    lines = [line for line in capsys.readouterr().out.splitlines() if "TensorChecker: 2" in line]
    assert lines[0] == "TensorChecker: 2 tensors equal in checker_transformer.wte.weight"
    assert "TensorChecker: 2 tensors equal in checker_transformer.h.0.attn.c_attn" in lines
    assert "TensorChecker: 2 tensors not equal in checker_transformer.h.0.attn_0" in lines
    first = next(line for line in lines if "not equal" in line)
    assert first.endswith("checker_transformer.h.0.attn.c_proj_input_0")
    assert tensor_checker.result.origins == ["transformer.h.0.attn"]


def test_eager_and_sdpa_are_close(checker):
    """One returns its attention weights and takes a mask, the other does not: that is left out."""
    one_sided = ["*.attn_1", "*_input_attention_mask", "*.h.?_input_2"]
    for attention in ("eager", "sdpa"):
        model, token_ids = gpt2(attention)
        with module_register_tensor_checker(model, checker, side=attention, exclude=one_sided):
            model(token_ids, use_cache=False)
    assert checker.check_allclose(rtol=1e-4, atol=1e-5)
    assert checker.check("calibrated")
    assert checker.result.excluded == 6


class HandWrittenLayerNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.eps = 1e-5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(-1, keepdim=True)
        variance = (x - mean).square().mean(-1, keepdim=True)
        return (x - mean) * torch.rsqrt(variance + self.eps) * self.weight + self.bias


class UnbiasedLayerNorm(HandWrittenLayerNorm):
    """The usual mistake: the variance divided by n - 1."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True)
        return (x - mean) * torch.rsqrt(variance + self.eps) * self.weight + self.bias


@pytest.mark.parametrize(
    ("kind", "passes"), [(HandWrittenLayerNorm, True), (UnbiasedLayerNorm, False)]
)
def test_a_layer_norm_written_by_hand_against_torch_nn(checker, kind, passes):
    torch.manual_seed(0)
    theirs = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 16))
    ours = nn.Sequential(nn.Linear(16, 32), kind(32), nn.Linear(32, 16))
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(8, 16)
    with module_register_tensor_checker([theirs, ours], checker, side=["torch.nn", "ours"]):
        theirs(x)
        ours(x)
    assert checker.check_allclose(rtol=1e-4, atol=1e-5) is passes
    assert checker.check("calibrated") is passes
    assert checker.result.origins == ([] if passes else ["1"])


def llama_pair() -> tuple[nn.Module, CompactLlama, torch.Tensor]:
    work = models.llama()
    theirs = work.model.eval()
    ours = CompactLlama(theirs.config).eval()

    def name_of(name: str) -> str:
        for pattern, replacement in NAMES:
            name = re.sub(pattern, replacement, name)
        return name

    weights = theirs.state_dict()
    ours.load_state_dict({name: weights[name_of(name)] for name in ours.state_dict()})
    return theirs, ours, work.batch[0]


def run_llamas(checker: TensorChecker, ours: CompactLlama | None = None) -> None:
    theirs, own, token_ids = llama_pair()
    ours = own if ours is None else ours
    with (
        torch.no_grad(),
        module_register_tensor_checker(theirs, checker, side="hf", exclude=NO_COUNTERPART),
        module_register_tensor_checker(
            ours, checker, side="ours", rename=NAMES, exclude=NO_COUNTERPART, strict=True
        ),
    ):
        theirs(input_ids=token_ids, use_cache=False)
        ours(input_ids=token_ids)


def test_llama_against_a_compact_one_with_other_names(checker):
    run_llamas(checker)
    assert checker.check("calibrated")
    tags = [record.tag for record in checker.result.records]
    assert "checker_model.layers.1.self_attn.q_proj" in tags
    assert "checker_<root>_logits" in tags


def test_a_fault_in_the_compact_llama_is_found_where_it_is(checker):
    _, ours, _ = llama_pair()
    ours.blocks[1].attn.theta = 9_000.0
    run_llamas(checker, ours)
    assert not checker.check("calibrated")
    assert checker.result.origins == ["model.layers.1.self_attn"]


@pytest.mark.parametrize("family", ["gpt2", "llama", "minilm"])
def test_float32_against_bf16_is_close_when_calibrated(checker, family):
    work = getattr(models, family)(**({"dropout": 0.0} if family == "minilm" else {}))
    reference = work.model.eval()
    narrow = copy.deepcopy(reference).bfloat16()
    ids = work.batch[0]
    exclude = ["*mask*", "transformer.h.?_input_2", "*encoder.layer.?_input_1", "*_input_[12]"]
    options: dict[str, Any] = {} if family == "minilm" else {"use_cache": False}
    with (
        torch.no_grad(),
        module_register_tensor_checker([reference, narrow], checker, exclude=exclude),
    ):
        reference(ids, **options)
        narrow(ids, **options)
    assert checker.check("calibrated"), checker.result
    assert not checker.check_allclose()
    assert "dtype bfloat16 against float32" in checker.result.first_divergence.reason


def test_a_bf16_model_with_one_weight_scaled_is_not_close(checker):
    work = models.gpt2()
    reference = work.model.eval()
    narrow = copy.deepcopy(reference).bfloat16()
    with torch.no_grad():
        narrow.transformer.h[1].mlp.c_proj.weight.mul_(1.02)
    with (
        torch.no_grad(),
        module_register_tensor_checker([reference, narrow], checker, exclude=["*_input_[12]"]),
    ):
        for model in (reference, narrow):
            model(work.batch[0], use_cache=False)
    assert not checker.check("calibrated")
    assert checker.result.origins[0] == "transformer.h.1.mlp.c_proj"


@pytest.mark.parametrize("shift", [0, 1], ids=["right", "positions off by one"])
def test_prefill_against_step_by_step_with_a_cache(checker, shift):
    """Train mode against inference mode of one model: the logits of each position."""
    work = models.llama()
    model, token_ids = work.model, work.batch[0]
    model.train()  # no dropout in this model
    checker.register_tensor(
        "logits", list(model(token_ids, use_cache=False).logits.unbind(1)), side="prefill"
    )
    model.eval()
    cache = import_module("transformers").DynamicCache(config=model.config)
    is_new = "cache" in signature(model.forward).parameters
    cached = {"cache" if is_new else "past_key_values": cache}
    with torch.inference_mode():
        for place in range(token_ids.shape[1]):
            positions = torch.full((token_ids.shape[0], 1), place + (shift if place > 3 else 0))
            out = model(
                token_ids[:, place : place + 1],
                use_cache=True,
                position_ids=positions,
                **cached,
            )
            checker.register_tensor(f"logits_{place}", out.logits[:, 0], side="steps")
    assert checker.check("calibrated") is not bool(shift)
    if shift:
        assert checker.result.first_divergence.tag == "logits_4"


# ---- step 2: which operator ---------------------------------------------------------------------


class MyModule(nn.Module):
    """The module of the document, `x2` with or without its factor."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tensor_checker.register_tensor("my_module.silu_input", x)
        x1 = functional.silu(x)
        tensor_checker.register_tensor("my_module.x1", x1)
        x2 = x1 * self.factor
        tensor_checker.register_tensor("my_module.x2", x2)
        x3 = functional.layer_norm(x2, x2.shape[-1:], eps=1e-2)
        tensor_checker.register_tensor("my_module.x3", x3)
        return x3


def test_step_2_finds_the_operator(shared, capsys):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    MyModule(0.5)(x)
    MyModule(1.0)(x)
    assert not tensor_checker.check_equal()
    assert capsys.readouterr().out.splitlines()[:4] == [
        "TensorChecker: 2 tensors equal in my_module.silu_input",
        "TensorChecker: 2 tensors equal in my_module.x1",
        "TensorChecker: 2 tensors not equal in my_module.x2",
        "TensorChecker: 2 tensors not equal in my_module.x3",
    ]
    assert tensor_checker.result.first_divergence.tag == "my_module.x2"


def test_step_2_narrows_an_attention_down_to_its_scale(checker):
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 4, 6, 8).unbind(0)

    def attention(side: str, scale: float) -> torch.Tensor:
        scores = query @ key.transpose(-2, -1) * scale
        checker.register_tensor("attention.scores", scores, side=side)
        weights = scores.softmax(-1)
        checker.register_tensor("attention.weights", weights, side=side)
        mixed = weights @ value
        checker.register_tensor("attention.mixed", mixed, side=side)
        return mixed

    attention("reference", 1 / math.sqrt(8))
    attention("fused", 1.0)
    assert not checker.check_allclose()
    assert checker.result.first_divergence.tag == "attention.scores"
    checker.clear()
    fixed = attention("reference", 1 / math.sqrt(8))
    checker.register_tensor("attention.mixed", fixed, side="fused")
    theirs = functional.scaled_dot_product_attention(query, key, value)
    assert_tensor_allclose(fixed, theirs, rtol=1e-4, atol=1e-6)


# ---- step 3: the cause, and the check again -----------------------------------------------------


def test_step_3_the_fixed_operator_is_equal(shared, tmp_path):
    """Case A: the formula differs. Align it, check again, keep the check as a test."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))

    def gelu(approximate: str) -> torch.Tensor:
        return functional.gelu(x, approximate=approximate)

    tensor_checker.register_tensor("gelu", gelu("none"))
    tensor_checker.register_tensor("gelu", gelu("tanh"))
    assert not tensor_checker.check_equal(
        dump_mode=DumpMode.NOT_EQUAL, dump_path=str(tmp_path / "debug")
    )
    dumped = load_dump(tmp_path / "debug")["gelu"]
    assert_tensor_equal(dumped, [gelu("none"), gelu("tanh")])
    tensor_checker.clear()
    for _ in range(2):
        tensor_checker.register_tensor("gelu", gelu("none"))
    assert tensor_checker.check_equal()
    assert_tensor_equal(gelu("none"), gelu("none"))


def test_case_b_a_layout_that_is_misread_shows_as_values(checker):
    """Case B: the same op, but an input whose strides were ignored."""
    x = torch.arange(12.0).view(3, 4)
    checker.register_tensor("x.t()", x.t(), side="torch")
    checker.register_tensor("x.t()", torch.from_numpy(x.numpy()).view(4, 3), side="port")
    assert not checker.check_equal()
    assert checker.result.records[0].first_index == (0, 1)


# ---- several processes --------------------------------------------------------------------------

TENSOR_PARALLEL = """
import os, sys
import torch
from torch import nn
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from modulecheck import TensorChecker, module_register_tensor_checker

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


torch.manual_seed(0)
model, x = MLP(), torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
plan = {
    "up": ColwiseParallel(use_local_output=False),
    "down": RowwiseParallel(),
}
checker = TensorChecker(quiet=True)
if sys.argv[3] == "single":
    run = model
else:
    run = parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
with torch.no_grad(), module_register_tensor_checker(run, checker):
    run(x)
if rank == 0:
    checker.save(f"{folder}/{sys.argv[3]}.npz")
dist.destroy_process_group()
"""


def run_ranks(folder: Path, kind: str) -> None:
    script = folder / "ranks.py"
    script.write_text(TENSOR_PARALLEL)
    (folder / "store").unlink(missing_ok=True)
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(folder), kind],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    said = finished(ranks)
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)


@pytest.mark.slow
def test_a_tensor_parallel_variant_is_close_and_not_equal(tmp_path):
    for kind in ("single", "parallel"):
        run_ranks(tmp_path, kind)
    checker = TensorChecker.load(tmp_path / "single.npz", tmp_path / "parallel.npz", quiet=True)
    assert checker.check_allclose(rtol=1e-4, atol=1e-5), checker.result
    assert checker.result.find("checker_up.weight").verdict is Verdict.PASS
    assert checker.check("calibrated")
    assert not checker.check_equal()
    assert checker.result.origins == ["down"]
