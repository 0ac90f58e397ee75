"""Call and result -> found by the rule in force; the one part that may run in a worker's thread."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from opcheck.calls import Call
from opcheck.compare import judge
from opcheck.declared import DeclaredDtypes
from opcheck.decomposed import has_vectors, judge_decomposed
from opcheck.expected import is_missing_kernel
from opcheck.followers import Followers
from opcheck.generators import restore_generators
from opcheck.large import judge_large
from opcheck.outside import outside_everything
from opcheck.records import Blame, SkipReason
from opcheck.references import choose
from opcheck.sampled import Criterion, Judged
from opcheck.selftest import Planter
from opcheck.settings import Settings
from opcheck.tensor_kinds import HALF
from opcheck.tolerances import documented_tolerances

__all__ = ["Comparison", "Outcome"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one comparison."""

    judged: Judged
    rtol: float
    atol: float
    blame: Blame | None
    """What was born in the call and what it inherited, where that is followed."""


class Comparison:
    """Of one session. Changes nothing but the call."""

    def __init__(
        self, settings: Settings, *, followers: Followers, planter: Planter | None
    ) -> None:
        self._settings = settings
        self._followers = followers
        self._planter = planter
        self._declared = DeclaredDtypes()

    def compare(self, call: Call, out: Any) -> Outcome | SkipReason:
        """Judge what an op gave, or say why that is not possible."""
        rtol, atol = documented_tolerances(
            rtol=self._settings.rtol,
            atol=self._settings.atol,
            half=any(dtype in HALF for dtype in call.signature),
        )
        with outside_everything():
            try:
                return self._compared(call, out, rtol, atol)
            except (NotImplementedError, RuntimeError) as error:
                if is_missing_kernel(error):
                    return SkipReason.REFERENCE_NOT_AVAILABLE
                raise
            finally:
                if call.rng_before is not None:
                    restore_generators(call.rng_before)

    def _compared(self, call: Call, out: Any, rtol: float, atol: float) -> Outcome | SkipReason:
        settings = self._settings
        if call.is_large:
            call.declared = self._declared.of(call)
            return _unblamed(judge_large(call, out, self._criterion(rtol, atol)), rtol, atol)
        reference = choose(call, on_device=call.on_device or call.in_kernel, seed=settings.seed)
        if reference is SkipReason.NO_INDEPENDENT_REFERENCE and has_vectors(call):
            return _unblamed(judge_decomposed(call, out, self._criterion(rtol, atol)), rtol, atol)
        if isinstance(reference, SkipReason):
            return reference
        if not reference.has_baseline:
            call.declared = self._declared.of(call)
        rule = partial(
            judge, reference=reference, criterion=settings.criterion, rtol=rtol, atol=atol
        )
        found = rule(call, out)
        if found.skip is not None:
            return found.skip
        if self._planter is not None and found.passed:
            self._planter.plant(call, out, reference, rule)
        blame = self._followers.measure(call, out, reference, passed=found.passed)
        return Outcome(Judged(found, reference.label), rtol, atol, blame)

    def _criterion(self, rtol: float, atol: float) -> Criterion:
        settings = self._settings
        return Criterion(name=settings.criterion, rtol=rtol, atol=atol, seed=settings.seed)


def _unblamed(judged: Judged | SkipReason, rtol: float, atol: float) -> Outcome | SkipReason:
    return judged if isinstance(judged, SkipReason) else Outcome(judged, rtol, atol, None)
