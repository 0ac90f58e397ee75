"""Blocks at whose end torch puts back all dispatch keys of the thread.

While any mode is on the stack, two keys lead every call of the thread to the modes. At the end of
`torch.inference_mode`, of the call of a compiled function and of a few more blocks these keys are
as they were at its beginning, whatever became of the modes within it: where the last mode left, the
next op of the user's step raises, and a mode that came sees nothing. So while a session may come
and go, the ends of such blocks put the two keys straight.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

from opcheck import _torch

__all__ = ["key_blocks"]


def _are_keys_straight() -> bool:
    is_on = _torch.mode_stack_length() > 0
    return all(_torch.is_key_on(key) == is_on for key in _torch.mode_keys)


def _put_keys_straight() -> None:
    """Let the calls of this thread reach the modes on its stack, or nobody where it is empty."""
    is_on = _torch.mode_stack_length() > 0
    for key in _torch.mode_keys:
        _torch.set_key_on(key, is_on)


class _KeyBlocks:
    """Puts the keys straight at the end of every such block, as long as anybody asks for it.

    Beyond that only for the blocks that are still open: they were begun under a mode that is gone.
    """

    def __init__(self) -> None:
        self._askers: list[object] = []
        self._open: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        """Were the keys straight at its beginning? Where torch itself holds them otherwise, they
        are left alone."""
        self._originals: dict[type[Any], tuple[Any, Any]] = {}
        self._patches: dict[type[Any], tuple[Any, Any]] = {}
        self._lock = threading.RLock()

    def watch(self, asker: object) -> None:
        """From now on, until `ignore`."""
        with self._lock:
            self._restore()  # where somebody else was in the way
            self._askers.append(asker)
            for block in _torch.KEY_BLOCKS:
                if block not in self._originals:
                    self._patch(block)

    def ignore(self, asker: object) -> None:
        """No more for this one; does no harm where it did not ask."""
        with self._lock:
            self._askers = [item for item in self._askers if item is not asker]
            self._restore()

    def _restore(self) -> None:
        """Take the patches off, once nobody asks and no block is open."""
        if self._askers or self._open:
            return
        for block, originals in list(self._originals.items()):
            patches = self._patches.get(block, originals)
            now = (block.__enter__, block.__exit__)
            # what somebody else has put around them since stays, and calls them
            if all(item in pair for item, *pair in zip(now, originals, patches, strict=True)):
                block.__enter__, block.__exit__ = originals
                del self._originals[block]

    def _patch(self, block: type[Any]) -> None:
        enter, leave = self._originals[block] = (block.__enter__, block.__exit__)

        def entered(opened: Any) -> Any:
            self._open[opened] = _are_keys_straight()
            return enter(opened)

        def left(opened: Any, *exc: object) -> Any:
            try:
                return leave(opened, *exc)
            finally:
                self._closed(opened)

        for function in (entered, left):  # they run where every frame is compiled
            _torch.keep_from_dynamo(function.__code__)
        self._patches[block] = entered, left
        block.__enter__, block.__exit__ = entered, left

    def _closed(self, opened: Any) -> None:
        if self._open.pop(opened, True):  # or begun before anybody asked
            _put_keys_straight()
        if not self._askers and not self._open:
            with self._lock:
                self._restore()


key_blocks = _KeyBlocks()
