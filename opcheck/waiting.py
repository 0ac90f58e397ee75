"""Places in a step whose check was dropped for want of time, and what is left for them."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Hashable

__all__ = ["FIRST", "LEAST", "RARE", "REST", "Place", "Waiting"]

Place = tuple[str, str, tuple[Hashable, ...]]
"""Module FQN, phase, signature."""

FIRST, RARE, LEAST, REST = range(4)
"""Values, the highest first."""


class Waiting:
    """Places whose check was dropped, and what calls of less value leave for them.

    Kept up to date place by place: there may be thousands, and every call asks.
    """

    def __init__(self) -> None:
        self._kept: dict[Place, tuple[int, float]] = {}
        """Value and estimated seconds."""
        self._costliest: tuple[list[tuple[float, int, Place]], ...] = tuple([] for _ in range(REST))
        """Of each value a heap of (minus the estimate, a number, place); of what went too."""
        self._total = 0.0
        self._num_added = 0

    def add(self, place: Place, value: int, estimate: float) -> None:
        """Its check was dropped."""
        if self._kept.get(place) == (value, estimate):
            return
        self.remove(place)
        self._kept[place] = (value, estimate)
        self._total += estimate
        self._num_added += 1  # places themselves have no order
        heapq.heappush(self._costliest[value], (-estimate, self._num_added, place))

    def remove(self, place: Place) -> None:
        """It waits no more."""
        value, estimate = self._kept.pop(place, (REST, 0.0))
        if value == REST:
            return
        self._total -= estimate
        if len(self._costliest[value]) > 2 * len(self._kept) + 16:
            self._rebuild()

    def keep(self, wanted: Callable[[Place], bool]) -> None:
        """Forget the others."""
        self._kept = {place: item for place, item in self._kept.items() if wanted(place)}
        self._rebuild()

    def _rebuild(self) -> None:
        for heap in self._costliest:
            heap.clear()
        self._total = sum(estimate for _, estimate in self._kept.values())
        for number, (place, (value, estimate)) in enumerate(self._kept.items()):
            self._costliest[value].append((-estimate, number, place))
        for heap in self._costliest:
            heapq.heapify(heap)
        self._num_added = len(self._kept)

    def values(self) -> Collection[tuple[int, float]]:
        """Value and estimated seconds of each."""
        return self._kept.values()

    def reserve(self, value: int) -> float:
        """Seconds that a call of this value leaves for those of more value."""
        if value == REST:
            return max(0.0, self._total) if self._kept else 0.0
        return max((self._largest(higher) for higher in range(value)), default=0.0)

    def _largest(self, value: int) -> float:
        heap = self._costliest[value]
        while heap and self._kept.get(heap[0][2]) != (value, -heap[0][0]):
            heapq.heappop(heap)
        return -heap[0][0] if heap else 0.0
