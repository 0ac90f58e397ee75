"""Elements so near a corner that rounding decides their branch, and runs in which they cross it.

Two modes for a module that runs again: `CornerScan` notes the corners of every op of the forward,
`FlipMode` carries chosen elements over them. Both number the corners in the order of the forward,
so that a number means the same in every run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from modulecheck.corners import Corner, corners_of, hides_corners
from opcheck import tolerances as tol
from opcheck.modes import Mode

__all__ = ["CornerScan", "Flip", "FlipMode"]

REACH = 8.0
"""An element this many errors from its corner may be on the other side in a correct run. The error
is that of eager, rms over the tensor; compiled code has another of the same size."""
SMALLEST_STEP = 1e-3
"""How far beyond a corner an element is put at least, in reaches."""


@dataclass(frozen=True, slots=True)
class Flip:
    """One element near one corner."""

    corner: int
    number: int
    side: int
    """Where it is in float64: 1 above the corner, -1 below or on it."""
    other: int
    """Where it is put: on the other side, or (0) on the corner."""
    element: int
    """Flat index in the tensor that the op gets."""
    beyond: float
    nearness: float
    """Distance in reaches, 0 to 1."""


class CornerScan(Mode):
    """Notes the distances to the corners; with those of eager beside it, which ones are near."""

    def __init__(self, eager: CornerScan | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flips: list[Flip] = []
        self.hidden = False
        """Some op may have corners that cannot be reached."""
        self._eager = eager
        self._gaps: list[tuple[Tensor, float]] = []
        self._count = 0

    def lines_up(self) -> bool:
        """Both runs met the same corners."""
        return self._eager is not None and self._count == len(self._eager._gaps)

    def _handle(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.hidden = self.hidden or hides_corners(func)
        with torch.no_grad():
            for corner in corners_of(func, args, kwargs):
                self._note(corner)
                self._count += 1
        return func(*args, **kwargs)

    def _note(self, corner: Corner) -> None:
        if self._eager is None:
            self._gaps.append((corner.gap, _rounding(corner.tensor)))
        elif self._count < len(self._eager._gaps):
            gaps, rounding = self._eager._gaps[self._count]
            if gaps.shape == corner.gap.shape:
                self.flips += _near(self._count, corner, gaps, rounding)
            else:
                self.hidden = True


def _rounding(tensor: Tensor) -> float:
    finite = tensor.detach().double().nan_to_num(0.0, 0.0, 0.0)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return tol.EPS.get(dtype, tol.EPS["float16"]) * float(finite.square().mean().sqrt())


def _near(number: int, corner: Corner, eager: Tensor, rounding: float) -> list[Flip]:
    gap, beside = (item.double().reshape(-1).cpu().numpy() for item in (corner.gap, eager))
    with np.errstate(all="ignore"):
        error = gap - beside
        error = error[np.isfinite(error)]
        reach = REACH * (rounding + (float(np.sqrt(np.mean(error**2))) if error.size else 0.0))
        # exactly at it on both sides: no rounding decides that
        near = (np.abs(gap) <= reach) & ((gap != 0.0) | (beside != 0.0))
    return [
        flip
        for at in map(int, np.flatnonzero(near))
        for flip in _flips_of(number, corner, at, float(gap[at]), reach)
    ]


def _flips_of(number: int, corner: Corner, at: int, gap: float, reach: float) -> Iterator[Flip]:
    side, beyond = 1 if gap > 0 else -1, max(abs(gap), SMALLEST_STEP * reach)
    for other in (-side, 0) if corner.tie else (-side,):
        yield Flip(number, at, side, other, corner.index(at), beyond, abs(gap) / reach)


class FlipMode(Mode):
    """Decides the branch of elements near a corner, in the memory of the op's input.

    Autograd keeps that input, so that the gradient takes the same branch. The run must own its
    inputs and parameters.
    """

    def __init__(self, flips: list[Flip], crossing: frozenset[int] = frozenset()) -> None:
        """Start.

        Args:
            flips: all of them stay on the side that they have in float64,
            crossing: but for those at these places, which take the other one.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        sides = {(flip.corner, flip.number): (flip, flip.side) for flip in flips}
        for flip in (flips[place] for place in crossing):
            sides[flip.corner, flip.number] = flip, flip.other
        self._waiting: dict[int, list[tuple[Flip, int]]] = {}
        for flip, side in sides.values():
            self._waiting.setdefault(flip.corner, []).append((flip, side))
        self._count = 0

    def _handle(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._waiting:
            with torch.no_grad():
                for corner in corners_of(func, args, kwargs):
                    for flip, side in self._waiting.pop(self._count, ()):
                        corner.put(flip.number, flip.element, side, flip.beyond)
                    self._count += 1
        return func(*args, **kwargs)
