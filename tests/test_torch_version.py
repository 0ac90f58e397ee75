"""A torch that lacks a private name is told apart by that name, at import."""

from __future__ import annotations

import subprocess
import sys

import pytest

LACKING = """
import torch
del {owner}.{name}
import {package}
from {package} import _torch
"""


@pytest.mark.parametrize("package", ["opcheck", "modulecheck"])
@pytest.mark.parametrize(
    ("owner", "name"),
    [("torch._C", "_current_graph_task_id"), ("torch.autograd", "_get_sequence_nr")],
)
def test_a_missing_private_name_is_an_error_that_says_which(package, owner, name):
    code = LACKING.format(package=package, owner=owner, name=name)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "OpcheckError" in last
    assert f"{owner}.{name}" in last
    assert "tested versions" in last
