"""The only door of this package to private torch: when a version moves something, mend it here.

Names, and functions of a line or two around them. What is asked for with `need` and `getter` is
looked up at import, the rest when the feature is used that needs it: importing Dynamo and inductor
takes seconds. A version that lacks a name is told apart by that name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from opcheck.private_names import Door

if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "COMPILED_CALL",
    "DYNAMO_CONFIG",
    "DYNAMO_LOG",
    "FUNCTORCH_CONFIG",
    "HOOK_TABLES",
    "INDUCTOR_BACKEND",
    "INDUCTOR_CONFIG",
    "TRACE_LOG",
    "BoxedBool",
    "CompileContext",
    "CompileId",
    "FakeTensorMode",
    "Function",
    "GraphLowering",
    "HigherOrderOperator",
    "InvalidBackend",
    "InvalidCxxCompiler",
    "PlainAOTInput",
    "TorchDispatchMode",
    "TracingContext",
    "aot_autograd",
    "base_of",
    "boxed",
    "buffers_of",
    "call_impl",
    "clone_preserve_strides",
    "code_state",
    "compilation_metrics",
    "compile_fx",
    "compile_fx_inner",
    "compile_to_module",
    "compiled_call",
    "counters",
    "default_store_of_group",
    "entries_of_region",
    "forward_hooks_with_kwargs",
    "forward_tables",
    "fsdp_state_of",
    "get_cpp_compiler",
    "graph_task_id",
    "has_saved_tensors_hooks",
    "in_region",
    "inductor_config",
    "input_codes",
    "inside_autograd",
    "is_compiled_wrapper",
    "is_managed_by_fsdp",
    "is_mutable",
    "is_pending",
    "is_unsharded",
    "is_view",
    "loaded_code_state",
    "lookup_backend",
    "memory_of",
    "mutation_names_of",
    "next_region",
    "next_sequence_nr",
    "no_modes",
    "not_by_dynamo",
    "optimize",
    "origin_node_of",
    "own_buffers",
    "param_groups_of",
    "patched",
    "queue_after_backward",
    "recompile_limit",
    "recompiling_freely",
    "reset_code",
    "resolve_group",
    "runs_in_this_backward",
    "schema_of",
    "select_decomp_table",
    "sequence_nr_of",
    "set_code_state",
    "set_fake_mode",
    "should_allocate",
    "tracing",
    "type_of_script_object",
    "unbox_group",
    "unbox_work",
    "version_of",
]

_door = Door("modulecheck")
Function = TypeVar("Function", bound=Callable[..., Any])

# ---- autograd and dispatch ----------------------------------------------------------------------

graph_task_id: Callable[[], int] = _door.need("torch._C._current_graph_task_id")
next_sequence_nr: Callable[[], int] = _door.need("torch.autograd._get_sequence_nr")
no_modes: Callable[[], AbstractContextManager[Any]] = _door.need(
    "torch.utils._python_dispatch._disable_current_modes"
)
if not TYPE_CHECKING:
    TorchDispatchMode = _door.need("torch.utils._python_dispatch.TorchDispatchMode")
HigherOrderOperator: type[Any] = _door.need("torch._ops.HigherOrderOperator")
schema_of: Callable[[Any], Any] = _door.getter("torch.ops.aten.add.Tensor._schema")
"""Of an overload."""
_sequence_nr = _door.getter("torch.autograd.graph.Node._sequence_nr")
_will_run: Callable[[Any], bool] = _door.need("torch._C._will_engine_execute_node")
_saved_tensors_hooks: Callable[[bool], Any] = _door.need(
    "torch._C._autograd._top_saved_tensors_default_hooks"
)
_engine: Any = _door.need("torch.autograd.Variable._execution_engine")


def not_by_dynamo(function: Function) -> Function:
    """Keeps Dynamo out of a function of ours, also where the user's frame is being traced."""
    disabled: Function = torch.compiler.disable(function)
    return disabled


def inside_autograd() -> bool:
    """True while a backward runs on this thread."""
    return graph_task_id() != -1


def sequence_nr_of(node: Any) -> int:
    """Of a node of the autograd graph."""
    return int(_sequence_nr(node)())


def runs_in_this_backward(node: Any) -> bool:
    """True for a node that the backward running on this thread runs, or whose gradient it gives."""
    try:
        return bool(_will_run(node))
    except RuntimeError:  # a leaf among the inputs of torch.autograd.grad
        return True


def queue_after_backward(function: Callable[[], None]) -> None:
    """Run `function` when the backward that is running ends, before the caller goes on."""
    _engine.queue_callback(function)


