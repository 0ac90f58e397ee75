"""Torch's own kernels, registered as if they were a library's: none may fail or crash a check.

Every kernel of the CPU key that computes something, on the sample inputs of torch's own tests.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import opcheck
from benchmarks.opinfo_sweep import WRONG_IN_TORCH
from opcheck.calls import traits_of
from opcheck.kernel_table import call_kernel, kernels, with_number_tensors
from opcheck.kernelcheck import find_op
from tests.registering import enabled, log_lines, registered

SAMPLES = 3
SWEEPS = [
    (torch.float32, "calibrated"),
    (torch.bfloat16, "allclose"),
    (torch.complex64, "calibrated"),
    (torch.int64, "calibrated"),
]
pytestmark = pytest.mark.slow


def own_kernel(func: Any, kernel: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return call_kernel(kernel, with_number_tensors(func, args), kwargs)

    return run


def own_kernels() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Torch's kernels by op key, those that would be skipped left out."""
    for name in sorted(torch._C._dispatch_get_registrations_for_dispatch_key("CPU")):  # noqa: TID251
        kernel = kernels().original(name)
        if name.startswith("aten::") and kernel is not None:
            func = find_op(name)
            if traits_of(func).skip is None:
                yield name, own_kernel(func, kernel)


def run_samples(dtype: torch.dtype) -> None:
    from torch.testing._internal.common_methods_invocations import op_db

    for op in op_db:
        if dtype not in op.supported_dtypes("cpu"):
            continue
        for number, sample in enumerate(op.sample_inputs("cpu", dtype)):
            if number >= SAMPLES:
                break
            with contextlib.suppress(Exception):  # samples that torch itself refuses
                op(sample.input, *sample.args, **sample.kwargs)


def is_wrong_in_torch(line):
    return any(
        f"Op: {op.split('.')[1]} | FAIL" in line and f":{dtype} |" in line
        for op, dtype in WRONG_IN_TORCH
    )


@pytest.mark.parametrize(("dtype", "criterion"), SWEEPS)
def test_no_kernel_of_torch_fails_or_crashes_a_check(tmp_path, dtype, criterion):
    log = tmp_path / "p.log"
    options = {"path": log, "criterion": criterion, "log_once": False}
    with (
        warnings.catch_warnings(),
        registered(*own_kernels(), dispatch_key="CPU") as register,
        enabled(**options),
    ):
        warnings.simplefilter("ignore")
        run_samples(dtype)
    assert register.failed == {}
    assert len(register.all_keys) > 600
    assert [line for line in log_lines(log) if not is_wrong_in_torch(line)] == []
    coverage = opcheck.coverage()
    assert coverage.errors == 0
    assert coverage.adds_up
    assert coverage.checked > 500
    assert coverage.skipped.get(opcheck.SkipReason.OP_RAISED, 0) < coverage.seen / 50
