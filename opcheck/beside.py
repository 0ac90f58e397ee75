"""References in worker threads beside the step (`workers=`). What they find never changes with it.

A worker gets copies: the step goes on and may write to what it was given. It compares, and nothing
more. Everything with a memory (counts, records, evidence over many calls, callbacks) happens in the
step's thread, in the order in which the calls were dispatched. What cannot be copied, or needs the
live call, waits for those before it and is judged at once.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from opcheck import _torch
from opcheck.calls import Call
from opcheck.kernel_table import kernels
from opcheck.outside import outside_everything
from opcheck.own_thread import OwnThread
from opcheck.tensor_kinds import HALF, is_plain_tensor, tensors_within

__all__ = ["MAX_BYTES", "Beside"]

MAX_BYTES = 1 << 30
"""Of copies that wait or are being judged."""
_WASTE = 1 << 20
"""Bytes that a view may drag along beyond twice its own."""
_QUIET_SECONDS = 1.0
"""Waiting is shown from then on."""


@dataclass(slots=True)
class _Waiting:
    call: Call
    out: Any
    memory: list[Any]
    num_bytes: int
    found: Future[Any] = field(default_factory=Future)
    seconds: float = 0.0
    """That a worker was busy with it."""


class Beside:
    """The calls of a session that workers judge.

    Args:
        num_workers: threads, at least 1.
        compare: what a worker does with a call and its result.
        conclude: what the step's thread does with what `compare` gave, through a function that
            returns it or raises what it raised. May raise Ctrl-C alone.
        charge: is told, in the step's thread, of a call how many seconds a worker was busy with it,
            and how many the step's thread waited.
        max_bytes: of copies held at a time.
    """

    def __init__(
        self,
        num_workers: int,
        *,
        compare: Callable[[Call, Any], Any],
        conclude: Callable[[Call, Any, Callable[[], Any]], None],
        charge: Callable[[Call, float, float], None],
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._num_workers = num_workers
        self._compare = compare
        self._conclude = conclude
        self._charge = charge
        self._waited = 0.0
        self._max_bytes = max_bytes
        self._pool: ThreadPoolExecutor | None = None
        self._process = os.getpid()
        self._prefix = f"opcheck-{id(self):x}_"
        self._thread = OwnThread()
        self._queue: deque[_Waiting] = deque()
        self._held_bytes = 0
        self._memory = _Memory()
        self.peak_bytes = 0
        self._of_signature: Counter[tuple[Any, ...]] = Counter()

    def takes(self, call: Call, out: Any) -> bool:
        """Hand a call over, where that changes nothing; False: it is to be judged at once."""
        if not _needs_nothing_live(call):
            return False
        if self._process != os.getpid():  # made before a fork: what waits there is the parent's
            self._forget()
            self._pool, self._process = None, os.getpid()
        self._collect(all_of_them=False)
        room = self._max_bytes - self._held_bytes
        with outside_everything():
            copied = _copied(call, out, room, self._memory)
        if copied is None:
            return False
        mine, result, memory, num_bytes = copied
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._num_workers, thread_name_prefix=self._prefix)
        item = _Waiting(mine, result, memory, num_bytes)
        item.found = self._pool.submit(self._work, item)
        self._queue.append(item)
        self._thread.claim()
        self._held_bytes += num_bytes
        self._memory.keep_below(self._max_bytes - self._held_bytes)
        self.peak_bytes = max(self.peak_bytes, self._held_bytes + self._memory.num_bytes)
        self._of_signature[call.signature] += 1
        return True

    def _work(self, item: _Waiting) -> Any:
        start = time.perf_counter()
        try:
            return self._compare(item.call, item.out)
        finally:
            item.seconds = time.perf_counter() - start

    @property
    def is_my_thread(self) -> bool:
        """True in the thread that handed calls over, where alone they are concluded on."""
        return self._thread.is_current

    def num_waiting(self, signature: tuple[Any, ...]) -> int:
        """Calls of a signature whose outcome is not known yet."""
        return self._of_signature[signature]

    def settle(self) -> None:
        """Wait for every call that was handed over, and conclude on it."""
        self._collect(all_of_them=True)

    def close(self, *, wait: bool) -> None:
        """Leave no thread behind; without `wait`, calls that nobody began are dropped.

        Raises:
            KeyboardInterrupt: while waiting; what was not concluded on has no outcome then.
        """
        try:
            if wait:
                self._collect(all_of_them=True, show=sys.stderr.isatty())
        finally:
            self._forget()
            pool = self._pool
            if pool is not None:
                pool.shutdown(wait=True, cancel_futures=True)
                self._join()
            self._pool = None

    def _join(self) -> None:
        """Wait for the one worker that the pool may not know: Ctrl-C came while it began."""
        for thread in threading.enumerate():
            if thread.name.startswith(self._prefix):
                begin = time.monotonic()
                while thread.ident is None and time.monotonic() - begin < _QUIET_SECONDS:
                    time.sleep(0.001)
                if thread.is_alive():
                    thread.join()

    def _forget(self) -> None:
        self._queue.clear()
        self._of_signature.clear()
        self._held_bytes = 0
        self._memory.keep_below(0)

    def _collect(self, *, all_of_them: bool, show: bool = False) -> None:
        """Conclude in order of dispatch, as far as outcomes are there."""
        if self._process != os.getpid():  # a fork has the queue and not the threads
            return
        begin = time.monotonic()
        shown = False
        try:
            while self._queue and (all_of_them or self._queue[0].found.done()):
                if show:
                    shown = self._wait_shown(self._queue[0].found, begin, shown=shown)
                self._conclude_first()
        finally:
            if shown:
                _show("\r" + " " * 60 + "\r")

    def _wait_shown(self, found: Future[Any], begin: float, *, shown: bool) -> bool:
        start = time.perf_counter()
        while not found.done():
            shown = shown or time.monotonic() - begin > _QUIET_SECONDS
            if shown:
                _show(f"\ropcheck: {len(self._queue):,} calls are still being checked ")
            wait([found], timeout=0.2)
        self._waited += time.perf_counter() - start
        return shown

    def _conclude_first(self) -> None:
        first = self._queue[0]
        start = time.perf_counter()
        if not first.found.done():
            wait([first.found])
        self._waited += time.perf_counter() - start
        waited, self._waited = self._waited, 0.0
        self._charge(first.call, first.seconds, waited)
        self._queue.popleft()
        self._held_bytes -= first.num_bytes
        self._of_signature[first.call.signature] -= 1
        self._conclude(first.call, first.out, first.found.result)
        memory = first.memory
        del first  # with its call, its tensors
        self._memory.take_back(memory)


class _Memory:
    """Storages of earlier copies, for copies of the same size.

    Memory that is new to the process costs 17 times as much to copy to (350 beside 20 us a MiB).
    """

    def __init__(self) -> None:
        self._free: dict[int, list[Any]] = {}
        """Bytes -> storages."""
        self.num_bytes = 0

    def copy_of(self, storage: Any) -> Any:
        """A storage with the same bytes."""
        free = self._free.get(storage.nbytes())
        if not free or storage.device.type != "cpu":
            return storage.clone()
        self.num_bytes -= storage.nbytes()
        return free.pop().copy_(storage)

    def take_back(self, memory: list[Any]) -> None:
        """What nobody holds any more may be used again; empties the list."""
        while memory:
            storage = memory.pop()
            if storage.device.type == "cpu" and _torch.is_unshared(storage):
                self._free.setdefault(storage.nbytes(), []).append(storage)
                self.num_bytes += storage.nbytes()

    def keep_below(self, num_bytes: int) -> None:
        """Let go of the sizes that were first there, until no more than this is held."""
        while self._free and self.num_bytes > num_bytes:
            size = next(iter(self._free))
            self.num_bytes -= size * len(self._free.pop(size))


def _show(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


def _needs_nothing_live(call: Call) -> bool:
    """Its outcome hangs on copies of its tensors alone."""
    return not (
        call.is_large
        or call.on_device
        or call.in_kernel
        or call.before_groups
        or call.rng_before is not None
        or call.site.phase == "optimizer"  # who owns what it writes to is asked by identity
        or kernels().is_overridden(call.traits.qualified)
        or kernels().original(call.traits.qualified) is None
    )


def _copied(
    call: Call, out: Any, room: int, memory: _Memory
) -> tuple[Call, Any, list[Any], int] | None:
    """A call on copies, with memory shared as in the original; that memory, and its bytes.

    None where there is no room, where a copy would not be the same, and where a value is not
    finite: what made that is asked of the live module.
    """
    leaves = list(tensors_within((call.args, call.kwargs, out)))
    storages: dict[int, Any] = {}
    wanted = 0
    for tensor in leaves:
        if not is_plain_tensor(tensor) or tensor.is_conj() or tensor.is_neg():
            return None
        storage = tensor.untyped_storage()
        storages[_torch.storage_id(storage)] = storage
        wanted += tensor.numel() * tensor.element_size()
    held = sum(storage.nbytes() for storage in storages.values())
    kept = sum(copy.numel() * copy.element_size() for copy in call.before.values())
    if held + kept > room or held > 2 * wanted + _WASTE or not all(map(_is_finite, leaves)):
        return None
    mine = {key: memory.copy_of(storage) for key, storage in storages.items()}
    copies: dict[int, Tensor] = {}

    def copy_of(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        known = copies.get(id(value))
        if known is None:
            known = torch.empty(0, dtype=value.dtype, device=value.device).set_(
                mine[_torch.memory_of(value)],
                value.storage_offset(),
                value.size(),
                value.stride(),
            )
            copies[id(value)] = known
        return known

    args, kwargs, result = _torch.tree_map(copy_of, (call.args, call.kwargs, out))
    before = {id(copies[key]): earlier for key, earlier in call.before.items() if key in copies}
    copied = replace(call, args=args, kwargs=kwargs, before=before, wide_storages={}, frame=None)
    return copied, result, list(mine.values()), held + kept


def _is_finite(tensor: Tensor) -> bool:
    dtype = tensor.dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        return True
    # NaN and Inf stay in a sum, so that a finite one tells of finite elements, at a thirtieth of
    # the cost of looking at each; one that is not may have run over
    total = tensor.sum(dtype=torch.float32 if dtype in HALF else None)
    return bool(torch.isfinite(total)) or bool(torch.isfinite(tensor).all())
