"""The README's commands run, and print what it says (up to numbers, times and run ids)."""

from __future__ import annotations

import inspect
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import opcheck
from opcheck import SkipReason
from tests.hanging import HANGS_S

README = Path(__file__).parents[1] / "README.md"
TEXT = README.read_text(encoding="utf-8")
FILES = dict(re.findall(r"<!-- file: (\S+) -->\n```python\n(.*?)```", TEXT, re.DOTALL))
CONSOLE = re.findall(r"```console\n(.*?)```", TEXT, re.DOTALL)


def commands() -> list[tuple[str, str]]:
    """(command line, what it prints) in the order of the README."""
    found = []
    for block in CONSOLE:
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            line, _, output = part.partition("\n")
            found.append((line, output))
    return found


def normalised(text: str) -> str:
    """Without what differs from run to run and from machine to machine."""
    text = re.sub(r"run\s+[0-9a-f]{12}", "run ID", text)
    text = re.sub(r"[█●]+( *[█●]+)*\n", "BAR\n", text)
    text = re.sub(r"\d{4}-\d\d-\d\dT[\d:.+]+", "TIME", text)
    text = re.sub(r"-?\d[\d,]*(\.\d+)?(e[+-]?\d+)?", "N", text)
    return re.sub(r"\s+", " ", text).strip()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("readme")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder


def run(folder: Path, line: str) -> subprocess.CompletedProcess[str]:
    program, *arguments = shlex.split(line)
    assert program in ("opcheck", "modulecheck", "python", "torchrun")
    names = {"python": [], "torchrun": ["-m", "torch.distributed.run"]}
    module = names.get(program, ["-m", program])
    return subprocess.run(
        [sys.executable, *module, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(README.parent), "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=HANGS_S,
        check=False,
    )


def test_the_first_screen_shows_what_the_demo_prints(folder):
    shown = TEXT.partition("```text\n")[2].partition("...\n```")[0]
    assert TEXT.index(shown) < TEXT.index("\n## ")
    done = run(folder, "opcheck demo --log-dir demo")
    assert done.returncode == 0, done.stderr
    printed = [normalised(line) for line in done.stdout.splitlines()]
    found = [printed.index(normalised(line)) for line in shown.splitlines() if line]
    assert found == sorted(found)


def test_the_readme_has_commands_to_run():
    assert len(commands()) >= 3
    assert FILES


def test_commands_print_what_the_readme_shows(folder):
    for line, expected in commands():
        done = run(folder, line)
        is_script = line.startswith(("python ", "torchrun ")) and "repro/" not in line
        expected_status = 0 if is_script else 1
        assert done.returncode == expected_status, (line, done.stderr)
        assert normalised(done.stdout) == normalised(expected), line


def anchor(heading: str) -> str:
    """As hosts of repositories make it of a heading."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def test_every_link_within_the_readme_leads_somewhere():
    prose = re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL)
    anchors = {anchor(heading) for heading in re.findall(r"^#+ (.*)$", prose, re.MULTILINE)}
    links = re.findall(r"\]\(\s*#([^)]*)\)", prose)
    assert len(links) > 10
    assert [link for link in links if link not in anchors] == []


def test_every_reason_for_skipping_and_every_option_is_explained():
    reasons = [reason.value for reason in SkipReason]
    assert [reason for reason in reasons if f"`{reason}`" not in TEXT] == []
    options = [*inspect.signature(opcheck.check).parameters]
    options += inspect.signature(opcheck.enable_precision_check).parameters
    rows = "\n".join(line for line in TEXT.splitlines() if line.startswith("| `"))
    assert [option for option in options if f"`{option}`" not in rows] == []


@pytest.mark.parametrize(
    "line",
    [*re.findall(r"`(opcheck review logs --[^`]*)`", TEXT), "opcheck export logs --format csv"],
)
def test_commands_of_the_tables_run(folder, line):
    if not (folder / "logs").exists():
        run(folder, commands()[0][0])
    done = run(folder, line)
    assert done.returncode in (0, 1), done.stderr
    assert done.stdout
