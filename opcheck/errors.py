"""Every exception of the package.

::

    OpcheckError
    ├── PrecisionError          a FAIL, raised on leaving the context when on_failure="raise"
    ├── ArgumentError           (ValueError) an argument has a value that is not allowed
    ├── ArgumentTypeError       (TypeError)  an argument has a type that is not allowed
    ├── LogWriteError           (OSError)    a log cannot be opened or written
    ├── PlotError               a picture cannot be drawn or written
    ├── ReproError              a reproducer or a recorded call cannot be written or read
    └── LogReadError            (ValueError) a log cannot be read
        └── SchemaVersionError  it was written by a newer version than this one
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opcheck.records import OpRecord

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "LogReadError",
    "LogWriteError",
    "OpcheckError",
    "PlotError",
    "PrecisionError",
    "ReproError",
    "SchemaVersionError",
]


class OpcheckError(Exception):
    """Base of every error that this package raises on purpose."""


class PrecisionError(OpcheckError):
    """A checked call failed and the caller asked for an exception.

    Attributes:
        record: the first divergence.
    """

    def __init__(self, message: str, record: OpRecord | None = None) -> None:
        super().__init__(message)
        self.record = record


class ArgumentError(OpcheckError, ValueError):
    """An argument has a value that is not allowed."""


class ArgumentTypeError(OpcheckError, TypeError):
    """An argument has a type that is not allowed."""


class LogWriteError(OpcheckError, OSError):
    """A log file cannot be opened or written."""


class PlotError(OpcheckError):
    """A picture cannot be drawn or written; the message says what is missing."""


class ReproError(OpcheckError):
    """A reproducer or a recorded call cannot be written or read; the message says why."""


class LogReadError(OpcheckError, ValueError):
    """A log file cannot be read; the message names the file and, where known, the line."""


class SchemaVersionError(LogReadError):
    """The log was written by a newer version than the one that reads it."""
