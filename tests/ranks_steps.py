"""Checked steps of models that several ranks share; run by `on_ranks` in processes of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from modulecheck import CompareResult, PrecisionChecker
from opcheck import ArgumentError
from tests.compiled import (
    CXX,
    KINDS,
    MARK,
    WIDTH,
    Block,
    add_to_one,
    compile_in_place,
    explain,
    stack,
    wrong_backend,
)

Wrap = Callable[[nn.Module], nn.Module]


def fsdp2(*, root: bool = True, mixed: bool = False, **options: Any) -> Wrap:
    if mixed:
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )

    def wrap(model: nn.Module) -> nn.Module:
        for block in model.blocks:
            fully_shard(block, **options)
        return fully_shard(model, **options) if root else model

    return wrap


def checkpointed(model: nn.Module) -> nn.Module:
    for place, block in enumerate(model.blocks):
        model.blocks[place] = checkpoint_wrapper(block)
    return fsdp2()(model)


def reentrant_around_fsdp2(model: nn.Module) -> nn.Module:
    for place, block in enumerate(model.blocks):
        model.blocks[place] = checkpoint_wrapper(
            fully_shard(block), checkpoint_impl=CheckpointImpl.REENTRANT
        )
    return fully_shard(model)


def each_layer(model: nn.Module) -> nn.Module:
    for module in list(model.modules()):
        if isinstance(module, (nn.Linear, nn.LayerNorm)):
            fully_shard(module)
    return fully_shard(model)


def ddp(**options: Any) -> Wrap:
    return lambda model: DistributedDataParallel(model, **options)


def tensor_parallel(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def two_dimensions(model: nn.Module) -> nn.Module:
    """FSDP2 of a model whose layers are tensor parallel."""
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "tp"))
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def sequence_parallel(model: nn.Module) -> nn.Module:
    """Blocks whose inputs, outputs and all between are DTensors."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = Shard(0)
    for block in model.blocks:
        plan = {
            "norm": SequenceParallel(sequence_dim=0),
            "up": ColwiseParallel(input_layouts=rows),
            "down": RowwiseParallel(output_layouts=rows, use_local_output=False),
        }
        parallelize_module(block, mesh, plan)
        into = PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=rows, use_local_output=False
        )
        out = PrepareModuleOutput(output_layouts=rows, desired_output_layouts=Replicate())
        parallelize_module(parallelize_module(block, mesh, into), mesh, out)
    return model


@dataclass(frozen=True)
class Case:
    """A way to share a model, and what is checked in it."""

    wrap: Wrap
    kind: str = "plain"
    classes: tuple[type[nn.Module], ...] | None = None
    backend: Any = "aot_eager"
    same_input: bool = False
    marked: bool = False
    """A backend knows one block by its width."""
    options: dict[str, Any] = field(default_factory=dict)


CLEAN = {
    "fsdp2": Case(fsdp2()),
    "fsdp2_no_reshard": Case(fsdp2(reshard_after_forward=False), options={"golden": "always"}),
    "fsdp2_mixed": Case(fsdp2(mixed=True)),
    "fsdp2_each_layer": Case(each_layer, classes=(nn.Linear, nn.LayerNorm)),
    "fsdp2_twice": Case(fsdp2(), "twice"),
    "fsdp2_in_reentrant": Case(reentrant_around_fsdp2),
    "fsdp2_blocks_only": Case(fsdp2(root=False)),
    "fsdp2_buffers": Case(fsdp2(), "batch_norm"),
    "fsdp2_dropout": Case(fsdp2(), "dropout"),
    "fsdp2_graph_break": Case(fsdp2(), "graph_break"),
    "fsdp2_inside_blocks": Case(fsdp2(), classes=(nn.Linear, nn.LayerNorm)),
    "fsdp2_checkpoint": Case(checkpointed),
    "fsdp2_inductor": Case(fsdp2(), backend="inductor"),
    "ddp": Case(ddp()),
    "ddp_buffers": Case(ddp(), "batch_norm"),
    "ddp_unused": Case(ddp(find_unused_parameters=True)),
    "ddp_static": Case(ddp(static_graph=True)),
    "tensor_parallel": Case(tensor_parallel, same_input=True, options={"golden": "always"}),
    "two_dimensions": Case(two_dimensions, same_input=True),
    "sequence_parallel": Case(sequence_parallel, same_input=True, options={"golden": "always"}),
}  # fmt: skip


# ---- a step -------------------------------------------------------------------------------------


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def build(case: Case, rank: int) -> tuple[nn.Module, Callable[[], Tensor]]:
    workload = stack(case.kind, num_blocks=2)
    if case.marked:
        mark_block(workload.model, MARK * (dist.get_world_size() if case.same_input else 1))
    torch._dynamo.reset()
    torch.manual_seed(7)
    model = case.wrap(workload.model)
    inputs, target = workload.batch
    inputs = inputs if case.same_input else inputs * (rank + 1)
    return model, lambda: functional.mse_loss(model(inputs).float(), target)


