"""A module compiled in place: the module tree, its class and its hooks are not touched."""

from __future__ import annotations

import contextlib
import itertools
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from modulecheck import _torch, dynamo, trees
from modulecheck.artifacts import Artifact, compiled_and_kept
from modulecheck.backends import compiles_only_inlined, inlined, is_own_inductor, load_backend
from modulecheck.distributed import is_fsdp2
from modulecheck.node_origin import names_of
from modulecheck.replay import replaying

__all__ = ["Boundary", "Ran", "counted"]


@dataclass(eq=False)
class Ran:
    """Compiled graphs that ran in one call."""

    num_runs: int = 0
    artifacts: list[Artifact] = field(default_factory=list)
    """Each once, in order; empty where the backend is not inductor."""
    versions: list[tuple[int, int]] = field(default_factory=list)
    """Dynamo's number of the function, and of its version, of each run."""

    def note(self, artifact: Artifact | None, version: tuple[int, int] | None) -> None:
        """One run."""
        self.num_runs += 1
        if version is not None:
            self.versions.append(version)
        if artifact is not None and artifact not in self.artifacts:
            self.artifacts.append(artifact)


class _Executions(threading.local):
    """The calls that are open on this thread."""

    def __init__(self) -> None:
        self.open: list[Ran] = []


_executions = _Executions()


class CountingBackend:
    """The user's backend, with every run of what it compiled counted.

    Two for the same backend are equal, so that Dynamo reuses code that an earlier one compiled.
    """

    def __init__(self, backend: Any, module: nn.Module) -> None:
        """Compile for a module.

        Args:
            backend: of `torch.compile`.
            module: names what is inside it; is not kept alive by Dynamo's cache.
        """
        self.backend = backend
        self._module = weakref.ref(module)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CountingBackend) and self.backend == other.backend

    def __hash__(self) -> int:
        try:
            return hash(self.backend)
        except TypeError:  # equal by value, and changeable
            return hash(type(self.backend))

    def __call__(self, graph: Any, inputs: Any, **options: Any) -> Callable[..., Any]:
        artifact, version = None, dynamo.version_compiled_now()
        if is_own_inductor(self.backend):
            artifact = compiled_and_kept(graph, inputs, self._names(), **options)
            compiled = artifact.compiled
        else:
            compiled = load_backend(self.backend)(graph, inputs, **options)

        def run(*args: Any) -> Any:
            for ran in _executions.open:
                ran.note(artifact, version)
            return compiled(*args)

        return run

    def _names(self) -> dict[int, str]:
        module = self._module()
        return {} if module is None else names_of(module)


def _eager(module: nn.Module) -> Callable[..., Any]:
    """What is compiled: inside the hooks of FSDP2, where parameters are plain and full."""
    return module.forward if is_fsdp2(module) else _torch.call_impl(module)


def _compiled(
    module: nn.Module,
    call: Any,
    backend: Any,
    cast_dtype: torch.dtype | None,
    device: str,
    num_modules: int,
) -> Any:
    code = _code_of(module.forward)
    if cast_dtype is not None:
        tag = f"{_tag(module, cast_dtype)} {device}"
        call = inlined(_with_autocast(call, device, cast_dtype), tag)
        code = _code_of(call)
    elif compiles_only_inlined(module):
        call = inlined(call, _tag(module, None))
        code = _code_of(call)
    return dynamo.compiled_apart(
        call, code, CountingBackend(backend, module), num_modules=num_modules
    )


def _code_of(function: Any) -> types.CodeType | None:
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return code if isinstance(code, types.CodeType) else None


def _with_autocast(call: Any, device: str, dtype: torch.dtype) -> Any:
    def cast_call(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device, dtype=dtype):
            return call(*args, **kwargs)

    return cast_call


def _tag(module: nn.Module, cast_dtype: Any) -> str:
    """Equal for modules that compile to the same graph."""
    shapes = [(name, tuple(item.shape), item.dtype) for name, item in module.named_parameters()]
    return f"{type(module).__qualname__} {module!r} {shapes} {cast_dtype}"


class _Runner:
    """Runs a module compiled, or in eager, under autocast of the device that its tensors are on."""

    def __init__(
        self,
        module: nn.Module,
        eager: Any,
        backend: Any,
        cast_dtype: torch.dtype | None,
        num_modules: int,
    ) -> None:
        self._module, self._eager = module, eager
        self._backend, self._cast_dtype = backend, cast_dtype
        self._num_modules = num_modules
        self._by_device: dict[str, Any] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        device = "" if self._cast_dtype is None else _device_of(self._module, args, kwargs)
        run = self._by_device.get(device)
        if run is None:
            run = self._by_device[device] = self._made(device)
        return run(*args, **kwargs)

    def _made(self, device: str) -> Any:
        if self._backend is not None:
            return _compiled(
                self._module, self._eager, self._backend, self._cast_dtype, device,
                self._num_modules,
            )  # fmt: skip
        if self._cast_dtype is None:
            return self._eager
        return _with_autocast(self._eager, device, self._cast_dtype)


def _device_of(module: nn.Module, args: Any, kwargs: Any) -> str:
    """The device type of its parameters and buffers, of its inputs where it has none."""
    state = next(itertools.chain(module.parameters(), module.buffers()), None)
    held = [state] if state is not None else trees.tensors((args, kwargs))
    return held[0].device.type if held else "cpu"


class Boundary:
    """A compiled version inside a module, from `put_on` until `remove`."""

    def __init__(
        self,
        module: nn.Module,
        backend: Any,
        *,
        cast_dtype: torch.dtype | None,
        around: Callable[[Callable[..., Any], Any, Any], Any] | None,
        num_modules: int = 1,
    ) -> None:
        """Compile.

        Args:
            module: runs compiled once this is put on.
            backend: of `torch.compile`; None: the module goes on in eager, and is looked at.
            cast_dtype: autocast inside the compiled region.
            around: given the compiled callable, args and kwargs; runs it once. None: nobody looks.
            num_modules: that are compiled one by one, and may share code.
        """
        self._module = module
        self._place = "forward" if is_fsdp2(module) else _torch.COMPILED_CALL
        self._before = module.__dict__.get(self._place)
        eager = _eager(module)
        compiled = _Runner(module, eager, backend, cast_dtype, num_modules)

        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return eager(*args, **kwargs)
            if around is None or replaying():
                return (eager if replaying() else compiled)(*args, **kwargs)
            return around(compiled, args, kwargs)

        self._call = call

    def put_on(self) -> None:
        """The module runs compiled from now on."""
        self._module.__dict__[self._place] = self._call

    def remove(self) -> None:
        """The module is as before."""
        self._module.__dict__.pop(self._place, None)
        if self._before is not None:
            self._module.__dict__[self._place] = self._before


@contextlib.contextmanager
def counted() -> Iterator[Ran]:
    """Notes runs of compiled graphs on this thread; final after the context."""
    ran = Ran()
    _executions.open.append(ran)
    try:
        yield ran
    finally:
        _executions.open.remove(ran)
