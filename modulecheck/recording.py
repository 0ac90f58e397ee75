"""Failing calls, kept whole: what a drill-down runs again after the step has gone on.

A recording is made while the parameters still are what the call used, and holds copies only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt
from torch import Tensor, nn

from modulecheck import _torch, trees
from modulecheck.artifacts import Artifact
from modulecheck.distributed import own_class, ranks_of
from modulecheck.goldens import Key
from modulecheck.replay import Snapshot

__all__ = ["RecordedCall", "Recorder", "phase_of"]

_MIB = 1 << 20


def phase_of(key: Key) -> str:
    """Of a tensor: "backward" if it is a gradient, else "forward"."""
    return "backward" if key[0] in ("grad_input", "param") else "forward"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedCall:
    """One call of a module that failed, with everything that decides what it computes."""

    name: str
    """In the report; "" for the root."""
    fqn: str
    """Where the module is in the model."""
    kind: str
    """Its class, `package.module:Class`."""
    module: nn.Module | None = field(repr=False)
    """The user's own module, whose parameters may have moved since; None: it comes from a file."""
    index: int
    """Which call of the module in its step, from 0."""
    snapshot: Snapshot = field(repr=False)
    """Inputs, buffers, random state, autocast, grad mode and cast_dtype before the call."""
    parameters: dict[str, Tensor] = field(repr=False)
    """Copies as of the call, by name in the module."""
    training: dict[str, bool] = field(repr=False)
    """The train or eval mode of each submodule, by name; "" is the module itself."""
    sources: tuple[Key, ...]
    """Outputs, and inputs changed in place, through which the gradients came in."""
    grads: tuple[Tensor, ...] = field(repr=False)
    """The gradients of the real step, beside `sources`; none: a forward alone."""
    actual: dict[Key, npt.NDArray[Any]] = field(repr=False)
    """What the real step gave, of the failing tensors that it gave."""
    failed: tuple[Key, ...]
    """Which tensors failed, in the order in which they were compared."""
    backend: Any
    cast_dtype: Any
    artifacts: tuple[Artifact, ...] = field(default=(), repr=False)
    """What inductor had compiled and ran in the call; empty where that is not known."""

    @classmethod
    def of(
        cls,
        name: str,
        module: nn.Module,
        snapshot: Snapshot,
        *,
        failed: Sequence[Key],
        actual: Mapping[Key, npt.NDArray[Any]],
        sources: Sequence[Key] = (),
        grads: Sequence[Tensor] = (),
        index: int = 0,
        backend: Any = "inductor",
        fqn: str | None = None,
        artifacts: Sequence[Artifact] = (),
    ) -> RecordedCall:
        """Copy the parameters and the gradients; the snapshot and the arrays are taken over.

        Args:
            name: of the module in the report.
            module: in the state, but for its buffers, in which the call found it.
            snapshot: taken before the call.
            failed: keys of the tensors that failed.
            actual: their values of the real step, where there are any.
            sources: where the output gradients belong.
            grads: beside `sources`.
            index: which call of the module.
            backend: of `torch.compile`.
            fqn: of the module in the model, where that is not its name.
            artifacts: what ran compiled.
        """
        kind = own_class(module)
        with _torch.no_modes():
            return cls(
                name=name,
                fqn=name if fqn is None else fqn,
                kind=f"{kind.__module__}:{kind.__qualname__}",
                module=module,
                index=index,
                snapshot=snapshot.to_keep(),
                parameters={key: _copy(item) for key, item in module.named_parameters()},
                training={key: item.training for key, item in module.named_modules()},
                sources=tuple(sources),
                grads=tuple(_copy(grad) for grad in grads),
                actual=dict(actual),
                failed=tuple(failed),
                backend=backend,
                cast_dtype=snapshot.cast_dtype,
                artifacts=tuple(artifacts),
            )

    @property
    def phases(self) -> tuple[str, ...]:
        """Where something failed: "forward", "backward" or both."""
        found = {phase_of(key) for key in self.failed}
        return tuple(phase for phase in ("forward", "backward") if phase in found)

    @property
    def num_bytes(self) -> int:
        """Memory of all that is held."""
        return _num_bytes(self.snapshot, self.parameters.values(), self.grads, self.actual.values())


def _copy(tensor: Tensor) -> Tensor:
    copy = tensor.detach().clone()
    return copy.requires_grad_() if tensor.requires_grad else copy


def _num_bytes(
    snapshot: Snapshot,
    parameters: Iterable[Tensor],
    grads: Iterable[Tensor],
    actual: Iterable[npt.NDArray[Any]],
) -> int:
    inputs = trees.tensors((snapshot.args, snapshot.kwargs))
    held = snapshot.attributes.all_tensors()
    tensors = [*inputs, *snapshot.buffers.values(), *held, *parameters, *grads]
    sizes = dict(_size_of_memory(item) for item in tensors)
    return sum(sizes.values()) + sum(array.nbytes for array in actual)


