"""Logs as a stream: JSON lines and the documented text log, in pieces of bounded size.

A line that cannot be read costs a warning with file and line number, never the rest of the log.
Schema versions: a log says its version in the header of each run. Older versions and this one are
read, a newer one is refused (`SchemaVersionError`), because what it means is not known here.
Within a version fields may be added: unknown fields and line types are ignored, missing fields
take their defaults.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from opcheck.errors import LogReadError
from opcheck.record_json import from_json
from opcheck.records import (
    SCHEMA,
    SCHEMA_VERSION,
    Blame,
    Coverage,
    Metrics,
    OpRecord,
    Overhead,
    Sample,
    SkipReason,
)
from opcheck.textline import format_text_line, parse_text_line

__all__ = [
    "Chunk",
    "Problems",
    "coverage_from",
    "format_text_line",
    "open_log",
    "parse_json_line",
    "parse_text_line",
    "read_chunks",
    "record_from",
    "schema_problem",
]

CHUNK_BYTES = 1 << 20
MAX_LINE_BYTES = 32 << 20
"""A longer line is no line of ours; it is dropped with a warning."""
MAX_WHOLE = 2**63 - 1
LINE_START = b'{"type":"'

Progress = Callable[[int, int], None]
"""Told (bytes read, bytes in all) now and then."""


@dataclass
class Problems:
    """What could not be read: the first few with file and line, the others counted."""

    shown: list[str] = field(default_factory=list)
    hidden: int = 0
    limit: int = 5

    def add(self, path: Path, line: int, text: str) -> None:
        """One more."""
        if len(self.shown) < self.limit:
            self.shown.append(f"{path}:{line}: {text}")
        else:
            self.hidden += 1

    @property
    def warnings(self) -> list[str]:
        """One sentence each."""
        more = [f"and {self.hidden:,} more lines that could not be read"] if self.hidden else []
        return self.shown + more


class Chunk(NamedTuple):
    """Some lines of a log, without their newlines."""

    lines: list[bytes]
    first_line: int
    """Number of the first one, from 1."""
    offset: int
    """Where it begins in the file."""
    is_torn: bool
    """The last line has no newline: whole only if it can be read."""


def open_log(path: Path) -> int:
    """Size of a regular file that can be read.

    Raises:
        LogReadError: there is none, it is a folder, a FIFO, a device, or not ours to read.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            kind = "a folder" if stat.S_ISDIR(status.st_mode) else "not a regular file"
            msg = f"{path}: {kind}; give a log file (precision.jsonl) or a folder with one"
            raise LogReadError(msg)
        with path.open("rb"):
            return status.st_size
    except (OSError, ValueError) as error:
        if isinstance(error, LogReadError):
            raise
        msg = f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}"
        raise LogReadError(msg) from error


def read_chunks(
    path: Path, problems: Problems | None = None, progress: Progress | None = None
) -> Iterator[Chunk]:
    """The lines of a log, some at a time; at most `MAX_LINE_BYTES` are held."""
    size = open_log(path)
    rest, number, offset, done = b"", 1, 0, 0
    dropping = False
    with path.open("rb", buffering=0) as file:
        while block := file.read(CHUNK_BYTES):
            done += len(block)
            if progress is not None:
                progress(done, max(size, done))
            if dropping:
                cut = block.find(b"\n")
                if cut < 0:
                    continue
                block, dropping = block[cut + 1 :], False
                number, offset = number + 1, done - len(block)
            data = rest + block if rest else block
            lines = data.split(b"\n")
            rest = lines.pop()
            if lines:
                yield Chunk(lines, number, offset, is_torn=False)
                number += len(lines)
                offset += len(data) - len(rest)
            if len(rest) > MAX_LINE_BYTES:
                if problems is not None:
                    problems.add(path, number, f"a line of over {MAX_LINE_BYTES >> 20} MiB")
                rest, dropping = b"", True
    if rest:
        yield Chunk([rest], number, offset, is_torn=True)


# ---- one line -----------------------------------------------------------------------------------


def parse_json_line(line: bytes) -> tuple[dict[str, Any], bool]:
    """The object of a line, and whether something in front of it was lost.

    A process that was killed leaves half a line, and the next run goes on behind it: then the
    second half is read.

    Raises:
        LogReadError: no object can be read.
    """
    text = line.strip(b"\0\r\t ").removeprefix(b"\xef\xbb\xbf")
    try:
        return _object(text), False
    except LogReadError:
        again = text.rfind(LINE_START)
        if again > 0:
            return _object(text[again:]), True
        raise