def has_saved_tensors_hooks() -> bool:
    """True where somebody has hooks on what autograd saves, as checkpoints and offloading do."""
    return _saved_tensors_hooks(True) is not None  # noqa: FBT003 - takes no keyword


def is_mutable(target: Any) -> bool | None:
    """Does an overload write to its arguments? None for what is no overload."""
    return bool(schema_of(target).is_mutable) if hasattr(target, "_schema") else None


# ---- tensors and modules ------------------------------------------------------------------------

version_of: Callable[[Tensor], int] = _door.getter("torch.Tensor._version")
"""How often a tensor was written to."""
_storage_id = _door.getter("torch.UntypedStorage._cdata")
base_of: Callable[[Tensor], Tensor | None] = _door.getter("torch.Tensor._base")
_is_view = _door.getter("torch.Tensor._is_view")
call_impl: Callable[[nn.Module], Callable[..., Any]] = _door.getter("torch.nn.Module._call_impl")
"""A module's own call, hooks included."""
compiled_call: Callable[[nn.Module], Callable[..., Any] | None] = _door.getter(
    "torch.nn.Module._compiled_call_impl"
)
"""What runs in its place."""
COMPILED_CALL = "_compiled_call_impl"
"""The attribute that holds it."""
own_buffers: Callable[[nn.Module], dict[str, Tensor | None]] = _door.getter(
    "torch.nn.Module()._buffers"
)
HOOK_TABLES = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
)
"""Attributes of every module; the first two hold the hooks around its forward."""
forward_tables: tuple[Callable[[nn.Module], dict[int, Any]], ...] = (
    _door.getter("torch.nn.Module()._forward_hooks"),
    _door.getter("torch.nn.Module()._forward_pre_hooks"),
)
_door.need("torch.nn.Module()._backward_hooks")
_door.need("torch.nn.Module()._backward_pre_hooks")
_door.need("torch.nn.Module()._forward_hooks_with_kwargs")
_door.need("torch.nn.Module()._forward_hooks_always_called")
_door.need("torch.nn.Module()._forward_pre_hooks_with_kwargs")
forward_hooks_with_kwargs: dict[int, bool] = _door.need(
    "torch.nn.modules.module._global_forward_hooks_with_kwargs"
)


def memory_of(tensor: Tensor) -> int:
    """The id of a tensor's storage: equal for tensors that share memory."""
    return int(_storage_id(tensor.untyped_storage()))


def is_view(tensor: Tensor) -> bool:
    """True for a view of another tensor, which `base_of` gives."""
    return bool(_is_view(tensor)())


# ---- Dynamo -------------------------------------------------------------------------------------

DYNAMO_LOG = "torch._dynamo.convert_frame"
"""Logger of what Dynamo makes of a frame."""
lookup_backend = _door.later("torch._dynamo.backends.registry.lookup_backend")
InvalidBackend = _door.later("torch._dynamo.exc.InvalidBackend")
INDUCTOR_BACKEND = "torch._dynamo.backends.inductor"
"""Where the backend of that name lives."""
aot_autograd = _door.later("torch._dynamo.backends.common.aot_autograd")
optimize = _door.later("torch._dynamo.optimize")
_recompile_limit = _door.later("torch._dynamo.config.recompile_limit")
input_codes = _door.later("torch._dynamo.convert_frame.input_codes")
"""The code objects that Dynamo has met."""
reset_code = _door.later("torch._C._dynamo.eval_frame.reset_code")
counters = _door.later("torch._dynamo.utils.counters")
compilation_metrics = _door.later("torch._dynamo.utils.get_compilation_metrics")
next_region = _door.later("torch._dynamo.eval_frame._next_isolate_recompiles_id")
entries_of_region = _door.later("torch._dynamo.eval_frame._get_cache_entries_for_region")
in_region = _door.writer("torch._dynamo.eval_frame.OptimizeContext._isolate_recompiles_id")
"""What a context of `optimize` compiles goes to a part of the caches of its own."""
CompileContext = _door.later("torch._guards.CompileContext")
CompileId = _door.later("torch._guards.CompileId")
_error_on_recompile = _door.later("torch._dynamo.config.error_on_recompile")
_stance = _door.later("torch._dynamo.eval_frame._stance")
_optimized_module = _door.later("torch._dynamo.eval_frame.OptimizedModule")
code_state = _door.later("torch._dynamo.pgo._CODE_STATE")
"""What Dynamo has learnt of sizes that change."""
loaded_code_state = _door.later("torch._dynamo.pgo.get_code_state")
"""The same, after a look at what an earlier process has left."""
_pgo = _door.later("torch._dynamo.pgo")
_write_code_state = _door.writer("torch._dynamo.pgo._CODE_STATE")


