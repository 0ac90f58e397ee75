"""One tensor of a call on both sides, and what was found of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from modulecheck.compared import Compared, Documented
from modulecheck.goldens import Key
from modulecheck.results import TensorDiff
from opcheck.records import Verdict

__all__ = ["FORWARD", "GRADIENTS", "UNKNOWN", "Item", "with_note"]

Array = npt.NDArray[Any]

FORWARD = ("fwd_input", "fwd_output", "mutated")
GRADIENTS = ("grad_input", "grad_output", "param_grads")
"""Kinds of items, by where they arise."""
UNKNOWN = Documented(float("nan"), float("nan"), float("nan"), allclose=False)
"""The documented numbers where two sides cannot be subtracted."""


@dataclass(slots=True)
class Item:
    """One tensor on both sides; arrays are held only until it is judged."""

    kind: str
    """A field of ModuleDiff."""
    key: Key
    name: str
    shape: tuple[int, ...]
    dtype: str
    actual: Array | None = None
    eager: Array | None = None
    result: Compared | None = None

    @property
    def failed(self) -> bool:
        """It was judged, and is wrong."""
        return self.result is not None and self.result.verdict == Verdict.FAIL

    @property
    def in_doubt(self) -> bool:
        """Wrong, or right only because eager is far off, whose values are there."""
        judged = self.result
        if judged is None or self.eager is None or judged.verdict == Verdict.INCONCLUSIVE:
            return False
        return judged.strained or judged.verdict == Verdict.FAIL

    @property
    def may_be_a_kink(self) -> bool:
        """A gradient out by its numbers, or with eager far from float64; both sides are there."""
        judged = self.result
        if judged is None or self.kind not in GRADIENTS:
            return False
        is_open = judged.verdict != Verdict.PASS or judged.strained
        return is_open and self.actual is not None and self.eager is not None

    def diff(self) -> TensorDiff:
        """For the report."""
        result = self.result or Compared(verdict=Verdict.INCONCLUSIVE, reason="was not judged")
        numbers = result.documented
        return TensorDiff(
            numbers.max_abs, numbers.mean_abs, numbers.max_rel, numbers.allclose, self.shape,
            verdict=result.verdict, metrics=result.metrics, name=self.name,
            reason=result.reason, notes=result.notes,
        )  # fmt: skip


def with_note(result: Compared, *notes: str) -> Compared:
    """The same result, with more to tell."""
    return Compared(
        verdict=result.verdict, reason=result.reason, notes=(*result.notes, *notes),
        documented=result.documented, metrics=result.metrics, strained=result.strained,
    )  # fmt: skip
