"""A wrong entry of the decomposition table: each op beside what it is decomposed into."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from modulecheck import _inductor, _torch
from modulecheck.compared import Compared
from modulecheck.graph_capture import Captured
from modulecheck.graph_values import Values, compute, draws_random_numbers, judge
from modulecheck.kernels import as_drawn
from opcheck.modes import Mode
from opcheck.records import Verdict

__all__ = ["WrongDecomposition", "wrong_decompositions"]

Table = Mapping[Any, Callable[..., Any]]


@dataclass(frozen=True)
class WrongDecomposition:
    """An op whose decomposition gives another result than the op."""

    node: fx.Node
    inner: str
    """The op inside the decomposition whose own entry is the wrong one; "" for the node's."""
    compared: Compared
    values: Values


def wrong_decompositions(captured: Captured, table: Table) -> list[WrongDecomposition]:
    """Compare op by op, on the values that the graph has there.

    Args:
        captured: a graph traced without decompositions, and its runs.
        table: of the stage under suspicion.
    """
    if not captured.runs:
        return []
    run = captured.runs[0]
    with as_drawn(run):
        values, _, _ = compute(captured.traced, run.inputs)
    found = []
    for node in captured.traced.graph.nodes:
        if node.op != "call_function" or node.target not in table or draws_random_numbers([node]):
            continue
        if _torch.is_mutable(node.target) is not False:
            continue
        wrong = _wrong(node, values, table)
        if wrong is not None:
            found.append(wrong)
    return found


def _wrong(node: fx.Node, values: Values, table: Table) -> WrongDecomposition | None:
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda item: _read(values[item.name]))
    mode = _Decomposing(table)
    with torch.no_grad(), _torch.no_modes():
        try:
            with mode:
                result = table[node.target](*args, **kwargs)
        except (RuntimeError, NotImplementedError, TypeError, ValueError, AssertionError):
            return None  # a decomposition that is for tracing only
    if result is NotImplemented:
        return None
    compared = _first_fail(node, result, values)
    if compared is None:
        return None
    return WrongDecomposition(node, mode.wrong, compared, values)


def _read(value: Any) -> Any:
    return _inductor.strided_copy(value) if isinstance(value, Tensor) else value


def _first_fail(node: fx.Node, result: Any, values: Values) -> Compared | None:
    expected = values[node.name]
    if isinstance(expected, Tensor):
        pairs: list[tuple[Any, Any, int | None]] = [(result, expected, None)]
    else:
        pairs = [(a, e, i) for i, (a, e) in enumerate(zip(result, expected, strict=False))]
    for actual, theirs, part in pairs:
        if not isinstance(actual, Tensor) or not isinstance(theirs, Tensor) or not theirs.numel():
            continue
        compared = judge(actual, theirs, nodes=[node], name=node.name, values=values, part=part)
        if compared.verdict == Verdict.FAIL:
            return compared
    return None


class _Decomposing(Mode):
    """Decomposes what a decomposition calls, too, and notes the innermost entry that is wrong."""

    def __init__(self, table: Table) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._table = table
        self._inside: list[Any] = []
        self.wrong = ""

    def _handle(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        direct = func(*args, **kwargs)
        entry = self._table.get(func)
        if entry is None or func in self._inside or _torch.is_mutable(func):
            return direct
        self._inside.append(func)
        try:
            with self:
                result = entry(*args, **kwargs)
        except (RuntimeError, NotImplementedError, TypeError, ValueError, AssertionError):
            return direct  # for tracing only
        finally:
            self._inside.pop()
        if not isinstance(result, Tensor) or not isinstance(direct, Tensor):
            return direct
        if not self.wrong and result.shape == direct.shape and direct.numel():
            compared = judge(result, direct, nodes=[], name="", values={})
            if compared.verdict == Verdict.FAIL:
                self.wrong = str(func)
        return result
