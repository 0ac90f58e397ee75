"""The graphs that Dynamo captures when a recorded call runs again, with what each of them got."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from modulecheck import _inductor
from modulecheck.recording import RecordedCall
from modulecheck.rerun import Rerun
from opcheck.errors import ReproError
from opcheck.runstate import RunState

__all__ = ["CapturedGraph", "graphs_of", "state_of"]


@dataclass
class CapturedGraph:
    """One graph, and its first run."""

    graph: fx.GraphModule
    inputs: list[Any] = field(default_factory=list)
    grads: dict[int, Tensor] = field(default_factory=dict)
    """By place of the output."""
    random_state: Tensor | None = None
    """Before the run, where it draws random numbers."""
    has_run: bool = False


class _Tap:
    """A backend that runs graphs op by op and keeps them."""

    def __init__(self) -> None:
        self.captured: list[CapturedGraph] = []

    def __call__(self, graph: fx.GraphModule, inputs: Any, **_: Any) -> Callable[..., Any]:
        entry = CapturedGraph(copy.deepcopy(graph))
        self.captured.append(entry)

        def run(*args: Any) -> Any:
            if entry.has_run:
                return graph(*args)
            entry.has_run = True
            entry.inputs = [_own(item) for item in args]
            before = torch.get_rng_state()
            out = graph(*args)
            if not torch.equal(before, torch.get_rng_state()):
                entry.random_state = before
            for place, item in enumerate(out if isinstance(out, (list, tuple)) else [out]):
                if isinstance(item, Tensor) and item.grad_fn is not None:
                    item.register_hook(_keeper(entry.grads, place))
            return out

        return run


def _own(item: Any) -> Any:
    if not isinstance(item, Tensor):
        return item
    return _inductor.strided_copy(item.detach()).requires_grad_(item.requires_grad)


def _keeper(kept: dict[int, Tensor], place: int) -> Callable[[Tensor], None]:
    def keep(grad: Tensor) -> None:
        kept.setdefault(place, grad.detach().clone())

    return keep


def graphs_of(again: Rerun) -> list[CapturedGraph]:
    """Run the call under Dynamo, op by op; call it inside `dynamo.isolated()`.

    Raises:
        ReproError: the call raised.
    """
    tap = _Tap()
    outcome = again.compiled(tap)
    if outcome.problem:
        raise ReproError(f"the call raised when its graph was taken: {outcome.problem}")
    return [entry for entry in tap.captured if entry.has_run]


def state_of(call: RecordedCall) -> RunState:
    """Of the process now, with the grad mode and autocast that the call ran in."""
    snapshot = call.snapshot
    autocast = [
        (item.device, str(item.dtype).removeprefix("torch."))
        for item in snapshot.autocast
        if item.enabled
    ]
    return dataclasses.replace(
        RunState.now(),
        grad_enabled=snapshot.grad_enabled,
        inference=snapshot.inference,
        autocast=tuple(autocast),
    )
