"""The only door to private torch: when a version moves something, this file is the one to mend.

Tested on PyTorch 2.13. Everything below is looked up once, at import, so that a version that lacks
a name fails here with the name in the message, and not in the middle of a user's step.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.util
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as _module
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _pop_mode,
    _push_mode,
)
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as _mode_stack
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from opcheck.errors import OpcheckError

__all__ = [
    "KernelTable",
    "StorageWeakRef",
    "TorchDispatchMode",
    "active_modes",
    "as_in_the_step",
    "call_kernel",
    "compiled_regions",
    "current_autograd_node",
    "current_graph_task_id",
    "decomposition",
    "dispatch_key_of",
    "graph_task_keeps_graph",
    "held_tensors",
    "is_innermost",
    "is_plain_tensor",
    "kernels",
    "leave_references",
    "modules_undisturbed",
    "next_sequence_nr",
    "outside_everything",
    "reference_depth",
    "register_module_hooks",
    "register_optimizer_hooks",
    "running_reference",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
    "unwraps_itself",
    "without_modes",
    "without_modes_above",
]


def _need(owner: object, name: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError:
        where = getattr(owner, "__name__", type(owner).__name__)
        raise OpcheckError(
            f"torch {torch.__version__} has no {where}.{name}, which opcheck needs;"
            " see the tested versions in the README"
        ) from None


current_graph_task_id: Callable[[], int] = _need(torch._C, "_current_graph_task_id")
current_autograd_node: Callable[[], Any] = _need(torch._C, "_current_autograd_node")
graph_task_keeps_graph: Callable[[], bool] = _need(
    torch._C._autograd, "_get_current_graph_task_keep_graph"
)
next_sequence_nr: Callable[[], int] = _need(torch.autograd, "_get_sequence_nr")
mode_stack_length: Callable[[], int] = _need(torch._C, "_len_torch_dispatch_stack")

_DisableTorchFunction = _need(torch._C, "DisableTorchFunction")
_BelowAutograd = _need(torch._C, "_AutoDispatchBelowAutograd")
_ExcludeKeys = _need(torch._C, "_ExcludeDispatchKeyGuard")
_AUTOCAST_KEYS = functools.reduce(
    lambda keys, name: keys | DispatchKeySet(getattr(DispatchKey, name)),
    [name for name in dir(DispatchKey) if name.startswith("Autocast")],
    DispatchKeySet(DispatchKey.Undefined),
)
_CPU = DispatchKeySet(DispatchKey.CPU)


class _Reference(threading.local):
    def __init__(self) -> None:
        self.open: list[outside_everything] = []


_reference = _Reference()


def running_reference() -> bool:
    """True while this thread does reference work: kernels under test stand aside then."""
    return bool(_reference.open) and _reference.open[-1].stands_aside


_GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
    "_global_buffer_registration_hooks",
    "_global_module_registration_hooks",
    "_global_parameter_registration_hooks",
)


def global_hook_counts() -> dict[str, int]:
    """How many hooks apply to every module and to every optimizer."""
    from torch.nn.modules import module
    from torch.optim import optimizer

    modules = {name: len(_need(module, name)) for name in _GLOBAL_HOOKS}
    optimizers = {
        name: len(_need(optimizer, name))
        for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
    }
    return modules | optimizers


def reference_depth() -> int:
    """How many contexts of reference work are open in this thread."""
    return len(_reference.open)


def leave_references(depth: int) -> None:
    """Close contexts of reference work that an exception left open.

    Ctrl-C may come at the first instruction of an `__exit__`, which then does nothing: autograd
    would stay off for the rest of the process (1 of 70 interrupts, measured).
    """
    while len(_reference.open) > depth:
        _reference.open[-1].__exit__()


class outside_everything:  # noqa: N801 - used as a context manager, spelled like one
    """Reference work: no autograd, no autocast, no mode, no `__torch_function__`, no override.

    A class and not a generator, because it is entered for every checked call: 2 us against 8.
    """

    __slots__ = ("_guards",)
    _guards: list[Any]
    stands_aside = True
    """Kernels under test do, for torch's own."""

    def __enter__(self) -> None:
        guards = self._guards = []
        _reference.open.append(self)
        try:
            for make in (_DisableTorchFunction, _BelowAutograd):
                guards.append(make())
                guards[-1].__enter__()
            guards.append(_ExcludeKeys(_AUTOCAST_KEYS))
            guards[-1].__enter__()
            if mode_stack_length():
                self._push(_disable_current_modes())
            if self.stands_aside and kernels().overridden:
                self._push(_Originals())  # type: ignore[no-untyped-call]
        except BaseException:  # Ctrl-C must not leave autograd off
            self.__exit__()
            raise

    def _push(self, guard: Any) -> None:
        guard.__enter__()
        self._guards.append(guard)

    def __exit__(self, *exc: object) -> None:
        while self._guards:
            self._guards.pop().__exit__(None, None, None)
        if _reference.open and _reference.open[-1] is self:
            _reference.open.pop()


