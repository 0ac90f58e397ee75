"""Failing calls of a session, saved as reproducers.

What a failing call got is copied while the step runs; all else (running it again, making it
smaller, writing it) waits until the step has left the context.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from opcheck.calls import Call
from opcheck.compare import Judgement
from opcheck.drift import NO_SINGLE_CALL
from opcheck.nonfinite import is_finite
from opcheck.packing import Packed, nbytes_of
from opcheck.records import OpRecord, Verdict
from opcheck.repro_call import script_of
from opcheck.repro_files import MIB, free_stem, write_repro
from opcheck.rerun import Again, KeptCall, NotJudged, keep, run_again
from opcheck.runstate import RunState
from opcheck.settings import Settings
from opcheck.shrinking import shrink

__all__ = ["ReproKeeper"]

MAX_Q = 3.0
"""A smaller call has to fail by as much as the first one, or by this share of what is allowed: one
that is only just out would pass on another machine."""
_NO_SHRINKING = "as in the step"


@dataclass(slots=True)
class _Failed:
    kept: KeptCall
    stem: str = ""


class ReproKeeper:
    """Keeps the first failing call of each op, module and phase, and writes them.

    Attributes:
        paths: index of a record -> its reproducer.
        notes: what was not saved, and why.
    """

    def __init__(self, folder: Path, settings: Settings) -> None:
        self._folder, self._settings = folder, settings
        self._open: dict[int, KeptCall] = {}
        """By index: judged, and it is not known yet whether they fail."""
        self._failed: list[_Failed] = []
        self._places: set[tuple[str, str, str]] = set()
        self._left_out: Counter[str] = Counter()
        self._held_bytes = 0
        self._pid = os.getpid()
        self.paths: dict[int, Path] = {}
        self._problems: list[str] = []

    @property
    def notes(self) -> list[str]:
        """One sentence for each reason."""
        counted = [f"{count} failing calls: {why}" for why, count in self._left_out.items()]
        return [*counted, *self._problems]

    # ---- in the step ----

    def wants_before(self, call: Call) -> bool:
        """Not beyond what may be held, and not where a failing call is known already."""
        settings, place = self._settings, (call.traits.name, call.site.module, call.site.phase)
        if place in self._places or os.getpid() != self._pid:
            return False
        size = self._held_bytes + nbytes_of((call.args, call.kwargs))
        has_room = len(self._failed) + len(self.paths) < settings.max_repros
        return has_room and size <= settings.max_repro_bytes

    def judged(self, call: Call, out: Any, record: OpRecord, *, is_open: bool) -> None:
        """A call was judged, and what it got is still there; never raises into the step."""
        if (record.verdict is not Verdict.FAIL and not is_open) or os.getpid() != self._pid:
            return
        place = record.op, record.module, record.phase
        if place in self._places:
            return
        try:
            why = self._take(call, record)
        except Exception as error:  # noqa: BLE001 - out of memory: never worth the user's step
            why = f"copying the arguments failed: {error!r}"
        if why:
            self._left_out[why] += 1

    def _take(self, call: Call, record: OpRecord) -> str:
        settings = self._settings
        if len(self._failed) + len(self.paths) >= settings.max_repros:
            return f"not saved, max_repros={settings.max_repros} are"
        size = nbytes_of((call.args, call.kwargs))
        if self._held_bytes + size > settings.max_repro_bytes:
            return (
                f"not saved, their arguments would go beyond max_repro_bytes="
                f"{settings.max_repro_bytes} ({settings.max_repro_bytes / MIB:.0f} MiB) together"
            )
        if call.is_large and call.traits.mutates and not call.whole_before:
            return (
                "not saved, they wrote to more than max_numel elements, of which no copy was kept"
            )
        self._open[record.index] = keep(call, record, RunState.now(), seed=settings.seed)
        self._held_bytes += size
        return ""

    def concluded(self, record: OpRecord) -> None:
        """The verdict of a call is final."""
        kept = self._open.pop(record.index, None)
        if kept is None:
            return
        place = record.op, record.module, record.phase
        if record.verdict is Verdict.FAIL and place not in self._places:
            self._places.add(place)
            self._failed.append(_Failed(replace(kept, record=record)))
        else:
            self._held_bytes -= kept.arguments.nbytes

    # ---- after the step ----

    def write(self, *, may_shrink: bool) -> None:
        """Write what failed since the last time.

        Args:
            may_shrink: look for smaller arguments, for `repro_seconds` together.
        """
        failed, self._failed = self._failed, []
        self._open.clear()
        self._held_bytes = 0
        deadline = time.monotonic() + (self._settings.repro_seconds if may_shrink else 0.0)
        for place, item in enumerate(failed):
            left = deadline - time.monotonic()
            try:
                self._write(item.kept, left / (len(failed) - place))
            except Exception as error:  # noqa: BLE001 - said, and the others are written
                self._problems.append(f"{item.kept.record.op}: no reproducer: {error}")

    def _write(self, kept: KeptCall, seconds: float) -> None:
        if NO_SINGLE_CALL in kept.record.reason:
            self._problems.append(f"{kept.record.op}: no reproducer: {kept.record.reason}")
            return
        try:
            first = run_again(kept, kept.arguments)
        except NotJudged as reason:
            self._problems.append(f"{kept.record.op}: no reproducer: {reason} when run again")
            return
        record = kept.record
        stem = free_stem(
            self._folder, record.op, record.module, record.phase, f"call{record.index}"
        )
        kind = _kind(first, kept)
        if not kind:
            note = "it did not fail when it was run again after the step"
            self._problems.append(f"{record.op} (call {record.index}): {note}")
            again_text = f"{_NO_SHRINKING}; {note} in the same process"
            self.paths[record.index] = self._save(kept, stem, kept.arguments, first, again_text)
            return
        wants_first = kept.on_device or kept.in_kernel
        if wants_first or seconds <= 0.0:  # such a kernel may take the process with it
            path = self._save(kept, stem, kept.arguments, first, _NO_SHRINKING)
            self.paths[record.index] = path
        if seconds > 0.0:
            smaller, text = self._shrunk(kept, kind, first.found.metrics.q, seconds)
            again = run_again(kept, smaller)
            self.paths[record.index] = self._save(kept, stem, smaller, again, text)

    def _shrunk(self, kept: KeptCall, kind: str, q: float, seconds: float) -> tuple[Packed, str]:
        least = min(q, MAX_Q)

        def fails(arguments: Packed) -> bool:
            try:
                again = run_again(kept, arguments)
            except Exception:  # noqa: BLE001 - such arguments make no sense to the op
                return False
            return _kind(again, kept) == kind and not again.found.metrics.q < least

        with _progress(kept.record.op, kept.arguments, seconds) as tell:
            found = shrink(kept.arguments, fails, seconds=seconds, progress=tell)
        text = f"{_sizes(kept.arguments)} -> {_sizes(found.arguments)}, {found.num_runs} runs"
        if found.out_of_time:
            text += f"; stopped after {seconds:.1f} s, larger than it need be"
        return found.arguments, text

    def _save(
        self, kept: KeptCall, stem: str, arguments: Packed, again: Again, shrunk: str
    ) -> Path:
        is_origin = _kind(again, kept) == "origin"
        script = script_of(kept, arguments, again, shrunk=shrunk, is_origin=is_origin)
        return write_repro(
            self._folder, stem, script.text, script.tensors,
            max_bytes=self._settings.max_repro_bytes,
        )  # fmt: skip


def _kind(again: Again, kept: KeptCall) -> str:
    """In which way it fails; "" if it does not."""
    found: Judgement = again.found
    if found.passed:
        inputs = (again.call.args, again.call.kwargs)
        is_origin = kept.record.metrics.num_out == 0 and found.nonfinite and is_finite(inputs)
        return "origin" if is_origin else ""
    if not found.metrics.num_elements:
        return "structure"
    if found.metrics.num_nonfinite:
        return "nonfinite"
    return "argument" if "argument" in found.reason and found.metrics.q <= 1.0 else "value"


def _sizes(arguments: Packed) -> str:
    return ", ".join(str(view.size) for view in arguments.views())


@contextmanager
def _progress(op: str, first: Packed, seconds: float) -> Iterator[Callable[[Packed], None] | None]:
    """On a terminal's stderr: how small it is by now."""
    if not sys.stderr.isatty():
        yield None
        return
    begin = time.monotonic()

    def tell(now: Packed) -> None:
        spent = time.monotonic() - begin
        text = f"opcheck: shrinking {op}: {_sizes(first)} -> {_sizes(now)}"
        sys.stderr.write(f"\r\x1b[K{text[:100]} ({spent:.0f} of {seconds:.0f} s)")
        sys.stderr.flush()

    tell(first)
    try:
        yield tell
    finally:
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()
