"""The CSV report as a file: its columns, written whole or not at all, read with clear errors."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

from opcheck.errors import LogReadError, LogWriteError
from opcheck.printing import spreadsheet_cell
from opcheck.whole_files import write_atomically

__all__ = ["CSV_FIELDS", "RANK_FIELDS", "read_table", "write_table"]

CSV_FIELDS = (
    "module_name",
    "check_type",
    "tensor_index",
    "status",
    "max_abs_diff",
    "mean_abs_diff",
    "max_rel_diff",
    "shape",
    "note",
)
RANK_FIELDS = ("rank", "scenario", *CSV_FIELDS)
"""Of a file with the rows of several ranks."""


def write_table(path: Path, fields: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Write the whole file or nothing; one that is there is replaced.

    Raises:
        LogWriteError: it cannot be written.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(fields)
    writer.writerows([_cell(cell) for cell in row] for row in rows)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda file: file.write(text.getvalue().encode()))
    except OSError as error:
        raise LogWriteError(f"the CSV report cannot be written to {path}: {error}") from error


def _cell(text: str) -> str:
    try:
        float(text)
    except ValueError:
        return text if text == "-" else spreadsheet_cell(text)
    return text


def read_table(path: Path) -> tuple[tuple[str, ...], list[list[str]]]:
    """The columns, of one rank or of several, and the rows below.

    Raises:
        LogReadError: there is no such file, or it is none of these reports.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise LogReadError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise LogReadError(f"{path}: is no CSV report: {error}") from error
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    rows = []
    try:
        fields = tuple(next(reader, ()))
        if fields not in (CSV_FIELDS, RANK_FIELDS):
            raise LogReadError(
                f"{path}: expected the columns {','.join(CSV_FIELDS)}, with or without"
                f" rank,scenario before them, got {','.join(fields)[:300] or 'an empty file'}"
            )
        for row in reader:
            if len(row) != len(fields):
                raise LogReadError(
                    f"{path}, line {reader.line_num}: expected {len(fields)} fields, got {len(row)}"
                )
            rows.append(row)
    except csv.Error as error:
        raise LogReadError(f"{path}, line {reader.line_num}: {error}") from error
    if not rows:
        raise LogReadError(f"{path}: has no rows below its columns")
    return fields, rows