class as_in_the_step(outside_everything):  # noqa: N801 - as above
    """As outside of everything, but whatever kernel the step ran runs again."""

    __slots__ = ()
    stands_aside = False


def active_modes() -> list[Any]:
    """The dispatch modes that a call of this thread goes through, innermost last."""
    return list(_mode_stack())


def is_innermost(mode: TorchDispatchMode) -> bool:
    """True for the mode that a call of this thread reaches first; False inside of its handler."""
    stack = _mode_stack()
    return bool(stack) and stack[-1] is mode


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Nobody's dispatch mode sees what runs in here; kernels are those that are registered."""
    if not mode_stack_length():
        yield
        return
    with _disable_current_modes():
        yield


@contextlib.contextmanager
def without_modes_above(mode: TorchDispatchMode) -> Iterator[Callable[[], None]]:
    """Take the modes that were entered after `mode` off the stack for a moment.

    A mode's own exit pops whatever is on top. Gives a function that takes off `mode` itself where
    it is still there.
    """
    stack = _mode_stack()
    above = stack[stack.index(mode) + 1 :] if mode in stack else []
    for _ in above:
        _pop_mode()

    def take_off() -> None:
        if mode in _mode_stack():
            _pop_mode()

    try:
        yield take_off
    finally:
        for item in above:
            _push_mode(item)


_PLAIN_TYPES = frozenset({Tensor, torch.nn.Parameter, torch.nn.Buffer})
_is_functional = _need(torch, "_is_functional_tensor")


def is_plain_tensor(tensor: Tensor) -> bool:
    """True for strided, not quantized, not nested, not fake tensors that hold real memory."""
    return (
        (type(tensor) in _PLAIN_TYPES or _is_plain_subclass(type(tensor)))
        and tensor.layout is torch.strided
        and (tensor.is_cpu or tensor.device.type != "meta")
        and not tensor.is_quantized
        and not tensor.is_nested
        and not _is_functional(tensor)
    )


@functools.cache
def _is_plain_subclass(kind: type[Tensor]) -> bool:
    """A subclass that only carries attributes: dispatch treats it like a Tensor."""
    disabled = torch._C._disabled_torch_dispatch_impl
    return getattr(kind, "__torch_dispatch__", disabled) is disabled


def unwraps_itself(types: tuple[type, ...]) -> bool:
    """True when a wrapper subclass (DTensor, jagged) will dispatch its inner tensors again.

    A mode that answers NotImplemented for those sees the inner calls one by one.
    """
    return any(hasattr(kind, "__tensor_flatten__") for kind in types)


def held_tensors(tensor: Tensor) -> list[Tensor]:
    """What a wrapper subclass holds, the local shard of a DTensor; nothing for other tensors."""
    if type(tensor) in _PLAIN_TYPES or not hasattr(tensor, "__tensor_flatten__"):
        return []
    return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]


# ---- kernels ------------------------------------------------------------------------------------

