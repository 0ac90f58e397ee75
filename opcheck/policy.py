"""Call -> check it, or skip it with a reason.

Decided from the settings and from what the call's arguments are; nothing is computed here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from opcheck.calls import Call, OpTraits, traits_of
from opcheck.globs import module_matches, op_matches
from opcheck.records import OpRecord, SkipReason, Verdict
from opcheck.settings import Settings
from opcheck.tensor_kinds import is_plain_tensor, tensors_in
from opcheck.written import meets_in_other_storage

__all__ = ["Described", "KernelPolicy", "Policy", "describe", "writes_overlapping"]

_GOLDEN_DTYPES = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.complex64, torch.float64, torch.complex128}
)
_INEXACT = frozenset(
    dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype.is_complex)
)
_UNSUPPORTED_DTYPES = frozenset(
    dtype
    for name, dtype in vars(torch).items()
    if isinstance(dtype, torch.dtype)
    and (
        (dtype in _INEXACT and dtype not in _GOLDEN_DTYPES)
        or name.startswith(("q", "bits", "int1", "int2", "int3", "int4", "int5", "int6", "int7",
                            "uint1", "uint2", "uint3", "uint4", "uint5", "uint6", "uint7"))
    )
) - {torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64}  # fmt: skip


class Described:
    """The tensor arguments of one call at a glance."""

    __slots__ = ("inexact", "key", "largest", "on_device", "unsupported")

    def __init__(self) -> None:
        self.key: list[Any] = []
        self.largest = 0
        self.inexact = False
        self.on_device = False
        self.unsupported = False


def describe(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Described:
    """Signature and size of a call, lists included."""
    found = Described()
    found.key.append(func)
    for value in args:
        kind = type(value)
        if kind is Tensor or kind is Parameter or isinstance(value, Tensor):
            _add(found, value)
        elif kind is list or kind is tuple:
            for item in value:
                if isinstance(item, Tensor):
                    _add(found, item)
    if kwargs:
        for value in kwargs.values():
            for item in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(item, Tensor):
                    _add(found, item)
    return found


def _add(found: Described, tensor: Tensor) -> None:
    dtype = tensor.dtype
    if dtype in _INEXACT:
        found.inexact = True
    # the type first: asking a fake or jagged tensor for its device or layout dispatches an op
    if dtype in _UNSUPPORTED_DTYPES or not is_plain_tensor(tensor):
        found.unsupported = True
        found.key += (dtype, "other")
        return
    if not tensor.is_cpu:
        found.on_device = True
    if tensor.is_contiguous():
        layout = "contiguous"
    else:
        layout = "expanded" if 0 in tensor.stride() else "strided"
    found.key += (dtype, layout)
    numel = tensor.numel()
    if numel > found.largest:
        found.largest = numel


def writes_overlapping(call: Call) -> bool:
    """The op writes to a tensor in which several elements may be the same memory.

    torch refuses those that have a stride of 0, and not others (`_foreach_mul_` on strides (1, 1)).
    What stands there afterwards depends on the order in which a kernel happens to write.
    """
    if not call.traits.mutates:
        return False
    bound = call.traits.bound(call.args, call.kwargs)
    written = tensors_in(value for param, value in bound if param.mutated)
    return any(map(_overlaps, written)) or meets_in_other_storage(call)


def _overlaps(tensor: Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.is_contiguous() or not tensor.numel():
        return False
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


class Policy:
    """The settings of a session, asked once per call."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._selected_ops: dict[str, bool] = {}
        self._selected_modules: dict[str, bool] = {}

    def outside(self, traits: OpTraits, module: str, step: int) -> SkipReason | None:
        """Not asked for by the user: other steps, ops or modules were."""
        settings = self._settings
        end = None if settings.num_steps is None else settings.start_step + settings.num_steps
        if step < settings.start_step or (end is not None and step >= end):
            return SkipReason.OUTSIDE_STEPS
        if not self._op_selected(traits):
            return SkipReason.EXCLUDED
        if settings.modules and not self._module_selected(module):
            return SkipReason.OUTSIDE_MODULES
        return None

    def unfit(self, found: Described, attempts: int) -> SkipReason | None:
        """Not possible, or too much."""
        settings = self._settings
        if found.unsupported:
            return SkipReason.UNSUPPORTED_TYPE
        if found.largest > settings.max_numel and settings.large == "skip":
            return SkipReason.TOO_LARGE
        if settings.max_checks is not None and attempts >= settings.max_checks:
            return SkipReason.BUDGET_USED_UP
        return None

    def samples(self, numel: int) -> bool:
        """True for a call with so large a tensor that only a sample of it is looked at."""
        return numel > self._settings.max_numel and self._settings.large == "sample"

    def late(self, call: Call) -> SkipReason | None:
        """Too much by now: other threads were checking while the op ran."""
        return None

    def judged(self, record: OpRecord) -> None:
        """A call was checked, or checking it crashed."""

    def _op_selected(self, traits: OpTraits) -> bool:
        settings = self._settings
        if not settings.include and not settings.exclude:
            return True
        chosen = self._selected_ops.get(traits.name)
        if chosen is None:
            chosen = not settings.include or _any(op_matches, traits.name, settings.include)
            chosen = chosen and not _any(op_matches, traits.name, settings.exclude)
            self._selected_ops[traits.name] = chosen
        return chosen

    def _module_selected(self, module: str) -> bool:
        chosen = self._selected_modules.get(module)
        if chosen is None:
            chosen = _any(module_matches, module, self._settings.modules)
            self._selected_modules[module] = chosen
        return chosen


def _any(matches: Callable[[str, str], bool], name: str, globs: tuple[str, ...]) -> bool:
    return any(matches(name, glob) for glob in globs)


class KernelPolicy(Policy):
    """The documented budget of registered kernels: per op, and none after a logged failure."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._attempts: Counter[str] = Counter()
        self._failed: set[str] = set()

    def unfit(self, found: Described, attempts: int) -> SkipReason | None:
        """As for a session, the calls of all signatures of an op counted together."""
        name = traits_of(found.key[0]).name
        if name in self._failed:
            return SkipReason.ALREADY_LOGGED
        return super().unfit(found, self._attempts[name])

    def late(self, call: Call) -> SkipReason | None:
        """Other threads used up the budget, or logged the failure, while the op ran."""
        limit = self._settings.max_checks
        if call.traits.name in self._failed:
            return SkipReason.ALREADY_LOGGED
        if limit is not None and self._attempts[call.traits.name] >= limit:
            return SkipReason.BUDGET_USED_UP
        return None

    def judged(self, record: OpRecord) -> None:
        """Count it; with `log_once` a failure is the last of its op."""
        self._attempts[record.op] += 1
        if record.verdict is Verdict.FAIL and self._settings.log_once:
            self._failed.add(record.op)
