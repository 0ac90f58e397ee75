"""Logs as a stream: JSON lines and the documented text log."""

from __future__ import annotations

from opcheck.textline import format_text_line, parse_text_line

__all__ = ["format_text_line", "parse_text_line"]
