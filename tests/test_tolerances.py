"""The constants: that they say what the dtypes are, and that the tables name what exists."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from opcheck import tolerances
from opcheck.allowances import ALLOWANCES, Allowance, find_allowance
from opcheck.tolerances import (
    EXACT_BESIDE_BASELINE_ONLY,
    EXACT_OPS,
    OP_CLASS,
    documented_tolerances,
    length_factor,
    op_class,
)
from opcheck.verdicts import Rule, judge_golden, round_to


def exists(op: str) -> bool:
    """`op` is the base name or an overload of an aten op, with or without in-place `_`."""
    base, _, overload = op.removeprefix("aten.").partition(".")
    packets = [getattr(torch.ops.aten, name, None) for name in (base, f"{base}_")]
    return any(
        packet is not None and (not overload or overload in packet.overloads())
        for packet in packets
    )


@pytest.mark.parametrize("dtype", tolerances.EPS)
def test_dtype_constants_are_those_of_torch(dtype: str) -> None:
    info = torch.finfo(getattr(torch, dtype))
    assert tolerances.EPS[dtype] == info.eps
    assert tolerances.SMALLEST_NORMAL[dtype] == info.smallest_normal
    limit = tolerances.ROUNDS_TO_INF[dtype]
    if math.isfinite(limit):
        below = math.nextafter(limit, 0.0) if dtype == "float32" else limit * (1 - 2.0**-20)
        rounded = torch.tensor([limit, below], dtype=torch.float64).to(getattr(torch, dtype))
        assert rounded.isinf().tolist() == [True, False]


def test_documented_tolerances_are_those_of_the_documents() -> None:
    assert (tolerances.OP_RTOL, tolerances.OP_ATOL, tolerances.HALF_TOLERANCE) == (1e-4, 1e-5, 1e-2)
    assert (tolerances.MODULE_ATOL, tolerances.MODULE_RTOL) == (1e-4, 1e-3)


def test_documented_tolerances_are_widened_for_half_inputs() -> None:
    assert documented_tolerances() == (1e-4, 1e-5)
    assert documented_tolerances(half=True) == (1e-2, 1e-2)
    assert documented_tolerances(rtol=0.1, atol=1e-5, half=True) == (0.1, 1e-2)


def test_limits_grow_only_with_long_sums() -> None:
    assert length_factor(0) == length_factor(1) == length_factor(4096) == 1.0
    assert length_factor(4 * 4096) == 2.0


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("mm", "mm"),
        ("convolution_backward", "mm"),
        ("native_layer_norm_backward", "mm"),
        ("_scaled_dot_product_flash_attention_for_cpu_backward", "mm"),
        ("index_add_", "atom"),
        ("_index_put_impl_", "atom"),
        ("scatter_reduce", "atom"),
        ("cumsum_", "scan"),
        ("native_layer_norm", "std"),
        ("gelu", "std"),
        ("no_such_op", "std"),
    ],
)
def test_op_class(op: str, expected: str) -> None:
    assert op_class(op) == expected


def test_tables_name_ops_that_exist() -> None:
    named = {*OP_CLASS, *ALLOWANCES, *EXACT_OPS}
    assert sorted(name for name in named if not exists(name)) == []
    assert EXACT_OPS > EXACT_BESIDE_BASELINE_ONLY


def all_allowances() -> list[tuple[str, Allowance]]:
    return [
        (name, item)
        for name, items in ALLOWANCES.items()
        for item in (items if isinstance(items, tuple) else (items,))
    ]


def test_every_allowance_has_its_evidence_and_does_something() -> None:
    for name, item in all_allowances():
        assert len(item.evidence) > 20, name
        does = (item.limit_factor, item.shift_factor, item.test_rms) != (1.0, 1.0, True)
        assert does or item.extra or item.bound or item.nonfinite_where, name


def test_allowances_apply_where_they_were_measured() -> None:
    assert find_allowance("gelu_", dtype="float32") is ALLOWANCES["gelu"]
    assert find_allowance("_log_softmax", dtype="bfloat16") is not None
    assert find_allowance("_log_softmax", dtype="float32") is None
    assert find_allowance("div_.Tensor_mode", dtype="float16") is not None
    assert find_allowance("div.Tensor", dtype="float16") is None
    assert find_allowance("native_layer_norm_backward", dtype="bfloat16", output=0) is None
    assert find_allowance("native_layer_norm_backward", dtype="bfloat16", output=1) is not None
    summed = "native_layer_norm_backward"
    assert find_allowance(summed, dtype="float32", output=2, half_inputs=True) is not None
    assert find_allowance(summed, dtype="float32", output=2) is None
    flash = "_scaled_dot_product_flash_attention_for_cpu"
    assert find_allowance(flash, dtype="float32", output=1, half_inputs=True) is not None
    assert find_allowance(flash, dtype="float32", output=1) is None


def judged(
    op: str, actual: Any, golden: Any, inputs: list[Any], dtype: str, *, output: int = 0
) -> list[bool]:
    """[passes the plain rule, passes with the op's allowance]."""
    plain = Rule(dtype=dtype)
    allowance = find_allowance(op, dtype=dtype, output=output)
    assert allowance is not None
    rules = plain, plain.with_allowance(allowance, inputs=inputs, golden=golden)
    return [judge_golden(actual, golden, perturbed=None, rule=rule).passed for rule in rules]


def half(*shape: int, scale: float = 1.0) -> Any:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * scale
    return values.to(torch.bfloat16)


def test_a_correct_log_softmax_passes_only_with_its_allowance() -> None:
    x = half(500, 5, scale=9.0)
    actual = torch.log_softmax(x, -1).float().numpy()
    golden = torch.log_softmax(x.double(), -1).numpy()
    assert judged("_log_softmax", actual, golden, [x.double().numpy()], "bfloat16") == [False, True]
    wrong = round_to(golden * 1.1, "bfloat16")
    assert judged("_log_softmax", wrong, golden, [x.double().numpy()], "bfloat16") == [False, False]


def test_a_correct_integer_quotient_passes_only_with_its_allowance() -> None:
    dividend, divisor = half(40_000, scale=20.0), half(80_000)[40_000:]
    actual = torch.div(dividend, divisor, rounding_mode="trunc").float().numpy()
    inputs = [dividend.double().numpy(), divisor.double().numpy()]
    golden = np.trunc(inputs[0] / inputs[1])
    rounded_up = (actual != golden) & (np.abs(golden) < 64)
    assert np.count_nonzero(rounded_up) > 100
    assert judged("div.Tensor_mode", actual, golden, inputs, "bfloat16") == [False, True]
    wrong = actual + np.sign(actual) * rounded_up
    assert judged("div.Tensor_mode", wrong, golden, inputs, "bfloat16") == [False, False]


def test_layer_norm_over_one_element_passes_only_with_its_allowance() -> None:
    x = half(1000, 1, scale=9.0)
    actual = torch.nn.functional.layer_norm(x, [1]).float().numpy()
    golden, inputs = np.zeros((1000, 1)), [x.double().numpy(), None, None]
    assert judged("native_layer_norm", actual, golden, inputs, "bfloat16") == [False, True]
    wrong = actual + np.float32(0.01)
    assert judged("native_layer_norm", wrong, golden, inputs, "bfloat16") == [False, False]


def test_a_gelu_tail_passes_only_with_its_allowance() -> None:
    x = np.full(100, -5.0)
    golden = x * 0.5 * math.erfc(5 / math.sqrt(2))
    actual = (golden + 2.5 * 2.0**-23 * 5).astype(np.float32)
    assert judged("gelu", actual, golden, [x], "float32") == [False, True]
    assert judged("gelu", actual * np.float32(4), golden, [x], "float32") == [False, True]
    assert judged("gelu", actual * np.float32(100), golden, [x], "float32") == [False, False]


def test_running_statistics_in_16_bit_pass_only_with_their_allowance() -> None:
    """All channels start from one value, so that all round the same way."""
    spread = torch.linspace(0.1, 1.5, 256, dtype=torch.bfloat16).reshape(1, 256, 1, 1)
    x = half(8, 256, 4, 4) * spread
    weight, bias, mean = torch.ones(256), torch.zeros(256), torch.zeros(256)
    state = [item.bfloat16() for item in (weight, bias, mean, torch.full((256,), 0.95))]
    variance = state[3]
    golden = 0.9 * variance.double() + 0.1 * x.double().var((0, 2, 3))
    torch.ops.aten.native_batch_norm(x, *state, True, 0.1, 1e-5)
    actual = variance.float().numpy()
    inputs = [x.double().numpy()]
    found = judged("native_batch_norm", actual, golden.numpy(), inputs, "bfloat16", output=4)
    assert found == [False, True]
    wrong = actual * np.float32(1 + 2.0**-5)
    found = judged("native_batch_norm", wrong, golden.numpy(), inputs, "bfloat16", output=4)
    assert found == [False, False]


def test_nothing_here_needs_torch() -> None:
    code = "import sys, opcheck.verdicts; sys.exit('torch' in sys.modules)"
    root = str(tolerances.__file__).rsplit("/", 2)[0]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
