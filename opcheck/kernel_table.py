"""The CPU kernels that torch ships, whatever was registered over them since."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from opcheck import _torch
from opcheck.modes import Mode

__all__ = [
    "KernelTable",
    "Originals",
    "call_kernel",
    "decomposition",
    "kernels",
    "with_number_tensors",
]

_IN_TREE = ("/aten/src/ATen/", "/torch/csrc/")
"""In the place of registration of every kernel that torch ships, and of no other."""
_COMPOSITE_KEYS = (
    "CPU",
    "CompositeExplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
    "CompositeImplicitAutograd",
)


_CPU = _torch.DispatchKeySet(_torch.DispatchKey.CPU)


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
            for name in _torch.registrations_for(key):
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

    def has_kernel(self, name: str) -> bool:
        """True when some kernel runs now on the CPU key, whoever registered it."""
        return _cpu_kernel(name) is not None

    @property
    def overridden(self) -> frozenset[str]:
        """Names of all ops whose kernel on the CPU key is not torch's own.

        Looked up again (25 ms) when something was registered from Python since.
        """
        if self._registrations != len(_torch.python_kernels):
            self._registrations = len(_torch.python_kernels)
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
            kernel = torch.library.get_kernel(name, _torch.dispatch_key_of(device_type))
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


class Originals(Mode):
    """Sends every op to the kernel that torch ships for it.

    Torch's own kernels call other ops through the dispatcher (`_foreach_mul` calls `mul`), and so
    do decompositions: an override of the inner op would judge the outer one that went through it.
    """

    _running: Any = None

    def _handle(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kernel = None
        # `detach` calls itself with other keys; no view computes anything
        if isinstance(func, _torch.OpOverload) and not func.is_view:
            kernel = kernels().original(func.name())
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
    leaves = _torch.tree_leaves((args, kwargs))
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
        for argument, value in zip(_torch.schema_of(func).arguments, args, strict=False)
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
        refs, table = _torch.refs(), _torch.decomposition_table()

    found: Callable[..., Any] | None = table.get(func)
    if found is None:
        base = _torch.schema_of(func).name.rpartition("::")[2]
        home: Any = refs
        for part in base.split("_", 1) if base.startswith(("special_", "linalg_", "fft_")) else ():
            home = getattr(home, part, home)
        found = getattr(home, base, None)
    return found