_IN_TREE = ("/aten/src/ATen/", "/torch/csrc/")
"""In the place of registration of every kernel that torch ships, and of no other."""
_python_kernels: set[str] = _need(torch.library, "_impls")
"""Everything that was registered from Python, in this process and as of now."""
_COMPOSITE_KEYS = (
    "CPU",
    "CompositeExplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
    "CompositeImplicitAutograd",
)


class KernelTable:
    """The CPU kernels as they were when this package first met torch.

    A kernel taken before an override goes on computing what it always did (measured, in float64
    too), so it can judge the override. A kernel that was overridden before we came cannot be had
    any more: `original` answers None for it, and the caller has to find another reference.
    """

    def __init__(self) -> None:
        self.registrants: dict[str, str] = {}
        """Op -> Python module that registered another kernel for it, where that is known."""
        self._kernels: dict[str, Any] = {}
        self._debug: dict[str, str] = {}
        self._overridden: frozenset[str] = frozenset()
        self._registrations = -1
        self._num_modules = 0
        for key in _COMPOSITE_KEYS:
            for name in torch._C._dispatch_get_registrations_for_dispatch_key(key):
                self.note(name)

    def note(self, name: str, *, registrant: str = "") -> None:
        """Take the kernel of an op that was defined after this table, before it is covered.

        Args:
            name: `aten::gelu`.
            registrant: the Python module whose kernel is about to cover it.
        """
        if registrant:
            self.registrants[name] = registrant
        if name in self._kernels:
            return
        kernel = _cpu_kernel(name)
        if kernel is not None:
            self._kernels[name] = kernel
            self._debug[name] = repr(kernel)

    def original(self, name: str) -> Any | None:
        """The kernel that torch itself ships for `aten::name.overload`, or None."""
        kernel = self._kernels.get(name)
        if kernel is None or (name.startswith("aten::") and not _in_tree(self._debug[name])):
            return None
        return kernel

    @property
    def overridden(self) -> frozenset[str]:
        """Names of all ops whose kernel on the CPU key is not torch's own.

        Looked up again (25 ms) when something was registered from Python since.
        """
        if self._registrations != len(_python_kernels):
            self._registrations = len(_python_kernels)
            self._overridden = frozenset(
                name
                for name in self._kernels
                if name.startswith("aten::") and self._is_covered(name)
            )
        return self._overridden

    def look_again(self) -> None:
        """A library in C++ may have registered kernels as it was imported."""
        if self._num_modules != len(sys.modules):
            self._num_modules = len(sys.modules)
            self._registrations = -1

    def is_overridden(self, name: str) -> bool:
        """True when the kernel that runs now on the CPU key is not torch's own."""
        covered = self._is_covered(name)
        if covered != (name in self._overridden):  # as many were taken off since as put on
            self._registrations = -1
        return covered

    def _is_covered(self, name: str) -> bool:
        kernel = _cpu_kernel(name)
        if kernel is None:
            return False
        debug = repr(kernel)
        if name.startswith("aten::"):
            return not _in_tree(debug)
        return debug != self._debug.get(name, debug)

    def registered(self, name: str, device_type: str = "cpu") -> str:
        """Where the kernel of an op that is not torch's own was registered; "" if it is torch's.

        For one registered from Python, file and line of the `torch.library.Library`.
        """
        try:
            kernel = torch.library.get_kernel(name, dispatch_key_of(device_type))
        except RuntimeError:
            return ""
        debug = repr(kernel)
        if _in_tree(debug) or debug == self._debug.get(name):
            return ""
        return debug.partition("debug='")[2].rstrip("')").splitlines()[0]


def _in_tree(debug: str) -> bool:
    return any(place in debug for place in _IN_TREE)


def _cpu_kernel(name: str) -> Any | None:
    try:
        return torch.library.get_kernel(name, "CPU")
    except RuntimeError:  # the op has no kernel for the CPU
        return None


@functools.cache
def kernels() -> KernelTable:
    """The table of this process, taken at the first call (20 ms)."""
    return KernelTable()


