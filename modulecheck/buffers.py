"""Buffers of a module and of all in it: which there are, and what they hold.

A forward may register, remove, replace or tie them, so that what is there is state like the values:
a run again begins with the buffers that the call found, and with no other ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from torch import Tensor, nn

from modulecheck import _torch

__all__ = ["all_buffers", "copied_buffers", "put_buffers", "unset_buffers"]

CopyAll = Callable[[list[Tensor]], list[Tensor]]


def all_buffers(module: nn.Module) -> dict[str, Tensor]:
    """By every name that they have: a tied one, or one of a shared module, has several."""
    return dict(module.named_buffers(remove_duplicate=False))


def copied_buffers(buffers: Mapping[str, Tensor], copies: CopyAll) -> dict[str, Tensor]:
    """Copies by name, tied as the originals are.

    Args:
        buffers: by name.
        copies: copies tensors that are not tied, all of them at once.
    """
    originals = list({id(item): item for item in buffers.values()}.values())
    found = dict(zip(map(id, originals), copies(originals), strict=True))
    return {name: found[id(item)] for name, item in buffers.items()}


def unset_buffers(module: nn.Module) -> frozenset[str]:
    """Names that are registered, and hold no tensor."""
    return frozenset(
        f"{path}.{name}" if path else name
        for path, item in module.named_modules(remove_duplicate=False)
        for name, buffer in _torch.own_buffers(item).items()
        if buffer is None
    )


def put_buffers(
    module: nn.Module, buffers: Mapping[str, Tensor], unset: Collection[str] | None
) -> None:
    """Give the module these buffers in place of its own; who calls puts those back.

    Args:
        module: the module, or a copy of it.
        buffers: by every name.
        unset: what is registered without a tensor; None: it is not known, and stays.
    """
    wanted: dict[str, dict[str, Tensor | None]] = {}
    for key in (*(unset or ()), *buffers):
        path, _, name = key.rpartition(".")
        wanted.setdefault(path, {})[name] = buffers.get(key)
    for path, item in module.named_modules(remove_duplicate=False):
        own, new = _torch.own_buffers(item), wanted.get(path, {})
        for name in own.keys() - new.keys():
            if own[name] is not None or unset is not None:
                del own[name]
        own.update(new)
