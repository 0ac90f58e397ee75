"""The only door of this package to private torch. Tested on PyTorch 2.13."""

from __future__ import annotations

import contextlib
import logging
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules import module as _module
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from opcheck.errors import OpcheckError

__all__ = [
    "CollectiveError",
    "TorchDispatchMode",
    "compiled_graphs",
    "compiles_only_inlined",
    "default_store",
    "graph_task_id",
    "group_of",
    "inlined",
    "inside_autograd",
    "inside_ddp",
    "is_backend",
    "is_compiled_wrapper",
    "is_fsdp2",
    "is_gathered",
    "is_own_inductor",
    "lacks_cpp_compiler",
    "load_backend",
    "local_part",
    "needed",
    "next_sequence_nr",
    "no_collectives",
    "no_modes",
    "not_by_dynamo",
    "own_class",
    "queue_after_backward",
    "random_as_eager",
    "rank_of_several",
    "ranks_of",
    "recompile_limit_hits",
    "replica_key",
    "runs_in_this_backward",
    "sharded_inside",
    "shared_by_ranks",
    "undisturbed",
    "unwraps_itself",
    "wait_for",
    "with_local_part",
]


def needed(owner: object, name: str) -> Any:
    """A private attribute of torch; OpcheckError where this version lacks it."""
    try:
        return getattr(owner, name)
    except AttributeError:
        where = getattr(owner, "__name__", type(owner).__name__)
        raise OpcheckError(
            f"torch {torch.__version__} has no {where}.{name}, which modulecheck needs;"
            " see the tested versions in the README"
        ) from None


graph_task_id: Callable[[], int] = needed(torch._C, "_current_graph_task_id")
next_sequence_nr: Callable[[], int] = needed(torch.autograd, "_get_sequence_nr")
no_modes = _disable_current_modes

Function = TypeVar("Function", bound=Callable[..., Any])


def not_by_dynamo(function: Function) -> Function:
    """Keeps Dynamo out of a function of ours, also where the user's frame is being traced."""
    disabled: Function = torch.compiler.disable(function)
    return disabled


def inside_autograd() -> bool:
    """True while a backward runs on this thread."""
    return graph_task_id() != -1


def runs_in_this_backward(node: Any) -> bool:
    """True for a node that the backward running on this thread runs, or whose gradient it gives."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # a leaf among the inputs of torch.autograd.grad
        return True


def queue_after_backward(function: Callable[[], None]) -> None:
    """Run `function` when the backward that is running ends, before the caller goes on."""
    needed(torch.autograd.Variable, "_execution_engine").queue_callback(function)


def lacks_cpp_compiler() -> bool:
    """True when inductor would not find the compiler that its CPU code needs."""
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        return True
    return False


def load_backend(backend: Any) -> Callable[..., Any]:
    """The function that compiles a graph, of a name that `torch.compile` takes."""
    if not isinstance(backend, str):
        found: Callable[..., Any] = backend
        return found
    from torch._dynamo.backends.registry import lookup_backend

    return lookup_backend(backend)


def is_backend(name: str) -> bool:
    """True for a name that `torch.compile` takes."""
    from torch._dynamo.exc import InvalidBackend

    try:
        load_backend(name)
    except InvalidBackend:
        return False
    return True


def is_own_inductor(backend: Any) -> bool:
    """True for "inductor", unless somebody has registered another backend by that name."""
    if not isinstance(backend, str) or backend != "inductor":
        return False
    return load_backend(backend).__module__ == "torch._dynamo.backends.inductor"


def is_compiled_wrapper(module: nn.Module) -> bool:
    """What `torch.compile(module)` gives."""
    home = sys.modules.get("torch._dynamo.eval_frame")
    return home is not None and isinstance(module, home.OptimizedModule)


# ---- how a module is compiled -------------------------------------------------------------------

_TORCH = str(Path(torch.__file__).parent)


def compiles_only_inlined(module: nn.Module) -> bool:
    """True when Dynamo skips the frame of this module's `forward`, as all of torch's own.

    False where a submodule is of a class whose Python module cannot be imported (a notebook, an
    exec): tracing into it from an extra frame crashes the user's step.
    """
    forward = getattr(module.forward, "__func__", module.forward)
    code = getattr(forward, "__code__", None)
    if code is None or not code.co_filename.startswith(_TORCH):
        return False
    return all(type(item).__module__ in sys.modules for item in module.modules())


def inlined(function: Callable[..., Any], tag: str | None) -> Callable[..., Any]:
    """`function` behind a frame that Dynamo does not skip, with a code object of its own.

    Dynamo keeps compiled code by code object. Were it one for all, the ninth shape of `nn.Linear`
    would fall back to eager. One without a tag is nobody else's.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    code = call.__code__.replace(co_name=f"call_{len(_CODES)}")
    if tag is not None:
        code = _CODES.setdefault(tag, code)
    return types.FunctionType(code, globals(), "call", None, call.__closure__)


