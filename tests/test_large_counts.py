"""Unique values and counts of large tensors: what holds of them, and that faults are found."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import opcheck
from opcheck import counted
from opcheck.records import Verdict
from tests.faults import planted

GENERATOR = torch.Generator().manual_seed(0)
INTS = torch.randint(0, 50, (30, 400), generator=GENERATOR)
FLOATS = torch.randint(-30, 30, (30, 400), generator=GENERATOR) / 4
DISTINCT = torch.randn(30, 400, generator=GENERATOR)
RUNS = INTS.reshape(-1).sort()[0].roll(100).view(30, 400)
WITH_NAN = torch.where(FLOATS == 2.0, torch.nan, FLOATS)
DATA = {
    "ints": INTS,
    "floats": FLOATS,
    "half": FLOATS.bfloat16(),
    "all distinct": DISTINCT,
    "transposed": FLOATS.t(),
    "NaN": WITH_NAN,
    "zeros of both signs": torch.where(FLOATS == 1.0, -0.0, FLOATS),
}
WANTED = [(inverse, counts) for inverse in (False, True) for counts in (False, True)]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(counted, "CHUNK", 1000)


def record_of(tmp_path, op, step):
    with opcheck.check(log_dir=tmp_path, quiet=True, max_numel=10_000) as session:
        step()
    (record,) = [item for item in session.records if item.op == f"aten.{op}"]
    assert record.error is None, record.error
    return record


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize(("inverse", "counts"), WANTED)
def test_correct_unique_values_pass(tmp_path, data, inverse, counts):
    record = record_of(
        tmp_path,
        "_unique2.default",
        lambda: DATA[data].unique(return_inverse=inverse, return_counts=counts),
    )
    assert record.verdict is Verdict.PASS, record.reason
    assert record.sample.strategy == "exact_full"
    assert record.sample.covers_all


@pytest.mark.parametrize("data", [*DATA, "runs"])
@pytest.mark.parametrize(("inverse", "counts"), WANTED)
def test_correct_consecutive_values_pass(tmp_path, data, inverse, counts):
    x = {**DATA, "runs": RUNS}[data]
    record = record_of(
        tmp_path,
        "unique_consecutive.default",
        lambda: x.unique_consecutive(return_inverse=inverse, return_counts=counts),
    )
    assert record.verdict is Verdict.PASS, record.reason


WEIGHTS = torch.randn(12_000, generator=GENERATOR)


@pytest.mark.parametrize("weights", [None, WEIGHTS, WEIGHTS.double()], ids=["none", "f32", "f64"])
@pytest.mark.parametrize("minlength", [0, 200])
def test_correct_counts_pass(tmp_path, weights, minlength):
    step = lambda: torch.bincount(INTS.view(-1), weights, minlength)  # noqa: E731
    record = record_of(tmp_path, "bincount.default", step)
    assert record.verdict is Verdict.PASS, record.reason
    assert record.sample.covers_all


def spoiled(number, change):
    def make(original):
        def kernel(*args, **kwargs):
            out = original(*args, **kwargs)
            change(out[number] if isinstance(out, (tuple, list)) else out)
            return out

        return kernel

    return make


def swap(y):
    y.view(-1)[[3, 4]] = y.view(-1)[[4, 3]]


def one_more(y):
    y.view(-1)[7] += 1


def moved(y):
    """The sum of the counts stays."""
    y[5] += 1
    y[6] -= 1


FAULTS = [
    ("_unique2", 0, swap, lambda x: x.unique(return_counts=True)),
    ("_unique2", 0, one_more, lambda x: x.unique()),
    ("_unique2", 0, one_more, lambda x: x.unique(return_counts=True)),
    ("_unique2", 1, one_more, lambda x: x.unique(return_inverse=True)),
    ("_unique2", 2, one_more, lambda x: x.unique(return_inverse=True, return_counts=True)),
    ("_unique2", 2, moved, lambda x: x.unique(return_counts=True)),
    ("unique_consecutive", 0, one_more, lambda x: x.unique_consecutive()),
    ("unique_consecutive", 1, one_more, lambda x: x.unique_consecutive(return_inverse=True)),
    ("unique_consecutive", 2, moved, lambda x: x.unique_consecutive(return_counts=True)),
    ("bincount", 0, moved, lambda x: x.abs().long().view(-1).bincount()),
    ("bincount", 0, moved, lambda x: x.abs().long().view(-1).bincount(WEIGHTS)),
]


@pytest.mark.parametrize(("op", "number", "change", "step"), FAULTS)
def test_faults_are_found_and_placed(tmp_path, op, number, change, step):
    with planted(f"aten.{op}.default", spoiled(number, change)):
        record = record_of(tmp_path, f"{op}.default", lambda: step(FLOATS))
    assert record.verdict is Verdict.FAIL
    assert record.metrics.worst_index is not None
    assert f"element {record.metrics.worst_index}" in record.reason


def test_a_value_that_is_missing_or_comes_twice_is_found(tmp_path):
    values = torch.unique(FLOATS)
    for wrong in (values[1:], torch.cat([values[:5], values[4:]])):
        with planted(
            "aten._unique2.default", lambda _, w=wrong: lambda *a: (w, *[INTS.new_zeros(0)] * 2)
        ):
            record = record_of(tmp_path, "_unique2.default", lambda: FLOATS.unique())
        assert record.verdict is Verdict.FAIL


def test_hashes_know_values_and_not_their_form():
    hashes = counted._hashes(np.array([0.0, -0.0, 1.0, np.nan, -np.nan], dtype=np.float32))
    assert hashes[0] == hashes[1] != hashes[2]
    assert hashes[3] == hashes[4]
    assert len(np.unique(counted._hashes(np.arange(-5000, 5000)))) == 10_000
