"""The way of a call: counted, decided on, referenced, compared, recorded.

The pipeline is told of calls by the mode and never raises into the step: whatever goes wrong in
here becomes a record with the traceback, and INCONCLUSIVE.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor

from opcheck import _torch
from opcheck.beside import Beside
from opcheck.births import Births, asks_for_nonfinite, is_cast_to_half, sentence
from opcheck.callers import CallerTracker
from opcheck.calls import Call, OpTraits, Site, traits_of
from opcheck.compare import Judgement, is_missing_kernel, judge, leaves_of, spell_tensor
from opcheck.declared import DeclaredDtypes
from opcheck.drift import Drift
from opcheck.followers import Followers
from opcheck.generators import generator_states, have_moved, restore_generators
from opcheck.kernel_inputs import keep_inputs, keep_whole, with_changed_inputs
from opcheck.large import judge_large, prepare_large
from opcheck.leaving import Exhaustion
from opcheck.ledger import Ledger
from opcheck.modules import ModuleFrame, ModuleTracker
from opcheck.nonfinite import Born, is_finite, judge_origin
from opcheck.overhead import OverheadBudget
from opcheck.policy import Described, Policy, describe, writes_overlapping
from opcheck.records import Blame, Coverage, OpRecord, SkipReason, Verdict
from opcheck.references import choose, snapshot
from opcheck.sampled import Criterion, Judged
from opcheck.selftest import Planter
from opcheck.settings import Settings
from opcheck.tolerances import documented_tolerances

__all__ = ["Pipeline"]

_HALF = (torch.float16, torch.bfloat16)


@dataclass(slots=True)
class _Held:
    """A record that waits for its module to end."""

    record: OpRecord
    call_site: Site
    signature: tuple[Any, ...]
    compared: int


class CallKeeper(Protocol):
    """Who keeps calls beyond their records."""

    def wants_before(self, call: Call) -> bool:
        """Are all arguments of a large op, which may change them, to be copied before it runs?

        May not raise.
        """

    def judged(self, call: Call, out: Any, record: OpRecord, *, is_open: bool) -> None:
        """A call was judged, and its tensors are still there; may not raise.

        Where it is open its record passes now and may yet become a FAIL.
        """

    def concluded(self, record: OpRecord) -> None:
        """The record of a call is final. May not raise."""


class Pipeline:
    """One per session; `before`, `after` and `raised` are what the mode calls."""

    def __init__(
        self,
        settings: Settings,
        tracker: ModuleTracker | CallerTracker,
        *,
        run_id: str,
        rank: int,
        emit: Callable[[OpRecord], None],
        policy: Policy | None = None,
        budget: OverheadBudget | None = None,
        keepers: tuple[CallKeeper, ...] = (),
    ) -> None:
        self.ledger = Ledger()
        self.step = 0
        self.lock = threading.RLock()
        self._settings = settings
        self._policy = policy or Policy(settings)
        self._budget = budget
        self._tracker = tracker
        self._run_id = run_id
        self._rank = rank
        self._emit = emit
        self.drift = Drift()
        self._keepers = keepers
        self._followers = Followers(settings)
        self._births = Births()
        self._declared = DeclaredDtypes()
        self._exhaustion = Exhaustion(settings)
        self.planter = Planter() if settings.selftest else None
        needs_live_calls = keepers or self._followers.is_on or self.planter is not None
        self._beside = (
            Beside(settings.workers, compare=self._compared_beside, conclude=self._settled)
            if settings.workers and not needs_live_calls
            else None
        )

    # ---- told by the mode ----

    def before(
        self, func: Any, types: tuple[type, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Call | bool:
        """A Call to be checked, True to count its result only, False for neither."""
        with self.lock:
            seen = self.ledger.seen
            depth = _torch.reference_depth()
            try:
                return self._before(func, types, args, kwargs)
            except BaseException as error:  # our crash must not be the user's
                _torch.leave_references(depth)
                if not isinstance(error, Exception):  # Ctrl-C
                    raise
                self._crashed_before(str(func), seen, "looking at this call crashed before it ran")
                return False

    def after(self, call: Call | bool, out: Any) -> None:  # noqa: FBT001 - see Observer
        """The op gave `out`."""
        follows = self._followers.is_on and isinstance(call, Call)
        if follows:  # not under the lock: a kernel may wait for its own threads
            self._timed(self._followers.run_again, call, out)
        with self.lock:
            depth = _torch.reference_depth()
            try:
                if call is True or (isinstance(call, Call) and call.counted):
                    self.ledger.elements_seen += _count_elements(out)
                if isinstance(call, Call):
                    skip = call.skipped or self._check(call, out)
                    skip = SkipReason.TOO_LARGE if call.is_large else skip
                    if follows:
                        self._timed(self._followers.follow, call, out, skip)
                    if call.skipped is not None and self._births.first is None:
                        self._timed(self._look_at_unchecked, call, out)
            except BaseException as error:  # our crash must not be the user's
                _torch.leave_references(depth)
                if not isinstance(error, Exception):  # Ctrl-C
                    raise
                if isinstance(call, Call):
                    self._crashed(call, out)

    def raised(self, call: Call | bool) -> None:  # noqa: FBT001 - see Observer
        """The op raised: it was seen, and there is nothing to check."""
        if isinstance(call, Call):
            with self.lock:
                if call.skipped is None:
                    self.ledger.skip(SkipReason.OP_RAISED, self.ledger.counts_of(call.signature))
                self._followers.follow(call, None, SkipReason.OP_RAISED)

    # ---- before the op ----

    def _before(
        self, func: Any, types: tuple[type, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Call | bool:
        ledger, tracker = self.ledger, self._tracker
        site = tracker.locate()
        module = site.module
        if site.phase == "optimizer":
            module = tracker.owner(_tensors(args[:1])) or tracker.owner(_tensors(args))
        if isinstance(func, torch._ops.HigherOrderOperator):
            if func.name() == "inductor_compiled_code":  # counted when its code runs
                return False
            self._followers.unseen_ran()
            ledger.count((module, site.phase, f"higher_order.{func.name()}.default"))
            ledger.skip(SkipReason.INSIDE_COMPILED_REGION)
            return False
        index, occurrence = ledger.count((module, site.phase, func))
        traits = traits_of(func)
        skip = SkipReason.UNWRAPPED if types and _torch.unwraps_itself(types) else traits.skip
        if skip is not None:
            tracker.random_calls += skip is SkipReason.RANDOM
            ledger.skip(skip)
            casts = is_cast_to_half(traits.base, args, kwargs)
            if not self._followers.is_on and not casts:
                return False
            wanted = self._policy.outside(traits, module, self.step) is None
            if not casts and not self._followers.watch(traits, skip, wanted=wanted):
                return False
            found = describe(func, args, kwargs)
        else:
            if traits.unreturned:
                ledger.elements_seen += _count_unreturned(traits, args, kwargs)
            found = describe(func, args, kwargs)
            signature = tuple(found.key)
            counts = ledger.signature(signature)
            skip = self._refusal(found, traits, Site(module, site.phase), counts.attempts)
            if skip is not None:
                ledger.skip(skip, counts)
                if not self._followers.follow_values or skip is SkipReason.OUTSIDE_STEPS:
                    return True
        source = "" if skip and self._births.first else tracker.source()
        call = Call(
            func=func, traits=traits, args=args, kwargs=kwargs, site=Site(module, site.phase),
            index=index, step=self.step, occurrence=occurrence, signature=tuple(found.key),
            on_device=found.on_device, source=source,
            frame=tracker.open_frame, skipped=skip, counted=traits.skip is None,
        )  # fmt: skip
        call.is_large = self._policy.samples(found.largest)
        self._prepare(call)
        return call

    def _refusal(
        self, found: Described, traits: OpTraits, site: Site, attempts: int
    ) -> SkipReason | None:
        """Why not to check a computing call, from what is known before it runs."""
        skip = self._policy.outside(traits, site.module, self.step)
        if skip is None and self._beside is not None:
            attempts = self._settled_attempts(tuple(found.key), attempts)
        skip = skip or self._policy.unfit(found, attempts)
        if skip is None and self._budget is not None:
            place = (site.module, site.phase, tuple(found.key))
            if not self._budget.admits(place, op=traits.name, numel=found.largest):
                return SkipReason.OUT_OF_TIME
        return skip

    def _settled_attempts(self, signature: tuple[Any, ...], attempts: int) -> int:
        """Checks so far; near the end of the budget the outcome of those that wait is asked for."""
        beside, limit = self._beside, self._settings.max_checks
        if beside is None or limit is None or attempts >= limit:
            return attempts
        waiting = beside.num_waiting(signature)
        if not waiting or attempts + waiting < limit:
            return attempts
        beside.settle()
        return self.ledger.counts_of(signature).attempts

    def _prepare(self, call: Call) -> None:
        """Keep what the op may change."""
        start = perf_counter()
        if call.traits.maybe_random:
            call.rng_before = generator_states(call.args)
        in_reach = call.skipped not in (SkipReason.TOO_LARGE, SkipReason.UNSUPPORTED_TYPE)
        if call.is_large:
            self._prepare_large(call)
        elif in_reach and (call.skipped is None or self._followers.follow_values):
            with _torch.outside_everything():
                snapshot(call)
        if call.skipped is None and _torch.kernels().is_overridden(call.traits.qualified):
            keep_inputs(call)
        if self._followers.is_on:
            self._followers.before(call, in_reach=in_reach and not call.is_large)
        self.ledger.check_seconds += perf_counter() - start

    def _prepare_large(self, call: Call) -> None:
        if call.skipped is None:
            with _torch.outside_everything():
                call.skipped = prepare_large(call, self._settings.seed)
            if call.skipped is not None:
                self.ledger.skip(call.skipped, self.ledger.counts_of(call.signature))
            elif call.traits.mutates and any(keeper.wants_before(call) for keeper in self._keepers):
                keep_whole(call)

    # ---- after the op ----

    def _check(self, call: Call, out: Any) -> SkipReason | None:
        """Judge it; why not, where that was not possible."""
        start = perf_counter()
        counts = self.ledger.counts_of(call.signature)
        skip = self._policy.late(call) or self._unfit_result(call, out)
        if skip is None and self._beside is not None:
            if self._beside.takes(call, out):
                self.ledger.check_seconds += perf_counter() - start
                return None
            self._beside.settle()
        if skip is None:
            skip = self._judge(call, out)
        if skip is not None:
            self.ledger.skip(skip, counts)
        else:
            counts.attempts += 1
        self.ledger.check_seconds += perf_counter() - start
        return skip

    def _look_at_unchecked(self, call: Call, out: Any) -> None:
        if call.skipped in (SkipReason.TOO_LARGE, SkipReason.UNSUPPORTED_TYPE):
            return
        with _torch.outside_everything():
            self._births.look(call, out, "")

    def _timed(self, work: Callable[..., None], *args: Any) -> None:
        """Do what is no part of the step."""
        start = perf_counter()
        work(*args)
        with self.lock:
            self.ledger.check_seconds += perf_counter() - start

    def _unfit_result(self, call: Call, out: Any) -> SkipReason | None:
        if call.rng_before is not None and have_moved(call.rng_before, call.args):
            self._tracker.random_calls += 1
            return SkipReason.RANDOM
        if writes_overlapping(call):
            return SkipReason.OVERLAPPING
        largest = 0
        for leaf in leaves_of(out):
            if not isinstance(leaf.value, Tensor):
                continue
            if not _torch.is_plain_tensor(leaf.value):
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

    def _judge(self, call: Call, out: Any) -> SkipReason | None:
        with _torch.outside_everything():
            judged, blame = self._tried(call, out)
        if isinstance(judged, SkipReason):
            return judged
        self._found(call, out, judged, blame)
        return None

    def _tried(self, call: Call, out: Any) -> tuple[Judged | SkipReason, Blame | None]:
        """The comparison; it changes nothing but the call."""
        try:
            return self._compared(call, out, *self._tolerances(call))
        except (NotImplementedError, RuntimeError) as error:
            if is_missing_kernel(error):
                return SkipReason.REFERENCE_NOT_AVAILABLE, None
            raise
        finally:
            if call.rng_before is not None:
                restore_generators(call.rng_before)

    def _tolerances(self, call: Call) -> tuple[float, float]:
        settings = self._settings
        return documented_tolerances(
            rtol=settings.rtol, atol=settings.atol, half=any(d in _HALF for d in call.signature)
        )

    def _compared_beside(self, call: Call, out: Any) -> tuple[Judged | SkipReason, Blame | None]:
        """In a worker's thread."""
        with _torch.outside_everything():
            return self._tried(call, out)

    def _settled(self, call: Call, out: Any, result: Callable[[], Any]) -> None:
        """A worker is done with a call: the rest, in the step's thread and in order of dispatch."""
        depth = _torch.reference_depth()
        counts = self.ledger.counts_of(call.signature)
        try:
            judged, blame = result()
            if not isinstance(judged, SkipReason):
                self._found(call, out, judged, blame)
                counts.attempts += 1
            else:
                self.ledger.skip(judged, counts)
        except BaseException as error:  # our crash must not be the user's
            _torch.leave_references(depth)
            if not isinstance(error, Exception):  # Ctrl-C
                raise
            self._crashed(call, out)

    def _found(self, call: Call, out: Any, judged: Judged, blame: Blame | None) -> None:
        """What follows of a comparison."""
        rtol, atol = self._tolerances(call)
        with _torch.outside_everything():
            found = judged.found
            if call.in_kernel and found.passed:
                found = with_changed_inputs(call, out, found)
            found = self._with_drift(call, found)
            if not found.passed and call.site.phase == "optimizer":
                self._blame_owner(call, found.metrics.worst_output)
            if found.nonfinite or not found.passed:
                found = self._look_for_birth(call, out, found)
            born = _made_nonfinite(call, out, found)
            held = born and self._can_hold(call)
            if born and not held:
                note = f"{call.traits.name} made a non-finite value of finite inputs"
                found = replace(found, notes=(*found.notes, note))
            record = self._record(call, out, found, judged.label, rtol, atol)
            record = self._followers.noted(record, call, blame)
        self._judged(call, out, _Held(record, call.site, call.signature, found.compared), held=held)

    def _judged(self, call: Call, out: Any, item: _Held, *, held: bool) -> None:
        for keeper in self._keepers:
            keeper.judged(call, out, item.record, is_open=held)
        if held:
            call.frame.held.append(item)
        else:
            self._finish(item)

    def _look_for_birth(self, call: Call, out: Any, found: Judgement) -> Judgement:
        verdict = Verdict.PASS if found.passed else Verdict.FAIL
        birth = self._births.look(call, out, verdict.value)
        return found if birth is None else replace(found, notes=(*found.notes, sentence(birth)))

    def _compared(
        self, call: Call, out: Any, rtol: float, atol: float
    ) -> tuple[Judged | SkipReason, Blame | None]:
        settings = self._settings
        if call.is_large:
            call.declared = self._declared.of(call)
            criterion = Criterion(name=settings.criterion, rtol=rtol, atol=atol, seed=settings.seed)
            return judge_large(call, out, criterion), None
        reference = choose(call, on_device=call.on_device or call.in_kernel, seed=settings.seed)
        if isinstance(reference, SkipReason):
            return reference, None
        if not reference.has_baseline:
            call.declared = self._declared.of(call)
        rule = partial(
            judge, reference=reference, criterion=settings.criterion, rtol=rtol, atol=atol
        )
        found = rule(call, out)
        if found.skip is not None:
            return found.skip, None
        if self.planter is not None and found.passed:
            self.planter.plant(call, out, reference, rule)
        blame = self._followers.measure(call, out, reference, passed=found.passed)
        return Judged(found, reference.label), blame

    def _with_drift(self, call: Call, found: Judgement) -> Judgement:
        """Fail the call that tips the evidence of many over."""
        if not found.passed or found.shift is None:
            return found
        site = call.site
        tipped = self.drift.add(call.traits.name, site.module, site.phase, found.shift)
        if tipped is None:
            return found
        metrics = replace(found.metrics, mean_shift=tipped.mean)
        return replace(found, passed=False, reason=tipped.reason, metrics=metrics)

    def _blame_owner(self, call: Call, output: int) -> None:
        """Lists of all parameters belong to no module; the tensor that is wrong in them does."""
        first = call.args[0] if call.args else None
        if call.site.module or not isinstance(first, (list, tuple)) or not first:
            return
        # results and written lists are as long as the first list, one after the other
        owner = self._tracker.owner([first[output % len(first)]])
        if owner:
            place = call.site.module, call.site.phase, call.func
            call.site = Site(owner, call.site.phase)
            self.ledger.moved(place, (owner, call.site.phase, call.func))

    @staticmethod
    def _can_hold(call: Call) -> bool:
        """True for the first such call of an open module: its end tells whether it was right."""
        frame = call.frame
        return frame is not None and not frame.held and call.site.phase == "forward"

    def _record(
        self, call: Call, out: Any, found: Judgement, label: str, rtol: float, atol: float
    ) -> OpRecord:
        return OpRecord(
            op=call.traits.name,
            module=call.site.module,
            phase=call.site.phase,
            index=call.index,
            step=call.step,
            occurrence=call.occurrence,
            inputs=tuple(spell_tensor((*call.args, *call.kwargs.values()))),
            outputs=tuple(spell_tensor(out)),
            verdict=Verdict.PASS if found.passed else Verdict.FAIL,
            metrics=found.metrics,
            source=call.source,
            reason=found.reason,
            notes=found.notes,
            sample=found.sample,
            criterion=self._settings.criterion,
            rtol=rtol,
            atol=atol,
            reference=label,
            run_id=self._run_id,
            rank=self._rank,
        )

    def _finish(self, item: _Held) -> None:
        record = item.record
        self.ledger.judged(
            (item.call_site.module, item.call_site.phase, record.op),
            item.signature,
            record.verdict,
            item.compared,
            crashed=record.error is not None,
            sampled=record.sample is not None and not record.sample.covers_all,
        )
        self._policy.judged(record)
        if self._budget is not None and record.verdict is Verdict.FAIL:
            self._budget.failed(record.op)
        self._births.concluded(record)
        for keeper in self._keepers:
            keeper.concluded(record)
        self._emit(record)

    # ---- non-finite origins ----

    def module_ended(self, frame: ModuleFrame, kwargs: Mapping[str, Any], output: Any) -> None:
        """Judge what was held back until now."""
        with self.lock:
            held, frame.held = frame.held, []
            self._settle()
            for item in held:
                born = self._origin(frame, kwargs, output, item.record)
                self._finish(replace(item, record=_with_origin(item.record, born)))

    def _origin(
        self, frame: ModuleFrame, kwargs: Mapping[str, Any], output: Any, record: OpRecord
    ) -> Born:
        start = perf_counter()
        depth = _torch.reference_depth()
        try:
            with self._tracker.looking_away(), _torch.outside_everything():
                return judge_origin(
                    frame, kwargs, output, record.op, record.occurrence, self._tracker.random_calls
                )
        except BaseException as error:  # our crash must not be the user's
            _torch.leave_references(depth)
            if not isinstance(error, Exception):  # Ctrl-C
                raise
            text = f"{record.op} made a non-finite value; looking into it crashed: {error!r}"
            return Born(failed=False, text=text)
        finally:
            self.ledger.check_seconds += perf_counter() - start

    def release(self) -> None:
        """Modules that never ended: what they hold is written as it is."""
        try:
            for frame in self._tracker.drain():
                self.module_ended(frame, {}, None)
        except Exception:  # noqa: BLE001 - our crash must not be the user's
            self.crashed_in("release")

    # ---- crashes of ours ----

    def _crashed(self, call: Call, out: Any) -> None:
        error = traceback.format_exc()
        self._followers.crashed(call)
        if call.skipped is not None:  # it is counted already, and only the shadow lost it
            return
        try:
            inputs = tuple(spell_tensor((*call.args, *call.kwargs.values())))
            outputs = tuple(spell_tensor(out))
        except Exception:  # noqa: BLE001 - then without them
            inputs = outputs = ()
        record = OpRecord(
            op=call.traits.name, module=call.site.module, phase=call.site.phase,
            index=call.index, step=call.step, occurrence=call.occurrence,
            inputs=inputs, outputs=outputs, source=call.source,
            verdict=Verdict.INCONCLUSIVE, reason="checking this call crashed",
            error=error, criterion=self._settings.criterion,
            run_id=self._run_id, rank=self._rank,
        )  # fmt: skip
        self.ledger.counts_of(call.signature).attempts += 1
        self._finish(_Held(record, call.site, call.signature, 0))

    def crashed_in(self, where: str) -> None:
        """Something of ours crashed that belongs to no call: counted as if it were one."""
        with self.lock:
            self._crashed_before(f"opcheck.{where}", self.ledger.seen, "the checker itself crashed")

    def _crashed_before(self, name: str, seen: int, reason: str) -> None:
        op = name if name.count(".") >= 2 else f"{name}.default"
        if self.ledger.seen == seen:  # not even counted
            self.ledger.seen += 1
        record = OpRecord(
            op=op, index=self.ledger.seen - 1, step=self.step, verdict=Verdict.INCONCLUSIVE,
            reason=reason, error=traceback.format_exc(), criterion=self._settings.criterion,
            run_id=self._run_id, rank=self._rank,
        )  # fmt: skip
        self._finish(_Held(record, Site("", "other"), (name,), 0))

    # ---- the sum, steps and compiled regions ----

    def coverage(self) -> Coverage:
        """Everything so far; other threads may be counting."""
        self.settle()
        with self.lock:
            coverage = replace(
                self.ledger.coverage(),
                first_nonfinite=self._births.first,
                overhead=None if self._budget is None else self._budget.summary(),
            )
            return self._followers.completed(coverage)

    def _settle(self) -> None:
        if self._beside is not None:
            self._beside.settle()

    def settle(self) -> None:
        """Wait for what workers have; in another thread than the step's, do nothing."""
        if self._beside is not None and self._beside.is_my_thread:
            with self.lock:
                self._beside.settle()

    def close(self, *, wait: bool) -> None:
        """The context is left: conclude on what workers still have, or drop it; end them."""
        if self._beside is not None:
            with self.lock:
                self._beside.close(wait=wait)

    def end_step(self) -> None:
        """The next call belongs to the next step."""
        with self.lock:
            self._settle()
            self.release()
            self.step += 1
            if self._budget is not None:
                self._budget.end_step()
            self._exhaustion.step_ended(self.ledger)
            self.ledger.end_step()

    @property
    def is_used_up(self) -> bool:
        """Nothing of the step that begins now would be checked: nobody need look."""
        return self._exhaustion.is_over(self.step)

    def stop_counting(self) -> None:
        """From now on nobody looks; said once, for the first call that was not seen."""
        if self.ledger.stopped_at is None:
            self.ledger.stopped_at = max(0, self.ledger.seen - 1)

    def compiled_region_ran(self) -> None:
        """Inductor code ran: one call that nobody can look into."""
        with self.lock:
            site = self._tracker.locate()
            self._followers.unseen_ran()
            self.ledger.count((site.module, site.phase, "inductor_compiled_code"))
            self.ledger.skip(SkipReason.INSIDE_COMPILED_REGION)

    def forget_values(self) -> None:
        """The step is left: what happens outside is not seen."""
        with self.lock:
            self._followers.forget()

    @property
    def own_problem(self) -> str:
        """Traceback of the first crash of ours beside checking, or ""."""
        return self._followers.problem


