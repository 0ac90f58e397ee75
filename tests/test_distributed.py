"""DDP, FSDP2 and tensor parallel on two processes: bit-equal, seen locally, named by rank."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import opcheck
from opcheck import Verdict
from tests.on_ranks import finished, start

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    ranks = start(["-m", "tests.distributed_step", str(folder)], folder)
    said = finished(ranks)
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "tensor_parallel"])
def test_a_fault_on_one_rank_is_named_after_merging(kind, logs, tmp_path):
    folder, merged = logs / f"{kind}_bad", tmp_path / "merged.jsonl"
    assert sorted(path.name for path in folder.iterdir()) == [
        "precision.rank0.jsonl", "precision.rank0.log",
        "precision.rank1.jsonl", "precision.rank1.log",
    ]  # fmt: skip
    command = [sys.executable, "-m", "opcheck"]
    parts = sorted(map(str, folder.glob("*.jsonl")))
    merge = subprocess.run(
        [*command, "merge", *parts, "-o", str(merged)], cwd=ROOT, capture_output=True, check=False
    )
    assert merge.returncode == 1  # FAIL
    run = opcheck.load_run(merged)
    assert run.verdict is Verdict.FAIL
    assert run.first_divergence.rank == 1
    assert run.first_divergence.module == "0.act"
    failed = {(r.rank, r.module, r.op) for r in run.records if r.verdict is Verdict.FAIL}
    assert failed == {(1, "0.act", "aten.gelu.default"), (1, "1.act", "aten.gelu.default")}
    review = subprocess.run(
        [*command, "review", str(merged)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert review.returncode == 1
    assert "only rank 1" in review.stdout
