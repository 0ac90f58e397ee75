"""Float64 twins of the memory of a step's tensors.

A mirror belongs to a storage, not to a tensor: element k of the mirror is element k of the
storage, so that every view of the storage is the same view of the mirror. A storage without a
mirror is as it should be: its actual values are the float64 ones. Nothing here keeps a tensor or
its memory alive: a storage is known by a weak reference, which also keeps its address from being
given to another one.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor

from opcheck import _torch
from opcheck.snapshots import to_host

__all__ = ["Mirrors"]

_REAL = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}
_SWEEP_EVERY = 32
"""New mirrors after which dead ones are looked for, or where there are many mirrors an eighth of
those: to go through all of them takes their number."""


class _Mirror:
    __slots__ = ("dtype", "storage", "values")

    def __init__(self, storage: _torch.StorageWeakRef, dtype: torch.dtype, values: Tensor) -> None:
        self.storage = storage
        self.dtype = dtype
        """Of the real components of the elements."""
        self.values = values
        """Flat float64, one for each real component."""


class Mirrors:
    """The mirrors of a session, at most `limit_bytes` of them.

    Attributes:
        peak_bytes: the most that was held at one time.
        evicted: mirrors given up while their storage lived, least recently used first.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.num_bytes = 0
        self.peak_bytes = 0
        self.evicted = 0
        self._mirrors: OrderedDict[int, _Mirror] = OrderedDict()
        self._new = 0
        self._has_dead = True
        """The last sweep found enough to be worth another one as soon as there is no room."""

    def __len__(self) -> int:
        return len(self._mirrors)

    def get(self, tensor: Tensor) -> Tensor | None:
        """The float64 (complex128) values of a tensor as a view of its mirror, strides as they are.

        None: it has no mirror. Conjugated and negated views are given as copies.
        """
        mirror = self._find(tensor)
        if mirror is None or mirror.dtype != _real_dtype(tensor):
            return None
        view = _view(mirror, tensor)
        if tensor.is_conj():
            view = torch.conj_physical(view)
        return torch.neg(view) if tensor.is_neg() else view

    def ensure(self, tensor: Tensor) -> bool:
        """Mirror the storage of a tensor as it is now, where it has no mirror; False: no room."""
        if self.get(tensor) is not None:
            return True
        self.drop(tensor)
        storage = tensor.untyped_storage()
        dtype = _real_dtype(tensor)
        count = storage.nbytes() // dtype.itemsize
        if not self._make_room(8 * count):
            return False
        flat = torch.empty(0, dtype=dtype, device=tensor.device).set_(storage, 0, (count,), (1,))
        values = to_host(flat).to(torch.float64, copy=True)
        mirror = _Mirror(_torch.StorageWeakRef(storage), dtype, values)
        self._mirrors[_torch.storage_id(storage)] = mirror
        self.num_bytes += 8 * count
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)
        return True

    def write(self, tensor: Tensor, values: Tensor) -> bool:
        """Give a tensor these float64 values, broadcast; False: there is no room for a mirror."""
        if tensor.is_conj() or tensor.is_neg() or not self.ensure(tensor):
            self.drop(tensor)
            return False
        mirror = self._mirrors[_torch.memory_of(tensor)]
        _view(mirror, tensor).copy_(values)
        return True

    def refresh(self, tensor: Tensor) -> None:
        """Its actual values are the float64 ones from now on."""
        mirror = self._find(tensor)
        if mirror is None:
            return
        whole = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
        if whole or mirror.dtype != _real_dtype(tensor):
            self.drop(tensor)
            return
        self.write(tensor, to_host(tensor))

    def drop(self, tensor: Tensor) -> None:
        """The whole storage of a tensor is as it should be from now on."""
        self._remove(_torch.memory_of(tensor))

    def clear(self) -> None:
        """Forget everything."""
        self._mirrors.clear()
        self.num_bytes = 0

    # ---- room ----

    def _find(self, tensor: Tensor) -> _Mirror | None:
        storage = tensor.untyped_storage()
        key = _torch.storage_id(storage)
        mirror = self._mirrors.get(key)
        if mirror is None:
            return None
        if mirror.values.numel() != storage.nbytes() // mirror.dtype.itemsize:  # resized
            self._remove(key)
            return None
        self._mirrors.move_to_end(key)
        return mirror

    def _remove(self, key: int) -> None:
        mirror = self._mirrors.pop(key, None)
        if mirror is not None:
            self.num_bytes -= 8 * mirror.values.numel()

    def _make_room(self, needed: int) -> bool:
        self._new += 1
        is_full = self.num_bytes + needed > self.limit_bytes
        if self._new >= max(_SWEEP_EVERY, len(self._mirrors) // 8) or (is_full and self._has_dead):
            self._sweep()
        if needed > self.limit_bytes:
            return False
        while self.num_bytes + needed > self.limit_bytes:
            key, mirror = next(iter(self._mirrors.items()))
            self.evicted += not mirror.storage.expired()
            self._remove(key)
        return True

    def _sweep(self) -> None:
        self._new = 0
        num_before = len(self._mirrors)
        for key in [key for key, mirror in self._mirrors.items() if mirror.storage.expired()]:
            self._remove(key)
        self._has_dead = num_before - len(self._mirrors) >= num_before // 8


def _real_dtype(tensor: Tensor) -> torch.dtype:
    return _REAL.get(tensor.dtype, tensor.dtype)


def _view(mirror: _Mirror, tensor: Tensor) -> Tensor:
    wide = torch.complex128 if tensor.dtype.is_complex else torch.float64
    view = torch.empty(0, dtype=wide)
    return view.set_(
        mirror.values.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
    )
