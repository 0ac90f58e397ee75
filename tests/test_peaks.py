"""What checks add to the peak memory of the process, and that the report says so."""

from __future__ import annotations

import itertools
import subprocess
import sys

import torch

import opcheck
from opcheck import ledger
from opcheck.peaks import peak_bytes

MIB = 1 << 20


def test_the_peak_only_grows():
    before = peak_bytes()
    assert before > 10 * MIB
    torch.ones(1000)
    assert peak_bytes() >= before


def test_memory_of_checks_is_added_up_and_printed(tmp_path, monkeypatch):
    peaks = itertools.count(0, 5 * MIB)
    monkeypatch.setattr(ledger, "peak_bytes", lambda: next(peaks))
    with opcheck.check(log_dir=tmp_path, quiet=True) as session:
        torch.ones(10).exp()
    assert session.coverage.check_peak_bytes >= 2 * 5 * MIB
    number = session.coverage.check_peak_bytes // MIB
    assert f"checks raised the peak memory by {number} MiB" in " ".join(session.report().split())
    assert opcheck.load_run(tmp_path).coverage == session.coverage


STEP = """
import tempfile, torch, opcheck
x = torch.randn(1 << 21)
with opcheck.check(log_dir=tempfile.mkdtemp(), quiet=True, large={large!r}) as session:
    x.exp()
print(session.coverage.check_peak_bytes)
"""


def check_peak(large: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", STEP.format(large=large)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return int(done.stdout)


def test_a_check_of_all_elements_takes_more_than_one_of_a_sample():
    assert check_peak("full") > check_peak("sample") + 16 * MIB


def test_memory_of_the_process_that_started_this_one_does_not_count():
    ballast = torch.ones(600 * MIB, dtype=torch.uint8)  # more than torch and the step take
    assert check_peak("full") > 16 * MIB
    del ballast
