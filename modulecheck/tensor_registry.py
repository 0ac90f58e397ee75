"""What is registered, by whom, in which order: the collecting half of `TensorChecker`."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from modulecheck.tensor_calls import CallKey, KeptCall
from modulecheck.tensor_groups import Entry, tag_matches
from modulecheck.tensor_records import Site, TensorCheckResult
from modulecheck.tensor_store import Held, Scratch, Stored, holds
from modulecheck.tensor_values import Snapshot, dtype_name, leaves
from opcheck.errors import ArgumentError
from opcheck.tolerances import HALF_DTYPES
from opcheck.validation import a_flag, a_path, a_string, one_of

__all__ = ["TensorRegistry"]

KEEP = ("all", "stats")


class TensorRegistry:
    """Collects snapshots under tags; holds no graph and no memory of the user's."""

    def __init__(
        self,
        *,
        keep: str = "all",
        quiet: bool = False,
        repro_dir: str | Path | None = None,
    ) -> None:
        one_of("keep", keep, allowed=KEEP)
        a_flag("quiet", quiet)
        a_path("repro_dir", repro_dir, optional=True)
        self.keep = keep
        self.quiet = quiet
        self.repro_dir = repro_dir
        """Where a check that fails writes reproducers; None: nowhere."""
        self.generation = 0
        """Grows with every `clear()`."""
        self.running = _Running()
        """The module calls that are open, by thread."""
        self._lock = threading.RLock()
        self._sides: list[str] = []
        self._models: dict[str, Any] = {}
        self._module_names: dict[str, tuple[str, ...]] = {}
        self._result: TensorCheckResult | None = None
        self._closer: weakref.finalize[Any, Any] | None = None
        self._forget()

    def _forget(self) -> None:
        self._entries: list[Entry] = []
        self._counts: dict[tuple[str, str | None, object], int] = {}
        self._first: dict[object, Stored] = {}
        self._coarsest: dict[str, str] = {}
        self._problems: list[str] = []
        self._not_registered: dict[str, str] = {}
        self._unseen_outputs: set[str] = set()
        self._excluded = 0
        self._kept_calls: dict[CallKey, KeptCall] = {}
        if self._closer is not None:
            self._closer()
        self._scratch: Scratch | None = None

    # ---- registering ----

    def register_tensor(self, tag: str, tensor: Any, *, side: str | None = None) -> None:
        """Register a tensor, or one tag per leaf of a list, dict or dataclass of tensors.

        The first one under a tag is the reference of the others. Inside the forward of a model that
        is registered with this checker, the side is that model's.

        Args:
            tag: what it is compared under.
            tensor: a tensor, an array, a number, an object with `to_torch()`, `__dlpack__` or
                `__array__`, or a list, dict or dataclass of these. It is copied.
            side: which implementation it is of, where the order does not tell.

        Raises:
            ArgumentTypeError: the tag is no string, or a leaf holds no numbers; names tag and type.
            ArgumentError: a leaf has no values, or there is no leaf.
        """
        a_string("tag", tag)
        a_string("side", side, optional=True)
        found = list(leaves(tag, tensor))
        if not found:
            raise ArgumentError(f"tag {tag[:200]!r}: a {type(tensor).__name__} without any tensor")
        for leaf_tag, snapshot in found:
            self.add(leaf_tag, snapshot, side=side if side is not None else self.running.side)

    def add(
        self,
        tag: str,
        snapshot: Snapshot,
        *,
        side: str | None,
        site: Site | None = None,
        exclude: Iterable[str] = (),
    ) -> None:
        """Register a snapshot that is nobody else's."""
        if any(tag_matches(tag, pattern) for pattern in exclude):
            with self._lock:
                self._excluded += 1
            return
        with self._lock:
            if side is not None and side not in self._sides:
                self._sides.append(side)
            place = None if site is None else (site.module, site.role)
            key = (tag, side, place)
            number = self._counts.get(key, 0)
            self._counts[key] = number + 1
            if site is not None:
                number = site.call
            entry = Entry(
                tag,
                side,
                number,
                self._store(snapshot, (tag, number if side is not None else 0, place)),
                site,
                self._precision(side, snapshot),
                snapshot.device,
            )
            self._entries.append(entry)

    def _store(self, snapshot: Snapshot, key: object) -> Stored:
        if self.keep == "all":
            return Held(snapshot)
        first = self._first.get(key)
        if first is not None and holds(first, snapshot):
            return first
        if self._scratch is None:
            self._scratch = Scratch()
            self._closer = weakref.finalize(self, self._scratch.close)
        stored = self._scratch.add(snapshot)
        self._first.setdefault(key, stored)
        return stored

    def _precision(self, side: str | None, snapshot: Snapshot) -> str | None:
        """Coarsest 16-bit dtype that the side has shown: what follows carries its rounding."""
        if side is None:
            return None
        dtype = dtype_name(snapshot.tensor.dtype)
        known = self._coarsest.get(side)
        if dtype in HALF_DTYPES and known != "bfloat16":
            self._coarsest[side] = dtype
        return self._coarsest.get(side)

    def clear(self) -> None:
        """Forget every tensor and the result. Hooks on models stay on, and start anew."""
        with self._lock:
            self._forget()
            self.running.frames.clear()  # an interrupt may have left some
            self.generation += 1
            self._result = None
            alive = self.model_hooks()
            self._models = alive
            self._module_names = {
                side: names for side, names in self._module_names.items() if side in alive
            }
            self._sides = [side for side in self._sides if side in alive]

    def keep_call(self, side: str, site: Site, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Keep what a module is about to get, where a reproducer may need it."""
        if self.repro_dir is None or self.keep != "all":
            return
        kept = KeptCall.take(module, args, kwargs)
        with self._lock:
            self._kept_calls[side, site.module, site.call] = kept

    # ---- models (used by module_register_tensor_checker) ----

    def add_model(self, side: str, hooks: Any, names: Sequence[str]) -> None:
        """A model registers its modules under a side."""
        with self._lock:
            if side not in self._sides:
                self._sides.append(side)
            self._models[side] = hooks
            self._module_names[side] = tuple(names)

    def remove_model(self, side: str) -> None:
        """Its hooks are off; what was registered stays until `clear()`."""
        with self._lock:
            self._models.pop(side, None)
            if all(entry.side != side for entry in self._entries):
                self._module_names.pop(side, None)
                if side in self._sides:
                    self._sides.remove(side)

    def model_hooks(self) -> dict[str, Any]:
        """The hooks that are on, by side; those of a model that is gone are not."""
        return {side: hooks for side, hooks in self._models.items() if hooks.model() is not None}

    @property
    def module_names(self) -> dict[str, tuple[str, ...]]:
        """Names of the modules by side, the reference first."""
        order = [side for side in self._sides if side in self._module_names]
        return {side: self._module_names[side] for side in order}

    @property
    def sides(self) -> tuple[str, ...]:
        """Named sides, the reference first."""
        return tuple(self._sides)

    def note_problem(self, problem: str) -> None:
        """A crash of ours inside a hook."""
        with self._lock:
            self._problems.append(problem)

    def note_unknown(self, tag: str, kind: str, *, is_output: bool) -> None:
        """A module took or gave something that holds no numbers."""
        with self._lock:
            self._not_registered.setdefault(tag, kind)
            if is_output and kind not in ("str", "bytes"):
                self._unseen_outputs.add(tag)


class _Running(threading.local):
    """The open calls of registered modules in this thread."""

    def __init__(self) -> None:
        self.frames: list[Any] = []

    @property
    def side(self) -> str | None:
        """Of the innermost one."""
        return self.frames[-1].side if self.frames else None
