"""A session that leaves or rests within a block that puts the dispatch keys back at its end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import opcheck
from opcheck import _torch
from tests.hanging import HANGS_S
from tests.key_block_steps import BLOCKS, CALLS
from tests.test_layers import ROOT


@pytest.fixture(scope="module")
def results() -> dict[str, list[str]]:
    """What went wrong in each case, by its name."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.key_block_steps"],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=HANGS_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(json.loads(line) for line in done.stdout.splitlines())


@pytest.mark.parametrize("name", [*BLOCKS, *CALLS, "a hook"])
def test_the_steps_are_as_without_it_and_nothing_is_left_behind(results, name):
    cases = {case: wrong for case, wrong in results.items() if case.split(",")[0] == name}
    assert len(cases) >= (1 if name == "a hook" else 3)
    assert {case: wrong for case, wrong in cases.items() if wrong} == {}


def test_what_somebody_else_puts_around_a_block_meanwhile_stays(tmp_path: Path) -> None:
    block = _torch.KEY_BLOCKS[0]
    before = block.__enter__
    seen = []
    try:
        with opcheck.check(log_dir=tmp_path, quiet=True):
            ours = block.__enter__

            def theirs(opened: Any) -> Any:
                seen.append(opened)
                return ours(opened)

            block.__enter__ = theirs
        assert block.__enter__ is theirs
        with torch.inference_mode():
            torch.ones(2) + 1
        assert len(seen) == 1
        block.__enter__ = ours
        with opcheck.check(log_dir=tmp_path, quiet=True):
            pass
        assert block.__enter__ is before
    finally:
        block.__enter__ = before