def recompile_limit() -> int:
    """How many versions of one function Dynamo compiles before it goes on in eager."""
    return int(_recompile_limit())


@contextmanager
def recompiling_freely() -> Iterator[None]:
    """What is compiled inside is none of the recompilations that the user forbade."""
    with ExitStack() as stack:
        if _error_on_recompile():
            stack.enter_context(patched(DYNAMO_CONFIG, error_on_recompile=False))
        if _stance().stance == "fail_on_recompile":
            stack.enter_context(torch.compiler.set_stance("default"))
        yield


def set_code_state(state: Any) -> None:
    """Put it back."""
    _write_code_state(_pgo(), state)


def is_compiled_wrapper(module: nn.Module) -> bool:
    """What `torch.compile(module)` gives."""
    return "torch._dynamo.eval_frame" in sys.modules and isinstance(module, _optimized_module())


# ---- inductor and AOT autograd ------------------------------------------------------------------

TRACE_LOG = "torch.__trace"
"""Logger of the structured trace that torch keeps for `TORCH_TRACE`."""
inductor_config = _door.later("torch._inductor.config")
INDUCTOR_CONFIG = "torch._inductor.config"
FUNCTORCH_CONFIG = "torch._functorch.config"
DYNAMO_CONFIG = "torch._dynamo.config"
get_cpp_compiler = _door.later("torch._inductor.cpp_builder.get_cpp_compiler")
InvalidCxxCompiler = _door.later("torch._inductor.exc.InvalidCxxCompiler")
compile_fx = _door.later("torch._inductor.compile_fx.compile_fx")
compile_fx_inner = _door.later("torch._inductor.compile_fx.compile_fx_inner")
GraphLowering = _door.later("torch._inductor.graph.GraphLowering")
compile_to_module = _door.later("torch._inductor.graph.GraphLowering.compile_to_module")
buffers_of = _door.reader("torch._inductor.graph.GraphLowering.name_to_buffer")
origin_node_of = _door.reader("torch._inductor.ir.Buffer.get_origin_node")
should_allocate = _door.reader("torch._inductor.ir.Buffer.should_allocate")
mutation_names_of = _door.reader("torch._inductor.ir.Buffer.get_mutation_names")
select_decomp_table = _door.later("torch._inductor.decomposition.select_decomp_table")
BoxedBool = _door.later("torch._inductor.utils.BoxedBool")
set_fake_mode = _door.later("torch._inductor.virtualized.V.set_fake_mode")
TracingContext = _door.later("torch._guards.TracingContext")
tracing = _door.later("torch._guards.tracing")
FakeTensorMode = _door.later("torch._subclasses.FakeTensorMode")
clone_preserve_strides = _door.later("torch._prims_common.clone_preserve_strides")
PlainAOTInput = _door.later("torch._functorch._aot_autograd.descriptors.PlainAOTInput")


def boxed(function: Function) -> Function:
    """Mark a function that takes its inputs in one list, which it may empty."""
    function.__dict__["_boxed_call"] = True
    return function


def patched(config: str, **options: Any) -> AbstractContextManager[None]:
    """One of the three configurations above with other settings, for the length of the context."""
    for name in options:
        _door.need(f"{config}.{name}")
    context: AbstractContextManager[None] = _door.need(config).patch(options)
    return context


# ---- several ranks ------------------------------------------------------------------------------

default_store_of_group = _door.later("torch.distributed.distributed_c10d._get_default_store")
resolve_group = _door.later("torch.distributed.distributed_c10d._resolve_process_group")
unbox_group = _door.later("torch.distributed.distributed_c10d.ProcessGroup.unbox")
type_of_script_object = _door.later("torch.ScriptObject._type")
unbox_work = _door.later("torch.distributed.Work.unbox")
fsdp_state_of = _door.reader("torch.distributed.fsdp.FSDPModule._get_fsdp_state")
param_groups_of = _door.reader(
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._fsdp_param_groups"
)
is_unsharded = _door.reader(
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup.is_unsharded"
)
_async_tensor = _door.later("torch.distributed._functional_collectives.AsyncCollectiveTensor")


def is_pending(tensor: Tensor) -> bool:
    """True for what a functional collective gave and has not arrived."""
    home = "torch.distributed._functional_collectives"
    return home in sys.modules and isinstance(tensor, _async_tensor())


def is_managed_by_fsdp(module: nn.Module) -> bool:
    """FSDP2 marks the modules whose parameters it shards."""
    return bool(getattr(module, "_is_fsdp_managed_module", False))
