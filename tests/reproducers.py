"""Running reproducers as somebody does who was sent one: a fresh process, an empty folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.hanging import HANGS_S

ROOT = Path(__file__).parents[1]

PLANT = """
from tests import faults
planted = faults.{fault}()
planted.__enter__()
"""


def plant_file(folder: Path, fault: str) -> Path:
    """A library that registers a wrong kernel when it is imported."""
    path = folder / f"library_{fault}.py"
    path.write_text(PLANT.format(fault=fault))
    return path


def run_file(
    script: Path, *arguments: str, load: Path | None = None, before: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a reproducer, moved with its tensors to an empty folder, in a fresh process.

    Only with a library to load, or code to run before, can it import this project.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "REPRO_LOAD")
    }
    environment["OMP_NUM_THREADS"] = "1"
    if load is not None:
        environment["REPRO_LOAD"] = str(load)
    if load is not None or before:
        environment["PYTHONPATH"] = str(ROOT)
    with tempfile.TemporaryDirectory() as folder:
        for path in script.parent.glob(f"{script.stem}.*"):
            shutil.copy(path, folder)
        command = [sys.executable, script.name, *arguments]
        if before:
            code = f"{before}\nimport runpy, sys\nsys.argv = {[script.name, *arguments]!r}\n"
            code += f"runpy.run_path({script.name!r}, run_name='__main__')"
            command = [sys.executable, "-c", code]
        return subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False,
            timeout=HANGS_S,
        )  # fmt: skip
