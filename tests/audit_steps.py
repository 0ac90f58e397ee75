"""Audited steps of several ranks; run by `on_ranks` in processes of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import opcheck
from modulecheck import CollectiveAudit, audit_collectives

Wrap = Callable[[nn.Module], nn.Module]


def fsdp2(**options: Any) -> Wrap:
    def wrap(model: nn.Module) -> nn.Module:
        fully_shard(model[0], **options)
        return fully_shard(model, **options)

    return wrap


def tensor_parallel(model: nn.Module) -> nn.Module:
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(model, init_device_mesh("cpu", (2,)), plan)


MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
WRAPS: dict[str, Wrap] = {
    "fsdp2": fsdp2(),
    "fsdp2_mixed": fsdp2(mp_policy=MIXED),
    "ddp": DistributedDataParallel,
    "tensor_parallel": tensor_parallel,
}


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def train(wrap: str, rank: int, audit: bool, **options: Any) -> tuple[list[Tensor], Any]:
    """Two steps; what they leave behind."""
    torch.manual_seed(0)
    model = WRAPS[wrap](nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 6)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    own = 1 if wrap == "tensor_parallel" else rank + 1
    x = torch.linspace(-1, 1, 32).reshape(4, 8) * own
    context: Any = audit_collectives(model, **options) if audit else contextlib.nullcontext()
    with context:
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    kept = [local(t.detach()).clone() for p in model.parameters() for t in (p, p.grad)]
    versions = [local(t)._version for p in model.parameters() for t in (p, p.grad)]
    return [*kept, torch.tensor(versions), torch.get_rng_state()], context


def told(audit: CollectiveAudit) -> dict[str, Any]:
    return {
        "verdict": str(audit.verdict),
        "findings": [dataclasses.asdict(item) for item in audit.findings],
        "compared": audit.compared,
        "not_understood": audit.not_understood,
        "problems": audit.problems,
        "report": audit.report(),
    }


# ---- clean --------------------------------------------------------------------------------------


def clean_steps(rank: int, folder: Path) -> dict[str, Any]:
    found = {}
    for wrap in WRAPS:
        plain, _ = train(wrap, rank, audit=False)
        audited, audit = train(wrap, rank, audit=True)
        found[wrap] = {**told(audit), "same": all(map(torch.equal, plain, audited))}
    _, audit = train("fsdp2", rank, audit=True, max_sums=4)
    found["in_blocks"] = told(audit)
    with opcheck.check(log_dir=folder / "logs", quiet=True) as session:
        _, audit = train("fsdp2", rank, audit=True)
    found["under_opcheck"] = {**told(audit), "opcheck": str(session.verdict)}
    return found


def every_op(rank: int) -> Tensor:
    """Each way to call a collective that is understood; what they all give."""
    world = dist.group.WORLD
    values = torch.randn(8, generator=torch.Generator().manual_seed(rank))
    results = [values.clone() for _ in range(6)]
    dist.all_reduce(results[0])
    dist.all_reduce(results[1], op=dist.ReduceOp.MAX)
    dist.broadcast(results[2], 1)
    listed = [torch.empty(8), torch.empty(8)]
    dist.all_gather(listed, values)
    whole = torch.empty(16)
    work = dist.all_gather_into_tensor(whole, values, async_op=True)
    halves = whole.chunk(2)  # a view may be taken before the result is there
    work.wait()
    part = torch.empty(4)
    dist.reduce_scatter_tensor(part, values)
    dist.reduce_scatter(results[3], [values, values + 1])
    counts = torch.tensor([rank + 1, 2**62])
    dist.all_reduce(counts)
    wide = values.double() * 1e200
    dist.all_reduce(wide)
    infinite = torch.tensor([1.0, float("inf"), float("nan"), 3e38])
    dist.all_reduce(infinite)
    dist.all_reduce(torch.tensor([rank == 0, False]), op=dist.ReduceOp.MAX)
    buffer = values.repeat(50_000)  # slices are reduced, and used one after the other
    slices = buffer.chunk(2)
    works = [dist.all_reduce(item, async_op=True) for item in slices]
    for work, item in zip(works, slices, strict=True):
        work.wait()
        item.mul_(0.5)
    mapped = [
        functional.all_reduce(values, "avg", world),
        functional.all_gather_tensor(values, 0, world),
        functional.reduce_scatter_tensor(values, "sum", 0, world),
        functional.broadcast(values, 0, world),
        *functional.all_reduce_coalesced([values, values * 2], "sum", world),
        functional.all_reduce(values.bfloat16(), "sum", world).float(),
    ]
    return torch.cat([*results, *listed, *halves, part, buffer, *(item + 0 for item in mapped)])


def exchanges(rank: int) -> Tensor:
    """What is exchanged by other ops than those of every step."""
    values = torch.arange(4.0) + rank
    equal, uneven = torch.empty(4), torch.empty(2 + 4 * rank)
    dist.all_to_all_single(equal, values)
    dist.all_to_all_single(uneven, values, [1 + 2 * rank] * 2, [1, 3], async_op=True).wait()
    mapped = functional.all_to_all_single(values, None, None, dist.group.WORLD) + 0
    parts = [torch.empty(4), torch.empty(4)] if rank == 1 else None
    dist.gather(values, parts, dst=1)
    dealt = torch.empty(4)
    dist.scatter(dealt, [values, values * 2] if rank == 0 else None, src=0)
    reduced = values.clone()
    dist.reduce(reduced, dst=0)
    received = torch.empty(4)
    requests = [dist.irecv(received, 1 - rank, tag=7), dist.isend(values, 1 - rank, tag=7)]
    for request in requests:
        request.wait()
    if rank == 0:
        dist.send(values * 3, 1)
    else:
        dist.recv(received, 0)
    return torch.cat([equal, uneven, mapped, *(parts or []), dealt, received, reduced * (1 - rank)])


def others(rank: int) -> None:
    if rank == 0:
        dist.send(torch.ones(2), 1)
    else:
        dist.recv(torch.ones(2))
    dist.barrier()


def ops(rank: int) -> dict[str, Any]:
    plain = every_op(rank)
    with audit_collectives() as audit:
        audited = every_op(rank)
    exchanged = exchanges(rank)
    with audit_collectives() as exchange:
        again = exchanges(rank)
    with audit_collectives() as alone:
        dist.all_reduce(torch.ones(2))
        if rank == 0:
            dist.send(torch.ones(2), 1)
    if rank == 1:
        dist.recv(torch.ones(2), 0)
    with audit_collectives() as uncounted:
        others(rank)
        dist.all_reduce(torch.ones(2))
    with audit_collectives() as booleans:
        dist.all_reduce(torch.tensor([rank == 0, False]))
    with audit_collectives() as empty:
        torch.ones(2) + 1
    return {
        "all": {**told(audit), "same": torch.equal(plain, audited)},
        "others": told(uncounted),
        "exchange": {**told(exchange), "same": torch.equal(exchanged, again)},
        "alone": told(alone),
        "booleans": told(booleans),
        "empty": told(empty),
    }


# ---- faults -------------------------------------------------------------------------------------


@contextlib.contextmanager
def planted(op: str, spoil: Callable[[Any], None], *, here: bool) -> Iterator[None]:
    """A backend that spoils what `op` gives; of a reduce-scatter, the input on the way to it.

    Waiting for a reduce-scatter of gloo writes its result once more.
    """
    if not here:
        yield
        return
    kernel = torch.library.get_kernel(f"c10d::{op}", "CPU")

    def run(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if op == "_reduce_scatter_base_":
            output, given, *rest = args
            sent = given.clone()
            spoil(sent.view(2, -1)[1])  # what rank 1 will get
            return kernel.call_boxed(keyset, output, sent, *rest, **kwargs)
        if op == "send":
            sent = [tensor.clone() for tensor in args[0]]
            spoil(sent)
            return kernel.call_boxed(keyset, sent, *args[1:], **kwargs)
        out = kernel.call_boxed(keyset, *args, **kwargs)
        written, work = (out[0], out[-1]) if isinstance(out, tuple) else (args[0], out)
        dist.Work.unbox(work).wait()
        spoil(written)
        return out

    library = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered")
        library.impl(op, run, "CPU", with_keyset=True)
    try:
        yield
    finally:
        library._destroy()


def first(value: Any) -> Tensor:
    while not isinstance(value, Tensor):
        value = value[0]
    return value.view(-1)


def scale_one(value: Any) -> None:
    flat = first(value)
    flat[3] += 1e-4 * flat[3].abs() if flat.is_floating_point() else 1


def swap(value: Any) -> None:
    flat = first(value)
    flat.copy_(flat.roll(len(flat) // 2))


def lose_one(value: Any) -> None:
    first(value)[-1] = float("nan")


def change_a_bit(value: Any) -> None:
    flat = first(value)
    flat[-1:].view(torch.int16).add_(1)


FAULTS: dict[str, tuple[str, str, Callable[[Any], None]]] = {
    "reduce_scatter": ("fsdp2", "_reduce_scatter_base_", scale_one),
    "reduce_scatter_nan": ("fsdp2", "_reduce_scatter_base_", lose_one),
    "all_gather": ("fsdp2", "_allgather_base_", swap),
    "all_gather_bits": ("fsdp2_mixed", "_allgather_base_", change_a_bit),
    "all_reduce": ("ddp", "allreduce_", scale_one),
}


EXCHANGES = {
    "all_to_all": ("alltoall_base_", 1),
    "gather": ("gather_", 1),
    "scatter": ("scatter_", 1),
    "reduce": ("reduce_", 0),
    "recv": ("send", 0),
}
"""By kind of collective: the op, and the rank whose backend is wrong."""


def faulty_steps(rank: int) -> dict[str, Any]:
    found = {}
    for kind, (op, wrong) in EXCHANGES.items():
        with planted(op, scale_one, here=rank == wrong), audit_collectives() as audit:
            exchanges(rank)
        found[f"exchange_{kind}"] = told(audit)
    for name, (wrap, op, spoil) in FAULTS.items():
        with planted(op, spoil, here=rank == 1):
            found[name] = told(train(wrap, rank, audit=True)[1])
    with planted("_reduce_scatter_base_", scale_one, here=rank == 1):
        found["in_blocks"] = told(train("fsdp2", rank, audit=True, max_sums=8)[1])
    return {**found, **wrong_calls(rank)}


def wrong_calls(rank: int) -> dict[str, Any]:
    values = torch.arange(4.0) + rank
    with planted("broadcast_", scale_one, here=rank == 1), audit_collectives() as broadcast:
        dist.broadcast(values, 0)
    with audit_collectives() as order:
        dist.all_reduce(values)
        with contextlib.suppress(RuntimeError):
            if rank == 0:
                dist.all_reduce(torch.ones(2), op=dist.ReduceOp.MAX)
            else:
                dist.all_reduce(torch.ones(2))
    with planted("allreduce_", scale_one, here=rank == 1), audit_collectives() as extreme:
        dist.all_reduce(values, op=dist.ReduceOp.MIN)
    with planted("allreduce_", scale_one, here=rank == 1), audit_collectives() as integers:
        dist.all_reduce(torch.arange(4) * 100_000)
    model = DistributedDataParallel(nn.Linear(3, 2))
    with audit_collectives(model) as drifted:
        dist.all_reduce(values)
        if rank == 1:
            with torch.no_grad():
                model.module.bias[1] += 1e-6
    return {
        "broadcast": told(broadcast), "order": told(order), "extreme": told(extreme),
        "integers": told(integers), "replica": told(drifted),
    }  # fmt: skip


def left_early(rank: int) -> dict[str, Any]:
    """Rank 1 has an exception; rank 0 waits no longer than it was told."""
    audit = audit_collectives(timeout_s=1.0)
    begin = time.monotonic()
    with contextlib.suppress(KeyError), audit:
        dist.all_reduce(torch.ones(2))
        if rank == 1:
            raise KeyError("mine")
    return {**told(audit), "waited_s": time.monotonic() - begin}


def all_steps(rank: int, folder: Path) -> dict[str, Any]:
    warnings.simplefilter("ignore", FutureWarning)
    return {
        "clean": clean_steps(rank, folder),
        "ops": ops(rank),
        "faulty": faulty_steps(rank),
        "left": left_early(rank),
    }