def _object(text: bytes) -> dict[str, Any]:
    try:
        data = json.loads(text.decode("utf-8", "surrogateescape"))
    except (ValueError, RecursionError) as error:
        detail = getattr(error, "msg", "nested too deeply")
        msg = f"not JSON ({detail})"
        raise LogReadError(msg) from error
    if not isinstance(data, dict):
        msg = f"a JSON {type(data).__name__} where an object should be"
        raise LogReadError(msg)
    return data


_TEXT = ("op", "module", "phase", "source", "reason", "criterion", "reference", "run_id")
_LISTS = ("inputs", "outputs", "notes")
_WHOLE = ("index", "step", "occurrence", "rank")
_METRIC_WHOLE = ("num_out", "num_elements", "num_nonfinite", "worst_output")
_METRIC_OPTIONAL = ("rmse_ratio", "mean_shift", "allowed_at", "expected_rms")
_METRIC_FLOAT = ("max_abs", "mean_abs", "max_rel", "q")


def record_from(data: Mapping[str, Any]) -> OpRecord:
    """The record of a JSON line, every field of the type that readers count on.

    Raises:
        LogReadError: a field has another type; the message names it.
    """
    if "op" not in data:
        msg = "a record without op"
        raise LogReadError(msg)
    for names, kinds in ((_TEXT, str), (_WHOLE, int), (("metrics",), dict)):
        for name in names:
            _expect(data, name, kinds)
    for name in ("rtol", "atol"):
        _expect(data, name, (int, float))
    _expect(data, "error", (str, type(None)))
    _expect(data, "blame", (dict, type(None)))
    if not isinstance(data.get("repeats"), (bool, type(None))):
        msg = "repeats: expected true, false or null"
        raise LogReadError(msg)
    _expect(data, "sample", (dict, type(None)))
    for name in _LISTS:
        _expect(data, name, list)
        if not all(isinstance(item, str) for item in data.get(name, ())):
            msg = f"{name}: expected a list of strings"
            raise LogReadError(msg)
    try:
        record: OpRecord = from_json(OpRecord, data)
    except (TypeError, ValueError) as error:
        raise LogReadError(str(error)) from error
    _check_metrics(record.metrics)
    if record.blame is not None:
        _expect(data["blame"], "word", str)
        _check_blame(record.blame)
    _check_sample(record.sample)
    return record


def _check_blame(blame: Blame) -> None:
    for name in ("born", "inherited", "total", "inputs"):
        if not _is_a(getattr(blame, name), (int, float)):
            msg = f"blame.{name}: expected a number"
            raise LogReadError(msg)


def _expect(data: Mapping[str, Any], name: str, kinds: type | tuple[type, ...]) -> None:
    if name in data and not _is_a(data[name], kinds):
        msg = f"{name}: a {type(data[name]).__name__} is not expected there"
        raise LogReadError(msg)


def _is_a(value: object, kinds: type | tuple[type, ...]) -> bool:
    """Of that type, not a truth value, and a whole number only if 64 bits hold it."""
    if isinstance(value, bool) or not isinstance(value, kinds):
        return False
    return not isinstance(value, int) or -MAX_WHOLE <= value <= MAX_WHOLE


def _check_metrics(metrics: Metrics) -> None:
    for names, kinds in (
        (_METRIC_FLOAT, (int, float)),
        (_METRIC_WHOLE, (int,)),
        (_METRIC_OPTIONAL, (int, float, type(None))),
    ):
        for name in names:
            value = getattr(metrics, name)
            if not _is_a(value, kinds):
                msg = f"metrics.{name}: a {type(value).__name__} is not expected there"
                raise LogReadError(msg)
    elements: tuple[Any, ...] = (metrics.actual_at, metrics.expected_at)
    for value in elements:
        if value is not None and not isinstance(value, (bool, int, float, complex)):
            msg = f"metrics: an element cannot be a {type(value).__name__}"
            raise LogReadError(msg)
    if not all(_is_a(place, int) for place in metrics.worst_index or ()):
        msg = "metrics.worst_index: expected a list of whole numbers"
        raise LogReadError(msg)


def _check_sample(sample: Sample | None) -> None:
    if sample is None:
        return
    flag: Any = sample.covers_all
    fits = [isinstance(flag, bool), _is_a(sample.share, (int, float))]
    fits += [isinstance(text, str) for text in (sample.strategy, sample.detail)]
    fits += [_is_a(number, int) for number in (sample.seed, sample.num_elements)]
    fits += [_is_a(place, int) for place in sample.tile or ()]
    if not all(fits):
        msg = "sample: a field has another type"
        raise LogReadError(msg)


_COVERAGE_WHOLE = (
    "seen", "checked", "failed", "errors", "elements_seen", "elements_checked", "elements_sampled",
    "signatures_seen", "signatures_checked", "steps",
)  # fmt: skip


