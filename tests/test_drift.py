"""A bias too small for one 16-bit call shows over many; what correct kernels do does not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import opcheck
from opcheck.drift import MIN_CALLS, MIN_MODULE_CALLS, Drift, shift_of
from opcheck.records import Verdict
from tests.faults import planted


def slightly_large(original):
    """One part in a thousand, before the result is rounded."""

    def kernel(*args, **kwargs):
        wide = [item.float() if isinstance(item, torch.Tensor) else item for item in args]
        out = original(*wide, **kwargs)
        return out.add(out, alpha=0.001).to(args[0].dtype)

    return kernel


def exact(original):
    return lambda *args, **kwargs: original(*args, **kwargs)


def in_halves(original):
    """Split-K with partial sums in 16 bit."""

    def kernel(a, b):
        middle = a.shape[1] // 2
        left = original(a[:, :middle].contiguous(), b[:middle])
        return left + original(a[:, middle:].contiguous(), b[middle:].contiguous())

    return kernel


def transposed(original):
    return lambda a, b: original(b.t(), a.t()).t()


def checked(tmp_path, step, calls, **options):
    generator = torch.Generator().manual_seed(0)
    with opcheck.check(log_dir=tmp_path, quiet=True, max_checks=None, **options) as session:
        for _ in range(calls):
            step(generator)
    assert session.coverage.adds_up
    return session


def multiply(generator):
    a = torch.randn(48, 96, generator=generator).bfloat16()
    return a @ torch.randn(96, 40, generator=generator).bfloat16()


def activate(generator):
    return F.silu(torch.randn(64, 64, generator=generator).bfloat16())


@pytest.mark.parametrize(("op", "step"), [("mm", multiply), ("silu", activate)])
@pytest.mark.parametrize("max_numel", [1_000_000, 1500], ids=["whole", "sampled"])
def test_one_part_in_a_thousand_shows_over_many_calls(tmp_path, op, step, max_numel):
    with planted(f"aten.{op}.default", slightly_large):
        few = checked(tmp_path, step, 20, max_numel=max_numel)
        many = checked(tmp_path, step, MIN_MODULE_CALLS + 20, max_numel=max_numel)
    assert few.failures == []
    (failure,) = many.failures
    assert failure.op == f"aten.{op}.default"
    assert failure.reason.startswith(f"over {MIN_MODULE_CALLS} calls of aten.{op}.default in bfl")
    assert failure.metrics.mean_shift > 0.1
    assert many.verdict is Verdict.FAIL


@pytest.mark.parametrize("variant", [exact, in_halves, transposed])
def test_correct_variants_never_show(tmp_path, variant):
    with planted("aten.mm.default", variant):
        session = checked(tmp_path, multiply, MIN_CALLS + 20)
    assert session.failures == []


def test_calls_of_many_modules_are_evidence_together(tmp_path):
    layers = nn.Sequential(*[nn.Linear(64, 64) for _ in range(10)]).bfloat16()
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    with planted("aten.addmm.default", slightly_large), torch.no_grad():
        session = checked(tmp_path, lambda _: layers(x), MIN_CALLS // 10)
    (failure,) = session.failures
    assert f"over {MIN_CALLS} calls" in failure.reason


def test_the_documented_criterion_knows_no_drift(tmp_path):
    with planted("aten.silu.default", slightly_large):
        session = checked(tmp_path, activate, MIN_MODULE_CALLS + 5, criterion="allclose")
    assert session.failures == []


def test_rounding_that_all_elements_share_is_no_shift():
    constant = np.full(4096, 1.003)
    assert shift_of(np.full(4096, 1.0, np.float32), constant, dtype="bfloat16") is None
    few = np.tile([1.003, 1.0101, 2.02, 3.01], 1024)
    assert shift_of(few.astype(np.float32), few, dtype="bfloat16") is None


def test_distances_are_to_the_rounded_result():
    golden = np.linspace(1.0, 1.9, 5000)
    rounded = torch.from_numpy(golden).bfloat16().float().numpy()
    assert shift_of(rounded, golden, dtype="bfloat16").mean == 0.0
    assert shift_of(rounded + 2.0**-7, golden, dtype="bfloat16").mean == 1.0
    assert shift_of(-rounded - 2.0**-7, -golden, dtype="bfloat16").mean == 1.0


def test_nan_and_inf_are_left_out():
    golden = np.linspace(1.0, 1e39, 5000)
    rounded = torch.from_numpy(golden).bfloat16().float().numpy()
    assert shift_of(rounded, golden, dtype="bfloat16").mean == 0.0


def test_float32_needs_no_evidence_of_many_calls():
    values = np.linspace(0, 1, 5000)
    assert shift_of(values.astype(np.float32), values, dtype="float32") is None


def test_shifts_to_both_sides_cancel():
    drift, golden = Drift(), np.linspace(1.0, 1.9, 5000)
    rounded = torch.from_numpy(golden).bfloat16().float().numpy()
    for number in range(2 * MIN_CALLS):
        actual = rounded + (2.0**-7 if number % 2 else -(2.0**-7))
        shift = shift_of(actual, golden, dtype="bfloat16")
        assert drift.add("op", "module", "forward", shift) is None
