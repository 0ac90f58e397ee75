"""Rows of the table of costs, as text and as JSON."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.measuring import Spread

__all__ = ["Row", "Table", "rows_as_json"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure, or why there is none."""

    part: str
    subject: str
    """Model, op, or what grows."""
    arm: str
    unit: str
    cpu: Spread | None = None
    """By the CPU clock, or where there is no clock the figure itself."""
    wall: Spread | None = None
    limit: str = ""
    """What is wanted of it."""
    held: bool | None = None
    """None: nothing is wanted."""
    note: str = ""

    @property
    def text(self) -> str:
        """One line of the table."""
        blank = " " * 24
        cpu = blank if self.cpu is None else f"{self.cpu.text():<24}"
        wall = blank if self.wall is None else f"{self.wall.text():<24}"
        wanted = {None: "", True: "held", False: "MISSED"}[self.held]
        end = "; ".join(item for item in (self.note, self.limit and f"{self.limit}") if item)
        return (
            f"{self.part:<10}{self.subject:<20}{self.arm:<27}{self.unit:<11}"
            f"{cpu} {wall} {wanted:<7}{end}"
        ).rstrip()


class Table:
    """Printed row by row, so that a run which is cut leaves what it has."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def head(self) -> None:
        """Print the names of the columns."""
        print(
            f"{'part':<10}{'of':<20}{'arm':<27}{'unit':<11}"
            f"{'CPU clock [min, max]':<24} {'wall clock [min, max]':<24} {'target':<7}notes"
        )

    def add(self, row: Row) -> None:
        """Print it, and keep it."""
        self.rows.append(row)
        print(row.text, flush=True)


def rows_as_json(rows: Sequence[Row], path: Path, *, command: str) -> None:
    """Write the rows, and what they were measured on."""
    about = {
        "command": command,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
    }
    data = {"about": about, "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")
