"""Collective ops: what each gives and gets on this rank, from the arguments of its overload.

`c10d` ops write into buffers that they are given; functional ones return their results. Both may
go on while the step does: results are there at their first use, and no sooner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from modulecheck import _torch
from modulecheck.distributed import group_of, is_on_its_way, wait_for

__all__ = [
    "Collective",
    "Part",
    "is_collective",
    "is_neutral",
    "is_wait",
    "namespace_of",
    "parse",
    "parts_got",
    "wait_until_there",
]

_KINDS = {
    "c10d._allgather_base_": "all_gather",
    "c10d.allgather_": "all_gather",
    "c10d.allgather_into_tensor_coalesced_": "all_gather",
    "c10d._reduce_scatter_base_": "reduce_scatter",
    "c10d.reduce_scatter_": "reduce_scatter",
    "c10d.reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "c10d.allreduce_": "all_reduce",
    "c10d.allreduce_coalesced_": "all_reduce",
    "c10d.broadcast_": "broadcast",
    "c10d.alltoall_base_": "all_to_all",
    "c10d.alltoall_": "all_to_all",
    "c10d.gather_": "gather",
    "c10d.scatter_": "scatter",
    "c10d.reduce_": "reduce",
    "c10d.send": "send",
    "c10d.recv_": "recv",
    "_c10d_functional.all_gather_into_tensor": "all_gather",
    "_c10d_functional.all_gather_into_tensor_out": "all_gather",
    "_c10d_functional.all_gather_into_tensor_coalesced": "all_gather",
    "_c10d_functional.reduce_scatter_tensor": "reduce_scatter",
    "_c10d_functional.reduce_scatter_tensor_out": "reduce_scatter",
    "_c10d_functional.reduce_scatter_tensor_coalesced": "reduce_scatter",
    "_c10d_functional.all_reduce": "all_reduce",
    "_c10d_functional.all_reduce_": "all_reduce",
    "_c10d_functional.all_reduce_coalesced": "all_reduce",
    "_c10d_functional.all_reduce_coalesced_": "all_reduce",
    "_c10d_functional.broadcast": "broadcast",
    "_c10d_functional.broadcast_": "broadcast",
    "_c10d_functional.all_to_all_single": "all_to_all",
}
"""Those that are understood; all others of these namespaces are counted by name."""

_NAMESPACES = ("c10d", "_c10d_functional")
_NO_DATA = frozenset(
    {
        "c10d.barrier", "c10d.monitored_barrier_", "c10d.check_for_nan",
        "_c10d_functional.wait_tensor", "_c10d_functional._wrap_tensor_autograd",
    }
)  # fmt: skip
_NEUTRAL = frozenset({"record_stream", "_wrap_tensor_autograd", "is_pinned", "set_"})
"""Ops that take a tensor and need none of its values."""

_GIVEN = ("input_tensor", "input_tensors", "inputs", "input", "tensors")
_BUFFER = ("output_tensor", "output_tensors", "outputs", "output", "tensors")
_REDUCTIONS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")
"""In the order of `torch.distributed.ReduceOp.RedOpType`."""


@dataclass(frozen=True)
class Part:
    """One tensor of a collective; coalesced ones have several.

    Attributes:
        tensors: one for each rank of the group where the op splits or joins, one otherwise.
        whole: the tensor that they are views of, or themselves.
    """

    tensors: tuple[Tensor, ...]
    whole: tuple[Tensor, ...]


@dataclass(frozen=True)
class Collective:
    """One collective op on this rank, before it runs.

    Attributes:
        op: `c10d._allgather_base_`.
        kind: "all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all", "gather",
            "scatter", "reduce", "send", "recv", or "" for an op that is counted and not understood.
        group: name of the process group.
        ranks: global ranks of the group, in its order.
        reduction: "sum", "avg", ..., "" where nothing is reduced.
        root: global rank that it comes from, or goes to, where that is one; else -1.
        tag: by which a send finds its receive.
        is_awaited: the caller waits for it before doing anything else.
        given: what this rank puts in.
    """

    op: str
    kind: str
    group: str = ""
    ranks: tuple[int, ...] = ()
    reduction: str = ""
    root: int = -1
    tag: int = 0
    is_awaited: bool = False
    given: tuple[Part, ...] = ()


def namespace_of(func: Any) -> str:
    """The namespace of an overload, "" for what has none."""
    return str(getattr(func, "namespace", ""))


def _name_of(func: Any) -> str:
    return f"{func.namespace}.{_torch.schema_of(func).name.partition('::')[2]}"


def is_collective(func: Any) -> bool:
    """True for an op of a namespace of collectives; older namespaces are spelled in these."""
    return namespace_of(func) in _NAMESPACES


def is_wait(func: Any) -> bool:
    """The functional op after which results are there."""
    return namespace_of(func) == "_c10d_functional" and "wait_tensor" in _name_of(func)


def is_neutral(func: Any) -> bool:
    """True for an op that may be given results which are still on their way: views and the like."""
    if getattr(func, "is_view", False):
        return True
    if isinstance(func, _torch.HigherOrderOperator):
        return False
    return _torch.schema_of(func).name.partition("::")[2] in _NEUTRAL


def parse(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Collective | None:
    """What a call is about to do; None where it moves no data between ranks."""
    if not is_collective(func) or _name_of(func) in _NO_DATA:
        return None
    name = _name_of(func)
    kind = _KINDS.get(name, "")
    if not kind:
        return Collective(name, "")
    bound = _bound(func, args, kwargs)
    group, ranks = group_of(bound.get("process_group", bound.get("group_name")))
    given = next(bound[key] for key in _GIVEN if key in bound)
    if kind == "all_to_all":
        parts = _chunks(given, bound.get("input_split_sizes"), len(ranks))
    else:
        parts = _parts(given, len(ranks), split=kind == "reduce_scatter")
    return Collective(
        name, kind, group, ranks, _reduction(bound.get("reduce_op")), _root(bound, ranks),
        int(bound.get("tag", 0)), bound.get("async_op") is False, () if kind == "recv" else parts,
    )  # fmt: skip


def wait_until_there(func: Any, out: Any, parts: tuple[Part, ...]) -> None:
    """Wait for results that the step has not waited for.

    Raises:
        RuntimeError: a receive, for which the step has to wait itself.
    """
    if namespace_of(func) == "c10d":
        is_receive = _KINDS.get(_name_of(func)) == "recv"
        if is_receive and all(tensor.is_cpu for part in parts for tensor in part.whole):
            if is_on_its_way(out):
                raise RuntimeError("the step has not waited for it")
            return
        wait_for(out)
        return
    for part in parts:
        for tensor in part.whole:
            torch.ops._c10d_functional.wait_tensor(tensor)


def parts_got(
    call: Collective, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> tuple[Part, ...]:
    """Where the results of a call are, or will be."""
    bound = _bound(func, args, kwargs)
    got = out
    if namespace_of(func) == "c10d":
        got = next(bound[key] for key in _BUFFER if key in bound)
    if call.kind == "all_to_all":
        return _chunks(got, bound.get("output_split_sizes"), len(call.ranks))
    return _parts(got, len(call.ranks), split=call.kind == "all_gather")


def _bound(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = [argument.name for argument in _torch.schema_of(func).arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _parts(value: Any, num_ranks: int, *, split: bool) -> tuple[Part, ...]:
    items = [value] if isinstance(value, Tensor) else list(value)
    return tuple(_part(item, num_ranks, split=split) for item in items)


def _chunks(value: Any, sizes: Sequence[int] | None, num_ranks: int) -> tuple[Part, ...]:
    """What goes to, or comes from, each rank: rows of one tensor, or one tensor each."""
    if not sizes or not isinstance(value, Tensor):
        return (_part(value, num_ranks, split=True),)
    item = value.detach()
    return (Part(tuple(item.split(list(sizes))), (item,)),)


def _part(item: Tensor | Sequence[Tensor], num_ranks: int, *, split: bool) -> Part:
    if not isinstance(item, Tensor):
        tensors = tuple(item)
        return Part(tensors, tensors)
    item = item.detach()
    return Part(item.reshape(num_ranks, -1).unbind(0) if split else (item,), (item,))


def _reduction(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    number = int(value.op())
    return _REDUCTIONS[number] if number < len(_REDUCTIONS) else "unknown"


def _root(bound: dict[str, Any], ranks: tuple[int, ...]) -> int:
    """`c10d` counts ranks within the group, and so do functional ops."""
    place = bound.get("root_rank", bound.get("src", bound.get("dst")))
    return -1 if place is None else ranks[int(place)]
