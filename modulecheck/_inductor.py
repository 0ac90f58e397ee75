"""What AOT autograd and inductor are asked for."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from modulecheck import _torch

__all__ = [
    "AOT_STAGES",
    "CAPTURE_FAILED",
    "Lowered",
    "aot_backend",
    "compile_fx",
    "compile_inner",
    "compile_lowered",
    "concrete",
    "decompositions",
    "inductor_options",
    "lowerings",
    "place_of_input",
    "sources_of",
    "strided_copy",
    "symbol_is",
]

AOT_STAGES = ("eager", "aot_eager", "aot_eager_decomp_partition", "inductor")
CAPTURE_FAILED = "the generated code cannot be reached (C++ wrapper, or another code path)"


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
