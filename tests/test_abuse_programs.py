"""Programs unlike the usual training step: nobody is accused, and no fault is let by."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import opcheck
from opcheck import Verdict
from opcheck.session import Session
from tests.faults import planted, spoiled

Program = Callable[[], Any]


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def checked(program: Program, log_dir: Path, **options: Any) -> Session:
    options = {"max_checks": None, **options}
    with opcheck.check(log_dir=log_dir, quiet=True, **options) as session:
        program()
    return session


# ---- dtypes that meet ---------------------------------------------------------------------------

X, Y = normal(32, 64), normal(32, 64, dtype=torch.bfloat16, seed=1)
MEETING: dict[str, tuple[str, Program]] = {
    "16 bits added to float32": ("aten.add.Tensor", lambda: X + Y),
    "in place": ("aten.mul_.Tensor", lambda: X.clone().mul_(Y)),
    "in lists": ("aten._foreach_mul_.List", lambda: torch._foreach_mul_([X.clone()], [Y])),
    "float32 and float64": ("aten.mul.Tensor", lambda: X * X.double()),
    "summed in float32": ("aten.sum.dim_IntList", lambda: Y.sum(1, dtype=torch.float32)),
    "a norm in float32": (
        "aten.linalg_vector_norm.default",
        lambda: torch.linalg.vector_norm(Y, dim=1, dtype=torch.float32),
    ),
}


def a_little_too_large(result: Tensor) -> None:
    numbers = result.numpy()  # no op of torch, which might be the one that is planted
    numbers *= 1.001


@pytest.mark.parametrize("large", [False, True], ids=["whole", "in part"])
@pytest.mark.parametrize("name", MEETING)
def test_a_small_error_in_the_wider_dtype_is_found(name: str, large: bool, tmp_path: Path) -> None:
    op, program = MEETING[name]
    options = {"max_numel": 1000} if large else {}
    clean = checked(program, tmp_path, **options)
    assert clean.verdict is Verdict.PASS, clean.report()
    assert op in {record.op for record in clean.records}

    def make_wrong(original: Any) -> Any:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            out = original(*args, **kwargs)
            a_little_too_large(args[0][0] if out is None else out)
            return out

        return kernel

    with planted(op, make_wrong):
        session = checked(program, tmp_path, **options)
    assert [record.op for record in session.failures] == [op], session.report()


HALVES = normal(20_000, dtype=torch.bfloat16)
POINT_THREE = torch.tensor(0.3)
"""As a number it would be rounded to the dtype of the tensors beside it, and so is it."""
BESIDE_A_NUMBER: dict[str, Program] = {
    "compared": lambda: HALVES > POINT_THREE,
    "modulo": lambda: HALVES.fmod(POINT_THREE),
    "remainder": lambda: POINT_THREE.remainder(HALVES),
    "lerp": lambda: torch.lerp(HALVES, HALVES.flip(0), POINT_THREE),
    "added": lambda: torch.add(HALVES, POINT_THREE, alpha=0.7),
    "divided": lambda: HALVES // POINT_THREE,
    "in lists": lambda: torch._foreach_add([HALVES], POINT_THREE),
    "of float64": lambda: HALVES.float().fmod(POINT_THREE.double() / 3),
}


@pytest.mark.parametrize("large", [False, True], ids=["whole", "in part"])
@pytest.mark.parametrize("name", BESIDE_A_NUMBER)
def test_a_tensor_without_dims_is_a_number(name: str, large: bool, tmp_path: Path) -> None:
    options = {"max_numel": 1000} if large else {}
    session = checked(BESIDE_A_NUMBER[name], tmp_path, **options)
    assert session.verdict is Verdict.PASS, session.report()


# ---- a fault of torch ---------------------------------------------------------------------------


def sgd(*, fused: bool) -> Tensor:
    parameter = torch.nn.Parameter(normal(64, dtype=torch.bfloat16))
    parameter.grad = normal(64, dtype=torch.bfloat16, seed=1)
    torch.optim.SGD([parameter], lr=0.1, fused=fused).step()
    return parameter.detach()


def test_a_wrong_kernel_of_torch_itself_is_found(tmp_path: Path) -> None:
    """Fused SGD of 16-bit parameters, in the versions of torch that leave most of them alone."""
    is_wrong = not torch.allclose(sgd(fused=True), sgd(fused=False), atol=0.02)
    session = checked(lambda: sgd(fused=True), tmp_path)
    failed = [record.op for record in session.failures]
    assert failed == (["aten._fused_sgd_.default"] if is_wrong else [])


# ---- correct programs ---------------------------------------------------------------------------


def a_few_tokens() -> None:
    """One query for each head, which leaves 64 numbers, some of them small differences."""
    for seed in (121, 268, 276):
        sizes = ((1, seed), (8, 1000 + seed), (8, 2000 + seed))
        qkv = [normal(2, 4, n, 8, dtype=torch.bfloat16, seed=number) for n, number in sizes]
        torch.nn.functional.scaled_dot_product_attention(*qkv)


def encoder_without_gradients(dtype: torch.dtype) -> None:
    """The fast path, a layer in one op, as `nn.TransformerEncoder` and its attention take it."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dtype=dtype).eval()
    is_padding = torch.arange(5) > torch.tensor([[2], [4]])
    with torch.no_grad():
        for seed in range(8):
            x = normal(2, 5, 16, dtype=dtype, seed=seed)
            layer(x, src_key_padding_mask=is_padding)
            layer.self_attn(x, x, x, key_padding_mask=is_padding, need_weights=False)