def coverage_from(data: Mapping[str, Any]) -> tuple[Coverage, str]:
    """The coverage of a JSON line, and a warning or "".

    A reason for skipping that is not known here is counted as `not_checkable`, so that the sum
    still holds.

    Raises:
        LogReadError: a field has a type that it cannot have.
    """
    fields, unknown = dict(data), set()
    known = {reason.value for reason in SkipReason}
    for name in _COVERAGE_WHOLE:
        _expect(fields, name, int)
    try:
        skipped: dict[str, int] = {}
        for reason, count in dict(fields.get("skipped", {})).items():
            unknown |= {reason} - known
            name = reason if reason in known else SkipReason.NOT_CHECKABLE.value
            skipped[name] = skipped.get(name, 0) + int(count)
        fields["skipped"] = skipped
        fields["unchecked_signatures"] = [
            {**item, "reason": item["reason"] if item["reason"] in known else "not_checkable"}
            for item in fields.get("unchecked_signatures", ())
        ]
        coverage: Coverage = from_json(Coverage, fields)
        _check_counts(coverage)
        _check_followed(coverage)
    except (TypeError, ValueError, KeyError) as error:
        msg = f"coverage: {error}"
        raise LogReadError(msg) from error
    names = ", ".join(sorted(map(str, unknown)))
    return coverage, f"reason for skipping not known here: {names}" if unknown else ""


def _check_counts(coverage: Coverage) -> None:
    texts = [name for call in coverage.calls for name in (call.op, call.module, call.phase)]
    texts += [name for item in coverage.unchecked_signatures for name in (item.op, item.signature)]
    counts = [
        count
        for call in coverage.calls
        for count in (call.seen, call.checked, call.failed, call.errors)
    ]
    counts += [item.calls for item in coverage.unchecked_signatures]
    counts += coverage.skipped.values()
    texts.append(coverage.left_by)
    stopped = coverage.counting_stopped_at
    if (
        not all(isinstance(text, str) for text in texts)
        or not all(_is_a(count, int) for count in counts)
        or not (stopped is None or _is_a(stopped, int))
        or not _is_a(coverage.check_seconds, (int, float))
        or not _is_a(coverage.check_peak_bytes, int)
        or not _is_overhead(coverage.overhead)
    ):
        msg = "a name or a count has another type"
        raise TypeError(msg)


def _is_overhead(share: Overhead | None) -> bool:
    if share is None:
        return True
    seconds = (
        share.own_seconds, share.allowed_seconds, share.spent_seconds, share.counting_seconds,
        share.setup_seconds,
    )  # fmt: skip
    counts = [share.num_places, share.num_left, share.num_steps, share.num_rests]
    counts += [] if share.steps_left is None else [share.steps_left]
    return all(_is_a(value, (int, float)) for value in seconds) and all(
        _is_a(value, int) for value in counts
    )


def _check_followed(coverage: Coverage) -> None:
    """What `blame` and `repeat` added."""
    birth = coverage.first_nonfinite
    texts: list[Any] = [*coverage.shadow, *coverage.repeat]
    counts: list[Any] = [*coverage.shadow.values(), *coverage.repeat.values()]
    for item in coverage.unrepeatable:
        texts += [item.op, item.module, item.phase]
        counts += [item.calls, item.first]
    if birth is not None:
        texts += [birth.op, birth.module, birth.phase, birth.source, birth.value, birth.verdict]
        texts += birth.inputs
        counts += [birth.step, birth.index, birth.output, *birth.place]
    if (
        not all(isinstance(text, str) for text in texts)
        or not all(_is_a(count, int) for count in counts)
        or not all(_is_a(item.max_abs, (int, float)) for item in coverage.unrepeatable)
        or not (birth is None or isinstance(birth.arrived, bool))
    ):
        msg = "a name or a count has another type"
        raise TypeError(msg)


def schema_problem(header: Mapping[str, Any]) -> tuple[str, bool]:
    """Why a run with this header cannot be read, or ""; and whether it is because it is newer."""
    schema, version = header.get("schema", SCHEMA), header.get("version", SCHEMA_VERSION)
    if schema != SCHEMA:
        return f"schema {schema!r}, expected {SCHEMA!r}", False
    if isinstance(version, bool) or not isinstance(version, int):
        return f"schema version {version!r} is not a whole number", False
    if version > SCHEMA_VERSION:
        environment = header.get("environment")
        by = environment.get("opcheck") if isinstance(environment, Mapping) else None
        written = f" (it was written by opcheck {by})" if by else ""
        return (
            f"schema version {version}, this opcheck reads versions up to {SCHEMA_VERSION};"
            f" an opcheck that knows version {version} is needed{written}",
            True,
        )
    return "", False
