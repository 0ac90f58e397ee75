"""Several ranks: wrappers, parameters in parts, process groups, collectives."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch
from torch import nn

from modulecheck import _torch
from opcheck.modes import PassingMode

__all__ = [
    "CollectiveError",
    "default_store",
    "group_of",
    "inside_ddp",
    "is_fsdp2",
    "is_gathered",
    "local_part",
    "no_collectives",
    "own_class",
    "rank_of_several",
    "ranks_of",
    "replica_key",
    "sharded_inside",
    "shared_by_ranks",
    "wait_for",
    "with_local_part",
]


def inside_ddp(module: nn.Module) -> nn.Module:
    """What a DistributedDataParallel holds, whose own forward talks to other ranks."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        held: nn.Module = module.module
        return held
    return module


# ---- parameters in parts ------------------------------------------------------------------------


def is_fsdp2(module: nn.Module) -> bool:
    """`fully_shard` was applied to it: hooks of its own gather its parameters and free them."""
    home = sys.modules.get("torch.distributed.fsdp")
    return home is not None and isinstance(module, home.FSDPModule)


def own_class(module: nn.Module) -> type[nn.Module]:
    """The user's class, which `fully_shard` has replaced by one of its own."""
    kind = type(module)
    return kind.__mro__[2] if is_fsdp2(module) else kind


def is_gathered(module: nn.Module) -> bool:
    """FSDP2 manages parameters in it, so that they are plain and full only while it runs."""
    return any(map(_torch.is_managed_by_fsdp, module.modules()))


def sharded_inside(module: nn.Module) -> str:
    """The name of a submodule whose parameters FSDP2 holds sharded at this moment, else ""."""
    for name, item in module.named_modules():
        if name and is_fsdp2(item):
            groups = _torch.param_groups_of(_torch.fsdp_state_of(item)())
            if not all(map(_torch.is_unsharded, groups)):
                return str(name)
    return ""


def _dtensor_class() -> type | None:
    home = sys.modules.get("torch.distributed.tensor")
    return None if home is None else home.DTensor


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a DTensor, and what a collective gave once it has arrived."""
    dtensor = _dtensor_class()
    if dtensor is not None and isinstance(tensor, dtensor):
        tensor = tensor.to_local()  # type: ignore[attr-defined]
    if _torch.is_pending(tensor):
        tensor = tensor.wait()  # type: ignore[attr-defined]
    return tensor


def ranks_of(tensors: list[torch.Tensor]) -> list[int]:
    """The ranks that hold the parts of the DTensors among these, if there are several."""
    dtensor = _dtensor_class()
    found: set[int] = set()
    for tensor in tensors:
        if dtensor is not None and isinstance(tensor, dtensor):
            found.update(tensor.device_mesh.mesh.flatten().tolist())  # type: ignore[attr-defined]
    return sorted(found) if len(found) > 1 else []


def shared_by_ranks(model: nn.Module) -> str:
    """By what a step of this model talks to other ranks, "" if it does not seem to."""
    if default_store() is None:
        return ""
    for item in model.modules():
        if inside_ddp(item) is not item:
            return "DistributedDataParallel reduces its gradients over ranks"
    ranks = ", ".join(map(str, ranks_of([*model.parameters(), *model.buffers()])))
    return f"ranks {ranks} share its parameters" if ranks else ""


def with_local_part(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """`local` in place of what this rank holds of `tensor`, which may be an ordinary one."""
    dtensor = _dtensor_class()
    if dtensor is None or not isinstance(tensor, dtensor):
        return local
    whole: torch.Tensor = dtensor.from_local(  # type: ignore[attr-defined]
        local, tensor.device_mesh, tensor.placements, run_check=False,  # type: ignore[attr-defined]
        shape=tensor.shape, stride=tensor.stride(),
    )  # fmt: skip
    return whole


def default_store() -> tuple[Any, int, int] | None:
    """Store, rank and size of the default process group; None: there is none, or it is alone."""
    dist = torch.distributed
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() < 2:
        return None
    return _torch.default_store_of_group()(), dist.get_rank(), dist.get_world_size()


def group_of(value: Any) -> tuple[str, tuple[int, ...]]:
    """Name and global ranks of a process group, as an op is given it: an object or its name."""
    from torch.distributed import distributed_c10d as c10d

    if isinstance(value, str):
        value = _torch.resolve_group()(value)
    elif not isinstance(value, c10d.ProcessGroup):
        value = _torch.unbox_group()(value)
    return str(value.group_name), tuple(c10d.get_process_group_ranks(value))


def replica_key(tensor: torch.Tensor) -> str:
    """The same on all ranks that hold the same part of a DTensor; "" where each has its own."""
    dtensor = _dtensor_class()
    if dtensor is None or not isinstance(tensor, dtensor):
        return ""
    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    place = mesh.get_coordinate()
    shared = [placement.is_replicate() for placement in placements]
    is_whole = not any(placement.is_partial() for placement in placements)
    if place is None or not is_whole or not any(shared):
        return ""
    own = [at for at, replicated in zip(place, shared, strict=True) if not replicated]
    return f"{mesh.mesh.tolist()} {own}"


def wait_for(out: Any) -> None:
    """Wait for what a collective returned: the work of a `c10d` op, or functional results.

    Not without need: waiting for a reduce-scatter of gloo writes its result once more.
    """
    for item in out if isinstance(out, (list, tuple)) else (out,):
        if not isinstance(item, torch.ScriptObject):
            continue
        if "Work" in str(_torch.type_of_script_object()(item)):
            _torch.unbox_work()(item).wait()


def is_on_its_way(out: Any) -> bool:
    """True for the work of a receive that nobody has waited for: of gloo, that can be done once."""
    work: Any = _torch.unbox_work()(out)
    return not work.is_completed()


class CollectiveError(RuntimeError):
    """A run again would talk to other ranks, which may not do the same."""


_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional")


class _NoCollectives(PassingMode):
    supports_higher_order_operators = True

    def _handle(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if getattr(func, "namespace", "") in _COLLECTIVES:
            raise CollectiveError(
                f"collective: {func} inside of the module would be run once more, and other ranks"
                " may not do the same; wrap the modules beside it"
            )
        return func(*args, **kwargs)


def no_collectives() -> contextlib.AbstractContextManager[Any]:
    """Raises CollectiveError in place of a collective, where there are several ranks."""
    if default_store() is None:
        return contextlib.nullcontext()
    return _NoCollectives()  # type: ignore[no-untyped-call]


def rank_of_several() -> int | None:
    """The rank of this process, None where it is alone."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank() if distributed.get_world_size() > 1 else None
