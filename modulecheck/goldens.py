"""References of one call, computed when asked for: float64, and inputs moved a little."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from modulecheck import trees
from modulecheck.compared import Kinks, References
from modulecheck.distributed import local_part, with_local_part
from modulecheck.flips import CornerScan, Flip, FlipMode
from modulecheck.kink_rule import KINK_DRAWS
from modulecheck.replay import Replayed, Snapshot, replay, same_dtype, widened
from modulecheck.trial import SENSITIVE_DRAWS
from modulecheck.widening import NarrowWatch, OpByOp, eps_of
from opcheck import tolerances as tol
from opcheck.references import host_array
from opcheck.verdicts import rms, spacing_of

__all__ = ["Goldens", "Key", "results_of"]

Array = npt.NDArray[Any]
Key = tuple[str, int | str]
"""("output", place), ("input", place), ("argument", name), ("attribute", name), ("buffer", name),
("grad_input", place), ("param", name)."""
Results = dict[Key, Array]
FlippedRun = tuple[str, frozenset[int] | int]
"""("flipped", which elements) or ("pinned", draw)."""

_KINK_SCALES = (1.0, 4.0)
"""Draws move inputs by the size of the forward's own error, and by a few times that."""
MAX_FLIPS = 32
MAX_FLIP_ELEMENTS = 2**25
"""Each flip is a float64 run, and what it changes is kept: 256 MiB at most."""


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
    for name, tensor in replayed.attributes.items():
        found[("attribute", name)] = tensor
    return found


