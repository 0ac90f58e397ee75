"""The scripts of the README's part about TensorChecker, run as they stand there."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from modulecheck import load_dump, tensor_checker

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"<!-- file: (\S+) -->\n```python\n(.*?)```", README, re.DOTALL))
STATUS = {"two_models.py": 1, "two_operators.py": 1, "test_fixed.py": 0}


def shown_after(name: str) -> list[str]:
    """The documented lines of the text block that follows a script."""
    after = README.partition(f"<!-- file: {name} -->")[2]
    block = after.split("```text\n", 1)[1].split("```", 1)[0]
    return [line for line in block.splitlines() if line.startswith("TensorChecker:")]


@pytest.mark.parametrize("name", STATUS)
def test_a_script_of_the_readme_prints_what_is_shown(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tensor_checker.clear()
    Path(name).write_text(FILES[name])
    try:
        runpy.run_path(name)
        status = 0
    except SystemExit as leave:
        status = int(leave.code or 0)
    finally:
        tensor_checker.clear()
    assert status == STATUS[name]
    if status:
        assert shown_after(name)[-1] in capsys.readouterr().out.splitlines()
    if name == "two_operators.py":
        assert sorted(path.name for path in Path("debug").iterdir()) == [
            "index.json",
            "my_module.x2.0.npy",
            "my_module.x2.1.npy",
        ]
        assert len(load_dump("debug")["my_module.x2"]) == 2
