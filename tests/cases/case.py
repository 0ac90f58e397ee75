"""What a case is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

Inputs = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
"""A model, and the positional and keyword arguments of one call."""


@dataclass(frozen=True, kw_only=True)
class Culprit:
    """Where the first divergence is to be found."""

    ops: tuple[str, ...]
    """Full overload names; any one of them is right."""
    module: str
    phase: str


def forward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the model, the step of a case that is about the forward alone."""
    return model(*args, **kwargs)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A reported fault, or a reported difference that is none, reduced to one small model."""

    title: str
    source: str
    """Issue in which it was reported, `owner/repository#number`."""
    kind: Literal["op", "compile", "backward", "benign"]
    """op: eager is wrong; compile, backward: the compiled one is; benign: nobody is."""
    expect: str
    """What a checker should say, for people."""
    build: Callable[[], Inputs]
    """Deterministic: two calls give two equal, independent copies."""
    step: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any] = forward
    """Given what `build` made; runs backward too where the case is about gradients."""
    config: Callable[[], AbstractContextManager[Any]] = field(default=nullcontext)
    """Settings under which the case shows."""
    culprit: Culprit | None = None
    """For faults of eager ops, what a checker should name first."""
    modelled: bool = False
    """The fault of another backend, re-created here as an override of the CPU kernel."""
    min_threads: int = 1
    """Threads that the fault needs to show."""
    has_float64_truth: bool = True
    """False where a float64 run of the model means something else."""

    def run(self) -> Any:
        """Build the case and run its step under its settings."""
        model, args, kwargs = self.build()
        with self.config():
            return self.step(model, args, kwargs)
