"""Culprits made of what the searches found: names, lines, sentences."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from modulecheck.budget import Budget
from modulecheck.compared import Compared
from modulecheck.culprit import NOT_REPRODUCED, Culprit
from modulecheck.goldens import Key
from modulecheck.graph_capture import Captured
from modulecheck.ladder import Ladder
from modulecheck.node_origin import Origin, names_of, origin_of
from modulecheck.recording import phase_of
from modulecheck.rerun import Rerun

__all__ = ["Place", "described", "joined", "not_reproduced"]


class Place:
    """The failing call, and names for what is inside its module."""

    def __init__(self, rerun: Rerun) -> None:
        self.rerun = rerun
        self._names = names_of(rerun.module)
        self._of_step: dict[fx.Graph, dict[int, str]] = {}

    def learn(self, graphs: Iterable[Captured]) -> None:
        """Graphs of the step are of the user's modules, those of a run again of copies of them."""
        for captured in graphs:
            if captured.names is not None:
                self._of_step[captured.lowered_graph.graph] = captured.names

    def origin(self, node: fx.Node) -> Origin:
        """Op, module inside the failing module, and line of a node."""
        return origin_of(node, self._of_step.get(node.graph, self._names))

    def fqn(self, inner: str) -> str:
        """Inside the model."""
        return joined(self.rerun.call.fqn, inner)

    @property
    def phases(self) -> list[str]:
        """Where something failed in the real step, forward first."""
        found = {phase_of(key) for key in self.rerun.call.failed}
        return [phase for phase in ("forward", "backward") if phase in found]

    @property
    def tensor(self) -> str:
        """The first argument or buffer that ended wrong, "" if none did."""
        changed = [key for key in self.rerun.call.failed if key[0] in ("argument", "buffer")]
        return described(changed[0]) if changed else ""

    def culprit(
        self, node: fx.Node, stage: str, phase: str, compared: Compared | None, **rest: Any
    ) -> Culprit:
        """Of a node of any graph that was captured in a run again."""
        origin = self.origin(node)
        values: dict[str, Any] = {
            "module": self.fqn(origin.module),
            "op": origin.op,
            "source": origin.source,
            **rest,
        }
        if compared is not None:
            values["metrics"] = compared.metrics
        return Culprit(phase=phase, stage=stage, node=node.name, **values)


def joined(outer: str, inner: str) -> str:
    """Two parts of a qualified name."""
    return f"{outer}.{inner}" if outer and inner else outer or inner


def described(key: Key) -> str:
    """`argument 0`, `buffer running_mean`, `output 0`, `gradient of input 0`."""
    kind, name = key
    kinds = {"grad_input": "gradient of input", "param": "gradient of"}
    return f"{kinds.get(kind, kind)} {name}"


def listed(items: Iterable[str], most: int = 4) -> str:
    """`a, b and 3 more`."""
    items = list(dict.fromkeys(items))
    if len(items) <= most:
        return ", ".join(items)
    return f"{', '.join(items[:most])} and {len(items) - most} more"


def not_reproduced(
    place: Place, reason: str, budget: Budget, ladder: Ladder | None = None
) -> Culprit:
    """The call run again does not show the fault."""
    call = place.rerun.call
    differs = [
        f"it was call {call.index} of its module, and is now compiled alone and first"
        if call.index
        else "it is compiled alone, from its inputs, apart from the step",
        f"torch {torch.__version__}",
    ]
    if ladder is not None and ladder.top == "inductor":
        differs.append(ladder.step_code)
    if ladder is not None and ladder.capture is not None:
        differs.append(
            f"{len(ladder.capture.given)} graphs, {ladder.capture.num_runs} runs of them"
        )
    if budget.refused:
        differs.append(f"not tried: {listed(budget.refused)}")
    failed = listed(described(key) for key in call.failed)
    return Culprit(
        module=call.fqn,
        phase=place.phases[0] if place.phases else "forward",
        stage=NOT_REPRODUCED,
        reproduced=False,
        explanation=(
            f"{failed} failed in the step, but {reason}. That is no clean bill: what differs is"
            f" that {'; '.join(differs)}."
        ),
        not_reached="; ".join(budget.refused),
    )
