"""A reproducer for each place where two implementations part.

Where the models ran here and Dynamo captures the module on both sides as one graph, the file runs
both graphs on what they got. Otherwise it holds what was recorded, and says so.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from modulecheck import _torch, dynamo
from modulecheck.call_graphs import graphs_of, state_of
from modulecheck.graph_limits import loaded
from modulecheck.graph_repro import DEFAULT_REPRO_BYTES
from modulecheck.recording import RecordedCall
from modulecheck.rerun import Rerun
from modulecheck.snapshot import RandomState
from modulecheck.tensor_calls import CallKey, KeptCall
from modulecheck.tensor_compare import Criterion
from modulecheck.tensor_groups import Group
from modulecheck.tensor_judge import precision_of
from modulecheck.tensor_limits import limit_for
from modulecheck.tensor_records import ModuleFinding, TensorRecord
from modulecheck.tensor_repro_text import Sides, Text, recorded_text, sides_text
from modulecheck.tensor_values import Snapshot
from opcheck.errors import ReproError
from opcheck.records import Verdict
from opcheck.repro_files import free_stem, write_repro

__all__ = ["MAX_REPROS", "Checked", "write_tensor_repros"]

MAX_REPROS = 20
"""Of one check."""
MAX_ELEMENTS = 1 << 22
"""Of a tensor: files compare lists of numbers, a few seconds and 500 MB for so many."""
_RESULTS = ("output", "buffer_after")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What a check has looked at, while the tensors still are there."""

    groups: Sequence[Group]
    records: Sequence[TensorRecord]
    """Beside the groups."""
    findings: Sequence[ModuleFinding]
    criterion: Criterion
    precision: Any
    calls: Mapping[CallKey, KeptCall]


def write_tensor_repros(folder: Path, checked: Checked) -> tuple[list[str], list[str]]:
    """A file for each module where a difference was born; none: for the first tag that differs.

    Returns:
        The paths, and a sentence for each file that could not be written.
    """
    paths: list[str] = []
    notes: list[str] = []
    before = RandomState.now()
    wanted = list(_places(checked))
    if len(wanted) > MAX_REPROS:
        notes.append(f"{len(wanted) - MAX_REPROS} origins more have no reproducer")
    try:
        with _torch.no_modes():
            for place, finding in wanted[:MAX_REPROS]:
                divergence = _Divergence(checked, place, finding)
                try:
                    paths.append(str(divergence.write(folder)))
                except ReproError as reason:
                    notes.append(f"no reproducer of {divergence.record.tag}: {reason}")
                except Exception as error:  # noqa: BLE001 - our failure must not cost the result
                    why = f"{type(error).__name__}: {error}"
                    notes.append(f"no reproducer of {divergence.record.tag}: {why}")
    finally:
        before.restore()
    return paths, notes


def _places(checked: Checked) -> Iterator[tuple[int, ModuleFinding | None]]:
    """Indices of groups."""
    failed = [place for place, item in enumerate(checked.records) if item.verdict is Verdict.FAIL]
    seen: set[str] = set()
    for finding in checked.findings:
        if finding.kind != "origin" or finding.module in seen:
            continue
        seen.add(finding.module)
        for place in failed:
            site = checked.records[place].site
            if site is None or site.role not in _RESULTS:
                continue
            if (site.module, site.call) == (finding.module, finding.call):
                yield place, finding
                break
    if not seen and failed:
        yield failed[0], None


