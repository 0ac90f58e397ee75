"""A call that is dispatched -> to be checked, to be followed only, or skipped with a reason.

Decided before it runs, and once more on its result. What the op may change is kept on the way.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from opcheck import _torch
from opcheck.beside import Beside
from opcheck.births import Births, is_cast_to_half
from opcheck.callers import CallerTracker
from opcheck.calls import Call, OpTraits, Site, traits_of
from opcheck.expected import leaves_of
from opcheck.followers import Followers
from opcheck.generators import generator_states, have_moved
from opcheck.keepers import CallKeeper
from opcheck.kernel_inputs import keep_inputs, keep_whole
from opcheck.kernel_table import kernels
from opcheck.large import prepare_large
from opcheck.ledger import Ledger
from opcheck.modules import ModuleTracker
from opcheck.outside import outside_everything
from opcheck.overhead import OverheadBudget
from opcheck.policy import Described, Policy, describe, writes_overlapping
from opcheck.records import SkipReason
from opcheck.settings import Settings
from opcheck.snapshots import snapshot
from opcheck.tensor_kinds import is_plain_tensor, tensors_in, unwraps_itself

__all__ = ["Admission", "count_elements"]


class Admission:
    """Of one session; counts every call in the ledger, and each skip with its reason."""

    def __init__(
        self,
        settings: Settings,
        *,
        ledger: Ledger,
        tracker: ModuleTracker | CallerTracker,
        policy: Policy,
        budget: OverheadBudget | None,
        followers: Followers,
        births: Births,
        keepers: tuple[CallKeeper, ...],
        beside: Beside | None,
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._tracker = tracker
        self._policy = policy
        self._budget = budget
        self._followers = followers
        self._births = births
        self._keepers = keepers
        self._beside = beside

    # ---- before the op ----

    def decide(
        self,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        step: int,
    ) -> Call | bool:
        """A Call to be checked or followed, True to count its result only, False for neither."""
        site = self._site(args)
        if isinstance(func, _torch.HigherOrderOperator):
            self._count_higher_order(func.name(), site)
            return False
        index, occurrence = self._ledger.count((site.module, site.phase, func))
        traits = traits_of(func)
        skip = SkipReason.UNWRAPPED if types and unwraps_itself(types) else traits.skip
        if skip is not None:
            if not self._is_followed(traits, skip, args, kwargs, module=site.module, step=step):
                return False
            found = describe(func, args, kwargs)
        else:
            if traits.unreturned:
                self._ledger.elements_seen += _count_unreturned(traits, args, kwargs)
            found = describe(func, args, kwargs)
            skip = self._refusal(found, traits, site, step)
            if skip is not None and (
                not self._followers.follow_values or skip is SkipReason.OUTSIDE_STEPS
            ):
                return True
        source = "" if skip and self._births.first else self._tracker.source()
        call = Call(
            func=func, traits=traits, args=args, kwargs=kwargs, site=site,
            index=index, step=step, occurrence=occurrence, signature=tuple(found.key),
            on_device=found.on_device, source=source,
            frame=self._tracker.open_frame, skipped=skip, counted=traits.skip is None,
        )  # fmt: skip
        call.is_large = self._policy.samples(found.largest)
        self._prepare(call)
        return call

    def _site(self, args: tuple[Any, ...]) -> Site:
        tracker = self._tracker
        site = tracker.locate()
        if site.phase != "optimizer":
            return site
        module = tracker.owner([*tensors_in(args[:1])]) or tracker.owner([*tensors_in(args)])
        return Site(module, site.phase)

    def _count_higher_order(self, name: str, site: Site) -> None:
        if name == "inductor_compiled_code":  # counted when its code runs
            return
        self._followers.unseen_ran()
        self._ledger.count((site.module, site.phase, f"higher_order.{name}.default"))
        self._ledger.skip(SkipReason.INSIDE_COMPILED_REGION)

    def _is_followed(
        self,
        traits: OpTraits,
        skip: SkipReason,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        module: str,
        step: int,
    ) -> bool:
        """Is a call that is never checked to be looked at all the same?"""
        self._tracker.random_calls += skip is SkipReason.RANDOM
        self._ledger.skip(skip)
        if is_cast_to_half(traits.base, args, kwargs):
            return True
        if not self._followers.is_on:
            return False
        wanted = self._policy.outside(traits, module, step) is None
        return self._followers.watch(traits, skip, wanted=wanted)

    def _refusal(
        self, found: Described, traits: OpTraits, site: Site, step: int
    ) -> SkipReason | None:
        """Why not to check a computing call, from what is known before it runs; counts it."""
        counts = self._ledger.signature(tuple(found.key))
        skip = self._policy.outside(traits, site.module, step)
        attempts = counts.attempts
        if skip is None and self._beside is not None:
            attempts = self._settled_attempts(self._beside, tuple(found.key), attempts)
        skip = skip or self._policy.unfit(found, attempts)
        if skip is None and self._budget is not None:
            place = (site.module, site.phase, tuple(found.key))
            if not self._budget.admits(place, op=traits.name, numel=found.largest):
                skip = SkipReason.OUT_OF_TIME
        elif skip is SkipReason.BUDGET_USED_UP and self._budget is not None:
            self._budget.capped(tuple(found.key))
        if skip is not None:
            self._ledger.skip(skip, counts)
        return skip

    def _settled_attempts(self, beside: Beside, signature: tuple[Any, ...], attempts: int) -> int:
        """Checks so far; near the end of the budget the outcome of those that wait is asked for."""
        limit = self._settings.max_checks
        if limit is None or attempts >= limit:
            return attempts
        waiting = beside.num_waiting(signature)
        if not waiting or attempts + waiting < limit:
            return attempts
        beside.settle()
        return self._ledger.counts_of(signature).attempts

    # ---- what the op may change ----

    def _prepare(self, call: Call) -> None:
        """Crashes when the op has given a result: what makes no sense is refused by it first."""
        try:
            self._keep_before(call)
        except Exception as error:  # noqa: BLE001 - raised by `Pipeline.after`
            call.crash = error

    def _keep_before(self, call: Call) -> None:
        with self._ledger.checking():
            if call.traits.maybe_random:
                call.rng_before = generator_states(call.args)
            in_reach = call.skipped not in (SkipReason.TOO_LARGE, SkipReason.UNSUPPORTED_TYPE)
            if call.is_large:
                self._prepare_large(call)
            elif in_reach and (call.skipped is None or self._followers.follow_values):
                with outside_everything():
                    snapshot(call)
            if call.skipped is None and kernels().is_overridden(call.traits.qualified):
                keep_inputs(call)
            if self._followers.is_on:
                self._followers.before(call, in_reach=in_reach and not call.is_large)

    def _prepare_large(self, call: Call) -> None:
        if call.skipped is None:
            with outside_everything():
                call.skipped = prepare_large(call, self._settings.seed)
            if call.skipped is not None:
                self._ledger.skip(call.skipped, self._ledger.counts_of(call.signature))
            elif call.traits.mutates and any(keeper.wants_before(call) for keeper in self._keepers):
                keep_whole(call)

    # ---- after the op ----

    def refuse_result(self, call: Call, out: Any) -> SkipReason | None:
        """Why not to check a call after all, from what it gave; notes dtype, device and size."""
        skip = self._policy.late(call)
        if skip is not None:
            return skip
        if call.rng_before is not None and have_moved(call.rng_before, call.args):
            self._tracker.random_calls += 1
            return SkipReason.RANDOM
        if writes_overlapping(call):
            return SkipReason.OVERLAPPING
        largest = 0
        for leaf in leaves_of(out):
            if not isinstance(leaf.value, Tensor):
                continue
            if not is_plain_tensor(leaf.value):
                return SkipReason.UNSUPPORTED_TYPE
            largest = max(largest, leaf.value.numel())
            dtype = leaf.value.dtype
            if call.out_dtype is None and (dtype.is_floating_point or dtype.is_complex):
                call.out_dtype = dtype
            call.on_device = call.on_device or leaf.value.device.type != "cpu"
        if self._policy.samples(largest):
            call.is_large = True
        elif largest > self._settings.max_numel and self._settings.large == "skip":
            return SkipReason.TOO_LARGE
        return None


def count_elements(out: Any) -> int:
    """Of all tensors in what an op gave."""
    if isinstance(out, Tensor):
        return out.numel()
    if isinstance(out, (list, tuple)):
        return sum(count_elements(item) for item in out)
    return 0


def _count_unreturned(traits: OpTraits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    bound = traits.bound(args, kwargs)
    return sum(count_elements(value) for param, value in bound if param.name in traits.unreturned)
