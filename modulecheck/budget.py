"""How long a drill-down may take, how much it may compile, and what that kept from being done."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from opcheck.errors import ArgumentError

__all__ = ["Budget", "Progress"]

Progress = Callable[[str], None]
"""Told in a few words what is being done next."""


class Budget:
    """Asked before every piece of work that takes long; what it refuses is kept for the report."""

    def __init__(self, *, seconds: float = 300.0, compiles: int = 60) -> None:
        """The clock starts now.

        Args:
            seconds: work that has begun is not cut short, no new one begins after that.
            compiles: of whole calls and of pieces of graphs together.

        Raises:
            ArgumentError: a value is negative or NaN.
        """
        if not seconds >= 0.0:
            raise ArgumentError(f"seconds: expected a number of 0 or more, got {seconds!r}")
        if compiles < 0:
            raise ArgumentError(f"compiles: expected 0 or more, got {compiles!r}")
        self._ends = time.monotonic() + seconds if seconds != math.inf else math.inf
        self._compiles = compiles
        self.num_compiles = 0
        self.refused: list[str] = []

    def allows(self, what: str) -> bool:
        """There is time for it."""
        if time.monotonic() < self._ends:
            return True
        self._refuse(what)
        return False

    def allows_compile(self, what: str) -> bool:
        """There is time for it, and one more compile, which is counted."""
        if self.num_compiles < self._compiles and time.monotonic() < self._ends:
            self.num_compiles += 1
            return True
        self._refuse(what)
        return False

    def _refuse(self, what: str) -> None:
        if what not in self.refused:
            self.refused.append(what)
