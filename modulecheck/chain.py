"""References of a whole step: model and loss in float64, and with everything moved a little.

A module deep in a model gets other inputs in the two runs, because rounding differs upstream. So it
is held against the same module in a float64 run of the whole step, not in one of its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from modulecheck import _torch
from modulecheck.compared import Kinks, References
from modulecheck.goldens import Key, array_of
from modulecheck.kink_rule import KINK_DRAWS
from modulecheck.sides import Side, same_inputs, same_random
from opcheck import tolerances as tol
from opcheck.golden_rules import wider
from opcheck.verdicts import rms, spacing_of

__all__ = ["LOSS", "ChainGoldens", "ChainJudge", "Change"]

Array = npt.NDArray[Any]
Place = tuple[str, int, Key]
"""Module, number of the call, tensor."""
LOSS: Key = ("loss", 0)

_KINK_SCALES = (1.0, 4.0)
"""Draws move inputs by the size of the forward's own error, and by a few times that."""


@dataclass(frozen=True, slots=True)
class Change:
    """What happens to parameters, buffers and inputs before a run."""

    wide: bool
    """Float64 instead of the dtype of the program."""
    generator: np.random.Generator | None = None
    """None: nothing is moved."""
    size: float = 0.0
    """Moves are one ulp, or this share of a value where that is more."""

    def on_model(self, model: nn.Module) -> None:
        """Change a copy of the model in place."""
        for parameter in model.parameters():
            parameter.data = self.on_input(parameter.data)
            if parameter.grad is not None and self.wide:
                parameter.grad.data = parameter.grad.data.to(wider(parameter.grad.dtype))
        for module in model.modules():
            for name, buffer in _torch.own_buffers(module).items():
                if buffer is not None and self.wide:
                    _torch.own_buffers(module)[name] = buffer.to(wider(buffer.dtype))

    def on_input(self, tensor: Tensor) -> Tensor:
        """A changed tensor; gradients flow back through the change."""
        base = tensor.to(wider(tensor.dtype)) if self.wide else tensor
        if self.generator is None or not tensor.is_floating_point():
            return base
        dtype = str(tensor.dtype).removeprefix("torch.")
        values = array_of(tensor).astype(np.float64).reshape(-1)
        if dtype not in tol.EPS or not values.size:
            return base
        step = spacing_of(values, dtype)
        if self.size:
            np.maximum(step, self.size * np.maximum(np.abs(values), rms(values)), out=step)
        move = (self.generator.choice((-1.0, 1.0), size=values.size) * step).reshape(tensor.shape)
        return base + torch.from_numpy(move).to(device=tensor.device, dtype=base.dtype)


class ChainGoldens:
    """Runs of the whole step, each when it is first asked for."""

    def __init__(
        self,
        run: Callable[[Change], Side],
        *,
        wanted: set[Place],
        eager: Side,
        forward_error: float,
    ) -> None:
        """Nothing runs yet.

        Args:
            run: runs the step in eager, on a copy with a change.
            wanted: what is kept of a run.
            eager: the real run; one that got other inputs or drew other random numbers is none.
            forward_error: relative size of the error of eager's and compiled's outputs.
        """
        self._run_step, self._wanted, self._eager = run, wanted, eager
        self._forward_error = forward_error
        self._runs: dict[tuple[str, int], dict[Place, Array] | None] = {}
        self.missing = ""
        """Why there is no float64 run."""

    def at(self, kind: str, draw: int, place: Place) -> Array | None:
        """One tensor of a run, None where it is not there."""
        results = self._run(kind, draw)
        return None if results is None else results.get(place)

    def _run(self, kind: str, draw: int) -> dict[Place, Array] | None:
        run = (kind, draw)
        if run not in self._runs:
            wide = kind == "golden" or self._run("golden", 0) is not None
            runs = wide or kind == "moved"
            self._runs[run] = self._results(kind, self._change(kind, draw, wide)) if runs else None
        return self._runs[run]

    def _change(self, kind: str, draw: int, wide: bool) -> Change:  # noqa: FBT001
        if kind == "golden":
            return Change(wide=True)
        size = 0.0
        if kind == "kink":
            size = self._forward_error * _KINK_SCALES[draw * len(_KINK_SCALES) // KINK_DRAWS]
        return Change(wide, np.random.default_rng([draw, kind == "kink"]), size)

    def _results(self, kind: str, change: Change) -> dict[Place, Array] | None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                side = self._run_step(change)
            return self._kept(side)
        except Exception as error:  # noqa: BLE001 - a model may refuse float64 in any way
            if kind == "golden":
                self.missing = f"{type(error).__name__}: {error}".split("\n")[0][:200]
            return None

    def _kept(self, side: Side) -> dict[Place, Array]:
        if not same_inputs(self._eager, side):
            raise RuntimeError("run_step gave the model other inputs in this run")
        kept: dict[Place, Array] = {}
        for name, calls in side.calls.items():
            real = self._eager.calls.get(name, [])
            for index, call in enumerate(calls):
                if index < len(real) and not same_random(real[index], call):
                    raise RuntimeError("other random numbers were drawn in this run")
                for key, tensor in call.results():
                    if (name, index, key) in self._wanted:
                        kept[name, index, key] = array_of(tensor).copy()
        if side.loss_recorded:
            kept["", 0, LOSS] = np.float64(side.loss).reshape(())
        side.release()
        return kept


@dataclass(frozen=True, slots=True)
class ChainJudge:
    """The references of one call."""

    goldens: ChainGoldens
    name: str
    index: int

    @property
    def missing(self) -> str:
        """Why there is no float64 run."""
        return self.goldens.missing

    @property
    def refused(self) -> str:
        """Nothing is run op by op."""
        return ""

    @property
    def autocast(self) -> str:
        """Not followed here."""
        return ""

    def expect_kinks(self, failing: dict[Key, int]) -> None:
        """Whole steps are moved, nothing is carried across a corner by itself."""

    def references(self, key: Key, *, kinks: bool, noise_floor: float) -> References:
        """What the rule may ask for, of one tensor."""
        place = (self.name, self.index, key)
        at = self.goldens.at
        return References(
            golden=lambda: at("golden", 0, place),
            moved=lambda draw: at("moved", draw, place),
            kinks=(lambda: _by_draws(lambda draw: at("kink", draw, place))) if kinks else None,
            noise_floor=noise_floor,
        )


def _by_draws(moved: Callable[[int], Array | None]) -> Kinks:
    def nothing(which: object) -> None:
        return None

    return Kinks(elements=(), complete=False, flipped=nothing, pinned=nothing, moved=moved)
