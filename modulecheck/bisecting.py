"""The first op of a graph with which a backend goes wrong, where its kernels cannot be reached.

Prefixes of the graph that Dynamo handed over are compiled by the backend and held against the same
prefix run op by op: outputs, inputs after the run, and for a backward the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from modulecheck import _inductor, _torch
from modulecheck.budget import Budget
from modulecheck.compared import Array, Compared, References
from modulecheck.goldens import array_of
from modulecheck.graph_capture import Given
from modulecheck.graph_values import (
    draws_random_numbers,
    judge,
    judge_beside,
    same_bits,
    wide_dtypes,
    widened,
)
from modulecheck.snapshot import RandomState
from opcheck import tolerances as tol
from opcheck.golden_rules import wider
from opcheck.records import Verdict
from opcheck.verdicts import rms

__all__ = ["FirstBad", "first_bad_node"]

Ambient = Callable[[], AbstractContextManager[Any]]
"""The autocast, grad and inference mode of the call."""
_OPENERS = {"_enter_autocast": "_exit_autocast"}
"""Calls that leave a state behind; a prefix that ends in between gets the other half."""


@dataclass(frozen=True)
class FirstBad:
    """Where a backend first differs from the graph that it was given."""

    node: fx.Node
    compared: Compared
    changed_input: int | None
    """Place, among the inputs that the prefix reads, of the one that ended wrong; None: an output
    or a gradient did."""
    phase: str


@dataclass(frozen=True)
class _Seen:
    """Tensors of one run of a prefix: outputs, inputs after it, gradients."""

    outputs: list[Any]
    inputs: list[Any]
    gradients: list[Any]
    weights: list[Any] | None
    """Gradients of the outputs that want one; None: no backward was run."""

    def part(self, kind: str, place: int) -> Any:
        """One tensor."""
        found = getattr(self, kind)
        return found[place] if place < len(found) else None


class _Goldens:
    """A prefix in float64, as it is and with its inputs moved by one ulp."""

    def __init__(
        self, prefix: fx.GraphModule, given: Given, ambient: Ambient, expected: _Seen
    ) -> None:
        self._prefix, self._given = prefix, given
        self._ambient, self._expected = ambient, expected
        self._runs: dict[int | None, _Seen | None] = {}

    def references(self, kind: str, place: int) -> References:
        """For one tensor of the prefix."""
        gradients = self._expected.gradients if kind == "gradients" else []
        floor = max((_noise(item) for item in gradients if isinstance(item, Tensor)), default=0.0)

        def run(draw: int | None) -> Array | None:
            if draw not in self._runs:
                self._runs[draw] = self._run(draw)
            seen = self._runs[draw]
            value = None if seen is None else seen.part(kind, place)
            return array_of(value) if isinstance(value, Tensor) else None

        return References(golden=lambda: run(None), moved=run, noise_floor=floor)

    def _run(self, draw: int | None) -> _Seen | None:
        """None: it cannot run in float64, or draws random numbers, which would be others."""
        if draws_random_numbers(self._prefix.graph.nodes):
            return None
        generator = np.random.default_rng([0 if draw is None else draw, len(self._given.inputs)])
        inputs = [widened(item, draw, generator, wide=True) for item in self._given.inputs]
        given = Given(self._given.graph, inputs, self._given.requires_grad)
        try:
            return _run(_Wide(self._prefix).run, given, self._ambient, self._expected.weights)
        except (RuntimeError, NotImplementedError, TypeError, ValueError, AssertionError):
            return None  # no float64 kernel, or arguments that mean something in one dtype


class _Wide(fx.Interpreter):
    """Runs a graph of any kind in float64."""

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> Any:
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        return wide_dtypes(args), wide_dtypes(kwargs)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        return value.to(wider(value.dtype)) if isinstance(value, Tensor) else value

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        target = "double" if target in _NARROWING else target
        return super().call_method(target, args, kwargs)


_NARROWING = ("float", "half", "bfloat16")
_NOISE = 8.0
"""As in the comparison of a step: gradients of so many eps of the largest one are noise."""


def _noise(gradient: Tensor) -> float:
    values = array_of(gradient).reshape(-1)
    if values.dtype.kind != "f" or not values.size:
        return 0.0
    dtype = str(gradient.dtype).removeprefix("torch.")
    return _NOISE * tol.EPS.get(dtype, tol.EPS["float32"]) * rms(values)


def first_bad_node(
    given: Given,
    backend: Callable[..., Any],
    *,
    phases: Collection[str],
    ambient: Ambient,
    budget: Budget,
) -> FirstBad | None:
    """Halve the graph until one op is left; None where the whole graph is right by itself.

    Args:
        given: the graph and the inputs of its first run.
        backend: given a graph and inputs, returns what runs in its place.
        phases: "forward": look at outputs and inputs after the run, "backward": at gradients.
        ambient: entered to compile and for each forward, not for a backward.
        budget: of compiles.
    """
    nodes = [
        node
        for node in given.graph.graph.nodes
        if node.op not in ("placeholder", "output", "get_attr")
    ]
    low, high, found = 0, len(nodes) - 1, None
    while low <= high:
        middle = high if found is None else (low + high) // 2
        if not budget.allows_compile("prefixes of the graph"):
            return found
        bad = _compare(given, nodes[: middle + 1], backend, ambient, phases)
        if bad is not None:
            found, high = bad, middle - 1
        elif found is None:
            return None
        else:
            low = middle + 1
    return found


def _compare(
    given: Given,
    nodes: list[fx.Node],
    backend: Callable[..., Any],
    ambient: Ambient,
    phases: Collection[str],
) -> FirstBad | None:
    backward = "backward" in phases
    parts = ["outputs", "inputs"] if "forward" in phases else []
    prefix, part = _prefix(given, nodes)
    random = RandomState.now()
    expected = _run(prefix, part, ambient, [] if backward else None)
    with ambient():
        compiled = backend(_prefix(given, nodes)[0], _inputs(part))
    random.restore()
    actual = _run(compiled, part, ambient, expected.weights)
    goldens = _Goldens(prefix, part, ambient, expected)
    for kind in [*parts, "gradients"]:
        pairs = zip(getattr(actual, kind), getattr(expected, kind), strict=True)
        for place, (mine, theirs) in enumerate(pairs):
            compared = _judged(mine, theirs, goldens, kind, place)
            if compared is not None and compared.verdict == Verdict.FAIL:
                return FirstBad(
                    nodes[-1], compared, place if kind == "inputs" else None,
                    "backward" if kind == "gradients" else "forward",
                )  # fmt: skip
    return None


def _judged(
    actual: Any, expected: Any, goldens: _Goldens, kind: str, place: int
) -> Compared | None:
    if not isinstance(actual, Tensor) or not isinstance(expected, Tensor):
        return None
    if same_bits(actual, expected):
        return None
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return judge(actual, expected, nodes=[], name="", values={})
    return judge_beside(actual, expected, goldens.references(kind, place))


def _run(
    function: Callable[..., Any], given: Given, ambient: Ambient, weights: list[Any] | None
) -> _Seen:
    """Run a prefix on copies.

    Args:
        function: the prefix, in any form.
        given: what it gets.
        ambient: entered for the forward.
        weights: gradients of the outputs; empty: made here; None: no backward is run.
    """
    inputs = _inputs(given)
    with _torch.no_modes(), torch.set_grad_enabled(weights is not None):
        passed = [_linked(item) for item in inputs]
        with ambient():
            outputs = function(*passed)
        outputs = list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
        gradients: list[Any] = []
        if weights is not None:
            made = [item for item in outputs if isinstance(item, Tensor) and item.requires_grad]
            weights = weights or _weights(made)
            gradients = _gradients(made, inputs, weights)
    return _Seen(_copies(outputs), _copies(passed), _copies(gradients), weights)


def _linked(item: Any) -> Any:
    """Leaves must not be written in place; their views may."""
    return item.view_as(item) if isinstance(item, Tensor) and item.requires_grad else item


def _copies(values: list[Any]) -> list[Any]:
    return [_inductor.strided_copy(item) for item in values]


def _weights(outputs: list[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(item.shape, generator=generator).to(device=item.device, dtype=item.dtype)
        for item in outputs
    ]


def _gradients(
    outputs: list[Tensor], inputs: list[Any], weights: list[Tensor]
) -> list[Tensor | None]:
    wanted = [item for item in inputs if isinstance(item, Tensor) and item.requires_grad]
    if not wanted or not outputs:
        return []
    own = [item.to(output.dtype) for item, output in zip(weights, outputs, strict=True)]
    return list(torch.autograd.grad(outputs, wanted, own, allow_unused=True))


def _inputs(given: Given) -> list[Any]:
    copies = [_inductor.strided_copy(item) for item in given.inputs]
    for item, wants in zip(copies, given.requires_grad, strict=True):
        if wants:
            item.requires_grad_()
    return copies


def _prefix(given: Given, nodes: list[fx.Node]) -> tuple[fx.GraphModule, Given]:
    """The graph up to the last of `nodes`, and the inputs that it reads.

    Its outputs are what the rest of the graph would have read.
    """
    inside, owner = set(nodes), given.graph
    twin = fx.Graph()
    made: dict[fx.Node, Any] = {}
    opened: list[fx.Node] = []
    for node in owner.graph.nodes:
        closes = bool(opened) and bool(node.all_input_nodes) and node.all_input_nodes[0] in opened
        outside = node.op in ("placeholder", "get_attr") and any(u in inside for u in node.users)
        if node not in inside and not outside and not closes:
            continue
        made[node] = twin.node_copy(node, lambda item: made[item])
        name = getattr(node.target, "__name__", "")
        if name in _OPENERS:
            opened.append(node)
        elif name in _OPENERS.values():
            opened.remove(node.all_input_nodes[0])
    outputs = [
        made[node]
        for node in nodes
        if _is_tensor(node) and (node is nodes[-1] or any(u not in inside for u in node.users))
    ]
    twin.output(tuple(outputs))
    twin.lint()
    return fx.GraphModule(owner, twin), _read_by(given, set(made))


def _read_by(given: Given, made: set[fx.Node]) -> Given:
    placeholders = [node for node in given.graph.graph.nodes if node.op == "placeholder"]
    kept = [place for place, node in enumerate(placeholders) if node in made]
    return Given(
        given.graph,
        [given.inputs[place] for place in kept],
        [given.requires_grad[place] for place in kept],
    )


def _is_tensor(node: fx.Node) -> bool:
    value = node.meta.get("example_value", node.meta.get("val"))
    return isinstance(value, Tensor)
