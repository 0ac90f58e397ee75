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
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from modulecheck.tensor_compare import Criterion
from modulecheck.tensor_dump import Dumper, DumpMode
from modulecheck.tensor_files import load_entries, save_entries
from modulecheck.tensor_groups import (
    Group,
    group_entries,
    mismatches,
    output_tag,
    tag_matches,
)
from modulecheck.tensor_judge import judge_group
from modulecheck.tensor_origins import module_findings
from modulecheck.tensor_records import TensorCheckResult, TensorRecord, overall
from modulecheck.tensor_registry import TensorRegistry
from modulecheck.tensor_report import printed_line, report_lines
from modulecheck.tensor_repro import Checked, write_tensor_repros
from opcheck.errors import ArgumentError
from opcheck.printing import style_for
from opcheck.records import Verdict
from opcheck.validation import a_path, an_instance, several_globs, several_paths

__all__ = ["TensorChecker", "tensor_checker"]

DEFAULT_DUMP_PATH = "tensor_dump"


class TensorChecker(TensorRegistry):
    """Collects tensors under tags and compares those of one tag with each other.

    Args:
        keep: "all" keeps every tensor in memory. "stats" keeps the first one of a tag in a scratch
            file, compares the next as it comes, and lets it go unless it differs.
        quiet: print nothing; `result` has everything.
        repro_dir: a check that fails writes a Python file there, which needs torch alone, for each
            module where a difference was born. With `keep="all"` what modules get is then kept a
            second time, so that the file can run the code of both sides.
    """

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
        differ and NaN at the same place is equal unless told otherwise. A 16-bit tensor makes its
        whole side, from there on, one of that precision; `precision` (a dtype or its name) says
        more than tensors do.

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
        an_instance("dump_mode", mode, DumpMode, "a DumpMode")
        folder = a_path("dump_path", dump_path)
        with self._lock:
            groups = group_entries(self._entries, self._sides)
            dumper = Dumper(mode, folder)
            dumper.start()
            records = []
            for index, group in enumerate(groups):
                record = judge_group(group, criterion, index=index, precision=precision)
                self._say_record(record)
                dumper.add(group, record.verdict)
                records.append(record)
            dumper.finish()
            result = self._conclude(records, criterion, groups)
            self._result = self._with_repros(result, groups, criterion, precision)
            if self._result.verdict is not Verdict.PASS and not self.quiet:
                print("\n".join(report_lines(self._result)))  # noqa: T201 - stdout as documented
            return bool(self._result)

    def _with_repros(
        self, result: TensorCheckResult, groups: list[Group], criterion: Criterion, precision: Any
    ) -> TensorCheckResult:
        if self.repro_dir is None or result.verdict is not Verdict.FAIL:
            return result
        checked = Checked(
            groups=groups,
            records=result.records,
            findings=result.findings,
            criterion=criterion,
            precision=precision,
            calls=self._kept_calls,
        )
        paths, notes = write_tensor_repros(Path(self.repro_dir), checked)
        return replace(result, repros=tuple(paths), repro_notes=tuple(notes))

    def _say_record(self, record: TensorRecord) -> None:
        if not self.quiet:
            print(printed_line(record, style_for(sys.stdout)))  # noqa: T201 - as documented

    def _conclude(
        self, records: list[TensorRecord], criterion: Criterion, groups: list[Group]
    ) -> TensorCheckResult:
        names = mismatches(self.module_names)
        ran = {(entry.side, entry.site.module) for entry in self._entries if entry.site is not None}
        idle = [side for side in self.module_names if side not in {side for side, _ in ran}]
        verdict, reason = overall(
            records,
            crashes=len(self._problems),
            gaps=[
                *(f"{side} is registered and did not run" for side in idle),
                *([f"{len(names)} module names have no counterpart"] if names else []),
                *(f"{tag} holds nothing that can be compared" for tag in self._unseen_outputs),
            ],
            word=criterion.word,
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
            not_run=self._not_run(),
            criterion=criterion.name,
            rtol=criterion.rtol,
            atol=criterion.atol,
            sides=self.sides or tuple(seen),
        )

    def _not_run(self) -> tuple[str, ...]:
        """Modules of the reference that ran on no side."""
        roles = ("input", "output")
        ran = {
            entry.site.module
            for entry in self._entries
            if entry.site is not None and entry.site.role in roles
        }
        names = next(iter(self.module_names.values()), ())
        return tuple(name for name in names if name not in ran)

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
        target = a_path("path", path)
        with self._lock:
            save_entries(target, self._entries, self.sides, self.module_names, self._problems)

    @classmethod
    def load(
        cls,
        *paths: str | Path,
        keep: str = "all",
        quiet: bool = False,
        repro_dir: str | Path | None = None,
        exclude: Iterable[str] = (),
    ) -> TensorChecker:
        """A checker with what was saved; of several files each is a side (or has its own sides).

        No code of a file runs. An `.npz` of named arrays serves as well. With `keep="stats"`
        tensors stay in the files until they are compared. Tags that match a glob of `exclude` are
        left out.

        Raises:
            TensorFileError: a file cannot be read.
            ArgumentError: no file was given.
        """
        checker = cls(keep=keep, quiet=quiet, repro_dir=repro_dir)
        files, unwanted = several_paths("paths", paths), several_globs("exclude", exclude)
        if not files:
            raise ArgumentError("paths: expected at least one file, got none")
        for saved in load_entries(files, in_memory=keep == "all"):
            wanted = [
                entry
                for entry in saved.entries
                if not any(tag_matches(entry.tag, pattern) for pattern in unwanted)
            ]
            checker._entries += wanted
            checker._excluded += len(saved.entries) - len(wanted)
            checker._problems += saved.problems
            for side, names in saved.module_names.items():
                checker._module_names[side] = tuple(
                    name
                    for name in names
                    if not any(tag_matches(output_tag(name), pattern) for pattern in unwanted)
                )
            checker._sides += saved.sides
        for entry in checker._entries:
            key = (entry.tag, entry.side, entry.place)
            checker._counts[key] = max(checker._counts.get(key, 0), entry.number + 1)
            number = entry.number if entry.side is not None else 0
            checker._first.setdefault((entry.tag, number, entry.place), entry.stored)
        return checker


tensor_checker = TensorChecker()
"""The checker that scripts share, as documented."""