_CODES: dict[str, types.CodeType] = {}
"""One code object for all modules that compile to the same graph, kept for the life of the process
because Dynamo's cache hangs on it."""


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
    return any(getattr(item, "_is_fsdp_managed_module", False) for item in module.modules())


def sharded_inside(module: nn.Module) -> str:
    """The name of a submodule whose parameters FSDP2 holds sharded at this moment, else ""."""
    for name, item in module.named_modules():
        if name and is_fsdp2(item):
            groups: Any = item._get_fsdp_state()._fsdp_param_groups
            if not all(group.is_unsharded for group in groups):
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
    pending = sys.modules.get("torch.distributed._functional_collectives")
    if pending is not None and isinstance(tensor, pending.AsyncCollectiveTensor):
        tensor = tensor.wait()
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
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store(), dist.get_rank(), dist.get_world_size()


def group_of(value: Any) -> tuple[str, tuple[int, ...]]:
    """Name and global ranks of a process group, as an op is given it: an object or its name."""
    from torch.distributed import distributed_c10d as c10d

    if isinstance(value, str):
        value = needed(c10d, "_resolve_process_group")(value)
    elif not isinstance(value, c10d.ProcessGroup):
        value = needed(c10d.ProcessGroup, "unbox")(value)
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
        if isinstance(item, torch.ScriptObject) and "Work" in str(item._type()):
            needed(torch.distributed.Work, "unbox")(item).wait()


def unwraps_itself(types: tuple[type, ...]) -> bool:
    """True for subclasses (DTensor) that dispatch what they hold again when a mode steps aside."""
    return any(hasattr(kind, "__tensor_flatten__") for kind in types)


class CollectiveError(RuntimeError):
    """A run again would talk to other ranks, which may not do the same."""


_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional")


class _NoCollectives(TorchDispatchMode):
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """What the module itself compiles runs compiled, as it does without this mode."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "namespace", "") in _COLLECTIVES:
            raise CollectiveError(
                f"collective: {func} inside of the module would be run once more, and other ranks"
                " may not do the same; wrap the modules beside it"
            )
        return func(*args, **(kwargs or {}))


def no_collectives() -> contextlib.AbstractContextManager[Any]:
    """Raises CollectiveError in place of a collective, where there are several ranks."""
    if default_store() is None:
        return contextlib.nullcontext()
    return _NoCollectives()  # type: ignore[no-untyped-call]


# ---- settings while a step is checked -----------------------------------------------------------


@contextlib.contextmanager
def random_as_eager(backend: Any) -> Iterator[bool]:
    """Have inductor draw the random numbers that eager draws; True where that was switched on."""
    if backend in ("eager", "aot_eager", "aot_eager_decomp_partition"):
        yield False
        return
    from torch._inductor import config

    before = config.fallback_random
    config.fallback_random = True
    try:
        yield not before
    finally:
        config.fallback_random = before


class _Listener(logging.Handler):
    def __init__(self, found: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._found = found

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if "recompile_limit" in message:
            self._found.append(message)


@contextlib.contextmanager
def recompile_limit_hits() -> Iterator[list[str]]:
    """The warnings of Dynamo that it goes on in eager, as they come."""
    found: list[str] = []
    handler = _Listener(found)
    logger = logging.getLogger("torch._dynamo.convert_frame")
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)


# ---- what is compiled ---------------------------------------------------------------------------

_STAGES = {
    "dynamo_output_graph": "Captured",
    "aot_forward_graph": "Forward",
    "aot_inference_graph": "Forward",
    "aot_backward_graph": "Backward",
    "inductor_post_grad_graph": "Post_Grad",
}


class _GraphListener(logging.Handler):
    """Takes graphs out of the structured trace that torch keeps for `TORCH_TRACE`."""

    def __init__(self, write: Callable[[str, str], None]) -> None:
        super().__init__(logging.DEBUG)
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        metadata, text = getattr(record, "metadata", {}), getattr(record, "payload", None)
        artifact = metadata.get("artifact")
        names = [artifact.get("name")] if isinstance(artifact, dict) else list(metadata)
        stage = next((_STAGES[name] for name in names if name in _STAGES), None)
        if stage is not None and isinstance(text, str):
            # torch calls some graphs by a name that is no Python
            self._write(stage, text.replace("class <lambda>(", "class GraphModule("))


@contextlib.contextmanager
def compiled_graphs(write: Callable[[str, str], None]) -> Iterator[None]:
    """Calls `write(stage, text)` for every graph that is compiled, caches left alone."""
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config

    handler = _GraphListener(write)
    logger = logging.getLogger("torch.__trace")
    logger.addHandler(handler)
    try:
        # a graph that comes out of a cache is not traced
        with (
            functorch_config.patch(enable_autograd_cache=False),
            inductor_config.patch(fx_graph_cache=False),
        ):
            yield
    finally:
        logger.removeHandler(handler)


def rank_of_several() -> int | None:
    """The rank of this process, None where it is alone."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank() if distributed.get_world_size() > 1 else None


