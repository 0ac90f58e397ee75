"""Copies of a model, on which two-pass runs the step."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

from torch import nn
from torch.nn.parameter import is_lazy

from modulecheck.distributed import shared_by_ranks
from modulecheck.selection import Target
from opcheck.errors import ArgumentError

__all__ = ["ModelCopyError", "copied", "refuse_without_values", "twins_of"]


class ModelCopyError(ArgumentError, RuntimeError):
    """The model cannot be copied, and two-pass compares copies."""


def copied(model: nn.Module) -> nn.Module:
    """A copy with the same values, modes and gradients.

    Raises:
        ModelCopyError: it cannot be copied, or ranks share it.
    """
    shared = shared_by_ranks(model)
    if shared:
        raise ModelCopyError(
            f"model: {shared}; single_pass=False runs further steps where one rank has a doubt, and"
            " the others would not answer its collectives: use single_pass=True, with install() and"
            " collect()"
        )
    try:
        twin = copy.deepcopy(model)
    except Exception as error:
        raise ModelCopyError(
            f"model: {type(model).__name__} cannot be copied ({type(error).__name__}: {error});"
            " single_pass=False runs copies: use single_pass=True, with install() and collect()"
        ) from error
    for mine, theirs in zip(twin.parameters(), model.parameters(), strict=True):
        if theirs.grad is not None:
            mine.grad = theirs.grad.detach().clone()
    return twin


def refuse_without_values(model: nn.Module) -> None:
    """A copy needs something to copy.

    Raises:
        ArgumentError: a parameter or buffer has no values, or no shape yet.
    """
    for name, item in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(item):
            raise ArgumentError(
                f"model: {name} is lazy and gets its shape in the first call: run a batch through"
                " the model before compare()"
            )
        if item.is_meta:
            raise ArgumentError(f"model: {name} is on the meta device and has no values")


def twins_of(targets: Sequence[Target], model: nn.Module, twin: nn.Module) -> list[Target]:
    """The same targets in a copy of the model."""
    found = dict(zip(model.modules(), twin.modules(), strict=True))
    return [replace(item, module=found[item.module]) for item in targets]
