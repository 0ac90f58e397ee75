"""What one rank saw of its collectives, as digests; the step goes on as without.

No collective is added and none is waited for before the step needs it: a result is read at the
first op that takes it, or at the end.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from modulecheck import _torch
from modulecheck.collective_rule import Digest, digest
from modulecheck.collectives import (
    Collective,
    Part,
    is_collective,
    is_neutral,
    is_wait,
    parse,
    parts_got,
    wait_until_there,
)
from opcheck.modes import PassingMode
from opcheck.source_lines import find_user_frame, spell_line
from opcheck.tensor_kinds import unwraps_itself

__all__ = ["Seen", "Watch", "bits_of"]

_SUMMED = ("sum", "avg", "min", "max")

Extent = tuple[int, int, int]
"""Of a tensor: its storage, and its first byte in it and the one after its last."""


@dataclass
class Seen:
    """One collective on one rank.

    Attributes:
        call: the op, without its tensors.
        given: digests of what this rank put in, for each part one or one a rank.
        got: likewise of what came out; None where it could not be read.
        source: line of the user's code.
        problem: why it could not be read.
    """

    call: Collective
    given: list[list[Digest]]
    source: str = ""
    got: list[list[Digest]] | None = None
    problem: str = ""

    def to_json(self) -> dict[str, Any]:
        """For the rank that compares."""
        call = self.call
        return {
            "op": call.op, "kind": call.kind, "group": call.group, "ranks": list(call.ranks),
            "reduction": call.reduction, "root": call.root, "tag": call.tag, "source": self.source,
            "problem": self.problem, "given": _json(self.given),
            "got": None if self.got is None else _json(self.got),
        }  # fmt: skip


def _json(digests: list[list[Digest]]) -> list[Any]:
    return [[item.to_json() for item in part] for part in digests]


@dataclass
class _Pending:
    seen: Seen
    func: Any
    parts: tuple[Part, ...]
    out: Any
    held: list[Extent]
    """Where its results are, or will be."""
    arrivals: int
    """Copies into its results that are part of waiting for it, and not yet seen."""


class Watch(PassingMode):
    """A dispatch mode that takes digests around collectives."""

    supports_higher_order_operators = True

    def __init__(self, max_sums: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[Seen] = []
        self.not_understood: Counter[str] = Counter()
        self.problems: list[str] = []
        self._max_sums = max_sums
        self._pending: list[_Pending] = []
        self._pid = os.getpid()
        self._user_files: dict[str, bool] = {}

    def _handle(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if os.getpid() != self._pid:
            return func(*args, **kwargs)
        if types and unwraps_itself(types):
            return NotImplemented
        if self._pending and not self._arrives(func, args) and not is_neutral(func):
            self._read(_memory((*args, *kwargs.values())))
        if not is_collective(func):
            return func(*args, **kwargs)
        return self._collective(func, args, kwargs)

    def _arrives(self, func: Any, args: tuple[Any, ...]) -> bool:
        """The op is part of waiting for a result: gloo sums, and then copies a rank's part."""
        if is_wait(func):
            return True
        if func is not torch.ops.aten.copy_.default:
            return False
        place = _memory(args[:1])
        for item in self._pending:
            if item.arrivals and _overlap(place, item.held):
                item.arrivals -= 1
                return True
        return False

    def _collective(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        seen: Seen | None = None
        try:
            call = parse(func, args, kwargs)
            seen = None if call is None else self._begun(call)
        except Exception as error:  # noqa: BLE001 - ours must not be the user's; it is no pass
            self.problems.append(f"{func}: what it was given could not be read: {error!r}")
        out = func(*args, **kwargs)
        if is_wait(func):
            self._read(_memory((*args, out)))
        elif seen is not None and seen.call.kind != "send":
            self._expect(seen, func, args, kwargs, out)
        return out

    def _expect(
        self, seen: Seen, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        try:
            with _torch.no_modes():
                parts = parts_got(seen.call, func, args, kwargs, out)
        except Exception as error:  # noqa: BLE001 - as above
            seen.problem = f"its result could not be found: {error!r}"
            return
        held = _memory([part.whole for part in parts])
        arrivals = len(parts) if seen.call.kind == "reduce_scatter" else 0
        self._pending.append(_Pending(seen, func, parts, out, held, arrivals))

    def _begun(self, call: Collective) -> Seen | None:
        if not call.kind:
            self.not_understood[call.op] += 1
            return None
        frame = find_user_frame(sys._getframe(1), self._user_files)
        source = spell_line(frame.f_code, frame.f_lineno) if frame else ""
        seen = Seen(replace(call, given=()), self._digests(call, call.given), source)
        self.seen.append(seen)
        return seen

    def _digests(self, call: Collective, parts: tuple[Part, ...]) -> list[list[Digest]]:
        with _torch.no_modes(), torch.no_grad():
            return [
                [
                    _digest(tensor, self._max_sums, with_sums=_has_sums(tensor, call.reduction))
                    for tensor in part.tensors
                ]
                for part in parts
            ]

    def _read(self, used: list[Extent]) -> None:
        """Take the digests of results that lie in this memory: the step is about to use them.

        Others in the same storage (slices of one flat buffer) may be still on their way.
        """
        for item in [*self._pending]:
            if _overlap(used, item.held):
                self._pending.remove(item)
                self._take(item, waits=False)

    def _take(self, item: _Pending, *, waits: bool) -> None:
        try:
            if waits and not item.seen.call.is_awaited:
                wait_until_there(item.func, item.out, item.parts)
            item.seen.got = self._digests(item.seen.call, item.parts)
        except Exception as error:  # noqa: BLE001 - ours must not be the user's; it is no pass
            item.seen.problem = f"its result could not be read: {error!r}"

    def finish(self) -> None:
        """Read what the step did not use, or not yet."""
        for item in self._pending:
            self._take(item, waits=True)
        self._pending.clear()


def _memory(values: Any) -> list[Extent]:
    found: list[Extent] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(_extent(value))
        elif isinstance(value, (list, tuple)):
            found += _memory(value)
    return found


def _extent(tensor: Tensor) -> Extent:
    try:
        storage = int(_torch.memory_of(tensor))
        start = int(tensor.storage_offset())
    except (NotImplementedError, RuntimeError):  # sparse and opaque tensors
        return 0, 0, 1
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    length = sum((int(size) - 1) * int(stride) for size, stride in sizes) + 1
    if not tensor.numel():
        length = 0
    width = tensor.element_size()
    return storage, start * width, (start + length) * width


def _overlap(some: list[Extent], others: list[Extent]) -> bool:
    return any(
        storage == other and start < other_stop and other_start < stop
        for storage, start, stop in some
        for other, other_start, other_stop in others
    )


def _has_sums(tensor: Tensor, reduction: str) -> bool:
    """More than the bits can be told of what a reduction gave."""
    if tensor.dtype == torch.bool:  # backends differ in what a sum of them is
        return reduction in ("min", "max")
    return reduction in _SUMMED


def bits_of(tensor: Tensor) -> str:
    """A hash of all bits of a tensor."""
    with _torch.no_modes(), torch.no_grad():
        return _digest(tensor, 1, with_sums=False).bits


def _digest(tensor: Tensor, max_sums: int, *, with_sums: bool) -> Digest:
    here = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    dtype = str(here.dtype).removeprefix("torch.")
    raw = here.reshape(-1).view(torch.uint8).numpy().tobytes() if here.numel() else b""
    if here.is_complex():
        here = torch.view_as_real(here)
    known = dtype in ("float64", "float32", "bfloat16", "float16", "complex64", "complex128")
    if known:
        values = here.reshape(-1).to(torch.float64).numpy()
    elif dtype == "bool" or ("int" in dtype and not dtype.startswith("q")):
        values = here.reshape(-1).to(torch.int64).numpy()
    else:  # float8: compared by their bits alone
        with_sums = False
        values = torch.empty(0).numpy()
    return digest(raw, values, dtype, numel=here.numel(), max_sums=max_sums, with_sums=with_sums)