@dataclass(frozen=True, slots=True)
class _Divergence:
    """One tensor that differs, and where it was born."""

    checked: Checked
    place: int
    finding: ModuleFinding | None

    @property
    def record(self) -> TensorRecord:
        return self.checked.records[self.place]

    def write(self, folder: Path) -> Path:
        """Write the file that shows the most.

        Raises:
            ReproError: none shows the difference, or it cannot be written.
        """
        if self.record.num_elements > MAX_ELEMENTS:
            raise ReproError(
                f"{self.record.num_elements:,} elements, and a file compares at most"
                f" {MAX_ELEMENTS:,}; dump_mode= saves such tensors"
            )
        try:
            return self._written(folder, self._sides_text())
        except ReproError as reason:
            return self._written(folder, self._recorded_text(str(reason)))

    def _written(self, folder: Path, text: Text) -> Path:
        stem = free_stem(folder, "tensors", self.record.tag.removeprefix("checker_"))
        path = write_repro(folder, stem, *text, max_bytes=DEFAULT_REPRO_BYTES)
        if _shows(path):
            return path
        for written in (path, path.with_suffix(".pt")):
            written.unlink(missing_ok=True)
        raise ReproError("the file does not show the difference")

    def _facts(self) -> dict[str, str]:
        record, criterion = self.record, self.checked.criterion
        expected, actual = record.sides[0], record.failing_side
        rule = criterion.name
        if rule == "allclose":
            rule += f", rtol={criterion.rtol:g} atol={criterion.atol:g}"
        facts = {"tag": record.tag, "expected": expected, "actual": actual, "criterion": rule}
        if self.finding is not None:
            name = self.finding.module or "<root>"
            call = f", call {self.finding.call}" if self.finding.call else ""
            facts["module"] = f"{name}{call}: {self.finding.reason}"
        return {**facts, "why": record.reason}

    # ---- both sides as code ----

    def _sides_text(self) -> Text:
        calls = [self._call(side) for side in (self.record.sides[0], self.record.failing_side)]
        expected, actual = (_one_graph(call) for call in calls)
        sides = Sides(
            (expected, actual),
            (state_of(calls[0]), state_of(calls[1])),
            _device_of(expected.inputs),
        )
        facts = self._facts()
        with tempfile.TemporaryDirectory() as scratch:
            text = sides_text(sides, facts, [])
            path = write_repro(Path(scratch), "sides", *text, max_bytes=DEFAULT_REPRO_BYTES)
            file = loaded(path)
            limits = self._limits(file.expected_side(), file.actual_side())
        text = sides_text(sides, facts, limits)
        with tempfile.TemporaryDirectory() as scratch:
            if not _shows(write_repro(Path(scratch), "sides", *text, max_bytes=1 << 62)):
                raise ReproError("both graphs, run alone, agree")
        return text

    def _call(self, side: str) -> RecordedCall:
        if self.finding is None:
            raise ReproError("no module is known whose inputs agree")
        name, call = self.finding.module, self.finding.call
        kept = self.checked.calls.get((side, name, call))
        if kept is None:
            raise ReproError(f"what {name or '<root>'} got in {side!r} was not kept as it ran")
        return kept.recorded(name, max_bytes=DEFAULT_REPRO_BYTES)

    def _limits(self, expected: list[Any], actual: list[Any]) -> list[Any]:
        if len(expected) != len(actual):
            raise ReproError(f"the graphs give {len(expected)} and {len(actual)} results")
        entries = self.checked.groups[self.place].entries
        precision = self._precision(entries)
        limits = []
        for place, pair in enumerate(zip(expected, actual, strict=True)):
            name = f"output {place}"
            if all(isinstance(item, Tensor) for item in pair):
                one, other = (Snapshot(item.detach().cpu()) for item in pair)
                limits.append(limit_for(name, one, other, self.checked.criterion, precision))
            else:
                limits.append({"name": name, "rule": "exact"})
        return limits

    def _precision(self, entries: Sequence[Any]) -> str | None:
        return precision_of(entries[0], entries[self._failing()], self.checked.precision)

    def _failing(self) -> int:
        return self.record.sides.index(self.record.failing_side, 1)

    # ---- what was recorded ----

    def _recorded_text(self, why_no_code: str) -> Text:
        entries = self.checked.groups[self.place].entries
        one, other = (entries[place].stored.load() for place in (0, self._failing()))
        precision = self._precision(entries)
        limit = limit_for(self.record.tag, one, other, self.checked.criterion, precision)
        facts = {**self._facts(), "code": f"none, the tensors alone: {why_no_code}"}
        pair = (one.tensor, other.tensor)
        return recorded_text(self._inputs(), pair, facts, limit, entries[0].device)

    def _inputs(self) -> dict[str, Tensor]:
        """Of the module, as the reference got them."""
        if self.finding is None:
            return {}
        found = {}
        for group, record in zip(self.checked.groups, self.checked.records, strict=True):
            site = record.site
            if site is None or site.role != "input":
                continue
            if (site.module, site.call) == (self.finding.module, self.finding.call):
                found[record.tag] = group.entries[0].stored.load().tensor
        return found


def _one_graph(call: RecordedCall) -> Any:
    with dynamo.isolated():
        found = graphs_of(Rerun(call))
    name = call.name or "<root>"
    if len(found) != 1:
        raise ReproError(f"{name} is captured in {len(found)} graphs, and a file runs one")
    return found[0]


def _device_of(inputs: Sequence[Any]) -> str:
    return next((str(item.device) for item in inputs if isinstance(item, Tensor)), "cpu")


def _shows(path: Path) -> bool:
    """The file, run here without the settings of its `main`, finds a difference."""
    file: Any = loaded(path)
    with contextlib.redirect_stdout(io.StringIO()):
        if hasattr(file, "expected_side"):
            expected, actual = file.expected_side(), file.actual_side()
        else:
            inputs, one, other = file.recorded("cpu", wide=False)
            expected, actual = [one], [file.compute(inputs, other)]
        return bool(file.verdict(file.limits(), actual, expected, expected))
