"""Crashes of ours are never the user's exception, and Ctrl-C is never ours."""

from __future__ import annotations

from opcheck import _torch

__all__ = ["is_ours"]


def is_ours(error: BaseException, depth: int) -> bool:
    """True for a crash, which becomes a record; False for Ctrl-C, which is to be raised on.

    Args:
        error: what code of ours raised.
        depth: `reference_depth()` from before it ran; references begun since then are left.
    """
    _torch.leave_references(depth)
    return isinstance(error, Exception)
