"""One tensor of a module, judged: at a glance where that does, else by the rule with float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from modulecheck.compared import (
    Array,
    Compared,
    Documented,
    Kinks,
    References,
    Rule,
    documented,
    quick,
)
from modulecheck.module_rule import agreed, judged
from modulecheck.trial import Trial
from opcheck import tolerances as tol
from opcheck.verdicts import rms

__all__ = [
    "Compared",
    "Documented",
    "Kinks",
    "References",
    "Rule",
    "compare",
    "documented",
    "quick",
]


def compare(
    actual: Array, eager: Array, *, dtype: str, rule: Rule, references: References
) -> Compared:
    """Judge one floating or complex tensor, with references where a quick look does not do."""
    first = quick(actual, eager, dtype, rule)
    look_on = references.always and rule.criterion == "calibrated" and actual.dtype.kind in "fc"
    if first.settled and not (look_on and actual.size):
        return first
    with np.errstate(all="ignore"):
        golden = references.golden()
        if golden is not None and golden.shape != actual.shape:
            golden = None
        if _is_of_autocast(eager, golden, dtype, references.autocast):
            dtype = references.autocast
            references = replace(
                references, moved=references.moved_as_autocast, is_of_autocast=True
            )
        trial = Trial.of(actual, eager, golden, dtype, references)
        return agreed(trial, first) if first.settled else judged(trial, first.documented)


_ROUNDED = 1 / 2048
"""Rounding once to a dtype leaves an rms error of 0.2 to 0.4 of its eps, less where a float32 term
is added; float32 results of float32 ops lie far below this share."""


def _is_of_autocast(eager: Array, golden: Array | None, dtype: str, autocast: str) -> bool:
    """A float32 tensor whose values went through the 16-bit ops of autocast, or may have."""
    if autocast not in tol.HALF_DTYPES or dtype != "float32":
        return False
    if golden is None:
        return True
    keep = np.isfinite(eager) & np.isfinite(golden)
    error, size = rms((eager[keep] - golden[keep]).reshape(-1)), rms(golden[keep].reshape(-1))
    return error > _ROUNDED * tol.EPS[autocast] * size
