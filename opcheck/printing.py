"""Text for people: safe to print whatever a log holds, aligned, with or without colour.

Everything that comes from a log goes through `Style.text` before it is printed: the terminal then
sees no control character, no bidi mark, no lone surrogate.
"""

from __future__ import annotations

import os
import shutil
import sys
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TextIO

__all__ = ["Style", "number", "spreadsheet_cell", "style_for", "visible"]

MAX_TEXT = 400
"""Characters of one string that are shown; of a longer one the rest is counted."""
MIN_WIDTH = 60

_COLORS = {"red": "31", "green": "32", "yellow": "33", "bold": "1", "dim": "2"}
_ASCII = {
    "…": "...",
    "←": "<-",
    "   ": "   ",
    "├─ ": "|- ",
    "└─ ": "`- ",
    "│  ": "|  ",
    "█": "#",
    "●": "o",
}


def visible(text: str) -> str:
    """Every character that a terminal might act on, as a backslash code."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _code(char) for char in text)


def spreadsheet_cell(text: str) -> str:
    """A text that no spreadsheet takes for a formula and every reader of CSV takes.

    What begins with `=`, `+`, `-` or `@` gets an apostrophe in front, control characters are
    written as backslash codes, and beyond 32,000 characters it is cut.
    """
    shown = visible(text[: _MAX_CELL + 1])
    if shown.lstrip().startswith(_FORMULA):
        shown = f"'{shown}"
    if len(shown) <= _MAX_CELL:  # so is what this gave earlier, read from a file
        return shown
    note = f"... ({len(text):,} characters)"
    return shown[: _MAX_CELL - len(note)] + note


_FORMULA = ("=", "+", "-", "@")
_MAX_CELL = 32_000
"""Spreadsheets take 32,767 characters, Python's reader of CSV 131,072."""


def _code(char: str) -> str:
    point = ord(char)
    if char in "\n\r\t":
        return {"\n": "\\n", "\r": "\\r", "\t": "\\t"}[char]
    if point < 0x100:
        return f"\\x{point:02x}"
    return f"\\u{point:04x}" if point < 0x10000 else f"\\U{point:08x}"


def _columns(text: str) -> int:
    """Columns of a terminal that the text takes."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(char) else 1 + (unicodedata.east_asian_width(char) in "WF")
        for char in text
    )


def number(value: Any) -> str:
    """A number of a record: short, and exact enough to find it again."""
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, (int, float, complex)):
        return visible(str(value))
    if isinstance(value, int):
        return str(value)
    if isinstance(value, complex):
        sign = "-" if value.imag < 0 else "+"
        return f"{value.real:.7g}{sign}{abs(value.imag):.7g}j"
    return f"{value:.7g}"


@dataclass(frozen=True, kw_only=True)
class Style:
    """How to print: width in columns, colour, Unicode."""

    width: int = 100
    color: bool = False
    unicode: bool = True

    def paint(self, text: str, color: str) -> str:
        """The text in a colour, where there are colours."""
        return f"\x1b[{_COLORS[color]}m{text}\x1b[0m" if self.color else text

    def glyph(self, text: str) -> str:
        """One of our own marks, in ASCII where needed."""
        return text if self.unicode else _ASCII[text]

    def text(self, value: object, limit: int = MAX_TEXT) -> str:
        """A string of a log, safe to print, cut after `limit` characters with a count."""
        raw = str(value)
        shown = visible(raw[:limit])
        if not self.unicode and not shown.isascii():
            shown = shown.encode("ascii", "backslashreplace").decode("ascii")
        if len(raw) > limit:
            shown += f"{self.glyph('…')} ({len(raw) - limit:,} more characters)"
        return shown

    def cell(self, value: object, width: int) -> str:
        """A string cut in the middle and padded so that it takes exactly `width` columns."""
        shown = self.text(value, max(MAX_TEXT, width))
        if _columns(shown) > width:
            mark = self.glyph("…")
            room = max(width - len(mark), 0)
            tail = _fit(shown[::-1], room * 2 // 3)[::-1]
            head = _fit(shown, room - _columns(tail))
            shown = _fit(head + mark + tail, width)
        return shown + " " * (width - _columns(shown))

    def wrap(self, text: str, indent: str, first: str | None = None) -> list[str]:
        """Lines of at most the width; `first` begins the first one in place of `indent`."""
        lines: list[str] = []
        current = indent if first is None else first
        empty = True
        for word in text.split(" "):
            rest = word
            if not empty and _columns(current) + 1 + _columns(rest) > self.width:
                lines.append(current)
                current, empty = indent, True
            while _columns(current) + _columns(rest) > self.width and len(rest) > 1:
                head = _fit(rest, max(self.width - _columns(current), 1))
                lines.append(current + head)
                current, rest = indent, rest[len(head) :]
            current += rest if empty else f" {rest}"
            empty = False
        return [*lines, current.rstrip()]

    def field(self, name: str, text: str) -> list[str]:
        """A name and what it is, the name in a column of its own; nothing for an empty text."""
        return self.wrap(text, " " * 13, f"  {name:<11}") if text else []

    def table(
        self,
        head: Sequence[str],
        rows: Sequence[Sequence[str]],
        *,
        numbers: frozenset[str] = frozenset(),
        red: Sequence[bool] = (),
    ) -> list[str]:
        """Aligned columns; where they are too wide, the widest text columns give way."""
        widths = [
            max([_columns(name), *(_columns(self.text(row[place])) for row in rows)])
            for place, name in enumerate(head)
        ]
        room = self.width - 2 * len(head)
        flexible = [place for place, name in enumerate(head) if name not in numbers]
        while sum(widths) > room and flexible:
            widest = max(flexible, key=lambda place: widths[place])
            if widths[widest] <= 8:
                break
            widths[widest] -= min(sum(widths) - room, max(1, widths[widest] // 10))

        def line(cells: Sequence[str]) -> str:
            parts = [
                self.cell(cell, width).strip().rjust(width)
                if name in numbers
                else self.cell(cell, width)
                for name, cell, width in zip(head, cells, widths, strict=True)
            ]
            return "  " + "  ".join(parts).rstrip()

        lines = [self.paint(line(head), "dim")]
        for place, row in enumerate(rows):
            text = line(row)
            lines.append(self.paint(text, "red") if place < len(red) and red[place] else text)
        return lines


def _fit(text: str, width: int) -> str:
    """The longest beginning that takes at most `width` columns."""
    if text.isascii():
        return text[:width]
    taken = 0
    for place, char in enumerate(text):
        taken += _columns(char)
        if taken > width:
            return text[:place]
    return text


def style_for(
    stream: TextIO | None, *, width: int | None = None, color: bool | None = None
) -> Style:
    """The style that a stream can show: no colour in a pipe or with NO_COLOR, ASCII if it must."""
    columns = width if width is not None else shutil.get_terminal_size((100, 24)).columns
    if color is None:
        color = (
            stream is not None
            and stream.isatty()
            and not os.environ.get("NO_COLOR")
            and os.environ.get("TERM") != "dumb"
        )
    return Style(width=max(columns, MIN_WIDTH), color=color, unicode=_speaks_unicode(stream))


def _speaks_unicode(stream: TextIO | None) -> bool:
    try:
        "…├─└│←█●".encode(getattr(stream or sys.stdout, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