def mark_block(model: nn.Module, width: int) -> None:
    """`compiled.mark`, for a block that is cut in parts of that width."""
    torch.manual_seed(5)
    model.blocks[1].up = nn.Linear(WIDTH, width)
    model.blocks[1].down = nn.Linear(width, WIDTH)


def compile_inside_fsdp2(module: nn.Module, backend: Any) -> None:
    if isinstance(module, FSDPModule):
        module.forward = torch.compile(module.forward, backend=backend)
    else:
        compile_in_place(module, backend)


def train(case: Case, rank: int, checker: PrecisionChecker | None) -> tuple[list[Any], list[Any]]:
    """Two steps; results of both, and every tensor that they leave behind."""
    classes = case.classes or (type(KINDS[case.kind].make()),)
    model, loss_of = build(case, rank)
    if checker is None:
        for module in [item for item in model.modules() if isinstance(item, classes)]:
            compile_inside_fsdp2(module, case.backend)
    else:
        checker.wrap_by_policy(model, classes)
        checker.install(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    results, kept = [], []
    for step in range(2):
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        if checker is not None:
            results.append(checker.collect(loss, keep_installed=step == 0))
        optimizer.step()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        kept += [loss.detach(), *(local(grad).clone() for grad in grads)]
    kept += [local(p.detach()) for p in (*model.parameters(), *model.buffers())]
    return results, [*kept, torch.get_rng_state()]


@contextlib.contextmanager
def random_as_eager(case: Case) -> Iterator[None]:
    if case.backend != "inductor":
        yield
        return
    with torch._inductor.config.patch(fallback_random=True):
        yield


def described(results: list[CompareResult]) -> dict[str, Any]:
    return {
        "verdicts": [str(result.verdict) for result in results],
        "reason": results[0].judgement[1],
        "suspects": [list(pair) for pair in results[0].suspects],
        "explained": "\n".join(explain(result) for result in results),
        "notes": [
            note
            for diff in results[0].diffs
            for _, _, item in diff.tensors()
            for note in item.notes
        ],
        "remarks": results[0].notes,
        "recorded": [
            [
                call.name,
                call.kind,
                list(call.phases),
                all(type(item) in (Tensor, nn.Parameter) for item in call.parameters.values()),
                [list(item.shape) for item in call.parameters.values()],
                len(call.grads),
            ]
            for call in results[0].recordings
        ],
        "compared": {diff.name: diff.compared for diff in results[0].diffs},
        "param_grads": {
            diff.name: sum(len(call.param_grads or ()) for call in diff.calls or [diff])
            for diff in results[0].diffs
        },
    }


# ---- what `on_ranks` calls ----------------------------------------------------------------------


def all_steps(rank: int, folder: Path) -> dict[str, Any]:
    return {
        "clean": clean_steps(rank),
        "faulty": faulty_steps(rank, folder),
        "uneven": uneven_steps(rank),
    }


def clean_steps(rank: int) -> dict[str, Any]:
    found = {}
    for name, case in CLEAN.items():
        if case.backend == "inductor" and CXX is None:
            continue
        with random_as_eager(case):
            _, plain = train(case, rank, None)
        results, checked = train(case, rank, PrecisionChecker(backend=case.backend, **case.options))
        found[name] = {
            **described(results),
            "same": len(plain) == len(checked) and all(map(torch.equal, plain, checked)),
        }
    return found


def faulty_steps(rank: int, folder: Path) -> dict[str, Any]:
    found = {}
    forward = wrong_backend(forward=add_to_one(0.5))
    backward = wrong_backend(backward=add_to_one(0.5))
    for name in ("fsdp2", "fsdp2_mixed", "fsdp2_checkpoint", "ddp", "tensor_parallel"):
        for phase, wrong in (("forward", forward), ("backward", backward)):
            checker = PrecisionChecker(backend=wrong if rank == 1 else "aot_eager")
            results, _ = train(dataclasses.replace(CLEAN[name], marked=True), rank, checker)
            if name == "fsdp2" and phase == "forward":
                report_all(checker, results[0], rank, folder)
            found[f"{name} {phase}"] = described(results)
            if name == "fsdp2" and rank == 1:
                found[f"{name} {phase}"]["culprits"] = drilled(checker, results[0])
    return found


def report_all(checker: PrecisionChecker, result: CompareResult, rank: int, folder: Path) -> None:
    """One CSV of all ranks, one of each, and what is printed."""
    checker.report(result, csv_path=folder / f"precision_rank{rank}.csv")
    with (folder / f"printed.{rank}").open("w") as file, contextlib.redirect_stdout(file):
        checker.report(result, csv_path=folder / "gathered.csv", gather=True)


def dying_rank(rank: int, folder: Path) -> dict[str, Any]:
    """Rank 1 ends after its backward; rank 0 goes on."""
    model, loss_of = build(CLEAN["ddp"], rank)
    checker = PrecisionChecker(rank_timeout_s=1.5)
    checker.wrap_all_children(model, depth=0)
    checker.install(model)
    loss = loss_of()
    loss.backward()
    if rank == 1:
        os._exit(3)
    result = checker.collect(loss)
    begin = time.monotonic()
    report_all(checker, result, rank, folder)
    return {**described([result]), "waited_s": time.monotonic() - begin}


def drilled(checker: PrecisionChecker, result: CompareResult) -> list[list[str]]:
    """One rank alone, without a collective: with the model as it is before it is sharded."""

    def plain() -> nn.Module:
        model = stack(num_blocks=2).model
        mark_block(model, MARK)
        return model

    try:
        found = checker.drilldown(result, repro_dir=None)
    except ArgumentError as error:
        assert "sharded by FSDP2" in str(error)  # noqa: PT017 - `raises` would hide the others
        found = checker.drilldown(result, repro_dir=None, model=plain)
    return [[item.module, item.phase, item.stage, item.explanation] for item in found]


COLLECTIVES = ("all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor",
               "reduce_scatter_single", "all_reduce", "broadcast", "barrier")  # fmt: skip


@contextlib.contextmanager
def counted_collectives() -> Iterator[dict[str, int]]:
    counts: dict[str, int] = {}
    originals = {name: getattr(dist, name) for name in COLLECTIVES if hasattr(dist, name)}

    def counting(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] = counts.get(name, 0) + 1
            return originals[name](*args, **kwargs)

        return call

    for name in originals:
        setattr(dist, name, counting(name))
    try:
        yield counts
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def fsdp1(model: nn.Module) -> nn.Module:
    options = {"use_orig_params": True, "device_id": torch.device("cpu")}
    for place, block in enumerate(model.blocks):
        model.blocks[place] = FullyShardedDataParallel(block, **options)
    return FullyShardedDataParallel(model, **options)


def uneven_steps(rank: int) -> dict[str, Any]:
    """Ranks that differ in what they check, and steps that FSDP2 has no full parameters for."""
    case = CLEAN["fsdp2"]
    with counted_collectives() as plain_counts:
        train(case, rank, None)
    with counted_collectives() as checked_counts:
        results, _ = train(case, rank, PrecisionChecker(golden="always") if rank == 0 else None)
    checker = PrecisionChecker(rank_timeout_s=1.0) if rank == 0 else None
    tp_results, _ = train(CLEAN["tensor_parallel"], rank, checker)
    return {
        "one_rank": described(results) if results else None,
        "plain_collectives": plain_counts,
        "checked_collectives": checked_counts,
        "tensor_parallel": described(tp_results) if tp_results else None,
        "collective_inside": described([_collective_inside()]),
        "fsdp1": described(train(Case(fsdp1), rank, PrecisionChecker())[0]),
        "two_pass": {name: _two_pass(CLEAN[name], rank) for name in ("fsdp2", "ddp")},
        "ddp_root": described([_ddp_root(rank)]),
        "root": described([_root_step(rank)]),
        "no_backward": described([_forward_only(rank, grad=True)]),
        "inference": described([_forward_only(rank, grad=False)]),
    }


class ReducingBlock(Block):
    """Sums over all ranks inside of its forward."""

    def forward(self, hidden: Tensor) -> Tensor:
        summed = all_reduce(super().forward(hidden).detach(), "sum", dist.group.WORLD)
        return super().forward(hidden) + summed


def _collective_inside() -> CompareResult:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), ReducingBlock())
    checker = PrecisionChecker()
    checker.wrap_by_policy(model, (ReducingBlock, nn.Linear))
    with checker.installed(model):
        loss = model(torch.ones(2, WIDTH)).square().mean()
        loss.backward()
    return checker.collect(loss)


