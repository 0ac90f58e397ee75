"""The only door to private torch: when a version moves something, this file is the one to mend.

Names, and functions of a line or two around them. What is asked for with `need` and `getter` is
looked up at import: a version that lacks it fails here, and not in the middle of a user's step.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from opcheck.private_names import Door

if TYPE_CHECKING:
    from torch._ops import HigherOrderOperator, OpOverload
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

__all__ = [
    "HOOK_KINDS",
    "HOOK_TABLES",
    "INDUCTOR_CODE",
    "KEY_BLOCKS",
    "LAZY_BITS",
    "BelowAutograd",
    "DisableTorchFunction",
    "DispatchKey",
    "DispatchKeySet",
    "ExcludeKeys",
    "HigherOrderOperator",
    "OpOverload",
    "StorageWeakRef",
    "TorchDispatchMode",
    "compiled_fx_graph",
    "cpu_multiplies_in_tiles",
    "current_autograd_node",
    "current_graph_task_id",
    "decomposition_table",
    "destroy_library",
    "disable_current_modes",
    "disabled_torch_dispatch",
    "dispatch_key_of",
    "forward_hooks_always_called",
    "forward_hooks_with_kwargs",
    "global_forward_tables",
    "global_hook_counts",
    "graph_task_keeps_graph",
    "hook_counts_of",
    "hook_tables_of",
    "is_composite",
    "is_functional",
    "is_key_excluded",
    "is_key_on",
    "is_unshared",
    "keep_from_dynamo",
    "memory_of",
    "mode_keys",
    "mode_notes",
    "mode_stack",
    "mode_stack_length",
    "neg_view",
    "next_sequence_nr",
    "optimizer_tables",
    "own_children",
    "own_parameters",
    "pop_mode",
    "push_mode",
    "python_dispatch",
    "python_kernels",
    "refs",
    "registrations_for",
    "schema_of",
    "sequence_nr_of",
    "set_key_excluded",
    "set_key_on",
    "set_no_compile",
    "storage_id",
    "tags_of",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
    "version_of",
]

_door = Door("opcheck")

# ---- autograd -----------------------------------------------------------------------------------

current_graph_task_id: Callable[[], int] = _door.need("torch._C._current_graph_task_id")
current_autograd_node: Callable[[], Any] = _door.need("torch._C._current_autograd_node")
graph_task_keeps_graph: Callable[[], bool] = _door.need(
    "torch._C._autograd._get_current_graph_task_keep_graph"
)
next_sequence_nr: Callable[[], int] = _door.need("torch.autograd._get_sequence_nr")
_sequence_nr = _door.getter("torch.autograd.graph.Node._sequence_nr")


def sequence_nr_of(node: Any) -> int:
    """Of a node of the autograd graph."""
    return int(_sequence_nr(node)())


# ---- dispatch -----------------------------------------------------------------------------------

DispatchKey: Any = _door.need("torch._C.DispatchKey")
DispatchKeySet: Any = _door.need("torch._C.DispatchKeySet")
BelowAutograd: Any = _door.need("torch._C._AutoDispatchBelowAutograd")
DisableTorchFunction: Any = _door.need("torch._C.DisableTorchFunction")
ExcludeKeys: Any = _door.need("torch._C._ExcludeDispatchKeyGuard")
disabled_torch_dispatch: Any = _door.need("torch._C._disabled_torch_dispatch_impl")
mode_stack_length: Callable[[], int] = _door.need("torch._C._len_torch_dispatch_stack")
dispatch_key_of: Callable[[str], str] = _door.need("torch._C._dispatch_key_for_device")
"""`CPU`, `CUDA`, `PrivateUse1`, ...: the key under which a device's kernels are registered."""
registrations_for: Callable[[str], list[str]] = _door.need(
    "torch._C._dispatch_get_registrations_for_dispatch_key"
)
python_kernels: set[str] = _door.need("torch.library._impls")
"""Everything that was registered from Python, in this process and as of now."""
destroy_library: Callable[[Any], None] = _door.need("torch.library.Library._destroy")

if not TYPE_CHECKING:
    TorchDispatchMode = _door.need("torch.utils._python_dispatch.TorchDispatchMode")
    OpOverload = _door.need("torch._ops.OpOverload")
    HigherOrderOperator = _door.need("torch._ops.HigherOrderOperator")
