"""What Dynamo, AOT autograd and inductor are asked for, and told to leave alone."""

from __future__ import annotations

import contextlib
import copy
import functools
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from modulecheck import _torch, backends

__all__ = [
    "AOT_STAGES",
    "CAPTURE_FAILED",
    "Attempt",
    "Lowered",
    "aot_backend",
    "attempts_since",
    "compile_fx",
    "compile_inner",
    "compile_lowered",
    "compiled_alone",
    "compiled_apart",
    "concrete",
    "decompositions",
    "inductor_options",
    "isolated",
    "last_attempt",
    "lowerings",
    "place_of_input",
    "sources_of",
    "strided_copy",
    "symbol_is",
    "version_compiled_now",
]

AOT_STAGES = ("eager", "aot_eager", "aot_eager_decomp_partition", "inductor")
CAPTURE_FAILED = "the generated code cannot be reached (C++ wrapper, or another code path)"
_NO_LIMIT = 1 << 20


# ---- compiling without a trace ------------------------------------------------------------------


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
    before = {id(code) for code in _codes()}
    counters = _torch.counters()
    counted = {name: dict(counts) for name, counts in counters.items()}
    code_state = copy.deepcopy(_torch.code_state())
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
        _forget_codes(before)
        _torch.set_code_state(code_state)
        counters.clear()
        for name, counts in counted.items():
            counters[name].update(counts)


def _codes() -> list[Any]:
    found = [reference() for reference in _torch.input_codes().seen]
    return [code for code in found if code is not None]


def _forget_codes(before: set[int]) -> None:
    """Code that Dynamo met for the first time forgets what was compiled.

    Code that it knew keeps all its entries: ours sit in a bucket that no other call looks into.
    """
    for code in _codes():
        if id(code) not in before:
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


# ---- what inductor made of a graph --------------------------------------------------------------


@dataclass
class Lowered:
    """The generated Python module of one graph, and which FX node each of its buffers is."""

    module: Any
    source: str
    nodes: dict[str, str]
    """Name of a buffer -> name of the FX node whose value it holds."""
    mutated: dict[str, list[str]] = field(default_factory=dict)
    """Name of a buffer or input -> buffers that stand for its later values, in order."""
    problem: str = ""
    """Why nothing is known of the code."""


@contextlib.contextmanager
def lowerings() -> Iterator[list[Lowered]]:
    """Every graph that inductor generates code for, in order."""
    found: list[Lowered] = []
    lowering, original = _torch.GraphLowering(), _torch.compile_to_module()

    @functools.wraps(original)
    def noting(self: Any) -> Any:
        module = original(self)
        try:
            found.append(_lowered(self, module))
        except Exception as error:  # noqa: BLE001 - whatever it is, the user's compile goes on
            problem = f"the generated code cannot be looked into: {type(error).__name__}: {error}"
            found.append(Lowered(module, "", {}, problem=problem))
        return module

    lowering.compile_to_module = noting
    try:
        yield found
    finally:
        lowering.compile_to_module = original


def _lowered(lowering: Any, module: Any) -> Lowered:
    path = getattr(module, "__file__", None)
    source = ""
    if path and str(path).endswith(".py"):
        with open(path, encoding="utf-8") as file:  # noqa: PTH123
            source = file.read()
    nodes: dict[str, str] = {}
    mutated: dict[str, list[str]] = {}
    for name, buffer in _torch.buffers_of(lowering).items():
        node = _torch.origin_node_of(buffer)()
        if node is not None:
            nodes[name] = node.name
        if _torch.should_allocate(buffer)():
            continue
        for changed in _torch.mutation_names_of(buffer)():
            mutated.setdefault(changed, []).append(name)
    return Lowered(module, source, nodes, mutated)


def compile_fx(graph: Any, inputs: Any, inner: Callable[..., Any]) -> Any:
    """Inductor as a backend, with `inner` in place of its own compiler of one graph."""
    return _torch.compile_fx()(graph, inputs, inner_compile=inner)


def compile_inner(graph: fx.GraphModule, inputs: Any, **options: Any) -> Any:
    """Inductor's own compiler of one graph, forward or backward."""
    return _torch.compile_fx_inner()(graph, inputs, **options)


def compile_lowered(graph: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """Inductor on a graph of ATen ops whose placeholders carry their meta values."""
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    examples = [node.meta["val"] for node in placeholders]
    modes = [getattr(value, "fake_mode", None) for value in examples]
    fake_mode = next((mode for mode in modes if mode is not None), None)
    if fake_mode is None:
        fake_mode = _torch.FakeTensorMode()(allow_non_fake_inputs=True)
        examples = [
            fake_mode.from_tensor(value) if isinstance(value, Tensor) else value
            for value in examples
        ]
    context = _torch.TracingContext()(fake_mode)
    with _torch.tracing()(context), _torch.set_fake_mode()(fake_mode), torch.no_grad():
        compiled = compile_inner(
            graph, examples, cudagraphs=_torch.BoxedBool()(value=False), static_input_idxs=[],
            is_inference=True, boxed_forward_device_index=None,
        )  # fmt: skip
    function: Callable[[list[Any]], Any] = compiled
    return function


@contextlib.contextmanager
def inductor_options(**options: Any) -> Iterator[None]:
    """Options of `torch._inductor.config` for the length of the context."""
    with _torch.patched(_torch.INDUCTOR_CONFIG, **options):
        yield


def aot_backend(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """AOT autograd with two compilers and no decompositions of its own."""
    backend: Callable[..., Any] = _torch.aot_autograd()(fw_compiler=forward, bw_compiler=backward)
    return backend


def decompositions() -> dict[Any, Callable[..., Any]]:
    """The table with which inductor and `aot_eager_decomp_partition` trace."""
    return dict(_torch.select_decomp_table()())


def strided_copy(value: Any) -> Any:
    """A copy of a tensor with its very strides, as generated code asserts them; else the value."""
    with _torch.no_modes():
        return (
            _torch.clone_preserve_strides()(value.detach()) if isinstance(value, Tensor) else value
        )


# ---- sizes --------------------------------------------------------------------------------------


def concrete(value: Any, sizes: dict[Any, Any]) -> Any:
    """A size or several, with what their symbols stand for put in; text where one is left."""
    if isinstance(value, torch.Size):
        return tuple(concrete(item, sizes) for item in value)
    if not isinstance(value, torch.SymInt):
        return value
    found = value.node.expr.xreplace(sizes)
    return int(found) if found.is_Integer else str(found)


def symbol_is(size: Any, other: Any) -> dict[Any, Any]:
    """What the symbol stands for, where a size is nothing but a symbol."""
    import sympy  # type: ignore[import-untyped] # it has no stubs

    expression = size.node.expr if isinstance(size, torch.SymInt) else None
    if not isinstance(expression, sympy.Symbol):
        return {}
    theirs = other.node.expr if isinstance(other, torch.SymInt) else sympy.Integer(int(other))
    return {expression: theirs}


# ---- inputs -------------------------------------------------------------------------------------


def sources_of(graph: fx.GraphModule) -> list[str]:
    """Where Dynamo took each input of a graph from: `L['x']`; "" where it does not say."""
    sources = [
        getattr(node.meta.get("grapharg"), "source", None)
        for node in graph.graph.nodes
        if node.op == "placeholder"
    ]
    return ["" if source is None else str(source.name) for source in sources]


def place_of_input(node: fx.Node) -> int | None:
    """Of a placeholder of AOT autograd's graph among the inputs of Dynamo's; None: it is none."""
    about = node.meta.get("desc")
    return about.idx if isinstance(about, _torch.PlainAOTInput()) else None
