"""Kernels that are correct and compute in another way are not flagged; wrong ones are counted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from benchmarks.alarms import ARMS, Tally
from benchmarks.correct_kernels import VARIANTS, Variant
from benchmarks.opinfo_sweep import op_infos
from benchmarks.opinfo_variants import Options, sweep
from benchmarks.subjects import Subject
from opcheck.references import Result

REPRESENTATIVE = (
    "add", "sum", "cumsum", "mm", "addmm", "index_add", "softmax", "pow", "clamp",
    "nn.functional.conv2d", "nn.functional.layer_norm", "nn.functional.gelu",
    "nn.functional.embedding",
)  # fmt: skip
"""Of every kind that a variant is for: pointwise, rows, scans, products, atomics."""
NARROW = {"float32, rounded", "decomposition in float32", "16-bit atomics", "16-bit scan"}
FEW = Options(samples=2, calls=2)
VARIANTS_HERE = [variant for variant in VARIANTS if variant.name != "two threads"]
"""No sample of OpInfo is large enough for two threads."""


@pytest.fixture(scope="module", params=["float32", "bfloat16", "complex64"])
def found(request: pytest.FixtureRequest) -> tuple[str, Tally]:
    dtype = getattr(torch, request.param)
    return request.param, sweep(op_infos(REPRESENTATIVE), dtype, FEW)


def test_correct_kernels_pass(found: tuple[str, Tally]) -> None:
    _, tally = found
    assert tally.errors == []
    assert tally.alarms == []
    assert tally.calls > 50


def test_every_variant_computed_something_else(found: tuple[str, Tally]) -> None:
    dtype, tally = found
    names = {variant.name for variant in VARIANTS_HERE if not variant.takes_tf32}
    names -= set() if dtype == "bfloat16" else NARROW
    assert {name for name in names if not tally.judged[name, ARMS[0]]} == set()
    on_cpu = {variant.name for variant in VARIANTS_HERE if variant.on_cpu}
    # paths of one kernel round alike in 16 bit
    assert {name for name in names - on_cpu if not tally.differ[name]} == set()
    assert dtype != "float32" or (tally.differ["other order"] and tally.differ["other layout"])
    assert {name for name in on_cpu if not tally.judged[name, ARMS[1]]} == set()


def test_tf32_is_right_where_it_is_allowed_and_wrong_elsewhere(found: tuple[str, Tally]) -> None:
    dtype, tally = found
    if dtype == "float32":
        assert tally.judged["TF32 inputs", ARMS[0]] > 5
        assert tally.tf32_found == tally.judged["TF32 inputs", ARMS[0]]
    assert tally.tf32_missed == 0


def shifted(subject: Subject) -> Iterator[Result]:
    result = subject.run()
    value = result.out if isinstance(result.out, torch.Tensor) else result.out[0]
    if value.numel() and value.is_floating_point() and bool(value.isfinite().all()):
        value += 1 + value.abs().max()

        yield result


@pytest.mark.parametrize("on_cpu", [True, False])
def test_a_wrong_variant_is_counted(on_cpu: bool) -> None:
    wrong = Variant("wrong", shifted, on_cpu=on_cpu)
    tally = sweep(op_infos(REPRESENTATIVE[:6]), torch.float32, replace(FEW, variants=[wrong]))
    judged = tally.judged.total()
    assert judged > 15
    assert len(tally.alarms) == judged
    assert {alarm.arm for alarm in tally.alarms} == set(ARMS if on_cpu else ARMS[:1])
    assert min(alarm.q for alarm in tally.alarms) > 1.0


def crashing(subject: Subject) -> Iterator[Result]:
    yield Result(torch.zeros(1, 2, 3, 4, 5), [])


def test_a_result_of_another_shape_is_an_alarm() -> None:
    wrong = Variant("wrong", crashing)
    tally = sweep(op_infos(("mm",)), torch.float32, replace(FEW, variants=[wrong]))
    assert len(tally.alarms) == tally.judged.total() > 0
    assert "has shape" in tally.alarms[0].reason
