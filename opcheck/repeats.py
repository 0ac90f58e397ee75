"""The very kernel run a second time on the same inputs: does it give the same bits?

No verdict hangs on it. Arguments that the op writes to are copied before it runs, with what shares
their memory; random ops run again from the generator states of the first time, and the generators
are as the step left them afterwards.
"""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opcheck import _torch
from opcheck.arrays import Array
from opcheck.calls import Call
from opcheck.expected import leaves_of
from opcheck.golden_rules import COMPARED_OUTPUTS
from opcheck.intercept import CheckMode
from opcheck.kernel_table import kernels
from opcheck.ledger import Signature
from opcheck.modes import active_modes
from opcheck.outside import as_in_the_step, outside_everything
from opcheck.records import RepeatDifference, SkipReason
from opcheck.references import host_array
from opcheck.switch import SWITCH
from opcheck.tensor_kinds import is_plain_tensor, tensors_within
from opcheck.written import memory_written

__all__ = ["REPEATED_UNCHECKED", "Repeat", "Repeats"]

REPEATED_UNCHECKED = frozenset({SkipReason.RANDOM, SkipReason.OUT_VARIANT})
"""Calls that nothing can be compared with, and that can be compared with themselves."""
_NAMESPACES = ("aten", "prims")
"""Torch's own ops do nothing but compute; of others only registered kernels are run twice."""


@dataclass(slots=True)
class _Prepared:
    """What a second run needs, taken before the first."""

    copies: dict[int, Tensor]
    """id of a tensor argument -> its copy."""
    states: list[tuple[Any, Tensor]]
    """Generator or device type, and its state."""


@dataclass(frozen=True, slots=True)
class Repeat:
    """What became of a second run."""

    same: bool
    num_out: int = 0
    num_elements: int = 0
    max_abs: float = 0.0

    @property
    def note(self) -> str:
        """A sentence for the record of a call that did not repeat; "" for one that did."""
        if self.same:
            return ""
        return (
            f"run again on the same inputs, {self.num_out:,} of {self.num_elements:,} elements"
            f" differ by up to {self.max_abs:.3g}"
        )


