"""Two steps on two ranks: run by `test_distributed.py` in processes of its own."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import opcheck
from tests.faults import gelu_off_by
from tests.on_ranks import join_group


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.act = nn.Linear(8, 8), nn.GELU()

    def forward(self, x):
        return self.act(self.linear(x))


def ddp(net):
    return DistributedDataParallel(net)


def fsdp2(net):
    for block in net:
        fully_shard(block)
    return fully_shard(net)


def tensor_parallel(net):
    plan = {"0.linear": ColwiseParallel(), "1.linear": RowwiseParallel()}
    return parallelize_module(net, init_device_mesh("cpu", (2,)), plan)


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def train(wrap, rank, context):
    torch.manual_seed(0)
    net = wrap(nn.Sequential(Block(), Block(), nn.Linear(8, 2)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    x = torch.linspace(-1, 1, 32).reshape(4, 8) * (1 if wrap is tensor_parallel else rank + 1)
    with context(net) as session:
        for _ in range(2):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
    kept = [local(t.detach()).clone() for p in net.parameters() for t in (p, p.grad)]
    return kept, session


def main(folder: Path) -> None:
    rank = join_group()
    for wrap in (ddp, fsdp2, tensor_parallel):
        plain, _ = train(wrap, rank, contextlib.nullcontext)

        def check(net, log_dir=folder / wrap.__name__):
            return opcheck.check(net, log_dir=log_dir, quiet=True, max_checks=None)

        checked, session = train(wrap, rank, check)
        assert all(map(torch.equal, plain, checked)), wrap.__name__
        assert session.verdict is opcheck.Verdict.PASS, session.report()
        assert session.coverage.adds_up
        assert session.coverage.elements_checked == session.coverage.elements_seen
        places = {(record.module, record.phase) for record in session.records}
        for phase in ("forward", "backward", "optimizer"):
            assert ("0.linear", phase) in places, (wrap.__name__, phase, places)

        def check_bad(net, log_dir=folder / f"{wrap.__name__}_bad"):
            return opcheck.check(net, log_dir=log_dir, quiet=True, max_checks=None)

        with gelu_off_by(1e-2) if rank == 1 else contextlib.nullcontext():
            train(wrap, rank, check_bad)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
