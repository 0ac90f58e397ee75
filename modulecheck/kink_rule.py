"""Gradients that jump where the forward does not: held against float64 runs across the corners."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from modulecheck.compared import Array, Compared, Documented, Kinks, flat
from modulecheck.trial import SENSITIVE_DRAWS, Trial
from opcheck import tolerances as tol
from opcheck.records import Verdict

__all__ = ["AT_A_KINK", "KINK_DRAWS", "at_a_kink"]

KINK_DRAWS = 8
KINK_GRANT = 2.0
"""Where flips cannot be tried one by one, an element is granted so many times its largest jump over
the draws."""
AT_A_KINK = "at a kink"


def at_a_kink(trial: Trial, base: Compared, notes: list[str], moved: Array) -> Compared | None:
    """The verdict where a jump of the gradient explains the distance; None: it does not."""
    if trial.references.kinks is None or not trial.has_golden:
        return None
    kinks, numbers = trial.references.kinks(), base.documented
    limits = trial.limits
    if kinks.elements:
        result = _across(trial, kinks, numbers, notes)
        if kinks.complete or result.verdict == Verdict.PASS:
            return result
    if kinks.complete or trial.apart() or base.verdict == Verdict.PASS:
        return None
    jump = trial.sensitivity(kinks.moved, KINK_DRAWS)
    share = tol.PERTURBED_SHARE_HALF if trial.half else tol.PERTURBED_SHARE
    wider = np.maximum(moved, jump * (KINK_GRANT / (limits.q * share)))
    found = trial.measure(trial.eager, trial.golden, wider)
    if found.why(limits, trial.golden.size):
        return None
    note = "moved inputs move it as far"
    return trial.done(Verdict.PASS, "", [*notes, AT_A_KINK, note], numbers, found)


def _across(trial: Trial, kinks: Kinks, numbers: Documented, notes: list[str]) -> Compared:
    """Each side beside float64 with the flips that explain it best."""
    moved = trial.sensitivity(kinks.pinned, SENSITIVE_DRAWS)
    scale = trial.spacing(trial.golden, moved)
    jumps: dict[int, Array] = {}
    for number in range(len(kinks.elements)):
        jump = _flipped(trial, kinks, frozenset({number})) - trial.golden
        if (np.abs(jump) > scale).any():
            jumps[number] = jump / scale
    mine, theirs = (
        _explained((side - trial.golden) / scale, jumps, kinks.elements)
        for side in (trial.actual, trial.eager)
    )
    golden = _flipped(trial, kinks, mine)
    own = trial.eager - _flipped(trial, kinks, theirs)
    # what is more than rounding, and no jump, is no allowance for the other side
    most = trial.limits.q * scale
    beside = golden + np.clip(own, -most, most)
    found = trial.measure(beside, golden, moved)
    num = len({kinks.elements[number] for number in mine | theirs})
    if num:
        what = "element" if num == 1 else "elements"
        note = f"{num} {what} within rounding of a corner took the other branch"
        notes = [*notes, AT_A_KINK, note]
    why = found.why(trial.limits, trial.golden.size)
    if why:
        return trial.done(Verdict.FAIL, trial.reason(found, why), notes, numbers, found)
    return trial.done(Verdict.PASS, "", notes, numbers, found)


def _flipped(trial: Trial, kinks: Kinks, numbers: frozenset[int]) -> Array:
    other = kinks.flipped(numbers) if numbers else None
    if other is None or other.size * (1 + trial.is_complex) != trial.keep.size:
        return trial.golden
    values = flat(other).astype(np.float64)[trial.keep]
    return np.where(np.isfinite(values), values, trial.golden)


def _explained(left: Array, jumps: dict[int, Array], elements: Sequence[int]) -> frozenset[int]:
    """The jumps whose sum comes nearest to what is left, at most one an element.

    Found by turning one or two at a time, since two may nearly cancel each other.
    """
    numbers = list(jumps)
    if not numbers:
        return frozenset()
    rows = np.array([jumps[number] for number in numbers])
    gram, along = rows @ rows.T, rows @ left
    of = [elements[number] for number in numbers]
    turns = [*itertools.combinations(range(len(numbers)), 1),
             *itertools.combinations(range(len(numbers)), 2)]  # fmt: skip
    chosen = np.zeros(len(numbers), dtype=bool)
    reached = 0.0
    while True:
        best, better = chosen, reached
        for turn in turns:
            trial = chosen.copy()
            trial[list(turn)] ^= True
            on = np.flatnonzero(trial)
            cost = float(gram[np.ix_(on, on)].sum() - 2.0 * along[on].sum())
            if cost < better and len({of[place] for place in on}) == len(on):
                best, better = trial, cost
        if best is chosen:
            return frozenset(numbers[place] for place in np.flatnonzero(chosen))
        chosen, reached = best, better