def call_kernel(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a kernel of the table, below the dispatcher."""
    return kernel.call_boxed(_CPU, *args, **kwargs)


class _Originals(TorchDispatchMode):
    """Sends every op to the kernel that torch ships for it.

    Torch's own kernels call other ops through the dispatcher (`_foreach_mul` calls `mul`), and so
    do decompositions: an override of the inner op would judge the outer one that went through it.
    """

    _running: Any = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        kernel = None
        # `detach` calls itself with other keys; no view computes anything
        if isinstance(func, torch._ops.OpOverload) and not func.is_view:
            kernel = kernels().original(func._name)
        if kernel is None or func is self._running or not _all_on_cpu(args, kwargs):
            return func(*args, **kwargs)
        args = with_number_tensors(func, args)
        earlier, self._running = self._running, func
        try:
            with self:
                return call_kernel(kernel, args, kwargs)
        finally:
            self._running = earlier


def _all_on_cpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """False for meta tensors, given or asked for: a CPU kernel would end the process over them."""
    leaves = tree_leaves((args, kwargs))
    return all(
        item.is_cpu if isinstance(item, Tensor) else item.type == "cpu"
        for item in leaves
        if isinstance(item, (Tensor, torch.device))
    )


_WIDE = {float: torch.float64, complex: torch.complex128, int: torch.int64, bool: torch.bool}


def with_number_tensors(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Positional arguments as a kernel below the dispatcher takes them.

    A number may stand there for a Tensor; as a 0-dim tensor it promotes likewise, if of a dtype
    that is no wider than the result's where all tensors have 0 dims or hold integers.
    """
    like: Tensor | None = None
    for arg in args:
        if isinstance(arg, Tensor) and (like is None or arg.dim() > like.dim()):
            like = arg
    return tuple(
        _number_tensor(value, like)
        if type(value) in _WIDE and str(argument.type) == "Tensor"
        else value
        for argument, value in zip(func._schema.arguments, args, strict=False)
    )


def _number_tensor(value: complex, like: Tensor | None) -> Tensor:
    promotes = like is not None and (
        like.dim() == 0 or not (like.is_floating_point() or like.is_complex())
    )
    dtype = torch.result_type(like, value) if promotes else _WIDE[type(value)]  # type: ignore[arg-type]
    return torch.tensor(value, dtype=dtype)


@functools.cache
def decomposition(func: Any) -> Callable[..., Any] | None:
    """A formula for `func` in terms of other ops, independent of its kernel, or None."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch._refs
        from torch._decomp import decomposition_table

    found = decomposition_table.get(func)
    if found is None:
        base = func._schema.name.rpartition("::")[2]
        home: Any = torch._refs
        for part in base.split("_", 1) if base.startswith(("special_", "linalg_", "fft_")) else ():
            home = getattr(home, part, home)
        found = getattr(home, base, None)
    return found


def dispatch_key_of(device_type: str) -> str:
    """`CPU`, `CUDA`, `PrivateUse1`, ...: the key under which a device's kernels are registered."""
    key: str = torch._C._dispatch_key_for_device(device_type)
    return key


def tags_of(func: Any) -> frozenset[str]:
    """Names of the tags of an overload: `pointwise`, `nondeterministic_seeded`, ..."""
    return frozenset(tag.name for tag in func.tags)


def is_composite(func: Any) -> bool:
    """True for an op made of others, such as `dropout`, which may give its argument back."""
    try:
        return bool(func.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd))
    except RuntimeError:  # TorchScript's own ops (`prim::device`) are not the dispatcher's
        return False


# ---- hooks --------------------------------------------------------------------------------------


