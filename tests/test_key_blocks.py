"""A session that leaves or rests within a block that puts the dispatch keys back at its end."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.key_block_steps import BLOCKS, CALLS
from tests.test_layers import ROOT


@pytest.fixture(scope="module")
def results() -> dict[str, list[str]]:
    """What went wrong in each case, by its name."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.key_block_steps"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return dict(json.loads(line) for line in done.stdout.splitlines())


@pytest.mark.parametrize("name", [*BLOCKS, *CALLS, "a hook"])
def test_the_steps_are_as_without_it_and_nothing_is_left_behind(results, name):
    cases = {case: wrong for case, wrong in results.items() if case.split(",")[0] == name}
    assert len(cases) >= (1 if name == "a hook" else 3)
    assert {case: wrong for case, wrong in cases.items() if wrong} == {}