class Repeats:
    """Runs calls of one session again, at most `max_checks` of each signature."""

    def __init__(self, *, max_checks: int | None, max_numel: int) -> None:
        self.problem = ""
        """Traceback of the first crash of ours in here."""
        self._lock = threading.Lock()
        self._max_checks = max_checks
        self._max_numel = max_numel
        self._attempts: Counter[Signature] = Counter()
        self._repeated = 0
        self._not_run: Counter[str] = Counter()
        self._differences: dict[tuple[str, str, str], RepeatDifference] = {}

    def before(self, call: Call) -> None:
        """About to run: keep what the second run needs, if there will be one."""
        if call.skipped is not None and not call.skipped.is_computation:
            return
        if call.skipped is SkipReason.SIDE_EFFECT and next(tensors_within(call.args), None) is None:
            return  # a mark for the profiler
        with self._lock:
            reason = self._hindrance(call)
            if reason:
                self._not_run[reason] += 1
                return
            self._attempts[call.signature] += 1
        with outside_everything():
            draws = call.traits.maybe_random or call.skipped is SkipReason.RANDOM
            call.repeat = _Prepared(_copies(call), _states(call) if draws else [])

    def after(self, call: Call, out: Any) -> Repeat | None:
        """The op gave `out`: run it again. None: it was not."""
        prepared: _Prepared | None = call.repeat
        call.repeat = None
        if prepared is None:
            return None
        args, kwargs = _torch.tree_map(
            lambda leaf: prepared.copies.get(id(leaf), leaf) if isinstance(leaf, Tensor) else leaf,
            (call.args, call.kwargs),
        )
        try:
            with _drawing_as(prepared.states), SWITCH.silenced(), as_in_the_step():
                again = call.func(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - the second run is ours
            with self._lock:
                self._not_run[f"it raised {type(error).__name__} the second time"] += 1
            return None
        with outside_everything():
            found = _compare(call, (out, _written(call, call.args, call.kwargs)),
                             (again, _written(call, args, kwargs)))  # fmt: skip
        with self._lock:
            self._repeated += 1
            if not found.same:
                self._note(call, found)
        return found

    def crashed(self) -> None:
        """Running a call again crashed in our own code."""
        with self._lock:
            self.problem = self.problem or traceback.format_exc()
            self._not_run["opcheck crashed"] += 1

    def counts(self) -> dict[str, int]:
        """What `Coverage.repeat` holds."""
        found = {"run twice": self._repeated}
        return found | {
            f"not run twice: {why}": count for why, count in self._not_run.most_common()
        }

    @property
    def differences(self) -> tuple[RepeatDifference, ...]:
        """What did not repeat, first call first."""
        return tuple(self._differences.values())

    def _note(self, call: Call, found: Repeat) -> None:
        key = (call.traits.name, *call.site)
        known = self._differences.get(key)
        if known is None:
            op, module, phase = key
            known = RepeatDifference(op=op, module=module, phase=phase, first=call.index)
        self._differences[key] = replace(
            known, calls=known.calls + 1, max_abs=max(known.max_abs, found.max_abs)
        )

    def _hindrance(self, call: Call) -> str:
        if call.skipped is not None and call.skipped not in REPEATED_UNCHECKED:
            return str(call.skipped)
        tensors = list(tensors_within((call.args, call.kwargs)))
        if not all(map(is_plain_tensor, tensors)):
            return str(SkipReason.UNSUPPORTED_TYPE)
        if any(tensor.numel() > self._max_numel for tensor in tensors):
            return str(SkipReason.TOO_LARGE)
        if self._max_checks is not None and self._attempts[call.signature] >= self._max_checks:
            return str(SkipReason.BUDGET_USED_UP)
        namespace = call.traits.name.partition(".")[0]
        name = call.traits.qualified
        if namespace not in _NAMESPACES and not kernels().is_overridden(name):
            return f"an op of {namespace}, which may do more than compute"
        if any(type(mode) is not CheckMode for mode in active_modes()):
            return "another dispatch mode takes part in it"
        return ""


# ---- before -------------------------------------------------------------------------------------


def _written(call: Call, args: Any, kwargs: Any) -> list[Any]:
    bound = call.traits.bound(args, kwargs)
    return [value for param, value in bound if param.mutated and value is not None]


def _copies(call: Call) -> dict[int, Tensor]:
    """Copies, on the device, of what the op writes to and of all that shares its memory."""
    written = memory_written(call)
    copies: dict[int, Tensor] = {}
    storages: dict[int, Any] = {}
    for tensor in tensors_within((call.args, call.kwargs)) if written else ():
        storage = tensor.untyped_storage()
        if _torch.storage_id(storage) not in written or id(tensor) in copies:
            continue
        own = storages.setdefault(_torch.storage_id(storage), None) or storage.clone()
        storages[_torch.storage_id(storage)] = own
        copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        copy.set_(own, tensor.storage_offset(), tensor.size(), tensor.stride())
        copies[id(tensor)] = copy
    return copies


def _states(call: Call) -> list[tuple[Any, Tensor]]:
    """The state of every generator that the call may draw from."""
    sources: list[Any] = [
        leaf
        for leaf in _torch.tree_leaves((call.args, call.kwargs))
        if isinstance(leaf, torch.Generator)
    ]
    devices = {tensor.device.type for tensor in tensors_within((call.args, call.kwargs))}
    device = call.kwargs.get("device")
    devices |= {"cpu"} if device is None else {"cpu", torch.device(device).type}
    sources += sorted(devices - {"meta"})
    return [(source, _state(source)) for source in sources]


def _state(source: Any) -> Tensor:
    if isinstance(source, torch.Generator):
        return source.get_state()
    if source == "cpu":
        return torch.get_rng_state()
    found: Tensor = torch.get_device_module(source).get_rng_state()
    return found


@contextlib.contextmanager
def _drawing_as(states: list[tuple[Any, Tensor]]) -> Iterator[None]:
    """Generators in these states inside, and as they are now afterwards.

    A generator function: where Ctrl-C cuts its exit off, Python closes it all the same.
    """
    now = [(source, _state(source)) for source, _ in states]
    try:
        for source, state in states:
            _set_state(source, state)
        yield
    finally:
        for source, state in now:
            _set_state(source, state)


def _set_state(source: Any, state: Tensor) -> None:
    with outside_everything():
        if isinstance(source, torch.Generator):
            source.set_state(state)
        elif source == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(source).set_rng_state(state)


_WORKSPACE_LAST = {"mkldnn_rnn_layer": (0, 1, 2), "miopen_rnn": (0, 1, 2)}
"""Results that mean something, of ops that nothing else compares: the rest is scratch memory."""

# ---- after --------------------------------------------------------------------------------------


def _compare(call: Call, first: Any, second: Any) -> Repeat:
    """Results and written arguments, bit for bit; any NaN equals any other."""
    chosen = COMPARED_OUTPUTS.get(call.traits.base, _WORKSPACE_LAST.get(call.traits.base))
    num_out = num_elements = 0
    max_abs = 0.0
    seen: set[int] = set()
    for part, (left_part, right_part) in enumerate(zip(first, second, strict=True)):
        left_leaves, right_leaves = leaves_of(left_part), leaves_of(right_part)
        for number, (left, right) in enumerate(zip(left_leaves, right_leaves, strict=True)):
            if part == 0 and chosen is not None and number not in chosen:
                continue
            if id(left.value) in seen and part:  # written, and returned as well
                continue
            seen.add(id(left.value))
            if not isinstance(left.value, Tensor):
                num_out += not (left.value == right.value or left.value is right.value)
                continue
            if not is_plain_tensor(left.value):
                continue
            got, again = host_array(left.value), host_array(right.value)
            num_elements += got.size
            if got.shape != again.shape or got.dtype != again.dtype:
                num_out += got.size
            elif got.tobytes() != again.tobytes():
                count, apart = _difference(got, again)
                num_out, max_abs = num_out + count, max(max_abs, apart)
    return Repeat(not num_out, num_out, num_elements, max_abs)


def _difference(got: Array, again: Array) -> tuple[int, float]:
    """How many elements have other bits, and the largest finite difference."""
    if got.dtype.kind == "c":
        parts = (_difference(getattr(got, name), getattr(again, name)) for name in ("real", "imag"))
        counts, apart = zip(*parts, strict=True)
        return max(counts), max(apart)
    got, again = np.ascontiguousarray(got), np.ascontiguousarray(again)
    other: Array = got.view(f"u{got.itemsize}") != again.view(f"u{got.itemsize}")
    if got.dtype.kind == "f":
        other &= ~(np.isnan(got) & np.isnan(again))
    with np.errstate(all="ignore"):
        apart_by = np.absolute(got.astype(np.float64) - again.astype(np.float64))[other]
    finite = apart_by[np.isfinite(apart_by)]
    return int(other.sum()), float(finite.max()) if finite.size else 0.0
