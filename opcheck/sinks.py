"""Records to files: the documented text line through loguru, and JSON lines flushed one by one."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from loguru import logger

from opcheck.errors import LogWriteError
from opcheck.record_json import to_json
from opcheck.records import Coverage, OpRecord
from opcheck.textline import format_text_line

__all__ = ["LogFiles", "log_names"]

_FORMAT = "{time:YYYY-MM-DD HH:mm:ss} [WARNING] {message}"
"""The level is spelled out: a quiet session logs below the level of the user's own sinks."""
_tokens = itertools.count()


def log_names(rank: int, world_size: int) -> tuple[str, str]:
    """Names of the text log and of the JSON lines for one rank."""
    stem = f"precision.rank{rank}" if world_size > 1 else "precision"
    return f"{stem}.log", f"{stem}.jsonl"


class LogFiles:
    """The two files of a run, open from `open()` to `close()`.

    A failure to write (disk full) never reaches the user's step: it is kept in `problem`, and
    said at the end.
    """

    def __init__(self, text_path: Path, json_path: Path, *, quiet: bool) -> None:
        self.text_path = text_path
        self.json_path = json_path
        self.problem: str | None = None
        self._quiet = quiet
        self._token = f"{os.getpid()}.{next(_tokens)}"
        self._pid = os.getpid()
        self._sink: int | None = None
        self._json: TextIO | None = None
        self._lock = threading.Lock()

    def open(self) -> None:
        """Make the folders, open both files for appending.

        Raises:
            LogWriteError: the path cannot be written.
        """
        try:
            self.text_path.parent.mkdir(parents=True, exist_ok=True)
            self.text_path.open("a", encoding="utf-8").close()
            self._json = self.json_path.open("a", encoding="ascii")
            self._end_torn_line(self._json)
        except OSError as error:
            self.close()
            raise LogWriteError(
                f"log_dir: cannot write {str(error.filename or self.json_path)!r}:"
                f" {error.strerror or error}; choose another folder with log_dir="
            ) from error

    def _add_sink(self) -> int:
        """Our sink in loguru, added at the first failure: adding one costs a millisecond."""
        return logger.add(
            self.text_path,
            format=_FORMAT,
            level=0,
            filter=self._is_ours,
            encoding="utf-8",
            colorize=False,
            backtrace=False,
            diagnose=False,
            catch=False,
        )

    def _is_ours(self, message: Mapping[str, Any]) -> bool:
        return bool(message["extra"].get("opcheck_log") == self._token)

    def _end_torn_line(self, file: TextIO) -> None:
        """A process that was killed may have left half a line: ours must not be glued to it."""
        if file.tell() == 0:
            return
        with self.json_path.open("rb") as earlier:
            earlier.seek(-1, os.SEEK_END)
            torn = earlier.read(1) != b"\n"
        if torn:
            file.write("\n")

    def header(self, fields: Mapping[str, Any]) -> None:
        """Begin a run."""
        self._write("header", dict, fields)

    def record(self, record: OpRecord) -> None:
        """One checked call; on disk when this returns."""
        self._write("record", to_json, record)

    def coverage(self, coverage: Coverage, run_id: str, rank: int) -> None:
        """End a run, or the part of it so far."""
        self._write("coverage", to_json, coverage, run_id=run_id, rank=rank)

    def failure(self, record: OpRecord) -> None:
        """The documented line, in our file and in the user's sinks."""
        if self._json is None or os.getpid() != self._pid:  # a late call of another thread
            return
        bound = logger.bind(opcheck=record.run_id, opcheck_log=self._token)
        try:
            if self._sink is None:
                self._sink = self._add_sink()
            bound.log("TRACE" if self._quiet else "WARNING", format_text_line(record))
        except Exception as error:  # noqa: BLE001 - our log is never worth the user's step
            self.note(error)

    def _write(self, kind: str, spell: Callable[[Any], Any], item: Any, **more: Any) -> None:
        if self._json is None or os.getpid() != self._pid:
            return
        try:
            fields = {"type": kind, **more, **spell(item)}
            line = json.dumps(fields, allow_nan=False, separators=(",", ":")) + "\n"
            with self._lock:
                self._json.write(line)
                self._json.flush()
        except Exception as error:  # noqa: BLE001 - our log is never worth the user's step
            self.note(error)

    def note(self, error: Exception | str) -> None:
        """Something is missing from the log; the first reason is kept."""
        if self.problem is None:
            self.problem = f"{self.json_path}: {error}"

    def close(self) -> None:
        """Close both files; only our own sink is taken off. Does no harm a second time."""
        if self._sink is not None:
            try:
                logger.remove(self._sink)
            except OSError as error:  # what it still held could not be written
                self.note(error)
            except ValueError:  # it is off: Ctrl-C came right after that
                self._sink = None
            self._sink = None
        if self._json is not None:
            if not self._json.closed:
                self._close_lines(self._json)
            self._json = None

    def _close_lines(self, file: TextIO) -> None:
        try:
            if not self._is_in_place(file):
                self.note("it was removed or replaced while the session ran")
            file.close()
        except (OSError, ValueError) as error:
            self.note(error)
        finally:
            if not file.closed:  # what it still held could not be written; the second time is free
                with contextlib.suppress(OSError, ValueError):
                    file.close()

    def _is_in_place(self, file: TextIO) -> bool:
        """False when the folder was deleted meanwhile: what we wrote went nowhere."""
        try:
            return os.path.samestat(os.fstat(file.fileno()), self.json_path.stat())
        except (FileNotFoundError, NotADirectoryError):
            return False
