"""Eager against eager, computed in another way: nobody is wrong, and nobody is accused."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.eager_variants import CHANGES, DTYPES, measure
from tests.compiled import DYNAMO_WARNS

pytestmark = [DYNAMO_WARNS, pytest.mark.slow]


@pytest.mark.parametrize(
    ("name", "dtype", "change"),
    [("vit", "float32", "threads"), ("bert", "float32", "order"), ("llama", "bfloat16", "order"),
     ("gpt2", "float32", "batch")],
)  # fmt: skip
def test_another_way_to_compute_the_same_raises_no_alarm(
    name: str, dtype: str, change: str, tmp_path: Path
) -> None:
    assert dtype in DTYPES
    assert change in CHANGES
    tally = measure(name, dtype, change, tmp_path)
    judges = {"TensorChecker", "opcheck.check", *(["PrecisionChecker"] * (change != "batch"))}
    assert judges <= set(tally.shown)
    for judge in judges:
        assert tally.shown[judge] > 20
        assert tally.alarms[judge] == 0, tally.examples[judge]
    if change == "order":  # it was another way: not the same bits
        assert tally.alarms["torch.equal"] > 0
