"""The states of torch's random generators: read before an op, compared, put back."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

from opcheck.outside import outside_everything

__all__ = ["States", "generator_states", "have_moved", "restore_generators"]

States: TypeAlias = list[tuple[str, Tensor]]
"""Device type and state of each default generator."""


def generator_states(args: tuple[Any, ...]) -> States:
    """The states of the default generators that an op on these arguments may draw from."""
    states = [("cpu", torch.get_rng_state())]
    for arg in args:
        if isinstance(arg, Tensor) and arg.device.type != "cpu":
            device = arg.device.type
            states.append((device, torch.get_device_module(device).get_rng_state()))
            break
    return states


def have_moved(before: States, args: tuple[Any, ...]) -> bool:
    """True when an op on these arguments drew random numbers since."""
    with outside_everything():
        now = generator_states(args)
        return any(
            left[1].numpy().tobytes() != right[1].numpy().tobytes()
            for left, right in zip(before, now, strict=True)
        )


def restore_generators(states: States) -> None:
    """Put the generators back."""
    for device, state in states:
        if device == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(device).set_rng_state(state)