def _size_of_memory(tensor: Tensor) -> tuple[Any, int]:
    """What is held for a tensor, and by which it is known to be held once."""
    try:
        storage = tensor.untyped_storage()
        return (storage.data_ptr() or id(tensor), storage.nbytes()), storage.nbytes()
    except (RuntimeError, NotImplementedError):  # sparse tensors and wrappers have no storage
        return id(tensor), tensor.nbytes


class Recorder:
    """Takes the first failing call of each module and phase, as long as there is room.

    Attributes:
        calls: what was recorded, in the order in which it failed.
    """

    def __init__(
        self, *, limit_mb: float, backend: Any, fqns: Mapping[str, str] | None = None
    ) -> None:
        """Nothing is held yet.

        Args:
            limit_mb: of all recordings together, in MiB.
            backend: of `torch.compile`.
            fqns: by name, of modules that have a name of their own in the report.
        """
        self._fqns = fqns or {}
        self._limit_mb, self._backend = limit_mb, backend
        self.calls: list[RecordedCall] = []
        self._of: dict[str, list[RecordedCall]] = {}
        """The same by name."""
        self._used = 0
        self._left_out: dict[tuple[str, str], str] = {}

    def offer(
        self,
        name: str,
        module: nn.Module,
        snapshot: Snapshot,
        *,
        failed: Sequence[Key],
        actual: Mapping[Key, npt.NDArray[Any]],
        sources: Sequence[Key],
        grads: Sequence[Tensor],
        index: int,
        artifacts: Sequence[Artifact] = (),
    ) -> None:
        """Record a failing call, unless its module has an earlier one for these phases.

        Calls may come out of order, because most are judged in their backward. For the arguments
        see `RecordedCall.of`.
        """
        phases = {phase_of(key) for key in failed}
        kept = self._of.get(name, [])
        later = [
            call
            for call in kept
            if "forward" in call.phases and index < call.index and phases >= set(call.phases)
        ]
        phases -= {phase for call in kept if call not in later for phase in call.phases}
        if not phases:
            return
        if later:
            self._drop(name, later)
        why = self._record(
            name, module, snapshot,
            failed=failed, actual=actual, sources=sources, grads=grads, index=index,
            artifacts=artifacts,
        )  # fmt: skip
        for phase in phases:
            if why:
                self._left_out.setdefault((name, phase), why)
            else:
                self._left_out.pop((name, phase), None)

    def _drop(self, name: str, calls: list[RecordedCall]) -> None:
        dropped = {id(call) for call in calls}
        self.calls = [call for call in self.calls if id(call) not in dropped]
        self._of[name] = [call for call in self._of[name] if id(call) not in dropped]
        self._used -= sum(call.num_bytes for call in calls)

    def _record(self, name: str, module: nn.Module, snapshot: Snapshot, **rest: Any) -> str:
        """Why it was left out, "" if it is recorded."""
        if snapshot.parameters_moved(module):
            return "its parameters were written before its verdict was known"
        shared = [*module.parameters(), *trees.tensors((snapshot.args, snapshot.kwargs))]
        if ranks_of(shared):
            return "ranks share its tensors, and one of them cannot run it again alone"
        size = _num_bytes(snapshot, module.parameters(), rest["grads"], rest["actual"].values())
        if self._used + size > self._limit_mb * _MIB:
            return f"record_limit_mb={self._limit_mb:g} has no room for its {_mib(size)}"
        try:
            call = RecordedCall.of(
                name, module, snapshot, backend=self._backend, fqn=self._fqns.get(name), **rest
            )
        except Exception as error:  # noqa: BLE001 - out of memory, most likely; the step goes on
            return f"copying it failed: {type(error).__name__}: {error}"
        self.calls.append(call)
        self._of.setdefault(name, []).append(call)
        self._used += size
        return ""

    def notes(self) -> list[str]:
        """What could not be recorded, for the reader of the result."""
        found: dict[tuple[str, str], list[str]] = {}
        for (name, phase), why in self._left_out.items():
            found.setdefault((name, why), []).append(phase)
        return [
            f"the failing call of {name or '<root>'} ({', '.join(phases)}) is not recorded, so that"
            f" it cannot be drilled into: {why}"
            for (name, why), phases in found.items()
        ]

    def forget(self) -> None:
        """Begin anew; what `calls` held belongs to whoever took it."""
        self.calls, self._of, self._left_out, self._used = [], {}, {}, 0


def _mib(size: int) -> str:
    return f"{size / _MIB:.1f} MiB"