mode_stack: Callable[[], list[Any]] = _door.need(
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack"
)
disable_current_modes: Callable[[], Any] = _door.need(
    "torch.utils._python_dispatch._disable_current_modes"
)
pop_mode: Callable[[], Any] = _door.need("torch.utils._python_dispatch._pop_mode")
push_mode: Callable[[Any], None] = _door.need("torch.utils._python_dispatch._push_mode")
python_dispatch: Any = _door.need("torch.utils._python_dispatch")
mode_notes = (
    _door.writer("torch.utils._python_dispatch._is_in_torch_dispatch_mode"),
    _door.writer("torch.utils._python_dispatch._is_in_non_infra_torch_dispatch_mode"),
    _door.writer("torch.utils._python_dispatch._is_in_any_mode_without_ignore_compile_internals"),
)
"""What `python_dispatch` notes of the modes that are on: any, one of the user's, one without
compile."""
mode_keys: tuple[Any, ...] = (DispatchKey.Python, DispatchKey.PythonTLSSnapshot)
"""On, while any mode is on the thread's stack."""
is_key_on: Callable[[Any], bool] = _door.need("torch._C._dispatch_tls_is_dispatch_key_included")
set_key_on: Callable[[Any, bool], None] = _door.need(
    "torch._C._dispatch_tls_set_dispatch_key_included"
)
LAZY_BITS: tuple[Any, ...] = (DispatchKey.Conjugate, DispatchKey.Negative)
"""Keys that resolve the conjugate and the negative of a tensor, which are noted as bits."""
is_key_excluded: Callable[[Any], bool] = _door.need(
    "torch._C._dispatch_tls_is_dispatch_key_excluded"
)
set_key_excluded: Callable[[Any, bool], None] = _door.need(
    "torch._C._dispatch_tls_set_dispatch_key_excluded"
)
KEY_BLOCKS: tuple[type[Any], ...] = (
    _door.need("torch._C._InferenceMode"),
    _door.need("torch._C._ForceDispatchKeyGuard"),
    _door.need("torch._C._PreserveDispatchKeyGuard"),
)
"""Context managers that put back all dispatch keys: of `torch.inference_mode`, of the call of a
compiled function, of its compilation."""
_set_strategy = _door.need("torch._C._dynamo.eval_frame.set_code_exec_strategy")
_strategy = _door.need("torch._C._dynamo.eval_frame._FrameExecStrategy")
_frame_action = _door.need("torch._C._dynamo.eval_frame._FrameAction")


def keep_from_dynamo(code: Any) -> None:
    """Never compile a frame of this code, nor what it calls; imports no Dynamo."""
    _set_strategy(code, _strategy(_frame_action.SKIP, _frame_action.SKIP))


set_no_compile: Callable[[bool], None] = _door.need(
    "torch._C._dynamo.guards.set_is_in_mode_without_ignore_compile_internals"
)

cpu_multiplies_in_tiles: Callable[[], bool] = _door.need("torch.cpu._is_amx_tile_supported")
"""This CPU has the matrix unit without which no setting makes it round float32 factors."""

# ---- ops ----------------------------------------------------------------------------------------

schema_of = _door.getter("torch.ops.aten.add.Tensor._schema")
"""Of an overload: names, types and alias information of its arguments and results."""
decomposition_table = _door.later("torch._decomp.decomposition_table")
refs = _door.later("torch._refs")
compiled_fx_graph = _door.later("torch._inductor.output_code.CompiledFxGraph")
"""The class whose call runs inductor code."""
INDUCTOR_CODE = "torch._inductor.output_code"
"""Where it lives; importing it takes most of a second."""


def tags_of(func: Any) -> frozenset[str]:
    """Names of the tags of an overload: `pointwise`, `nondeterministic_seeded`, ..."""
    return frozenset(tag.name for tag in func.tags)


def is_composite(func: Any) -> bool:
    """True for an op made of others, such as `dropout`, which may give its argument back."""
    try:
        return bool(func.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd))
    except RuntimeError:  # TorchScript's own ops (`prim::device`) are not the dispatcher's
        return False


# ---- tensors ------------------------------------------------------------------------------------

