"""Conjugate and negative bits work within a dispatch mode as they do without one.

torch leaves the keys that resolve them out of whatever a mode's handler calls: an op that is made
of others then takes the conjugate of a matrix for the matrix. Under any mode at all
`torch.linalg.pinv` of a complex matrix gives something else, wrong by its own size (torch 2.13).
"""

from __future__ import annotations

from typing import Any

from opcheck import _torch

__all__ = ["lazy_bits"]


class lazy_bits:  # noqa: N801 - used as a context manager, spelled like one
    """Resolve them in here; afterwards it is as before."""

    __slots__ = ("_excluded",)
    _excluded: tuple[Any, ...]

    def __init__(self) -> None:
        self._excluded = ()

    def __enter__(self) -> None:
        self._excluded = tuple(key for key in _torch.LAZY_BITS if _torch.is_key_excluded(key))
        for key in self._excluded:
            _torch.set_key_excluded(key, False)  # noqa: FBT003 - the value is all it takes

    def __exit__(self, *exc: object) -> None:
        for key in self._excluded:
            _torch.set_key_excluded(key, True)  # noqa: FBT003 - as above
