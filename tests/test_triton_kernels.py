"""Triton kernels, interpreted on the CPU, through the registrar.

Triton is no dependency of anything here: where it is not installed it is taken from the package
index into a cache folder, apart from the environment, and where that fails the tests are skipped.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.second_device import cache_folder

ROOT = Path(__file__).parents[1]
REQUIREMENT = "triton>=3.4,<4"
KEYS = {
    "add.Tensor": "aten.add.Tensor",
    "_softmax": "aten._softmax.default",
    "native_layer_norm": "aten.native_layer_norm.default",
    "mm": "aten.mm.default",
}
pytestmark = pytest.mark.slow


def triton_path() -> str:
    """What to add to PYTHONPATH so that triton can be imported; skips where there is none."""
    if importlib.util.find_spec("triton") is not None:
        return ""
    folder = cache_folder("triton")
    if not folder.exists():
        install(folder)
    return str(folder)


def install(folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        target = Path(scratch) / "site"
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--only-binary=:all:",
        ]
        done = subprocess.run(
            [*pip, "--target", str(target), REQUIREMENT],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            why = done.stderr.strip().splitlines() or ["pip failed"]
            pytest.skip(f"triton cannot be installed: {why[-1]}")
        target.rename(folder)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("triton")
    paths = os.pathsep.join(filter(None, [str(ROOT), triton_path()]))
    done = subprocess.run(
        [sys.executable, "-m", "tests.triton_kernels", "results.json"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))


def test_correct_kernels_are_checked_and_silent(results):
    assert sorted(results["registered"]) == sorted(KEYS)
    assert results["checked"] == sorted(KEYS.values())
    assert (results["log"], results["errors"]) == ([], 0)


@pytest.mark.parametrize("criterion", ["allclose", "calibrated"])
@pytest.mark.parametrize("key", KEYS)
def test_wrong_mask_in_the_last_block_is_found(results, key, criterion):
    assert results["wrong"][f"{key} {criterion}"]["log"] == [key]


@pytest.mark.parametrize("key", ["add.Tensor", "_softmax"])
def test_the_worst_element_is_in_the_last_block(results, key):
    assert results["wrong"][f"{key} calibrated"]["worst_index"][-1] == 49