if not TYPE_CHECKING:
    StorageWeakRef = _door.need("torch.multiprocessing.reductions.StorageWeakRef")
    tree_flatten = _door.need("torch.utils._pytree.tree_flatten")
    tree_leaves = _door.need("torch.utils._pytree.tree_leaves")
    tree_map = _door.need("torch.utils._pytree.tree_map")
    tree_unflatten = _door.need("torch.utils._pytree.tree_unflatten")
is_functional: Callable[[Tensor], bool] = _door.need("torch._is_functional_tensor")
neg_view: Callable[[Tensor], Tensor] = _door.need("torch._neg_view")
storage_id: Callable[[Any], int] = _door.getter("torch.UntypedStorage._cdata")
"""Of a storage, the same for each of its Python objects."""
_use_count: Callable[[int], int] = _door.need("torch._C._storage_Use_Count")
version_of: Callable[[Tensor], int] = _door.getter("torch.Tensor._version")
"""How often a tensor was written to."""


def is_unshared(storage: Any) -> bool:
    """No tensor, view or NumPy array holds this memory, only the caller's one variable."""
    return _use_count(storage_id(storage)) == 1


def memory_of(tensor: Tensor) -> int:
    """The id of a tensor's storage: equal for tensors that share memory."""
    return storage_id(tensor.untyped_storage())


# ---- modules ------------------------------------------------------------------------------------

HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Attributes of every module."""
own_parameters: Callable[[nn.Module], dict[str, nn.Parameter | None]] = _door.getter(
    "torch.nn.Module()._parameters"
)
own_children: Callable[[nn.Module], dict[str, nn.Module | None]] = _door.getter(
    "torch.nn.Module()._modules"
)
forward_hooks_with_kwargs: dict[int, bool] = _door.need(
    "torch.nn.modules.module._global_forward_hooks_with_kwargs"
)
forward_hooks_always_called: dict[int, bool] = _door.need(
    "torch.nn.modules.module._global_forward_hooks_always_called"
)
global_forward_tables: tuple[dict[int, Any], ...] = (
    _door.need("torch.nn.modules.module._global_forward_hooks"),
    _door.need("torch.nn.modules.module._global_forward_pre_hooks"),
)
HOOK_KINDS = (*HOOK_TABLES, "_state_dict_hooks")
_hook_tables = (
    _door.getter("torch.nn.Module()._forward_hooks"),
    _door.getter("torch.nn.Module()._forward_pre_hooks"),
    _door.getter("torch.nn.Module()._backward_hooks"),
    _door.getter("torch.nn.Module()._backward_pre_hooks"),
    _door.getter("torch.nn.Module()._state_dict_hooks"),
)
_all_hook_tables = operator.attrgetter(*HOOK_KINDS)
optimizer_tables: tuple[dict[int, Any], ...] = (
    _door.need("torch.optim.optimizer._global_optimizer_pre_hooks"),
    _door.need("torch.optim.optimizer._global_optimizer_post_hooks"),
)
_global_tables = {
    "_global_forward_hooks": global_forward_tables[0],
    "_global_forward_pre_hooks": global_forward_tables[1],
    "_global_backward_hooks": _door.need("torch.nn.modules.module._global_backward_hooks"),
    "_global_backward_pre_hooks": _door.need("torch.nn.modules.module._global_backward_pre_hooks"),
    "_global_buffer_registration_hooks": _door.need(
        "torch.nn.modules.module._global_buffer_registration_hooks"
    ),
    "_global_module_registration_hooks": _door.need(
        "torch.nn.modules.module._global_module_registration_hooks"
    ),
    "_global_parameter_registration_hooks": _door.need(
        "torch.nn.modules.module._global_parameter_registration_hooks"
    ),
    "_global_optimizer_pre_hooks": optimizer_tables[0],
    "_global_optimizer_post_hooks": optimizer_tables[1],
}


def hook_counts_of(module: nn.Module) -> tuple[int, ...]:
    """How many hooks one module has, of each of `HOOK_KINDS`."""
    return tuple(map(len, _all_hook_tables(module)))


def hook_tables_of(module: nn.Module) -> dict[str, dict[int, Any]]:
    """The hooks of one module, by kind: those around its calls, and of its state dict."""
    tables = (read(module) for read in _hook_tables)
    return dict(zip(HOOK_KINDS, tables, strict=True))


def global_hook_counts() -> dict[str, int]:
    """How many hooks apply to every module and to every optimizer."""
    return {name: len(table) for name, table in _global_tables.items()}
