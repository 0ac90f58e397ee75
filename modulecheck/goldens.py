"""References of one call, computed when asked for: float64, and inputs moved a little."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from modulecheck import _torch, trees
from modulecheck.compared import References
from modulecheck.module_rule import KINK_DRAWS, SENSITIVE_DRAWS
from modulecheck.replay import Replayed, Snapshot, replay, same_dtype, widened
from opcheck import tolerances as tol
from opcheck.references import host_array
from opcheck.verdicts import rms, spacing_of

__all__ = ["Goldens", "Key", "results_of"]

Array = npt.NDArray[Any]
Key = tuple[str, int | str]
"""("output", place), ("input", place), ("argument", name), ("buffer", name),
("grad_input", place), ("param", name)."""
Results = dict[Key, Array]

_KINK_SCALES = (1.0, 4.0)
"""Draws move inputs by the size of the forward's own error, and by a few times that."""


def results_of(replayed: Replayed) -> dict[Key, Tensor]:
    """Outputs, inputs and buffers after a run."""
    found: dict[Key, Tensor] = {}
    for place, (_, tensor) in enumerate(trees.named_tensors(replayed.output)):
        found[("output", place)] = tensor
    for place, tensor in enumerate(replayed.inputs):
        found[("input", place)] = tensor
    for name, tensor in trees.named_tensors(replayed.arguments):
        found[("argument", name)] = tensor
    for name, tensor in replayed.buffers.items():
        found[("buffer", name)] = tensor
    return found


def array_of(tensor: Tensor) -> Array:
    """The values; of a DTensor this rank's, of layouts that NumPy does not know, as dense."""
    plain = _torch.local_part(tensor.detach())
    if plain.layout is not torch.strided:
        plain = plain.to_dense()
    if plain.is_quantized:
        plain = plain.dequantize()
    return host_array(plain)


class Goldens:
    """Runs of one call's module in float64 on its snapshot."""

    def __init__(
        self,
        module: nn.Module,
        snapshot: Snapshot,
        *,
        sources: list[Key],
        grads: list[Tensor],
        forward_error: Callable[[], float],
        seed: int,
    ) -> None:
        """Nothing runs yet.

        Args:
            module: the module.
            snapshot: what the call got.
            sources: through which outputs gradients came in; empty: forward only.
            grads: those gradients, of the real step.
            forward_error: relative size of the error of eager's and compiled's outputs.
            seed: of the moves, so that a verdict is the same every time.
        """
        self._module, self._snapshot = module, snapshot
        self._sources, self._grads = sources, grads
        self._forward_error, self._seed = forward_error, seed
        self._runs: dict[tuple[str, int], Results | None] = {}
        self._is_complete = False
        self.missing = ""
        """Why there is no float64 run."""

    def references(self, key: Key, *, kinks: bool, noise_floor: float) -> References:
        """What the rule may ask for, of one tensor."""
        return References(
            golden=lambda: self._at(("golden", 0), key),
            moved=lambda draw: self._at(("moved", draw), key),
            across_kinks=(lambda draw: self._at(("kink", draw), key)) if kinks else None,
            noise_floor=noise_floor,
        )

    def run_all(self) -> None:
        """Every run that a verdict may ask for, so that all ranks run as many."""
        kinks = KINK_DRAWS if self._sources else 0
        for kind, draws in (("golden", 1), ("moved", SENSITIVE_DRAWS), ("kink", kinks)):
            for draw in range(draws):
                self._run((kind, draw))
        self._is_complete = True

    def _at(self, run: tuple[str, int], key: Key) -> Array | None:
        results = self._run(run)
        return None if results is None else results.get(key)

    def _run(self, run: tuple[str, int]) -> Results | None:
        if run in self._runs:
            return self._runs[run]
        if self._is_complete:
            return None
        kind, draw = run
        if self._snapshot.parameters_moved(self._module):
            self.missing = (
                self.missing or "parameters were written or sharded before it could be run"
            )
            self._runs[run] = None
            return None
        wide = kind == "golden" or self._run(("golden", 0)) is not None
        if kind == "kink" and not wide:
            self._runs[run] = None
            return None
        try:
            self._runs[run] = self._results(self._convert(kind, draw, wide=wide), wide=wide)
        except Exception as error:  # noqa: BLE001 - a module may refuse float64 in any way
            self._runs[run] = None
            if kind == "golden":
                self.missing = f"{type(error).__name__}: {error}".split("\n")[0][:200]
        return self._runs[run]

    def _results(self, convert: Any, *, wide: bool) -> Results:
        replayed = replay(self._module, self._snapshot, convert, autocast=not wide)
        by_key = results_of(replayed)
        results = {key: array_of(tensor).copy() for key, tensor in by_key.items()}
        if self._sources:
            outputs = [by_key[key] for key in self._sources]
            grads = [grad.to(out.dtype) for grad, out in zip(self._grads, outputs, strict=True)]
            of_inputs, of_parameters = replayed.gradients(outputs, grads)
            for place, grad in enumerate(of_inputs):
                if grad is not None:
                    results["grad_input", place] = array_of(grad).copy()
            for name, grad in of_parameters.items():
                if grad is not None:
                    results["param", name] = array_of(grad).copy()
        return results

    def _convert(self, kind: str, draw: int, *, wide: bool) -> Any:
        if kind == "golden":
            return widened
        size = 0.0
        if kind == "kink":
            size = self._forward_error() * _KINK_SCALES[draw * len(_KINK_SCALES) // KINK_DRAWS]
        generator = np.random.default_rng([self._seed, draw, kind == "kink"])

        def moved(tensor: Tensor, name: str) -> Tensor:
            base = widened(tensor, name) if wide else same_dtype(tensor, name).clone()
            if not tensor.is_floating_point() or name.startswith("buffer"):
                return base
            values = array_of(tensor).astype(np.float64).reshape(-1)
            dtype = str(tensor.dtype).removeprefix("torch.")
            if dtype not in tol.EPS or not values.size:
                return base
            step = spacing_of(values, dtype)
            if size:
                np.maximum(step, size * np.maximum(np.abs(values), rms(values)), out=step)
            signs = generator.choice((-1.0, 1.0), size=values.size)
            shape = tuple(_torch.local_part(tensor.detach()).shape)
            new = torch.from_numpy((values + signs * step).reshape(shape))
            new = new.to(device=tensor.device, dtype=base.dtype)
            return _torch.with_local_part(tensor, new)

        return moved