def _with_origin(record: OpRecord, born: Born) -> OpRecord:
    if born.failed:
        return replace(record, verdict=Verdict.FAIL, reason=born.text)
    return replace(record, notes=(*record.notes, born.text))


def _made_nonfinite(call: Call, out: Any, found: Judgement) -> bool:
    """Right by its reference, and yet NaN or Inf came of finite inputs."""
    if not (found.passed and found.nonfinite) or asks_for_nonfinite(call):
        return False
    inputs = [
        call.before.get(id(item), item) for item in _tensors((*call.args, *call.kwargs.values()))
    ]
    written = [] if not call.traits.mutates else list(call.args)
    return is_finite(inputs) and not is_finite((out, written))


def _tensors(args: tuple[Any, ...]) -> list[Tensor]:
    return [
        item
        for value in args
        for item in (value if isinstance(value, (list, tuple)) else (value,))
        if isinstance(item, Tensor)
    ]


def _count_unreturned(traits: OpTraits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    bound = traits.bound(args, kwargs)
    return sum(_count_elements(value) for param, value in bound if param.name in traits.unreturned)


def _count_elements(out: Any) -> int:
    if isinstance(out, Tensor):
        return out.numel()
    if isinstance(out, (list, tuple)):
        return sum(_count_elements(item) for item in out)
    return 0
