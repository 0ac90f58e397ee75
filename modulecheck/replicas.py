"""Parameters that several ranks hold, each the same: DDP, and `Replicate` of a DTensor."""

from __future__ import annotations

import torch
from torch import nn

from modulecheck.collective_watch import bits_of
from modulecheck.distributed import inside_ddp, local_part, replica_key

__all__ = ["replicas_of"]


def replicas_of(model: nn.Module) -> list[tuple[str, str, str]]:
    """Name, who shares it, and a hash of the bits; ranks with equal name and key must agree.

    Parameters of no DDP module that are no DTensors belong to this rank alone.
    """
    found = []
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            key = replica_key(parameter) or ("ddp" if _in_ddp(model, name) else "")
            if key:
                found.append((name, key, bits_of(local_part(parameter))))
    return found


def _in_ddp(model: nn.Module, name: str) -> bool:
    """The parameter is reduced by a DDP module on the way to it."""
    module = model
    for part in name.split("."):
        if inside_ddp(module) is not module:
            return True
        module = getattr(module, part)
        if not isinstance(module, nn.Module):
            break
    return False
