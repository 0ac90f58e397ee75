"""Module, phase and source line of a call, read off the Python stack, without a hook.

Registered kernels are checked outside of sessions too, where no hook follows the modules. Whoever
called the kernel is still on the stack: each open module call has a frame there.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from opcheck import _torch
from opcheck.calls import Site
from opcheck.modules import ModuleFrame, clean_fqn
from opcheck.source_lines import find_user_frame, spell_line

__all__ = ["CallerTracker"]

_MODULE_CALL: CodeType = nn.Module.__call__.__code__
_Names = weakref.WeakKeyDictionary[nn.Module, str]
_OPTIMIZER_FILE: str = torch.optim.Optimizer.step.__code__.co_filename


class CallerTracker:
    """What `ModuleTracker` knows inside a session, as far as the stack tells it.

    Backward runs without the frames of the forward call, so that its calls have no module.
    """

    def __init__(self) -> None:
        self.random_calls = 0
        self._names: weakref.WeakKeyDictionary[nn.Module, _Names] = weakref.WeakKeyDictionary()
        self._user_files: dict[str, bool] = {}
        self._lock = threading.Lock()

    def locate(self) -> Site:
        """Module and phase of the call that runs in this thread."""
        outermost, innermost, in_optimizer = _open_modules(sys._getframe(1))
        fqn = self._name(outermost, innermost)
        if _torch.current_graph_task_id() != -1:
            is_recompute = innermost is not None and torch.is_grad_enabled()
            return Site(fqn if is_recompute else "", "recompute" if is_recompute else "backward")
        if innermost is not None:
            return Site(fqn, "forward")
        return Site("", "optimizer" if in_optimizer else "other")

    def _name(self, root: nn.Module | None, module: nn.Module | None) -> str:
        if root is None or module is None or root is module:
            return ""
        with self._lock:
            names = self._names.setdefault(root, weakref.WeakKeyDictionary())
            found = names.get(module)
            if found is None:  # new, or kept out of the module tree, which is remembered as well
                for name, child in root.named_modules():
                    names[child] = clean_fqn(name, root)
                found = names.setdefault(module, type(module).__name__)
        return found

    def source(self) -> str:
        """`model.py:41 in forward` of the running call, or ""."""
        frame = find_user_frame(sys._getframe(1), self._user_files)
        return spell_line(frame.f_code, frame.f_lineno) if frame else ""

    # ---- what only hooks can know ----

    def owner(self, tensors: Iterable[Any]) -> str:
        """Nobody told which module owns a parameter."""
        return ""

    @property
    def open_frame(self) -> ModuleFrame | None:
        """No module call is followed to its end."""
        return None

    def drain(self) -> list[ModuleFrame]:
        """No module call is followed to its end."""
        return []

    @contextlib.contextmanager
    def looking_away(self) -> Iterator[None]:
        """There is no hook that would have to look away."""
        yield


def _open_modules(
    frame: FrameType | None,
) -> tuple[nn.Module | None, nn.Module | None, bool]:
    """The outermost and the innermost open module of a stack, and whether an optimizer steps."""
    outermost = innermost = None
    in_optimizer = False
    while frame is not None:
        code = frame.f_code
        if code is _MODULE_CALL:
            outermost = frame.f_locals["self"]
            innermost = outermost if innermost is None else innermost
        elif code.co_filename == _OPTIMIZER_FILE:
            in_optimizer = True
        frame = frame.f_back
    return outermost, innermost, in_optimizer
