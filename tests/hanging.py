"""When a process or a thread of a test is taken to hang."""

from __future__ import annotations

HANGS_S = 900.0
"""Seconds. No measure of speed: on a busy machine the slowest takes several minutes."""
