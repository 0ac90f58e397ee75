"""Registered tensors to a file and back, so that each side can run where it can."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modulecheck.tensor_groups import Entry
from modulecheck.tensor_records import Site
from modulecheck.tensor_store import (
    Held,
    InFile,
    TensorFile,
    TensorFileError,
    write_file,
)
from modulecheck.untrusted_files import DAMAGED

__all__ = ["Saved", "load_entries", "save_entries"]


@dataclass(slots=True)
class Saved:
    """What one file holds."""

    entries: list[Entry] = field(default_factory=list)
    sides: list[str] = field(default_factory=list)
    module_names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def save_entries(
    path: Path,
    entries: Sequence[Entry],
    sides: Sequence[str],
    module_names: Mapping[str, Sequence[str]],
    problems: Sequence[str],
) -> None:
    """Write a file; tensors are read one at a time.

    Raises:
        OSError: it cannot be written.
    """
    members: dict[int, str] = {}
    stored = []
    rows = []
    for entry in entries:
        known = id(entry.stored)
        if known not in members:  # equal tensors may share one
            members[known] = f"t{len(members):08d}"
            stored.append((members[known], entry.stored))
        is_number = getattr(entry.stored, "is_number", False)
        if isinstance(entry.stored, Held):
            is_number = entry.stored.snapshot.is_number
        rows.append(
            {
                "tag": entry.tag,
                "side": entry.side,
                "number": entry.number,
                "member": members[known],
                "description": entry.stored.description,
                "is_number": is_number,
                "precision": entry.precision,
                "device": entry.device,
                "site": None if entry.site is None else dataclasses.asdict(entry.site),
            }
        )
    index = {
        "sides": list(sides),
        "module_names": {side: list(names) for side, names in module_names.items()},
        "problems": list(problems),
        "entries": rows,
    }
    write_file(path, index, stored)


def load_entries(paths: Sequence[Path], *, in_memory: bool) -> list[Saved]:
    """Read files; of several, each gets sides of its own.

    Raises:
        TensorFileError: one cannot be read.
    """
    found: list[Saved] = []
    taken: set[str] = set()
    for path in paths:
        saved = _load(path)
        if in_memory:
            loaded: dict[Any, Held] = {}
            for place, entry in enumerate(saved.entries):
                key = getattr(entry.stored, "member", None)
                if key not in loaded:
                    loaded[key] = Held(entry.stored.load())
                saved.entries[place] = dataclasses.replace(entry, stored=loaded[key])
        if len(paths) > 1:
            saved = _own_sides(saved, path, taken)
        found.append(saved)
    return found


def _own_sides(saved: Saved, path: Path, taken: set[str]) -> Saved:
    """One side: that of the file name. Several: their names with that of the file before them."""
    stem, number = path.stem, 1
    while stem in taken:
        number += 1
        stem = f"{path.stem} ({number})"
    taken.add(stem)
    has_unnamed = any(entry.side is None for entry in saved.entries)
    single = len(saved.sides) + has_unnamed <= 1
    new = {side: stem if single else f"{stem}:{side}" for side in saved.sides}
    unnamed = stem if single or not saved.sides else f"{stem}:"
    return Saved(
        [
            dataclasses.replace(entry, side=unnamed if entry.side is None else new[entry.side])
            for entry in saved.entries
        ],
        [*new.values(), *([unnamed] if has_unnamed or not new else [])],
        {new[side]: names for side, names in saved.module_names.items()},
        saved.problems,
    )


def _load(path: Path) -> Saved:
    file = TensorFile(path)
    index = file.index
    if index is None:
        return Saved([Entry(name, None, 0, InFile(file, name, "", "")) for name in file.arrays])
    try:
        sides = [_text(side) for side in index["sides"]]
        module_names = {
            _text(side): tuple(_text(name) for name in names)
            for side, names in index["module_names"].items()
        }
        entries = [_entry(file, row) for row in index["entries"]]
        problems = [_text(problem) for problem in index["problems"]]
    except DAMAGED as error:
        raise TensorFileError(f"{path}: its index is damaged: {error!r}") from error
    known = {*sides, None}
    if not all(entry.side in known for entry in entries) or not set(module_names) <= known:
        raise TensorFileError(f"{path}: its index is damaged: a side that it does not list")
    return Saved(entries, sides, module_names, problems)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a string, got {type(value).__name__}")
    return value


def _entry(file: TensorFile, row: Mapping[str, Any]) -> Entry:
    description = _text(row["description"])
    dtype = description.rpartition(":")[2]
    if not dtype:
        raise ValueError(f"it describes no tensor: {description!r}")
    stored = InFile(file, _text(row["member"]), dtype, description, bool(row["is_number"]))
    site = None
    if row["site"] is not None:
        given = dict(row["site"])
        parent = given.pop("parent", None)
        site = Site(
            module=_text(given["module"]),
            role=_text(given["role"]),
            call=int(given["call"]),
            parent=None if parent is None else (_text(parent[0]), int(parent[1])),
        )
    side = row["side"]
    return Entry(
        _text(row["tag"]),
        None if side is None else _text(side),
        int(row["number"]),
        stored,
        site,
        None if row["precision"] is None else _text(row["precision"]),
        _text(row.get("device", "cpu")),
    )
