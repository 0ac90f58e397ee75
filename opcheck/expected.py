"""What the reference of a call gave, result by result, each run made when it is first asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opcheck.calls import Call
from opcheck.equivalents import has_equivalent, nearest_class, spelled_otherwise
from opcheck.flushing import without_subnormals
from opcheck.references import Reference, Result, host_array
from opcheck.snapshots import to_host

__all__ = ["Expected", "Leaf", "is_missing_kernel", "leaves_of", "results_of"]


@dataclass(frozen=True, slots=True)
class Leaf:
    """One result: a tensor, a Python number, or None."""

    name: str
    value: Any


def leaves_of(out: Any, name: str = "output") -> list[Leaf]:
    """Results in order; nested lists give one leaf per element."""
    if isinstance(out, (list, tuple)):
        return [
            leaf for number, item in enumerate(out) for leaf in leaves_of(item, f"{name} {number}")
        ]
    return [Leaf(name, out)]


def results_of(out: Any, written: list[tuple[str, Any]]) -> list[Leaf]:
    """Returned values, then written arguments that were not returned."""
    found = leaves_of(out) if out is not None else []
    returned = {id(leaf.value) for leaf in found}
    for name, value in written:
        label = f"argument {name!r} after the call"
        found += [leaf for leaf in leaves_of(value, label) if id(leaf.value) not in returned]
    return found


class Expected:
    """The reference's results, each run made when somebody first asks for it."""

    def __init__(self, call: Call, reference: Reference, written: list[str]) -> None:
        self.reference = reference
        self.notes: list[str] = []
        self._written = written
        self._baseline: list[Leaf] | None = None
        self._golden: list[Leaf] | None = None
        self._has_golden = True
        self._call = call

    def _leaves(self, result: Result) -> list[Leaf]:
        return results_of(result.out, list(zip(self._written, result.written, strict=True)))

    def baseline(self) -> list[Leaf] | None:
        """In the dtype of the call; None where there is no independent kernel for it."""
        if self._baseline is None and self.reference.has_baseline:
            self._baseline = self._leaves(self.reference.baseline())
        return self._baseline

    def golden(self) -> list[Leaf] | None:
        """None where no kernel computes it in float64 and a baseline judges alone."""
        if self._golden is None and self._has_golden:
            try:
                self._golden = self._leaves(self.reference.golden())
            except (NotImplementedError, RuntimeError) as error:
                if not self.reference.has_baseline or not is_missing_kernel(error):
                    raise
                self._has_golden = False
                self.notes.append("no float64 kernel: judged by the same-dtype result alone")
        return self._golden

    def first(self) -> list[Leaf]:
        """The baseline, else the golden."""
        found = self.baseline()
        return found if found is not None else self.golden() or []

    def golden_array(self, number: int) -> Any:
        """One result in float64; None where there is none."""
        golden = self.golden()
        if golden is None:
            return None
        value = golden[number].value
        return None if value is None else host_array(value)

    def flushed_array(self, number: int) -> Any:
        """As `golden_array`, of inputs with zeros for subnormals; None where there is none."""
        if self.golden() is None:
            return None
        result = self.reference.on(self._flushed)
        value = self._leaves(result)[number].value
        return None if value is None else host_array(value)

    def _flushed(self, tensor: Tensor) -> Tensor | None:
        source = self._call.before.get(id(tensor), tensor)
        if not source.dtype.is_floating_point:
            return None
        return without_subnormals(to_host(source)).to(torch.float64)

    def golden_beside(self, number: int, actual: Any, dtype: str) -> Any:
        """As `golden_array`, by the op's other spelling where that alone has the result's class."""
        golden = self.golden_array(number)
        if golden is None or golden.dtype != np.float64 or not has_equivalent(self.reference):
            return golden
        other = host_array(self._leaves(spelled_otherwise(self.reference))[number].value)
        return nearest_class(actual, golden, other, dtype)

    def draw(self, number: int) -> Callable[[int], Any]:
        """From k to one result of the k-th perturbed golden; of inputs it refuses the golden."""

        def moved(k: int) -> Any:
            try:
                found = self.reference.perturbed(k)
            except (RuntimeError, ValueError, IndexError) as error:
                if is_missing_kernel(error) or "allocate" in str(error):
                    raise
                note = f"inputs moved by one rounding are refused: {_first_line(error)}"
                self.notes += [] if note in self.notes else [note]
                return self.golden_array(number)
            return host_array(self._leaves(found)[number].value)

        return moved


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0][:120]


def is_missing_kernel(error: BaseException) -> bool:
    """True when an exception says that no kernel exists for these arguments.

    Kernels of one dtype alone, as those of quantized layers, say it in various words, and name the
    one that they were given: "expected scalar type Float but found Double".
    """
    if isinstance(error, NotImplementedError):
        return True
    return any(words in str(error) for words in ("not implemented for", "found Double"))
