"""Dynamo, asked to compile beside the user's own code and without a trace; what it then tells."""

from __future__ import annotations

import contextlib
import copy
import functools
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from modulecheck import _torch, backends
from opcheck.exits import uncut

__all__ = [
    "Attempt",
    "attempts_since",
    "compiled_alone",
    "compiled_apart",
    "isolated",
    "last_attempt",
    "version_compiled_now",
]

_NO_LIMIT = 1 << 20


def compiled_alone(
    function: Callable[..., Any], backend: Any, *, dynamic: bool | None
) -> Callable[..., Any]:
    """`torch.compile` whose cache entries are its own and do not count for anybody else."""
    options: dict[str, Any] = {"isolate_recompiles": True}  # not in the overloads
    compiled: Callable[..., Any] = torch.compile(
        function, backend=backend, dynamic=dynamic, **options
    )
    return compiled


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Compile freely: caches, counters and compile configuration are as before afterwards.

    No graph is read from or written to the caches on disk, because a lowering may have been changed
    since they were filled. The user's compiled code stays valid and is not compiled again.
    """
    before = _codes()
    counters = _torch.counters()
    counted = {name: dict(counts) for name, counts in counters.items()}
    code_state = copy.deepcopy(_torch.code_state())

    def put_back() -> None:
        _forget_codes(before)
        _torch.set_code_state(code_state)
        counters.clear()
        for name, counts in counted.items():
            counters[name].update(counts)

    try:
        with (
            _torch.recompiling_freely(),
            _torch.patched(
                _torch.INDUCTOR_CONFIG, fx_graph_cache=False, fx_graph_remote_cache=False
            ),
            _torch.patched(
                _torch.FUNCTORCH_CONFIG,
                enable_autograd_cache=False,
                enable_remote_autograd_cache=False,
            ),
            _torch.patched(
                _torch.DYNAMO_CONFIG,
                recompile_limit=_NO_LIMIT,
                accumulated_recompile_limit=_NO_LIMIT,
                fail_on_recompile_limit_hit=False,
            ),
        ):
            yield
    finally:
        uncut(put_back)


def _codes() -> list[Any]:
    found = [reference() for reference in _torch.input_codes().seen]
    return [code for code in found if code is not None]


def _forget_codes(before: list[Any]) -> None:
    """Code that Dynamo met for the first time forgets what was compiled.

    Code that it knew keeps all its entries: ours sit in a bucket that no other call looks into.
    It is known by its id, while `before` holds it: equal code of two functions is equal.
    """
    known = {id(code) for code in before}
    for code in _codes():
        if id(code) not in known:
            _torch.reset_code()(code)


# ---- compiling beside the user's own compiled code ----------------------------------------------


@functools.cache
def _region() -> int:
    """The part of Dynamo's caches that the checkers of this process share."""
    return int(next(_torch.next_region()))


def compiled_apart(
    function: Callable[..., Any], code: types.CodeType | None, backend: Any, *, num_modules: int
) -> Callable[..., Any]:
    """`torch.compile`, with a recompile limit that is not used up by other modules.

    Modules of one class share a code object, and so share what is compiled, shapes that became
    dynamic, and the limit: with a number of its own in each (`layer_idx`) the ninth would silently
    run in eager. Here each brings the user's limit with it. What is compiled, and the sizes that it
    was for, count neither for what the user compiles nor, as to the limit, the other way round.

    Args:
        function: is compiled.
        code: of the frame that Dynamo meets first, if that is known.
        backend: a callable.
        num_modules: that are compiled one by one and may share the code.
    """
    earlier = 0
    if code is not None:
        earlier = len(_torch.entries_of_region()(code, _region()))
    context = _torch.optimize()(
        backend=backend, recompile_limit=_torch.recompile_limit() * num_modules + earlier
    )
    if not isinstance(context, contextlib.nullcontext):  # that is TORCHDYNAMO_DISABLE=1
        _torch.in_region(context, _region())
    compiled: Callable[..., Any] = context(function)

    def run(*args: Any, **kwargs: Any) -> Any:
        with _sizes().apart(), _torch.recompiling_freely():
            return compiled(*args, **kwargs)

    return run


@dataclass(eq=False)
class _Sizes:
    """Which sizes Dynamo has seen change, by function: those it makes symbols when it compiles.

    What a checked step has shown is kept apart. Else the user's own code would come out with
    symbols, and other bits, when it is compiled later for a batch of another size.
    """

    users: Any = None
    own: Any = None

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        current = _torch.loaded_code_state()()
        if current is self.own:
            yield
            return
        if current is not self.users:  # the first time, and after torch._dynamo.reset()
            self.users, self.own = current, copy.deepcopy(current)
        _torch.set_code_state(self.own)
        try:
            yield
        finally:
            if _torch.code_state() is self.own:
                _torch.set_code_state(current)


@functools.cache
def _sizes() -> _Sizes:
    """Of the checkers of this process."""
    return _Sizes()


def version_compiled_now() -> tuple[int, int] | None:
    """Which function a backend is compiling a graph of, and the number of its version."""
    found = _torch.CompileContext().current_compile_id()
    if found is None or found.frame_id is None or found.frame_compile_id is None:
        return None
    return found.frame_id, found.frame_compile_id


@dataclass(frozen=True)
class Attempt:
    """What Dynamo made of one frame."""

    version: tuple[int, int]
    function: str
    """"forward (file.py:12)", "" where it is not known."""
    recompiled: str
    """Which guard of the code that was there did not hold, "" if there was none."""
    broken: str
    """Why the graph was broken, or nothing was compiled, "" if neither."""
    limit_hit: bool


def last_attempt() -> Any:
    """A mark for `attempts_since`."""
    found = _torch.compilation_metrics()()
    return found[-1] if found else None


def attempts_since(mark: Any) -> list[Attempt]:
    """The frames that Dynamo has met since the mark, in order; the last 64 at most."""
    found: list[Attempt] = []
    for item in reversed(_torch.compilation_metrics()()):
        if item is mark:
            break
        attempt = _attempt_of(item)
        if attempt is not None:
            found.append(attempt)
    return found[::-1]


def _attempt_of(metrics: Any) -> Attempt | None:
    """None for the compilation of a backward graph, which is no frame."""
    if metrics.co_name is None and metrics.fail_reason is None:
        return None
    version = _torch.CompileId().from_string(metrics.compile_id)
    if version is None or version.frame_id is None or version.frame_compile_id is None:
        return None
    # a frame of ours in front of a class of torch.nn has no name that would tell anything
    known = metrics.co_name is not None and metrics.co_filename != backends.__file__
    place = f"{Path(metrics.co_filename or '').name}:{metrics.co_firstlineno}"
    broken = metrics.fail_reason or next(iter(sorted(metrics.restart_reasons or ())), "")
    return Attempt(
        (version.frame_id, version.frame_compile_id),
        f"{metrics.co_name} ({place})" if known else "",
        _guard(metrics.recompile_reason or ""),
        _cause(broken),
        "recompile limit exceeded" in (metrics.fail_reason or ""),
    )


def _cause(text: str) -> str:
    """What Dynamo says in its first line, and the setting that it hints at."""
    first, *more = map(str.strip, text.strip().split("\n"))
    hints = [line.partition("Hint: ")[2] for line in more if "Hint: " in line and "config." in line]
    return f"{first} ({hints[0].rstrip('.')})" if hints else first


def _guard(reason: str) -> str:
    """Of "0/7: self.index == 7   # return x * self.index  # ..." the condition alone."""
    first = reason.partition("\n")[0].partition("#")[0]
    return " ".join(first.partition(": ")[2].split())
