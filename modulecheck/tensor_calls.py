"""What a module call got, kept so that a reproducer can run the call again."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import nn

from modulecheck import _torch
from modulecheck.recording import RecordedCall
from modulecheck.snapshot import Snapshot
from opcheck.errors import ReproError
from opcheck.repro_files import MIB

__all__ = ["CallKey", "KeptCall"]

CallKey: TypeAlias = tuple[str, str, int]
"""Side, name of the module, n-th call of it from 0."""


@dataclass(frozen=True, slots=True)
class KeptCall:
    """Copies of one call's arguments, buffers and random state; keeps no model alive."""

    module: weakref.ref[nn.Module]
    snapshot: Snapshot | None = field(repr=False)
    problem: str = ""
    """Why there is no snapshot."""

    @classmethod
    def take(cls, module: nn.Module, args: Any, kwargs: Any) -> KeptCall:
        """Copy what a call is about to get."""
        try:
            with _torch.no_modes():
                found = Snapshot.take(module, args, kwargs, cast_dtype=None)
        except Exception as error:  # noqa: BLE001 - an odd argument costs the reproducer, no step
            return cls(weakref.ref(module), None, f"{type(error).__name__}: {error}")
        return cls(weakref.ref(module), found)

    def recorded(self, name: str, *, max_bytes: int) -> RecordedCall:
        """The call as it can be run again.

        Args:
            name: of the module.
            max_bytes: of its parameters, of which copies are made.

        Raises:
            ReproError: the module is gone or too large, or its parameters are others by now.
        """
        module = self.module()
        if self.snapshot is None:
            raise ReproError(f"what {name or '<root>'} got could not be copied: {self.problem}")
        if module is None:
            raise ReproError(f"the module {name or '<root>'} is gone")
        if self.snapshot.parameters_moved(module):
            raise ReproError(f"the parameters of {name or '<root>'} were changed since the call")
        num_bytes = sum(item.numel() * item.element_size() for item in module.parameters())
        if num_bytes > max_bytes:
            raise ReproError(f"the parameters of {name or '<root>'} take {num_bytes / MIB:.0f} MiB")
        return RecordedCall.of(name, module, self.snapshot, failed=(), actual={})