def register_module_hooks(
    before: Callable[..., None], after: Callable[..., None]
) -> list[Callable[[], None]]:
    """Global hooks around every module call; `after` runs also when the forward raises.

    Returns:
        Functions that take the hooks off again.
    """
    filters_before = list(warnings.filters)
    # an OptimizedModule warns that it calls global hooks twice, which ours do not mind
    warnings.filterwarnings("ignore", message=r"Using `torch\.compile\(module\)` when there are")
    ours = [item for item in warnings.filters if item not in filters_before]
    before_handle = _module.register_module_forward_pre_hook(before)
    after_handle = _module.register_module_forward_hook(after, with_kwargs=True, always_call=True)

    def remove_after() -> None:
        after_handle.remove()
        # on 2.13 the handle forgets this entry, which keeps every later module call off the fast
        # path for the rest of the process
        _module._global_forward_hooks_with_kwargs.pop(after_handle.id, None)

    def remove_filter() -> None:
        for item in ours:
            with contextlib.suppress(ValueError):  # the user has reset the filters
                cast("list[Any]", warnings.filters).remove(item)

    return [before_handle.remove, remove_after, remove_filter]


def register_optimizer_hooks(
    before: Callable[..., None], after: Callable[..., None]
) -> list[Callable[[], None]]:
    """Global hooks around every optimizer step; `after` does not run when the step raises."""
    handles = [
        register_optimizer_step_pre_hook(before),
        register_optimizer_step_post_hook(after),
    ]
    return [handle.remove for handle in handles]


_HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@contextlib.contextmanager
def modules_undisturbed(root: torch.nn.Module) -> Iterator[None]:
    """Run `root` again without anybody noticing: hooks off, attributes as before afterwards."""
    kept: list[tuple[torch.nn.Module, dict[str, Any]]] = []
    global_tables = ("_global_forward_hooks", "_global_forward_pre_hooks")
    kept_global = {name: dict(getattr(_module, name)) for name in global_tables}
    try:
        for name in global_tables:
            getattr(_module, name).clear()
        for item in root.modules():
            kept.append((item, dict(item.__dict__)))
            for name in _HOOK_TABLES:
                item.__dict__[name] = type(item.__dict__[name])()
        yield
    finally:
        for item, attributes in kept:
            item.__dict__.clear()
            item.__dict__.update(attributes)
        for name, table in kept_global.items():
            getattr(_module, name).update(table)


# ---- compiled regions ---------------------------------------------------------------------------

_INDUCTOR_CODE = "torch._inductor.output_code"


class _RegionCounter:
    """Tells its listeners each time that inductor code runs.

    The class that runs the code is patched while somebody listens. Importing inductor takes most
    of a second, so where it has not been imported yet, the patch waits for its import.
    """

    def __init__(self) -> None:
        self._listeners: list[Callable[[], None]] = []
        self._original: Any = None
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def listening(self, listener: Callable[[], None]) -> Iterator[None]:
        """Call `listener` at each run of a compiled region, for the length of the context."""
        with self._lock:
            self._listeners.append(listener)
            if len(self._listeners) == 1:
                self._start()
        try:
            yield
        finally:
            with self._lock:
                self._listeners.remove(listener)
                if not self._listeners:
                    self._stop()

    def _start(self) -> None:
        if _INDUCTOR_CODE in sys.modules:
            self.patch(sys.modules[_INDUCTOR_CODE])
        else:
            sys.meta_path.insert(0, _AfterImport(_INDUCTOR_CODE, self.patch))

    def _stop(self) -> None:
        sys.meta_path[:] = [item for item in sys.meta_path if not isinstance(item, _AfterImport)]
        if self._original is not None:
            sys.modules[_INDUCTOR_CODE].CompiledFxGraph.__call__ = self._original
            self._original = None

    def patch(self, module: Any) -> None:
        """Count the runs of `module.CompiledFxGraph`."""
        original = self._original = module.CompiledFxGraph.__call__

        @functools.wraps(original)
        def counted(graph: Any, *args: Any, **kwargs: Any) -> Any:
            for listener in list(self._listeners):
                listener()
            return original(graph, *args, **kwargs)

        module.CompiledFxGraph.__call__ = counted


class _AfterImport(importlib.abc.MetaPathFinder):
    """Runs a function on one module right after somebody has imported it, once."""

    def __init__(self, name: str, then: Callable[[Any], None]) -> None:
        self._name, self._then = name, then

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            self._then(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


compiled_regions = _RegionCounter()
