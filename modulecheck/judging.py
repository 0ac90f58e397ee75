"""One tensor of a module, judged: at a glance where that does, else by the rule with float64."""

from __future__ import annotations

import numpy as np

from modulecheck.compared import (
    Array,
    Compared,
    Documented,
    References,
    Rule,
    documented,
    quick,
)
from modulecheck.module_rule import Trial

__all__ = ["Compared", "Documented", "References", "Rule", "compare", "documented", "quick"]


def compare(
    actual: Array, eager: Array, *, dtype: str, rule: Rule, references: References
) -> Compared:
    """Judge one floating or complex tensor, with references where a quick look does not do."""
    first = quick(actual, eager, dtype, rule)
    if first.settled:
        return first
    with np.errstate(all="ignore"):
        golden = references.golden()
        if golden is not None and golden.shape != actual.shape:
            golden = None
        trial = Trial.of(actual, eager, golden, dtype, references)
        return trial.compared(first.documented)
