"""The records of a run, left in its log and read when somebody asks for them."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, overload

from opcheck.errors import LogReadError
from opcheck.groups import Filter
from opcheck.logfile import LINE_START, parse_json_line, parse_text_line, read_chunks, record_from
from opcheck.record_json import to_json
from opcheck.records import OpRecord, Verdict
from opcheck.scan import TEXT_MARK

__all__ = ["LightCall", "LogRecords", "light_calls"]

_LIGHT = re.compile(
    rb'\{"type":"record","op":"([^"\\]*)","module":"([^"\\]*)","phase":"([^"\\]*)"'
    rb',"index":(\d{1,18}),"step":(\d{1,18}),"occurrence":(\d{1,18}),'
)
_RANK = re.compile(rb',"rank":(\d{1,9})\}')


class LightCall(NamedTuple):
    """What pairs a call with another run's, and what became of it."""

    op: str
    module: str
    phase: str
    step: int
    occurrence: int
    rank: int
    call: int
    """Its `index`."""
    verdict: Verdict
    crashed: bool
    q: float

    @property
    def key(self) -> tuple[str, str, str, int, int]:
        """The same in both runs."""
        return self[:5]


def light_calls(records: Iterable[OpRecord]) -> Iterator[LightCall]:
    """The calls of a run; a log is not decoded more than needed."""
    if isinstance(records, LogRecords):
        yield from records.light()
        return
    yield from (_light(record) for record in records)


def _light(record: OpRecord) -> LightCall:
    return LightCall(
        record.op,
        record.module,
        record.phase,
        record.step,
        record.occurrence,
        record.rank,
        record.index,
        record.verdict,
        record.error is not None,
        record.metrics.q,
    )


def _light_of(line: bytes) -> LightCall | None:
    """A PASS line of the known shape; None: decode it."""
    found = _LIGHT.match(line)
    rank = _RANK.search(line, max(line.rfind(b',"rank":'), 0))
    at = line.find(b',"verdict":"PASS","metrics":{')
    q_at = line.find(b',"q":', at)
    if found is None or rank is None or at < 0 or q_at < 0 or line.rfind(LINE_START) != 0:
        return None
    op, module, phase, index, step, occurrence = found.groups()
    try:
        q = float(line[q_at + 5 : line.find(b",", q_at + 5)])
    except ValueError:
        return None
    return LightCall(
        op.decode("utf-8", "surrogateescape"),
        module.decode("utf-8", "surrogateescape"),
        phase.decode("utf-8", "surrogateescape"),
        int(step),
        int(occurrence),
        int(rank[1]),
        int(index),
        Verdict.PASS,
        False,  # noqa: FBT003 - a field of a tuple
        q,
    )


class LogRecords(Sequence[OpRecord]):
    """The records of a run, read from its files when they are asked for."""

    def __init__(
        self, paths: Sequence[Path], run_ids: Sequence[str], length: int, where: Filter | None
    ) -> None:
        self.paths = tuple(paths)
        self.run_ids = tuple(run_ids)
        self.where = where
        self._length = length
        self._offsets: tuple[array[int], array[int]] | None = None

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[OpRecord]:
        return (record for _, _, record in self._read())

    @overload
    def __getitem__(self, place: int) -> OpRecord: ...
    @overload
    def __getitem__(self, place: slice) -> list[OpRecord]: ...
    def __getitem__(self, place: int | slice) -> OpRecord | list[OpRecord]:
        if self._offsets is None:
            files, offsets = array("i"), array("q")
            for file, offset, _ in self._read():
                files.append(file)
                offsets.append(offset)
            self._offsets = files, offsets
        files, offsets = self._offsets
        if isinstance(place, slice):
            return [self[at] for at in range(*place.indices(len(offsets)))]
        with self.paths[files[place]].open("rb") as log:
            log.seek(offsets[place])
            line = log.readline().rstrip(b"\n")
        record = _record_of(line)
        if record is None:
            msg = f"{self.paths[files[place]]}: changed while it was read"
            raise LogReadError(msg)
        return record

    def failing(self) -> Iterator[OpRecord]:
        """The FAIL records, in the order of the log."""
        records = self._read(lambda line: b',"verdict":"PASS",' not in line)
        return (record for _, _, record in records if record.verdict is Verdict.FAIL)

    def with_index(self, index: int) -> list[OpRecord]:
        """The records of the n-th dispatched call, one of each rank."""
        mark = b',"index":%d,' % index
        records = self._read(lambda line: mark in line or b',"index":' not in line)
        return [record for _, _, record in records if record.index == index]

    def light(self) -> Iterator[LightCall]:
        """Each call, for pairing; where the log has no occurrence it is counted here."""
        seen: dict[tuple[str, str, str, int, int], int] = {}
        for file, _, line in self.lines():
            light = _light_of(line)
            if light is not None:
                if self._is_of(file, line):
                    yield light
                continue
            record = _record_of(line)
            if record is None or record.run_id != self.run_ids[file]:
                continue
            light = _light(record)
            if b'"occurrence"' not in line:
                occurrence = seen.get(light.key, 0)
                seen[light.key] = occurrence + 1
                light = light._replace(occurrence=occurrence)
            yield light

    def record_lines(self) -> Iterator[tuple[int, bytes]]:
        """File and line of each record, undecoded where its shape is known."""
        for file, _, line in self.lines():
            known = _light_of(line)
            if known is not None:
                if self._is_of(file, line):
                    yield file, line
                continue
            record = _record_of(line)
            if record is not None and record.run_id == self.run_ids[file]:
                if line.startswith(b"{") and line.rfind(LINE_START) == 0:
                    yield file, line
                else:
                    data = {"type": "record", **to_json(record)}
                    yield file, json.dumps(data, separators=(",", ":")).encode()

    def _is_of(self, file: int, line: bytes) -> bool:
        tail = line[line.rfind(b',"run_id":"') + 11 :]
        run_id = tail[: tail.find(b'"')]
        if b"\\" in run_id:
            record = _record_of(line)
            return record is not None and record.run_id == self.run_ids[file]
        return run_id.decode("utf-8", "surrogateescape") == self.run_ids[file]

    def lines(self) -> Iterator[tuple[int, int, bytes]]:
        """File, offset, line of everything in the logs."""
        for file, path in enumerate(self.paths):
            for chunk in read_chunks(path):
                offset = chunk.offset
                for line in chunk.lines:
                    yield file, offset, line
                    offset += len(line) + 1

    def _read(
        self, may_match: Callable[[bytes], bool] | None = None
    ) -> Iterator[tuple[int, int, OpRecord]]:
        """File, offset, record; whole lines of the known shape only where `may_match` says so."""
        where = self.where
        for file, offset, line in self.lines():
            if may_match is not None and line.rfind(LINE_START) == 0 and not may_match(line):
                continue
            record = _record_of(line)
            if (
                record is not None
                and record.run_id == self.run_ids[file]
                and (where is None or where.takes(record))
            ):
                yield file, offset, record


def _record_of(line: bytes) -> OpRecord | None:
    """The record in a line; None where there is none or it cannot be read (scanning has warned)."""
    try:
        if not line.lstrip(b"\0\r\t ").startswith(b"{") and TEXT_MARK.search(line[:80]):
            return parse_text_line(line.decode("utf-8", "surrogateescape"))
        data, _ = parse_json_line(line)
        return record_from(data) if data.get("type") == "record" else None
    except LogReadError:
        return None