# ---- running a module again ---------------------------------------------------------------------

_HOOK_TABLES = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
)
_FORWARD_TABLES = ("_forward_hooks", "_forward_pre_hooks")
_REPARAMETRIZING = "torch.nn.utils"
_GLOBAL_TABLES = ("_global_forward_hooks", "_global_forward_pre_hooks")


_DISTRIBUTING = "torch.distributed.tensor"


def _is_part_of_forward(hook: Any) -> bool:
    """Weight norm, spectral norm and pruning of torch.nn.utils compute weights in hooks.

    `parallelize_module` turns inputs and outputs into DTensors and back in hooks.
    """
    home = hook.__module__ if isinstance(hook, types.FunctionType) else type(hook).__module__
    return str(home).startswith((_REPARAMETRIZING, _DISTRIBUTING))


def user_hooks(root: nn.Module) -> int:
    """Hooks that a replay leaves out although they may change what the module computes.

    Those of a module of FSDP2 itself run outside of what is compared.
    """
    return sum(
        not _is_part_of_forward(hook)
        for item in root.modules()
        if item is not root or not is_fsdp2(root)
        for name in _FORWARD_TABLES
        for hook in getattr(item, name).values()
    )


def _held(value: Any) -> Any:
    """A shallow copy of what a forward may change in place without assigning it."""
    return type(value)(value) if type(value) in (list, dict, set) else None


@contextlib.contextmanager
def undisturbed(root: nn.Module) -> Iterator[None]:
    """Run `root` in eager without anybody noticing: hooks off, attributes as before afterwards."""
    kept: list[tuple[nn.Module, dict[str, Any], dict[str, Any]]] = []
    kept_global = {name: dict(needed(_module, name)) for name in _GLOBAL_TABLES}
    try:
        for name in _GLOBAL_TABLES:
            getattr(_module, name).clear()
        for item in root.modules():
            attributes = dict(item.__dict__)
            contents = {key: _held(value) for key, value in attributes.items()}
            kept.append((item, attributes, contents))
            part_of_forward = {
                key
                for name in _FORWARD_TABLES
                for key, hook in attributes[name].items()
                if _is_part_of_forward(hook)
            }
            for name in _HOOK_TABLES:
                table = attributes[name]
                item.__dict__[name] = type(table)(
                    (key, hook) for key, hook in table.items() if key in part_of_forward
                )
            item.__dict__["_compiled_call_impl"] = None
        yield
    finally:
        for item, attributes, contents in kept:
            item.__dict__.clear()
            item.__dict__.update(attributes)
            for key, copy in contents.items():
                if copy is not None:
                    _restore(attributes[key], copy)
        for name, table in kept_global.items():
            getattr(_module, name).update(table)


def _restore(value: Any, copy: Any) -> None:
    if isinstance(value, list):
        value[:] = copy
    else:
        value.clear()
        value.update(copy)
