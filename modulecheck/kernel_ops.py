"""Which op of a fused kernel is the wrong one: its ops compiled one at a time, then in prefixes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from modulecheck import _inductor, _torch
from modulecheck.budget import Budget
from modulecheck.compared import Compared
from modulecheck.graph_values import draws_random_numbers, judge
from modulecheck.node_origin import is_computing
from modulecheck.subgraphs import Piece, alone, piece
from opcheck.records import Verdict

__all__ = ["Blamed", "blamed_op"]


@dataclass(frozen=True)
class Blamed:
    """The op of a kernel that is the likely one."""

    node: fx.Node
    compared: Compared | None
    """Of that op alone; None where the kernel as a whole was judged."""
    how: str
    """A clause: how that is known."""


def blamed_op(
    owner: fx.GraphModule,
    nodes: list[fx.Node],
    target: fx.Node,
    values: Mapping[str, Any],
    budget: Budget,
) -> Blamed:
    """Find the op among those of one kernel.

    Args:
        owner: the graph.
        nodes: the ops of the kernel, in order.
        target: the first node whose value came out wrong.
        values: of the graph, op by op.
        budget: of compiles.
    """
    candidates = [node for node in nodes if is_computing(node)]
    if len(candidates) <= 1:
        return Blamed((candidates or [target])[0], None, "is the only op of that kernel")
    if any(draws_random_numbers([node]) for node in candidates):
        return Blamed(
            target, None, "is one of its ops, which draw random numbers and cannot be run again"
        )
    if not budget.allows_compile("the ops of a kernel one at a time"):
        return Blamed(target, None, "is one of its ops, which were not told apart")
    wrong = _judged(alone(owner, candidates, values), values, nodes=None)
    if wrong:
        first = min(wrong, key=candidates.index)
        return Blamed(first, wrong[first], "is wrong when compiled alone, too")
    return _first_fused(owner, nodes, candidates, target, values, budget)


_APART = "is its last op; all are right when compiled apart from the rest of the graph"


def _first_fused(
    owner: fx.GraphModule,
    nodes: list[fx.Node],
    candidates: list[fx.Node],
    target: fx.Node,
    values: Mapping[str, Any],
    budget: Budget,
) -> Blamed:
    """Every op alone is right: the first one that is wrong together with what leads to it.

    What leads to an op that comes out right is innocent; what leads to one that comes out wrong
    holds the culprit. Each question halves the ops that are left.
    """
    left = [node for node in candidates if node in _ancestors(target, nodes)]
    found: tuple[fx.Node, Compared] | None = None
    while left and (found is None or left != [found[0]]):
        goal = left[-1] if found is None else left[(len(left) - 1) // 2]
        if not budget.allows_compile("the beginnings of a fused kernel"):
            return Blamed(
                target, None, "is one of its ops, which are right alone and wrong once fused"
            )
        leading = _ancestors(goal, nodes)
        part = [node for node in nodes if node in leading]
        wrong = _judged(piece(owner, part, [goal], values), values, nodes=part)
        if wrong:
            found = goal, wrong[goal]
            left = [node for node in left if node in leading]
        elif found is None:
            return Blamed(target, None, _APART)
        else:
            left = [node for node in left if node not in leading]
    if found is None:
        return Blamed(target, None, _APART)
    return Blamed(*found, "is right alone and wrong once fused with the ops before it")


def _ancestors(node: fx.Node, among: list[fx.Node]) -> set[fx.Node]:
    inside, found, todo = set(among), set(), [node]
    while todo:
        item = todo.pop()
        if item in inside and item not in found:
            found.add(item)
            todo += item.all_input_nodes
    return found


def _judged(
    made: Piece, values: Mapping[str, Any], nodes: list[fx.Node] | None
) -> dict[fx.Node, Compared]:
    """Compile a piece, run it, and keep what fails, by node."""
    compiled = _inductor.compile_lowered(made.graph)
    with torch.no_grad(), _torch.no_modes():
        results = compiled([_inductor.strided_copy(item) for item in made.inputs])
    wrong: dict[fx.Node, Compared] = {}
    for (node, part), actual in zip(made.outputs, results, strict=True):
        expected = values[node.name] if part is None else values[node.name][part]
        compared = judge(
            actual, expected, nodes=nodes or [node], name=node.name, values=values, part=part
        )
        if compared.verdict == Verdict.FAIL:
            wrong.setdefault(node, compared)
    return wrong
