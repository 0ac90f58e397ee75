"""What ranks tell each other beside the step: through the group's store, never by a collective.

Every wait ends, and what was decided is decided for all: a rank that gives up writes so, and one
that comes late reads it. Works for any backend, since no tensor is sent.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Sequence
from typing import Any

from modulecheck.distributed import default_store

__all__ = ["TIMEOUT_S", "Agreement", "SideChannel"]

TIMEOUT_S = 60.0
"""How long one rank waits for another, unless told otherwise."""

_CHUNK = 1 << 20
"""Bytes of one value: stores refuse those of several MiB."""
_POLL_S = 0.002
_SLOW_POLL_S = 0.05


class SideChannel:
    """A corner of the store of the default process group.

    Attributes:
        rank: of this process.
        world_size: of the default group.
        timeout_s: how long a wait lasts at most.
    """

    def __init__(
        self, store: Any, rank: int, world_size: int, *, name: str, timeout_s: float = TIMEOUT_S
    ) -> None:
        """Nothing is sent yet.

        Args:
            store: as of `torch.distributed`.
            rank: of this process.
            world_size: of the default group.
            name: the same on every rank, and another one for every channel.
            timeout_s: how long a wait lasts at most.
        """
        self.rank, self.world_size, self.timeout_s = rank, world_size, timeout_s
        self._store, self._name = store, name
        self._agreed: dict[str, list[str]] = {}

    @classmethod
    def of_default_group(cls, name: str, *, timeout_s: float = TIMEOUT_S) -> SideChannel | None:
        """None where there is no process group, or it has one rank."""
        found = default_store()
        if found is None:
            return None
        store, rank, world_size = found
        return cls(store, rank, world_size, name=name, timeout_s=timeout_s)

    # ---- messages ----

    def send(self, key: str, data: Any) -> None:
        """Leave something that JSON can hold for whoever asks; does not wait.

        Raises:
            RuntimeError: the store cannot be reached.
        """
        packed = zlib.compress(json.dumps(data).encode())
        parts = [packed[at : at + _CHUNK] for at in range(0, len(packed), _CHUNK)]
        for place, part in enumerate(parts):
            self._store.set(self._key(key, self.rank, place), part)
        self._store.set(self._key(key, self.rank), str(len(parts)))  # last: all of it is there

    def receive(self, key: str, ranks: Sequence[int]) -> dict[int, Any]:
        """What these ranks have sent; those that have not after `timeout_s` are left out.

        Raises:
            RuntimeError: the store cannot be reached.
        """
        found: dict[int, Any] = {}
        deadline = time.monotonic() + self.timeout_s
        while True:
            for rank in [rank for rank in ranks if rank not in found]:
                if self._store.check([self._key(key, rank)]):
                    found[rank] = self._taken(key, rank)
            if len(found) == len(ranks) or time.monotonic() > deadline:
                return found
            time.sleep(_SLOW_POLL_S)

    def _taken(self, key: str, rank: int) -> Any:
        num_parts = int(self._store.get(self._key(key, rank)))
        keys = [self._key(key, rank, place) for place in range(num_parts)]
        packed = b"".join(self._store.get(part) for part in keys)
        for used in [*keys, self._key(key, rank)]:
            self._store.delete_key(used)
        return json.loads(zlib.decompress(packed))

    def _key(self, *parts: Any) -> str:
        return "/".join(["modulecheck", self._name, *map(str, parts)])

    # ---- votes ----

    def votes(self, key: str, ranks: Sequence[int], vote: bool) -> list[bool] | None:  # noqa: FBT001
        """Every rank's vote, the same answer for all; None: not all have come.

        None is for good: these ranks are not in step, and no later vote of theirs is waited for.

        Args:
            key: what is voted on; each rank asks once, and in the same order.
            ranks: who votes; this one among them.
            vote: of this rank.

        Raises:
            RuntimeError: the store cannot be reached.
        """
        group = ",".join(map(str, ranks))
        apart, decision = self._key(group, "apart"), self._key(group, key, "decision")
        boxes = [self._key(group, key, rank) for rank in ranks]
        self._store.set(boxes[list(ranks).index(self.rank)], str(int(vote)))
        deadline = time.monotonic() + self.timeout_s
        while not self._store.check([decision]):
            if self._store.check(boxes):
                counted = "".join(self._store.get(box).decode() for box in boxes)
                self._store.compare_set(decision, "", counted)
            elif self._store.check([apart]) or time.monotonic() > deadline:
                self._store.compare_set(decision, "", "apart")
            else:
                time.sleep(_POLL_S)
        found = self._store.get(decision).decode()
        if found == "apart":
            self._store.set(apart, "1")
            return None
        self._sweep(group, ranks, [*boxes, decision])
        return [letter == "1" for letter in found]

    def _sweep(self, group: str, ranks: Sequence[int], keys: list[str]) -> None:
        """Who votes has read what was decided before: that may go."""
        if self.rank == min(ranks):
            for key in self._agreed.get(group, ()):
                self._store.delete_key(key)
        self._agreed[group] = keys


class Agreement:
    """What the ranks that share the tensors of one call do together, or not at all."""

    def __init__(self, channel: SideChannel, ranks: Sequence[int], name: str) -> None:
        self._channel, self._ranks, self._name = channel, tuple(ranks), name
        self._stage = 0

    def votes(self, *, vote: bool) -> list[bool] | None:
        """Of all ranks on the next stage of the call; None: they are not in step."""
        self._stage += 1
        return self._channel.votes(f"{self._name}/{self._stage}", self._ranks, vote)

    def all_are_ready(self, *, ready: bool = True) -> bool:
        """Every rank is about to do the same."""
        votes = self.votes(vote=ready)
        return votes is not None and all(votes)

    def __str__(self) -> str:
        return f"ranks {', '.join(map(str, self._ranks))}"
