"""Dispatch mode -> calls. It snapshots, runs the op, hands both on, and never judges."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from opcheck import _torch
from opcheck.modes import PassingMode, active_modes, is_innermost, take_off
from opcheck.switch import SWITCH, Observer
from opcheck.tensor_kinds import unwraps_itself

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["CheckMode"]


class CheckMode(PassingMode):
    """Sees every ATen call of its thread (and of autograd's threads) while it is on the stack."""

    supports_higher_order_operators = True

    def __init__(self, observer: Observer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._observer = observer
        self._pid = os.getpid()
        self._has_left = False
        self._left_behind: list[Any] = []
        """The modes that were below when this one left."""

    def __enter__(self) -> Self:
        """Watch this thread, or, when Ctrl-C comes in the middle, leave nothing behind."""
        self._has_left = False
        try:
            super().__enter__()  # type: ignore[no-untyped-call]
        except BaseException:
            take_off(self)
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        """Leave, also from below modes that were entered later (generators, async tasks)."""
        take_off(self)

    @property
    def may_move(self) -> bool:
        """Getting on and off the stack has effect, also on what follows; see also `key_blocks`.

        Not within a backward: autograd puts the whole stack back at its end.
        """
        return _torch.current_graph_task_id() == -1

    def leave(self) -> bool:
        """Get off the stack before the context ends; True when nothing is seen from now on.

        Only from the top: a mode that was entered later keeps its place, and so does this one.
        """
        if not self._has_left and self.may_move and is_innermost(self):
            self.__exit__(None, None, None)
            self.stay_off()
        return self._has_left

    def stay_off(self) -> None:
        """Do not get on the stack yet; instead of entering."""
        self._has_left = True
        self._left_behind = active_modes()

    def come_back(self) -> bool:
        """Get on the stack again; True when every call is seen from now on.

        Only where the stack is as it was: whoever entered since takes off what is on top.
        """
        if self._has_left and self.may_move and active_modes() == self._left_behind:
            self.__enter__()
        return not self._has_left

    def _handle(
        self,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if os.getpid() != self._pid:  # a forked worker: its steps are not ours
            return func(*args, **kwargs)
        observer = self._observer
        call = observer.before(func, types, args, kwargs)
        if types and unwraps_itself(types):
            return NotImplemented
        try:
            if SWITCH.has_kernels:
                with SWITCH.announced(func, call):
                    out = func(*args, **kwargs)
            else:
                out = func(*args, **kwargs)
        except BaseException:
            observer.raised(call)
            raise
        if call is not False:
            observer.after(call, out)
        return out
