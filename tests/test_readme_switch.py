"""The two lines that a user of FlagGems changes do what the README says."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import opcheck
from tests import kernel_library as kernels
from tests.registering import logged_ops

TEXT = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
SWITCH = re.search(r"<!-- switch -->\n```python\n(.*?)```", TEXT, re.DOTALL)
ONLY = re.search(r"`(flag_gems\.only_enable\(.*?\))`", TEXT)
X = torch.linspace(-2, 2, 6).reshape(2, 3)


class FlagGems(types.ModuleType):
    """Stands in for the library: it calls the registrar as the library does."""

    def __init__(self) -> None:
        super().__init__("flag_gems")
        self.library = torch.library.Library("aten", "IMPL")
        self.config = (
            ("add.Tensor", kernels.spoiled(kernels.add)), ("mm", kernels.mm),
            ("_softmax", kernels.softmax), ("neg", kernels.spoiled(kernels.neg)),
        )  # fmt: skip

    def enable(self, *, registrar: type) -> None:
        self.registrar = registrar(
            self.config, user_exclude_ops=[], cpp_patched_ops=set(), lib=self.library,
            full_config_by_func=None,
        )  # fmt: skip

    def only_enable(self, *, include: list[str], registrar: type) -> None:
        by_function = {fn.__name__: [(key, fn)] for key, fn in self.config}
        self.registrar = registrar(
            self.config, user_include_ops=include, cpp_patched_ops=set(), lib=self.library,
            full_config_by_func=by_function,
        )  # fmt: skip


@pytest.fixture
def flag_gems(tmp_path, monkeypatch) -> Iterator[FlagGems]:
    library = FlagGems()
    monkeypatch.setitem(sys.modules, "flag_gems", library)
    monkeypatch.chdir(tmp_path)
    yield library
    opcheck.disable_precision_check()
    library.library._destroy()


def run_step() -> None:
    torch.softmax(-X + 1, 1) @ X.t()


def test_two_lines_switch_the_check_on(flag_gems, tmp_path):
    assert SWITCH is not None
    assert len(SWITCH[1].replace("import flag_gems\nimport opcheck", "").split()) == 2
    exec(SWITCH[1], {})
    run_step()
    assert logged_ops(tmp_path / "logs" / "precision.log") == ["neg", "add.Tensor"]


def test_only_enable_checks_those_alone(flag_gems, tmp_path):
    assert ONLY is not None
    opcheck.enable_precision_check()
    exec(ONLY[1], {"flag_gems": flag_gems, "opcheck": opcheck})
    run_step()
    assert sorted(flag_gems.registrar.get_all_ops()) == ["add", "mm", "softmax"]
    assert logged_ops(tmp_path / "logs" / "precision.log") == ["add.Tensor"]