def array_of(tensor: Tensor) -> Array:
    """The values; of a DTensor this rank's, of layouts that NumPy does not know, as dense."""
    plain = local_part(tensor.detach())
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
        self._flips: list[Flip] | None = None
        self._flips_complete = False
        self._flipped: dict[FlippedRun, Results | None] = {}
        self._op_by_op = False
        self._random_moved = False
        self._failing: dict[Key, int] = {}
        """Gradients that ask for kinks, and their sizes."""
        self.missing = ""
        """Why there is no float64 run."""
        self.refused = ""
        """Why the module as a whole does not run in float64, though its ops do one by one."""

    @property
    def autocast(self) -> str:
        """The dtype in which some ops compute, "" without autocast."""
        return self._snapshot.autocast_dtype()

    def expect_kinks(self, failing: dict[Key, int]) -> None:
        """Kinks are asked for these gradients, of so many elements; of others nothing is kept."""
        self._failing = failing

    def references(self, key: Key, *, kinks: bool, noise_floor: float) -> References:
        """What the rule may ask for, of one tensor."""
        return References(
            golden=lambda: self._at(("golden", 0), key),
            moved=lambda draw: self._at(("moved", draw), key),
            kinks=(lambda: self._kinks(key)) if kinks else None,
            noise_floor=noise_floor,
            autocast=self.autocast,
            moved_as_autocast=lambda draw: self._at(("moved as autocast", draw), key),
            draws_apart=lambda: self._random_moved,
        )

    def run_all(self) -> None:
        """Every run that a verdict may ask for, so that all ranks run as many."""
        kinks = KINK_DRAWS if self._sources else 0
        runs = {"golden": 1, "moved": SENSITIVE_DRAWS, "kink": kinks}
        if self.autocast:
            runs["moved as autocast"] = SENSITIVE_DRAWS
        for kind, draws in runs.items():
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
        elif kind == "golden":
            self._runs[run] = self._golden()
        else:
            wide = self._run(("golden", 0)) is not None
            moves = wide or kind != "kink"
            convert = self._convert(kind, draw, wide=wide)
            self._runs[run] = self._tried(convert, wide=wide) if moves else None
        return self._runs[run]

    # ---- float64 ----

    def _golden(self) -> Results | None:
        """The module in float64; where it refuses or comes back narrower, its ops one by one."""
        watch, plain = NarrowWatch(), None
        try:
            plain = self._results(widened, wide=True, modes=[watch])
            if watch.dtype is None:
                return plain
            self.refused = f"it computes in {watch.dtype} whatever it is given"
        except Exception as error:  # noqa: BLE001 - a module may refuse float64 in any way
            self.refused = _said(error)
        self._op_by_op = True
        try:
            return self._results(widened, wide=True)
        except Exception as error:  # noqa: BLE001 - and so may its ops
            self._op_by_op = False
            self.missing = "" if plain else f"{self.refused}; op by op: {_said(error)}"
            self.refused = ""
            return plain

    def _tried(self, convert: Any, *, wide: bool) -> Results | None:
        try:
            return self._results(convert, wide=wide)
        except Exception:  # noqa: BLE001 - moved inputs may be where the module raises
            return None

    def _results(self, convert: Any, *, wide: bool, modes: Sequence[Any] = ()) -> Results:
        backward = None
        if wide and self._op_by_op:
            modes = [*modes, OpByOp(self._own_eps())]
            backward = OpByOp(self._own_eps())
        replayed = replay(self._module, self._snapshot, convert, autocast=not wide, modes=modes)
        self._random_moved = not torch.equal(replayed.random_after, self._snapshot.random.torch_cpu)
        by_key = dict(results_of(replayed))
        if self._sources:
            outputs = [by_key[key] for key in self._sources]
            grads = [grad.to(out.dtype) for grad, out in zip(self._grads, outputs, strict=True)]
            of_inputs, of_parameters = replayed.gradients(outputs, grads, mode=backward)
            found: dict[Key, Tensor | None] = {
                **{("grad_input", place): grad for place, grad in enumerate(of_inputs)},
                **{("param", name): grad for name, grad in of_parameters.items()},
            }
            by_key.update((key, grad) for key, grad in found.items() if grad is not None)
        return {key: array_of(item).copy() for key, item in by_key.items()}

    def _own_eps(self) -> float:
        tensors = [*self._module.parameters(), *trees.tensors((self._snapshot.args,
                                                               self._snapshot.kwargs))]  # fmt: skip
        found = [eps_of(item.dtype) for item in tensors]
        return min((eps for eps in found if eps), default=tol.EPS["float32"])

    # ---- kinks ----

    def _kinks(self, key: Key) -> Kinks:
        if self._flips is None:
            # all ranks run as many: nothing more may run now
            self._flips = [] if self._is_complete else self._find_flips()
        return Kinks(
            elements=tuple(_numbered((flip.corner, flip.number) for flip in self._flips)),
            complete=self._flips_complete,
            flipped=lambda numbers: self._with_flips(("flipped", numbers), key),
            pinned=lambda draw: self._with_flips(("pinned", draw), key),
            moved=lambda draw: self._at(("kink", draw), key),
        )

    def _find_flips(self) -> list[Flip]:
        """The elements nearest to a corner of the forward, as many as can be tried."""
        eager = CornerScan()
        golden = CornerScan(eager)
        try:
            replay(self._module, self._snapshot, modes=[eager])
            modes = [golden, OpByOp(self._own_eps())] if self._op_by_op else [golden]
            replay(self._module, self._snapshot, widened, autocast=False, modes=modes)
        except Exception as error:  # noqa: BLE001 - then the draws have to do
            self.missing = self.missing or f"no search for corners ({_said(error)})"
            return []
        size = max(sum(self._failing.values()), 1)
        most = max(1, min(MAX_FLIPS, MAX_FLIP_ELEMENTS // size))
        flips = sorted(golden.flips, key=lambda flip: flip.nearness)
        self._flips_complete = golden.lines_up() and not golden.hidden and len(golden.flips) <= most
        return flips[:most]

    def _with_flips(self, run: FlippedRun, key: Key) -> Array | None:
        if run not in self._flipped:
            _, which = run
            crossing = which if isinstance(which, frozenset) else frozenset()
            convert = (
                self._convert("moved", which, wide=True) if isinstance(which, int) else widened
            )
            try:
                modes = [FlipMode(self._flips or [], crossing)]
                results = self._results(convert, wide=True, modes=modes)
                self._flipped[run] = {k: v for k, v in results.items() if k in self._failing}
            except Exception:  # noqa: BLE001 - across the corner is where the module raises
                self._flipped[run] = None
        found = self._flipped[run]
        return None if found is None else found.get(key)

    # ---- moves ----

    def _convert(self, kind: str, draw: int, *, wide: bool) -> Any:
        size = 0.0
        if kind == "kink":
            size = self._forward_error() * _KINK_SCALES[draw * len(_KINK_SCALES) // KINK_DRAWS]
        generator = np.random.default_rng([self._seed, draw, kind == "kink"])
        coarsest = self._snapshot.autocast_dtype() if kind == "moved as autocast" else ""

        def moved(tensor: Tensor, name: str) -> Tensor:
            base = widened(tensor, name) if wide else same_dtype(tensor, name).clone()
            if not tensor.is_floating_point() or name.startswith("buffer"):
                return base
            values = array_of(tensor).astype(np.float64).reshape(-1)
            dtype = str(tensor.dtype).removeprefix("torch.")
            if dtype not in tol.EPS or not values.size:
                return base
            step = spacing_of(values, max(dtype, coarsest or dtype, key=tol.EPS.__getitem__))
            if size:
                np.maximum(step, size * np.maximum(np.abs(values), rms(values)), out=step)
            signs = generator.choice((-1.0, 1.0), size=values.size)
            shape = tuple(local_part(tensor.detach()).shape)
            new = torch.from_numpy((values + signs * step).reshape(shape))
            new = new.to(device=tensor.device, dtype=base.dtype)
            return with_local_part(tensor, new)

        return moved


def _numbered(values: Iterable[Any]) -> Iterator[int]:
    seen: dict[Any, int] = {}
    return (seen.setdefault(value, len(seen)) for value in values)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0][:200]
