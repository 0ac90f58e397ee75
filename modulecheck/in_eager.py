"""The program itself: eager is the side that is far from float64."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from modulecheck.budget import Progress
from modulecheck.compared import Compared
from modulecheck.culprit import Culprit
from modulecheck.eager_ops import wrong_eager_ops
from modulecheck.findings import Place, described, joined, listed
from modulecheck.goldens import Key
from modulecheck.judging import compare
from modulecheck.rerun import RULE, Rerun
from opcheck import tolerances as tol
from opcheck.records import Verdict
from opcheck.verdicts import round_to

__all__ = ["WrongEager", "eager_is_wrong", "in_eager"]


@dataclass
class WrongEager:
    """Tensors whose eager value does not agree with float64."""

    keys: dict[Key, Compared] = field(default_factory=dict)
    alone: bool = False
    """The compiled step agrees with float64 in all that failed."""


def eager_is_wrong(rerun: Rerun) -> WrongEager:
    """Hold eager and the real step's result, each by itself, against float64."""
    found = WrongEager()
    compiled_wrong = False
    for key in rerun.keys:
        eager = _against_float64(rerun, key, rerun.eager.results[key])
        actual = rerun.call.actual.get(key)
        compiled = None if actual is None else _against_float64(rerun, key, actual)
        compiled_wrong |= compiled is None or compiled.verdict == Verdict.FAIL
        if eager is not None and eager.verdict == Verdict.FAIL:
            found.keys[key] = eager
    found.alone = bool(found.keys) and not compiled_wrong
    return found


def _against_float64(rerun: Rerun, key: Key, values: Any) -> Compared | None:
    """None where float64 cannot tell: integers, or no float64 run."""
    dtype = rerun.eager.dtypes[key]
    golden = rerun.golden(key) if dtype in tol.EPS else None
    if golden is None or golden.shape != values.shape:
        return None
    rounded = round_to(golden.reshape(-1), dtype).reshape(golden.shape).astype(values.dtype)
    own = rerun.goldens().references(key, kinks=True, noise_floor=0.0)
    references = replace(own, golden=lambda: golden)
    return compare(values, rounded, dtype=dtype, rule=RULE, references=references)


def in_eager(place: Place, wrong: WrongEager, on_progress: Progress) -> list[Culprit]:
    """The ops of the eager run that are wrong, or the program as a whole."""
    on_progress("checking the ops of the eager run")
    tensors = listed(described(key) for key in wrong.keys)
    first = next(iter(wrong.keys.values()))
    who = "the compiled result agrees with float64" if wrong.alone else "it is one of two faults"
    culprits: dict[tuple[str, str, str], Culprit] = {}
    for record in wrong_eager_ops(place.rerun):
        module = joined(place.rerun.call.fqn, record.module)
        culprits.setdefault(
            (record.op, module, record.phase),
            Culprit(
                module=module, phase=record.phase, stage="eager", kernel=record.op, op=record.op,
                source=record.source, metrics=record.metrics,
                explanation=(
                    f"eager is the wrong side ({tensors}; {who}): {record.op} of eager fails"
                    f" against float64: {record.reason}"
                ),
            ),
        )  # fmt: skip
    if culprits:
        return list(culprits.values())
    return [
        Culprit(
            module=place.rerun.call.fqn,
            phase=place.phases[0],
            stage="eager",
            metrics=first.metrics,
            tensor=place.tensor,
            explanation=(
                f"eager is far from float64 ({tensors}; {who}) although each of its ops is right"
                f" by itself: the program is ill-conditioned there, or overflows: {first.reason}"
            ),
        )
    ]
