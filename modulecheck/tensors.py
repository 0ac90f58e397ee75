"""Two implementations of a model, tensor by tensor.

::

    module_register_tensor_checker(reference_model, tensor_checker)
    module_register_tensor_checker(model, tensor_checker)
    reference_model(x)
    model(x)
    tensor_checker.check_equal()          # prints a line per tag, returns a bool
    print(tensor_checker.result)          # first divergence, origin, what was not compared

What is registered is copied at once; what a checker keeps holds no graph and no user memory.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from modulecheck.tensor_compare import Criterion
from modulecheck.tensor_dump import Dumper, DumpMode
from modulecheck.tensor_files import load_entries, save_entries
from modulecheck.tensor_groups import (
    Entry,
    Group,
    group_entries,
    mismatches,
    output_tag,
    tag_matches,
)
from modulecheck.tensor_judge import judge_group
from modulecheck.tensor_origins import module_findings
from modulecheck.tensor_records import Site, TensorCheckResult, TensorRecord, overall
from modulecheck.tensor_report import printed_line, report_lines
from modulecheck.tensor_store import Held, Scratch, Stored, holds
from modulecheck.tensor_values import Snapshot, dtype_name, leaves
from opcheck.errors import ArgumentError, ArgumentTypeError
from opcheck.printing import style_for
from opcheck.records import Verdict
from opcheck.tolerances import HALF_DTYPES

__all__ = ["TensorChecker", "tensor_checker"]

DEFAULT_DUMP_PATH = "tensor_dump"


class TensorChecker:
    """Collects tensors under tags and compares those of one tag with each other.

    Args:
        keep: "all" keeps every tensor in memory. "stats" keeps the first one of a tag in a scratch
            file, compares the next as it comes, and lets it go unless it differs.
        quiet: print nothing; `result` has everything.
    """

    def __init__(self, *, keep: str = "all", quiet: bool = False) -> None:
        if keep not in ("all", "stats"):
            raise ArgumentError(f"keep: expected 'all' or 'stats', got {keep!r}")
        self.keep = keep
        self.quiet = quiet
        self.generation = 0
        """Grows with every `clear()`."""
        self.running = _Running()
        """The module calls that are open, by thread."""
        self._lock = threading.RLock()
        self._sides: list[str] = []
        self._models: dict[str, Any] = {}
        self._module_names: dict[str, tuple[str, ...]] = {}
        self._result: TensorCheckResult | None = None
        self._closer: weakref.finalize[Any, Any] | None = None
        self._forget()

    def _forget(self) -> None:
        self._entries: list[Entry] = []
        self._counts: dict[tuple[str, str | None, object], int] = {}
        self._first: dict[object, Stored] = {}
        self._coarsest: dict[str, str] = {}
        self._problems: list[str] = []
        self._not_registered: dict[str, str] = {}
        self._excluded = 0
        if self._closer is not None:
            self._closer()
        self._scratch: Scratch | None = None

    # ---- registering ----

    def register_tensor(self, tag: str, tensor: Any, *, side: str | None = None) -> None:
        """Register a tensor, or one tag per leaf of a list, dict or dataclass of tensors.

        The first one under a tag is the reference of the others. Inside the forward of a model that
        is registered with this checker, the side is that model's.

        Args:
            tag: what it is compared under.
            tensor: a tensor, an array, a number, an object with `to_torch()`, `__dlpack__` or
                `__array__`, or a list, dict or dataclass of these. It is copied.
            side: which implementation it is of, where the order does not tell.

        Raises:
            ArgumentTypeError: the tag is no string, or a leaf holds no numbers; names tag and type.
            ArgumentError: a leaf has no values, or there is no leaf.
        """
        if not isinstance(tag, str):
            raise ArgumentTypeError(f"tag: expected a string, got {type(tag).__name__}")
        if side is not None and not isinstance(side, str):
            raise ArgumentTypeError(f"side: expected a string, got {type(side).__name__}")
        found = list(leaves(tag, tensor))
        if not found:
            raise ArgumentError(f"tag {tag[:200]!r}: a {type(tensor).__name__} without any tensor")
        for leaf_tag, snapshot in found:
            self.add(leaf_tag, snapshot, side=side if side is not None else self.running.side)

    def add(
        self,
        tag: str,
        snapshot: Snapshot,
        *,
        side: str | None,
        site: Site | None = None,
        exclude: Iterable[str] = (),
    ) -> None:
        """Register a snapshot that is nobody else's."""
        if any(tag_matches(tag, pattern) for pattern in exclude):
            with self._lock:
                self._excluded += 1
            return
        with self._lock:
            if side is not None and side not in self._sides:
                self._sides.append(side)
            place = None if site is None else (site.module, site.role)
            key = (tag, side, place)
            number = self._counts.get(key, 0)
            self._counts[key] = number + 1
            if site is not None:
                number = site.call
            entry = Entry(
                tag,
                side,
                number,
                self._store(snapshot, (tag, number if side is not None else 0, place)),
                site,
                self._precision(side, snapshot),
                snapshot.device,
            )
            self._entries.append(entry)

    def _store(self, snapshot: Snapshot, key: object) -> Stored:
        if self.keep == "all":
            return Held(snapshot)
        first = self._first.get(key)
        if first is not None and holds(first, snapshot):
            return first
        if self._scratch is None:
            self._scratch = Scratch()
            self._closer = weakref.finalize(self, self._scratch.close)
        stored = self._scratch.add(snapshot)
        self._first.setdefault(key, stored)
        return stored

    def _precision(self, side: str | None, snapshot: Snapshot) -> str | None:
        """Coarsest 16-bit dtype that the side has shown: what follows carries its rounding."""
        if side is None:
            return None
        dtype = dtype_name(snapshot.tensor.dtype)
        known = self._coarsest.get(side)
        if dtype in HALF_DTYPES and known != "bfloat16":
            self._coarsest[side] = dtype
        return self._coarsest.get(side)

    def clear(self) -> None:
        """Forget every tensor and the result. Hooks on models stay on, and start anew."""
        with self._lock:
            self._forget()
            self.running.frames.clear()  # an interrupt may have left some
            self.generation += 1
            self._result = None
            alive = self.model_hooks()
            self._models = alive
            self._module_names = {
                side: names for side, names in self._module_names.items() if side in alive
            }
            self._sides = [side for side in self._sides if side in alive]

    # ---- models (used by module_register_tensor_checker) ----

    def add_model(self, side: str, hooks: Any, names: Sequence[str]) -> None:
        """A model registers its modules under a side."""
        with self._lock:
            if side not in self._sides:
                self._sides.append(side)
            self._models[side] = hooks
            self._module_names[side] = tuple(names)

    def remove_model(self, side: str) -> None:
        """Its hooks are off; what was registered stays until `clear()`."""
        with self._lock:
            self._models.pop(side, None)
            if all(entry.side != side for entry in self._entries):
                self._module_names.pop(side, None)
                if side in self._sides:
                    self._sides.remove(side)

    def model_hooks(self) -> dict[str, Any]:
        """The hooks that are on, by side; those of a model that is gone are not."""
        return {side: hooks for side, hooks in self._models.items() if hooks.model() is not None}

    @property
    def module_names(self) -> dict[str, tuple[str, ...]]:
        """Names of the modules by side, the reference first."""
        order = [side for side in self._sides if side in self._module_names]
        return {side: self._module_names[side] for side in order}

    @property
    def sides(self) -> tuple[str, ...]:
        """Named sides, the reference first."""
        return tuple(self._sides)

    def note_problem(self, problem: str) -> None:
        """A crash of ours inside a hook."""
        with self._lock:
            self._problems.append(problem)

    def note_unknown(self, tag: str, kind: str) -> None:
        """A module took or gave something that holds no numbers."""
        with self._lock:
            self._not_registered.setdefault(tag, kind)

    # ---- checking ----

    def check_equal(
        self,
        dump_mode: DumpMode = DumpMode.NOT,
        dump_path: str | Path = DEFAULT_DUMP_PATH,
        *,
        equal_nan: bool = False,
        check_dtype: bool = True,
    ) -> bool:
        """Compare all tensors of each tag as `torch.equal` does, and print a line per tag.

        Args:
            dump_mode: which groups are written as `.npy` files.
            dump_path: the folder for them.
            equal_nan: NaN at the same place is equal.
            check_dtype: False compares values of different dtypes of one kind.

        Returns:
            True if everything had something to be compared with and is equal.
        """
        criterion = Criterion(name="equal", equal_nan=equal_nan, check_dtype=check_dtype)
        return self._check(criterion, None, dump_mode, dump_path)

    def check_allclose(
        self,
        rtol: float = 1e-5,
        atol: float = 1e-8,
        equal_nan: bool = False,  # noqa: FBT001, FBT002 - as torch.allclose
        dump_mode: DumpMode = DumpMode.NOT,
        dump_path: str | Path = DEFAULT_DUMP_PATH,
        *,
        check_dtype: bool = True,
    ) -> bool:
        """Compare as `torch.allclose` does: `|actual - reference| <= atol + rtol * |reference|`.

        Integers and bools have to be equal. The other arguments are those of `check_equal`.

        Raises:
            ArgumentError: a tolerance is negative or not finite.
        """
        criterion = Criterion(
            name="allclose", rtol=rtol, atol=atol, equal_nan=equal_nan, check_dtype=check_dtype
        )
        return self._check(criterion, None, dump_mode, dump_path)

    def check(
        self,
        criterion: str = "calibrated",
        *,
        rtol: float = 1e-5,
        atol: float = 1e-8,
        equal_nan: bool | None = None,
        check_dtype: bool | None = None,
        precision: str | Any = None,
        dump_mode: DumpMode = DumpMode.NOT,
        dump_path: str | Path = DEFAULT_DUMP_PATH,
    ) -> bool:
        """Compare by a criterion: "equal", "allclose", or "calibrated".

        "calibrated" grants what the rounding of the coarser of two precisions explains; dtypes may
        differ and NaN at the same place is equal. A 16-bit tensor makes its whole side, from there
        on, one of that precision; `precision` (a dtype or its name) says more than tensors do.

        Raises:
            ArgumentError: an unknown criterion or precision, a tolerance that is negative.
        """
        is_calibrated = criterion == "calibrated"
        chosen = Criterion(
            name=criterion,
            rtol=rtol,
            atol=atol,
            equal_nan=is_calibrated if equal_nan is None else equal_nan,
            check_dtype=not is_calibrated if check_dtype is None else check_dtype,
        )
        return self._check(chosen, precision, dump_mode, dump_path)

    def _check(
        self, criterion: Criterion, precision: Any, mode: DumpMode, dump_path: str | Path
    ) -> bool:
        if not isinstance(mode, DumpMode):
            raise ArgumentTypeError(f"dump_mode: expected a DumpMode, got {mode!r}")
        with self._lock:
            groups = group_entries(self._entries, self._sides)
            dumper = Dumper(mode, Path(dump_path))
            dumper.start()
            records = []
            for index, group in enumerate(groups):
                record = judge_group(group, criterion, index=index, precision=precision)
                self._say_record(record)
                dumper.add(group, record.verdict)
                records.append(record)
            dumper.finish()
            self._result = self._conclude(records, criterion, groups)
            if self._result.verdict is not Verdict.PASS and not self.quiet:
                print("\n".join(report_lines(self._result)))  # noqa: T201 - stdout as documented
            return bool(self._result)

    def _say_record(self, record: TensorRecord) -> None:
        if not self.quiet:
            print(printed_line(record, style_for(sys.stdout)))  # noqa: T201 - as documented

    def _conclude(
        self, records: list[TensorRecord], criterion: Criterion, groups: list[Group]
    ) -> TensorCheckResult:
        names = mismatches(self.module_names)
        verdict, reason = overall(
            records, mismatches=len(names), problems=len(self._problems), word=criterion.word
        )
        seen = dict.fromkeys(name for group in groups for name in group.names)
        return TensorCheckResult(
            verdict=verdict,
            reason=reason,
            records=tuple(records),
            findings=module_findings(records),
            name_mismatches=names,
            problems=tuple(self._problems),
            not_registered=tuple(self._not_registered.items()),
            excluded=self._excluded,
            criterion=criterion.name,
            rtol=criterion.rtol,
            atol=criterion.atol,
            sides=self.sides or tuple(seen),
        )

    @property
    def result(self) -> TensorCheckResult:
        """What the last check found.

        Raises:
            ArgumentError: nothing has been checked since `clear()`.
        """
        if self._result is None:
            raise ArgumentError("result: nothing checked yet; call check_equal() or another check")
        return self._result

    # ---- files ----

    def save(self, path: str | Path) -> None:
        """Write everything that is registered to one file, for `load` elsewhere.

        Raises:
            OSError: it cannot be written.
        """
        with self._lock:
            save_entries(Path(path), self._entries, self.sides, self.module_names, self._problems)

    @classmethod
    def load(
        cls,
        *paths: str | Path,
        keep: str = "all",
        quiet: bool = False,
        exclude: Iterable[str] = (),
    ) -> TensorChecker:
        """A checker with what was saved; of several files each is a side (or has its own sides).

        No code of a file runs. An `.npz` of named arrays serves as well. With `keep="stats"`
        tensors stay in the files until they are compared. Tags that match a glob of `exclude` are
        left out.

        Raises:
            TensorFileError: a file cannot be read.
        """
        checker = cls(keep=keep, quiet=quiet)
        for saved in load_entries([Path(path) for path in paths], in_memory=keep == "all"):
            wanted = [
                entry
                for entry in saved.entries
                if not any(tag_matches(entry.tag, pattern) for pattern in exclude)
            ]
            checker._entries += wanted
            checker._excluded += len(saved.entries) - len(wanted)
            checker._problems += saved.problems
            for side, names in saved.module_names.items():
                checker._module_names[side] = tuple(
                    name
                    for name in names
                    if not any(tag_matches(output_tag(name), pattern) for pattern in exclude)
                )
            checker._sides += saved.sides
        for entry in checker._entries:
            key = (entry.tag, entry.side, entry.place)
            checker._counts[key] = max(checker._counts.get(key, 0), entry.number + 1)
            number = entry.number if entry.side is not None else 0
            checker._first.setdefault((entry.tag, number, entry.place), entry.stored)
        return checker


class _Running(threading.local):
    """The open calls of registered modules in this thread."""

    def __init__(self) -> None:
        self.frames: list[Any] = []

    @property
    def side(self) -> str | None:
        """Of the innermost one."""
        return self.frames[-1].side if self.frames else None


tensor_checker = TensorChecker()
"""The checker that scripts share, as documented."""
