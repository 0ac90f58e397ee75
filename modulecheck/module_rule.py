"""The rule at module level: what the compiled module gave, what eager gave, and float64.

`actual` is the compiled side, `eager` the module in eager on the same inputs, `golden` the module
in float64, all NumPy arrays of one shape. An element is held against the interval between eager and
golden, in units of

    allowance = spacing + share * sensitivity + ec * typical size + rms(eager - golden)

where sensitivity is how far the golden moves when inputs and parameters move by one ulp. Where
eager is far from the golden, the two are apart by a fault or by other random numbers: then the
interval would hide everything, so the result has to agree with one of them on its own.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

import numpy as np

from modulecheck.compared import Array, Compared, Documented
from modulecheck.kink_rule import at_a_kink
from modulecheck.trial import SENSITIVE_DRAWS, Measured, Trial
from opcheck import tolerances as tol
from opcheck.arrays import classes, usual_size
from opcheck.records import Verdict
from opcheck.verdicts import rms

__all__ = ["agreed", "judged"]

FAR_LIMITS = MappingProxyType({True: (16.0, 2.0), False: (64.0, 4.0)})
"""16 bit or not: largest distance of an element, and of the tensor (rms), at which both sides still
are a rounding of the golden, in units of what rounding explains."""


def judged(trial: Trial, numbers: Documented) -> Compared:
    """Judge."""
    notes = [] if trial.has_golden else ["no float64 run: judged by the same dtype"]
    if trial.num_wrong:
        return trial.nonfinite(numbers, notes)
    why = _wrong_beside_dead_eager(trial)
    if why:
        return trial.done(Verdict.FAIL, why, notes, numbers, None)
    if not trial.golden.size:
        return trial.done(Verdict.PASS, "", [*notes, *trial.nearer()], numbers, None)
    if trial.is_noise():
        note = "zero in exact arithmetic, as far as float64 can tell: rounding on both sides"
        return trial.done(Verdict.PASS, "", [*notes, note], numbers, None)
    moved = trial.sensitivity(trial.references.moved, SENSITIVE_DRAWS)
    judge = _apart if trial.apart() else _together
    result = judge(trial, numbers, notes, moved)
    strained = trial.is_strained(moved)
    if strained or result.verdict == Verdict.FAIL:
        result = at_a_kink(trial, result, notes, moved) or result
    return replace(result, strained=strained)


def _wrong_beside_dead_eager(trial: Trial) -> str:
    """Where eager alone is NaN or Inf: why compiled is no rounding of the golden there, or ""."""
    dead = trial.where_eager_died()
    if dead is None:
        return ""
    moved = dead.sensitivity(dead.references.moved, SENSITIVE_DRAWS)
    allowed = dead.spacing(dead.golden, moved) + rms(trial.eager - trial.golden)
    finite = np.abs(trial.all_golden) < tol.ROUNDS_TO_INF[trial.dtype]
    around = trial.all_golden[finite]
    allowed += tol.EPS[trial.dtype] * usual_size(around)
    q = np.abs(dead.actual - dead.golden) / allowed
    worst = int(q.argmax())
    limit = FAR_LIMITS[trial.half][0]
    if float(q[worst]) <= limit:
        return ""
    _, place = trial.index(int(np.flatnonzero(dead.keep)[worst]))
    num_out = int(np.count_nonzero(q > limit))
    return (
        f"{place} is {dead.actual[worst]:.9g}, eager gives NaN or Inf, float64"
        f" {dead.golden[worst]:.9g}: both sides are wrong, in {num_out} of {q.size} such elements"
    )


def _together(trial: Trial, numbers: Documented, notes: list[str], moved: Array) -> Compared:
    found = trial.measure(trial.eager, trial.golden, moved)
    why = found.why(trial.limits, trial.golden.size)
    if why:
        return trial.done(Verdict.FAIL, trial.reason(found, why), notes, numbers, found)
    return trial.done(Verdict.PASS, "", [*notes, *trial.nearer()], numbers, found)


def _apart(trial: Trial, numbers: Documented, notes: list[str], moved: Array) -> Compared:
    limits = trial.limits
    with_golden = trial.measure(trial.golden, trial.golden, moved)
    if not with_golden.why(limits, trial.golden.size):
        note = "eager is the wrong side: compiled agrees with float64"
        return trial.done(Verdict.PASS, "", [*notes, note], numbers, with_golden)
    with_eager = trial.measure(trial.eager, trial.eager, moved)
    why = with_eager.why(limits, trial.golden.size)
    note = "float64 is no judge here (it drew other random numbers, or eager is far off)"
    if why:
        reason = trial.reason(with_eager, why)
        return trial.done(Verdict.FAIL, reason, [*notes, note], numbers, with_eager)
    return trial.done(Verdict.PASS, "", [*notes, note], numbers, with_eager)


def agreed(trial: Trial, first: Compared) -> Compared:
    """Both sides agree: does float64 agree with them?"""
    if not trial.has_golden:
        return replace(first, notes=(*first.notes, "no float64 run"))
    rounded = classes(trial.all_golden, tol.ROUNDS_TO_INF[trial.dtype])
    wrong = classes(trial.all_actual) != rounded
    if wrong.any():
        return _both_far(trial, first, f"NaN or Inf in {int(wrong.sum())} elements alone", None)
    if not trial.golden.size or rms(trial.golden) <= trial.references.noise_floor:
        return first
    moved = trial.sensitivity(trial.references.moved, SENSITIVE_DRAWS)
    found = trial.measure(trial.golden, trial.golden, moved)
    why = _why_far(trial, moved)
    if not why:
        return trial.done(Verdict.PASS, "", list(first.notes), first.documented, found)
    far = _both_far(trial, first, why, found)
    return at_a_kink(trial, far, list(first.notes), moved) or far


def _why_far(trial: Trial, moved: Array) -> str:
    """Why the common result is no rounding of the golden, "" if it may be one."""
    error = np.abs(trial.actual - trial.golden)
    # every op of the module rounds to the dtype, and later ones mix those roundings
    allowed = trial.spacing(trial.golden, moved) + tol.EPS[trial.dtype] * usual_size(trial.golden)
    q, share = error / allowed, rms(error) / rms(allowed)
    worst, limits = int(q.argmax()), FAR_LIMITS[trial.half]
    if float(q[worst]) > limits[0]:
        _, place = trial.index(int(np.flatnonzero(trial.keep)[worst]))
        return (
            f"{place} is {trial.actual[worst]:.9g}, float64 gives {trial.golden[worst]:.9g},"
            f" {float(q[worst]):.3g} times what rounding explains"
        )
    if trial.golden.size >= tol.MIN_ELEMENTS and share > limits[1]:
        return f"the rms distance is {share:.3g} times what rounding explains"
    return ""


def _both_far(trial: Trial, first: Compared, why: str, found: Measured | None) -> Compared:
    if trial.references.draws_apart() and trial.apart():
        note = "float64 is no judge here: it drew other random numbers"
        return replace(first, notes=(*first.notes, note))
    reason = f"both sides agree and are far from float64: the program itself, see opcheck ({why})"
    return trial.done(Verdict.INCONCLUSIVE, reason, list(first.notes), first.documented, found)