def _two_pass(case: Case, rank: int) -> str:
    model, _ = build(case, rank)
    checker = PrecisionChecker(single_pass=False)
    checker.wrap_all_children(model)
    try:
        checker.compare(lambda twin: twin(torch.ones(2, WIDTH)).square().mean(), model)
    except ValueError as error:
        return str(error)
    return ""


def _ddp_root(rank: int) -> CompareResult:
    model, loss_of = build(CLEAN["ddp_buffers"], rank)
    checker = PrecisionChecker()
    checker.wrap(model)
    with checker.installed(model):
        loss = loss_of()
        loss.backward()
    return checker.collect(loss)


def _root_step(rank: int) -> CompareResult:
    """The root holds modules that shard on their own."""
    model, loss_of = build(CLEAN["fsdp2"], rank)
    checker = PrecisionChecker()
    checker.wrap(model)
    with checker.installed(model):
        loss = loss_of()
        loss.backward()
    return checker.collect(loss)


def _forward_only(rank: int, *, grad: bool) -> CompareResult:
    model, loss_of = build(CLEAN["fsdp2"], rank)
    checker = PrecisionChecker(golden="always")
    checker.wrap_by_policy(model, type(model.blocks[0]))
    checker.install(model)
    with torch.set_grad_enabled(grad):
        loss = loss_of()
    return checker.collect(loss)
