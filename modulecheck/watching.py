"""What a dispatch mode sees while a module runs again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from modulecheck.replay import replay
from modulecheck.snapshot import Snapshot
from opcheck.modes import Mode

__all__ = ["num_ops", "undefined_casts"]


class _Counter(Mode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops = 0

    def _handle(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.ops += 1
        return func(*args, **kwargs)


def num_ops(module: nn.Module, snapshot: Snapshot) -> int:
    """How many ops the forward of the module runs in eager."""
    counter = _Counter()
    replay(module, snapshot, modes=[counter])
    return counter.ops


class _CastWatch(Mode):
    """Notices casts of floats that no integer of the target dtype can hold."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.undefined = 0

    def _handle(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        source = args[1] if func.overloadpacket is torch.ops.aten.copy_ else args[:1] and args[0]
        if isinstance(out, Tensor) and isinstance(source, Tensor) and source.is_floating_point():
            self._look(source, out.dtype)
        return out

    def _look(self, source: Tensor, dtype: torch.dtype) -> None:
        if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
            return
        whole, limits = source.detach().double().trunc(), torch.iinfo(dtype)
        # the largest int64 rounds up to 2**63, which it cannot hold
        holds = whole.isfinite() & (whole >= float(limits.min)) & (whole < float(limits.max) + 1.0)
        self.undefined += int((~holds).sum())


def undefined_casts(module: nn.Module, snapshot: Snapshot) -> int:
    """Elements that the eager forward casts to an integer dtype which cannot hold them."""
    watch = _CastWatch()
    replay(module, snapshot, modes=[watch])
    return watch.undefined
