"""Values of an FX graph node by node, and the rule that judges one of them.

The reference of a node is the ATen op itself, run eagerly on reference inputs; beside it stands the
same piece of graph in float64, and in float64 on inputs moved by one ulp.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, fx

from modulecheck import _inductor, _torch
from modulecheck.goldens import array_of
from modulecheck.judging import Compared, Documented, References, Rule, compare
from modulecheck.judging import quick as quick_look
from opcheck import tolerances as tol
from opcheck.golden_rules import wider
from opcheck.modes import Mode
from opcheck.records import Verdict
from opcheck.verdicts import spacing_of

__all__ = [
    "RULE", "Values", "aten_ops", "between", "compute", "draws_random_numbers", "judge",
    "judge_beside", "recomputed", "same_bits", "wide_dtypes", "widened",
    "zeros_differ",
]  # fmt: skip

Array = npt.NDArray[Any]
RULE = Rule(criterion="calibrated", atol=tol.MODULE_ATOL, rtol=tol.MODULE_RTOL)
Values = dict[str, Any]
"""Name of a node -> what it gave; tensors as they were right then."""

_RANDOM = ("rand", "seed", "bernoulli", "dropout", "normal", "uniform")


def compute(graph: fx.GraphModule, inputs: Iterable[Any]) -> tuple[Values, list[Any], list[Any]]:
    """Run a graph op by op on copies of its inputs.

    Returns:
        The value of every node, the outputs, and the inputs as they are after the run.
    """
    given = [_inductor.strided_copy(item) for item in inputs]
    mutates = any(_mutates(node) for node in graph.graph.nodes)
    runner = _Noting(graph, copies=mutates)
    with torch.no_grad(), _torch.no_modes():
        outputs = runner.run(*given)
    if not isinstance(outputs, (list, tuple)):
        outputs = [outputs]
    return runner.values, list(outputs), given


def aten_ops(graph: fx.GraphModule, inputs: Iterable[Any], name: str) -> list[Any]:
    """The ATen ops that one node of a graph of any kind runs, in order."""
    given = [_inductor.strided_copy(item) for item in inputs]
    runner = _Listing(graph, name)
    with torch.no_grad(), _torch.no_modes():
        runner.run(*given)
    return runner.ops.found


class _Ops(Mode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[Any] = []

    def _handle(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.found.append(func)
        return func(*args, **kwargs)


class _Listing(fx.Interpreter):
    def __init__(self, graph: fx.GraphModule, name: str) -> None:
        super().__init__(graph)
        self._name = name
        self.ops = _Ops()

    def run_node(self, node: fx.Node) -> Any:
        if node.name != self._name:
            return super().run_node(node)
        with self.ops:
            return super().run_node(node)


class _Noting(fx.Interpreter):
    def __init__(self, graph: fx.GraphModule, *, copies: bool) -> None:
        super().__init__(graph, garbage_collect_values=False)
        self.values: Values = {}
        self._copies = copies

    def run_node(self, node: fx.Node) -> Any:
        result = super().run_node(node)
        self.values[node.name] = _held(result) if self._copies else result
        return result


def _held(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_held(item) for item in value)
    return _inductor.strided_copy(value)


def _mutates(node: fx.Node) -> bool:
    return node.op == "call_function" and bool(_torch.is_mutable(node.target))


def between(targets: Iterable[fx.Node], known: set[str]) -> list[fx.Node]:
    """The ops that make `targets` out of placeholders and the nodes named in `known`, in order."""
    found: set[fx.Node] = set()
    todo = [node for node in targets if node.op != "placeholder"]
    goals = set(todo)
    while todo:
        node = todo.pop()
        if node in found:
            continue
        found.add(node)
        todo += [
            item
            for item in node.all_input_nodes
            if item.op not in ("placeholder", "get_attr")
            and (item.name not in known or item in goals)
        ]
    if not found:
        return []
    return [node for node in next(iter(found)).graph.nodes if node in found]


# ---- in float64 ---------------------------------------------------------------------------------


def recomputed(
    nodes: list[fx.Node], values: Mapping[str, Any], *, draw: int | None = None, wide: bool = True
) -> dict[str, Any] | None:
    """These ops again, from the reference values of what lies outside them.

    Args:
        nodes: in order.
        values: of every node outside that they read.
        draw: move what they read by one ulp, with the signs of this draw.
        wide: in float64.

    Returns:
        By name; None where an op refuses, draws random numbers or writes in place.
    """
    inside = {node.name for node in nodes}
    generator = np.random.default_rng([0 if draw is None else draw, len(nodes)])
    found: dict[str, Any] = {}

    def read(node: fx.Node) -> Any:
        if node.name in inside:
            return found[node.name]
        if node.name not in found:
            found[node.name] = widened(values[node.name], draw, generator, wide=wide)
        return found[node.name]

    with torch.no_grad(), _torch.no_modes():
        for node in nodes:
            if node.op != "call_function" or _mutates(node) or draws_random_numbers([node]):
                return None
            args, kwargs = fx.map_arg((node.args, node.kwargs), read)
            if wide:
                args, kwargs = wide_dtypes(args), wide_dtypes(kwargs)
            try:
                result = node.target(*args, **kwargs)  # type: ignore[operator]
            except (RuntimeError, NotImplementedError, TypeError, ValueError, AssertionError):
                return None  # no float64 kernel, or arguments that mean something in one dtype
            found[node.name] = widened(result, None, generator, wide=wide)
    return found


def draws_random_numbers(nodes: Iterable[fx.Node]) -> bool:
    """True when one of them does: run again, it gives other numbers."""
    return any(part in str(node.target) for node in nodes for part in _RANDOM)


def wide_dtypes(value: Any) -> Any:
    """Arguments of an op, with wider dtypes where they name some."""
    if isinstance(value, torch.dtype):
        return wider(value)
    if isinstance(value, (list, tuple)):
        return type(value)(wide_dtypes(item) for item in value)
    if isinstance(value, dict):
        return {key: wide_dtypes(item) for key, item in value.items()}
    return value


def widened(value: Any, draw: int | None, generator: np.random.Generator, *, wide: bool) -> Any:
    """In float64, with a `draw` moved by one ulp of its own dtype; lists of tensors too."""
    if isinstance(value, (list, tuple)):
        return [widened(item, draw, generator, wide=wide) for item in value]
    if not isinstance(value, Tensor):
        return value
    found = value.detach().to(wider(value.dtype)) if wide else value.detach()
    dtype = str(value.dtype).removeprefix("torch.")
    if draw is None or dtype not in tol.EPS or not value.numel():
        return found
    numbers = array_of(value).astype(np.float64)
    signs = generator.choice((-1.0, 1.0), size=numbers.shape)
    moved = numbers + signs * spacing_of(numbers.reshape(-1), dtype).reshape(numbers.shape)
    return torch.from_numpy(moved).to(device=value.device, dtype=found.dtype)


# ---- judging ------------------------------------------------------------------------------------


def judge(
    actual: Tensor,
    expected: Tensor,
    *,
    nodes: list[fx.Node],
    name: str,
    values: Mapping[str, Any],
    part: int | None = None,
) -> Compared:
    """Hold one value against the op-by-op reference and float64.

    Args:
        actual: what was computed.
        expected: of the same shape; the reference in the same dtype.
        nodes: the ops from what both sides share to this value; none: judged in its own dtype.
        name: of the node.
        values: of the graph, from `compute`.
        part: which of several results of the node.
    """
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        what = "dtype" if actual.dtype != expected.dtype else "shape"
        mine, theirs = getattr(actual, what), getattr(expected, what)
        return Compared(
            verdict=Verdict.FAIL,
            reason=f"{what} is {mine}, expected {theirs}",
            documented=Documented(allclose=False),
        )

    @functools.cache
    def run(draw: int | None) -> Array | None:
        if not nodes:
            return None
        wide = draw is None or run(None) is not None
        found = recomputed(nodes, values, draw=draw, wide=wide)
        value = None if found is None else found[name]
        if value is not None and part is not None:
            value = value[part]
        return array_of(value).reshape(expected.shape) if isinstance(value, Tensor) else None

    return judge_beside(actual, expected, References(golden=lambda: run(None), moved=run))


def judge_beside(actual: Tensor, expected: Tensor, references: References) -> Compared:
    """Hold one value against the same-dtype reference and float64; of one dtype and shape."""
    y, c = array_of(actual), array_of(expected)
    dtype = str(expected.dtype.to_real() if expected.is_complex() else expected.dtype)
    dtype = dtype.removeprefix("torch.")
    if dtype not in tol.EPS:
        dtype = "float16" if expected.is_floating_point() else dtype
    if y.dtype.kind not in "fc":
        return quick_look(y, c, dtype, RULE)
    return compare(y, c, dtype=dtype, rule=RULE, references=references)


def same_bits(actual: Any, expected: Any) -> bool:
    """Equal in dtype, shape and every value, the sign of zeros too; NaN equals NaN."""
    if not _same_values(actual, expected):
        return False
    y, c = array_of(actual), array_of(expected)
    if y.dtype.kind not in "fc":
        return True
    parts = [(y, c)] if y.dtype.kind == "f" else [(y.real, c.real), (y.imag, c.imag)]
    return all(
        np.array_equal(np.signbit(mine[mine == 0.0]), np.signbit(theirs[mine == 0.0]))
        for mine, theirs in parts
    )


def zeros_differ(actual: Any, expected: Any) -> bool:
    """Equal but for the sign of zeros, which division, atan2 and the like go on to read."""
    return _same_values(actual, expected) and not same_bits(actual, expected)


def _same_values(actual: Any, expected: Any) -> bool:
    if not isinstance(actual, Tensor) or not isinstance(expected, Tensor):
        return False
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return False
    equal_nan = actual.is_floating_point() or actual.is_complex()
    return bool(np.array_equal(array_of(actual), array_of(expected), equal_nan=equal_nan))