def weight_norm_in_half() -> None:
    linear = torch.nn.Linear(8, 16, dtype=torch.float16)
    torch.nn.utils.parametrizations.weight_norm(linear)(normal(4, 8, dtype=torch.float16))


def quantization_aware() -> None:
    x = normal(10, 100)
    scale = torch.linspace(0.01, 0.5, 10)
    torch.fake_quantize_per_channel_affine(x, scale, torch.zeros(10), 0, -128, 127)
    torch.fake_quantize_per_tensor_affine(x, 0.1, 3, -128, 127)
    observer = torch.ao.quantization.fake_quantize.FusedMovingAvgObsFakeQuantize()
    observer(x)


def quantized() -> None:
    linear = torch.nn.Sequential(torch.nn.Linear(8, 4))
    with torch.no_grad():
        torch.ao.quantization.quantize_dynamic(linear, {torch.nn.Linear})(normal(3, 8))


CORRECT: dict[str, Program] = {
    "attention of a few tokens": a_few_tokens,
    "encoder in bfloat16": lambda: encoder_without_gradients(torch.bfloat16),
    "encoder in float16": lambda: encoder_without_gradients(torch.float16),
    "weight norm": weight_norm_in_half,
    "quantization-aware training": quantization_aware,
}


@pytest.mark.filterwarnings("ignore")  # of quantization, which torch is about to move
@pytest.mark.parametrize("name", CORRECT)
def test_a_correct_program_passes(name: str, tmp_path: Path) -> None:
    session = checked(CORRECT[name], tmp_path)
    assert session.verdict is Verdict.PASS, session.report()
    assert session.coverage.checked > 0


@pytest.mark.filterwarnings("ignore")  # as above
def test_kernels_that_take_one_dtype_alone_are_counted_as_such(tmp_path: Path) -> None:
    session = checked(quantized, tmp_path)
    assert session.coverage.errors == 0, session.report()
    unchecked = {item.op: item.reason for item in session.coverage.unchecked_signatures}
    assert unchecked["quantized.linear_dynamic.default"] == "reference_not_available"


def test_a_wrong_fake_quantization_is_found(tmp_path: Path) -> None:
    op = "aten.fake_quantize_per_channel_affine_cachemask.default"
    with planted(op, spoiled(a_little_too_large)):
        session = checked(quantization_aware, tmp_path)
    assert [record.op for record in session.failures] == [op]


def test_a_library_may_name_its_ops_as_it_likes(tmp_path: Path) -> None:
    library = torch.library.Library("opcheck_names", "DEF")
    names = ("resize_bilinear", "empty_gelu", "copy", "size")
    try:
        for name in names:
            library.define(f"{name}(Tensor x) -> Tensor")
            library.impl(name, lambda x: x * 2.0, "CPU")
        session = checked(
            lambda: [getattr(torch.ops.opcheck_names, name)(X) for name in names], tmp_path
        )
    finally:
        library._destroy()
    assert len(session.coverage.unchecked_signatures) == len(names)
    assert set(session.coverage.skipped) == {"no_independent_reference"}


def test_a_graph_inside_of_an_op_is_said_to_be_unseen(tmp_path: Path) -> None:
    session = checked(lambda: torch.cond(X.sum() > 0, torch.sin, torch.cos, (X,)), tmp_path)
    assert session.verdict is Verdict.INCONCLUSIVE
    assert "1 compiled regions or higher-order ops ran" in session.report()


@pytest.mark.filterwarnings("ignore")  # torch would rather that nobody scripts
@pytest.mark.parametrize("scripted", [True, False], ids=["scripted", "traced"])
def test_a_torchscript_module_trains(scripted: bool, tmp_path: Path) -> None:
    plain = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))
    model = torch.jit.script(plain) if scripted else torch.jit.trace(plain, normal(3, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step() -> None:
        model(normal(3, 8)).square().mean().backward()
        optimizer.step()

    with opcheck.check(model, log_dir=tmp_path, quiet=True) as session:
        step()
        step()
    assert session.verdict is Verdict.PASS, session.report()
    in_optimizer = {item.module for item in session.records if item.phase == "optimizer"}
    assert in_optimizer == {"0", "2"}


def expert_without_tokens() -> None:
    linear = torch.nn.Linear(40, 40)
    linear(normal(0, 40).requires_grad_()).sum().backward()
    linear(normal(3, 40)).sum().backward()


def detector_without_boxes() -> None:
    for options in ({}, {"groups": 8}):
        head = torch.nn.Conv2d(8, 16, 3, **options)
        head(normal(0, 8, 6, 6).requires_grad_()).sum().backward()
    torch.nn.ConvTranspose2d(8, 16, 3)(normal(0, 8, 6, 6).requires_grad_()).sum().backward()
    head(normal(1, 8, 6, 6))


@pytest.mark.parametrize("program", [expert_without_tokens, detector_without_boxes])
def test_an_empty_batch_through_large_weights_is_no_crash(program: Program, tmp_path: Path) -> None:
    session = checked(program, tmp_path, max_numel=50)
    assert session.verdict is Verdict.PASS, session.report()
    assert session.coverage.skipped["nothing_to_compare"] > 0
