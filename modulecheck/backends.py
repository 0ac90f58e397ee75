"""Backends of `torch.compile`, and how a module is compiled by one."""

from __future__ import annotations

import contextlib
import logging
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from modulecheck import _torch
from opcheck import source_lines
from opcheck.errors import ArgumentError
from opcheck.validation import an_instance, wrong_type

__all__ = [
    "compiles_only_inlined",
    "inlined",
    "is_own_inductor",
    "lacks_cpp_compiler",
    "load_backend",
    "random_as_eager",
    "recompile_limit_hits",
    "require_backend",
    "require_backend_or_name",
]


def lacks_cpp_compiler() -> bool:
    """True when inductor would not find the compiler that its CPU code needs."""
    try:
        _torch.get_cpp_compiler()()
    except _torch.InvalidCxxCompiler():
        return True
    return False


def load_backend(backend: Any) -> Callable[..., Any]:
    """The function that compiles a graph, of a name that `torch.compile` takes."""
    if not isinstance(backend, str):
        found: Callable[..., Any] = backend
        return found
    named: Callable[..., Any] = _torch.lookup_backend()(backend)
    return named


def require_backend_or_name(backend: Any) -> None:
    """Whether there is a backend of that name is looked at when a model is there."""
    if not isinstance(backend, str) and not callable(backend):
        raise wrong_type("backend", "a name or a function", backend)


def require_backend(backend: Any, model: nn.Module) -> None:
    """Say now what would otherwise be an error in the middle of the step.

    Raises:
        ArgumentTypeError: the model is no module.
        ArgumentError: there is no backend of that name.
        RuntimeError: it is inductor, and the compiler that it needs is not there.
    """
    an_instance("model", model, nn.Module, "a torch.nn.Module")
    if not isinstance(backend, str):
        return
    try:
        load_backend(backend)
    except _torch.InvalidBackend() as error:
        raise ArgumentError(
            f"backend: torch.compile knows none of the name {backend!r};"
            " torch._dynamo.list_backends() gives those it knows"
        ) from error
    on_cpu = any(item.device.type == "cpu" for item in model.parameters())
    if backend == "inductor" and on_cpu and lacks_cpp_compiler():
        raise RuntimeError(
            "backend='inductor' needs a C++ compiler for a model on the CPU and finds none:"
            " install g++ or clang++, or choose backend='aot_eager'"
        )


def is_own_inductor(backend: Any) -> bool:
    """True for "inductor", unless somebody has registered another backend by that name."""
    if not isinstance(backend, str) or backend != "inductor":
        return False
    return load_backend(backend).__module__ == _torch.INDUCTOR_BACKEND


# ---- how a module is compiled -------------------------------------------------------------------


def compiles_only_inlined(module: nn.Module) -> bool:
    """True when Dynamo skips the frame of this module's `forward`, as all of torch's own.

    False where a submodule is of a class whose Python module cannot be imported (a notebook, an
    exec): tracing into it from an extra frame crashes the user's step.
    """
    forward = getattr(module.forward, "__func__", module.forward)
    code = getattr(forward, "__code__", None)
    if code is None or not code.co_filename.startswith(source_lines.TORCH_FOLDER):
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


# ---- settings while a step is checked -----------------------------------------------------------


@contextlib.contextmanager
def random_as_eager(backend: Any) -> Iterator[bool]:
    """Have inductor draw the random numbers that eager draws; True where that was switched on."""
    if backend in ("eager", "aot_eager", "aot_eager_decomp_partition"):
        yield False
        return
    before = _torch.inductor_config().fallback_random
    with _torch.patched(_torch.INDUCTOR_CONFIG, fallback_random=True):
        yield not before


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
    logger = logging.getLogger(_torch.DYNAMO_LOG)
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
