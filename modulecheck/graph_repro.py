"""A captured graph that comes out wrong, as a reproducer that runs with torch alone.

The file has the graph as readable Python, its inputs (and output gradients), and what each failing
result may differ by. It runs the graph in float64 and in eager, compiles it with the backend, and
exits 1 while the fault is there. A module's forward and backward, and the nodes of one generated
kernel, are all such graphs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, fx

from modulecheck import _torch
from modulecheck.fx_text import GraphText, spell_graph
from modulecheck.graph_limits import GraphRule, Result, graph_limits, loaded
from opcheck import tolerances as tol
from opcheck.errors import ReproError
from opcheck.packing import Packed, View, map_tree, pack
from opcheck.repro_files import free_stem, write_repro
from opcheck.repro_limits import Limit
from opcheck.repro_tensors import Tensors, identifier, spell_value
from opcheck.repro_text import Registered, frame
from opcheck.runstate import RunState

__all__ = ["DEFAULT_REPRO_BYTES", "Result", "write_graph_repro"]

DEFAULT_REPRO_BYTES = 1 << 28


def write_graph_repro(
    folder: str | Path,
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    name: str,
    backend: Any = "inductor",
    stage: str = "",
    failed: Sequence[Result] = (),
    grads: Mapping[int, Tensor] | None = None,
    facts: Mapping[str, str] | None = None,
    criterion: str = "calibrated",
    atol: float = tol.MODULE_ATOL,
    rtol: float = tol.MODULE_RTOL,
    dynamic: bool | None = None,
    state: RunState | None = None,
    random_state: Tensor | None = None,
    registered: Sequence[Registered] = (),
    max_bytes: int = DEFAULT_REPRO_BYTES,
) -> Path:
    """Write a graph with its inputs as a file that shows whether the backend computes it wrongly.

    Args:
        folder: made when missing.
        graph: as Dynamo, AOT autograd or inductor made it; a piece of one will do.
        inputs: one for each placeholder: tensors, whose `requires_grad` is kept, and numbers.
        name: of the file, without suffix; made safe, and another one where it is taken.
        backend: of `torch.compile`, a name or an importable function; "eager" compiles nothing and
            float64 alone judges.
        stage: where the fault is born, for the reader: "inductor", "kernel cpp_fused_add_0".
        failed: which results are judged; none: all.
        grads: place of an output -> the gradient that comes in there; none: forward alone.
        facts: more lines for the head of the file: module, phase, source line, reason.
        criterion: "calibrated", or "allclose" beside eager.
        atol: of "allclose".
        rtol: likewise.
        dynamic: of `torch.compile`.
        state: of the process when the fault was found; None: now.
        random_state: of the CPU generator before the graph ran, where it draws.
        registered: kernels that were not torch's own.
        max_bytes: of all tensors.

    Returns:
        The path of the Python file.

    Raises:
        ReproError: too large, not writable, or the graph cannot run elsewhere.
    """
    folder = Path(folder)
    with _torch.no_modes():
        given = {"inputs": list(inputs), "grads": dict(grads or {}), "rng": random_state}
        writer = _Writer.of(graph, given, backend, dynamic=dynamic)
        writer.state = state or writer.state
        writer.registered = registered
        rule = GraphRule(criterion, atol, rtol, tuple(failed), by_golden=backend == "eager")
        head = {"stage": stage, "backend": writer.backend_text, **(facts or {})}
        head = {key: value for key, value in head.items() if value}
        with tempfile.TemporaryDirectory() as scratch:
            text, tensors = writer.text(head, [])
            path = write_repro(Path(scratch), "graph", text, tensors, max_bytes=max_bytes)
            limits = graph_limits(loaded(path), rule)
        text, tensors = writer.text(head, limits)
        stem = free_stem(folder, name)
        return write_repro(folder, stem, text, tensors, max_bytes=max_bytes)


# ---- text ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Writer:
    text_of: GraphText
    packed: Packed
    names: dict[View, str]
    wants_grad: list[int]
    """Places of inputs."""
    backend_text: str
    dynamic: bool | None
    state: RunState
    registered: Sequence[Registered]

    @classmethod
    def of(
        cls, graph: fx.GraphModule, given: dict[str, Any], backend: Any, *, dynamic: bool | None
    ) -> _Writer:
        constants: dict[int, Tensor] = {}

        def constant(tensor: Tensor) -> str:
            constants.setdefault(id(tensor), tensor)
            return f"held[{list(constants).index(id(tensor))}]"

        text = spell_graph(graph, constant=constant)
        backend_text, imports = _spell_backend(backend)
        text.imports = [*text.imports, *imports]
        tree = {**given, "constants": list(constants.values())}
        packed = pack(map_tree(tree, lambda x: x.detach() if isinstance(x, Tensor) else x))
        wants = [
            place
            for place, item in enumerate(given["inputs"])
            if isinstance(item, Tensor) and item.requires_grad and given["grads"]
        ]
        names = _names(graph, packed)
        return cls(text, packed, names, wants, backend_text, dynamic, RunState.now(), ())

    def text(self, facts: Mapping[str, str], limits: list[Limit]) -> tuple[str, dict[str, Tensor]]:
        tensors = Tensors(self.packed, self.names, limits)
        body = [*self.text_of.classes, self._tensors_function(tensors), *self._functions()]
        text = frame(
            title="A graph that its backend computes wrongly.", facts=facts, state=self.state,
            tensors=tensors, body=body, main=self._main(), registered=self.registered,
            imports=[*self.text_of.imports, *_IMPORTS],
        )  # fmt: skip
        return text, tensors.saved

    def _tensors_function(self, tensors: Tensors) -> str:
        tree = self.packed.tree

        def spell(value: Any) -> str:
            return spell_value(value, self.names.__getitem__)

        grads = ", ".join(f"{place}: {spell(view)}" for place, view in tree["grads"].items())
        lines = [
            "def tensors(device, wide):",
            '    """Inputs, what the graph holds, output gradients by place, random state."""',
            *(f"    {line}" for line in tensors.view_lines()),
            f"    given = {spell(tree['inputs'])}",
            f"    held = {spell(tree['constants'])}",
            f"    return given, held, {{{grads}}}, {spell(tree['rng'])}",
        ]
        return "\n".join(lines)

    def _functions(self) -> list[str]:
        compute = _COMPUTE.replace("<wants>", repr(self.wants_grad))
        contexts = ", ".join(self.state.contexts())
        return [_CONSTANTS, compute.replace("<contexts>", contexts), _IN_FLOAT64, _REFERENCES]

    def _main(self) -> str:
        own = any(
            "torch.ops." in text and _has_own_namespace(text) for text in self.text_of.classes
        )
        lines = _LOAD_FIRST if own else _LOAD_LAST
        text = _MAIN.replace("    <order>\n", lines)
        return text.replace("<backend>", self.backend_text).replace("<dynamic>", repr(self.dynamic))


_NAMESPACES = ("aten", "prims", "inductor", "prim", "higher_order", "quantized", "rngprims")


def _has_own_namespace(text: str) -> bool:
    parts = text.split("torch.ops.")[1:]
    return any(part.partition(".")[0] not in _NAMESPACES for part in parts)


def _spell_backend(backend: Any) -> tuple[str, list[str]]:
    """As `torch.compile` is to be given it, and the import that it needs."""
    if isinstance(backend, str):
        return repr(backend), []
    home, name = getattr(backend, "__module__", ""), getattr(backend, "__qualname__", "")
    if not (home and name.isidentifier()) or home == "__main__":
        raise ReproError(f"the backend {backend!r} has no name under which a file can import it")
    return name, [f"from {home} import {name}"]


def _names(graph: fx.GraphModule, packed: Packed) -> dict[View, str]:
    names: dict[View, str] = {}
    placeholders = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
    tree = packed.tree
    if len(placeholders) != len(tree["inputs"]):
        raise ReproError(
            f"the graph takes {len(placeholders)} inputs, {len(tree['inputs'])} were given"
        )
    pairs = [
        *zip(placeholders, tree["inputs"], strict=True),
        *((f"constant_{place}", view) for place, view in enumerate(tree["constants"])),
        *((f"grad_output_{place}", view) for place, view in tree["grads"].items()),
        ("random_state", tree["rng"]),
    ]
    for name, view in pairs:
        if isinstance(view, View):
            names.setdefault(view, identifier(name))
    return names


_IMPORTS = (
    "import contextlib",
    "from torch.utils._python_dispatch import TorchDispatchMode",
)

_CONSTANTS = '''\
def constants(device, wide):
    """What the graph holds beside its inputs."""
    return tensors(device, wide)[1]'''

_COMPUTE = '''\
WANTS_GRAD = <wants>
"""Places of the inputs that get a gradient."""


def compute(model, wide, change=None):
    """Outputs of the graph, then the gradients of its inputs."""
    given, _, grads, random_state = tensors(DEVICE, wide)
    given = given if change is None else change(given)
    if random_state is not None:
        torch.set_rng_state(random_state)
    with <contexts>, InFloat64() if wide else contextlib.nullcontext():
        for place in WANTS_GRAD:
            given[place].requires_grad_()
        out = results(model(*given))
        if not grads:
            return out
        sources = [place for place in grads if out[place].requires_grad]
        wanted = [given[place] for place in WANTS_GRAD]
        incoming = [grads[place].to(out[place].dtype) for place in sources]
        found = torch.autograd.grad(
            [out[place] for place in sources], wanted, incoming, allow_unused=True
        )
    return [*out, *found]'''

_IN_FLOAT64 = '''\
class InFloat64(TorchDispatchMode):
    """Casts to a floating dtype become casts to float64, and so do factories."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.view.dtype:
            return func(*args, **(kwargs or {}))
        return func(*map(widened, args), **{k: widened(v) for k, v in (kwargs or {}).items()})


def widened(value):
    """The float64 twin of a dtype; anything else as it is."""
    if not isinstance(value, torch.dtype):
        return value
    if value.is_complex:
        return torch.complex128
    return torch.float64 if value.is_floating_point else value'''

_REFERENCES = '''\
def in_float64(change=None):
    """The graph with everything in float64, in eager."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return compute(Graph(DEVICE, True), True, change)
    finally:
        torch.set_default_dtype(usual)


def in_eager(change=None):
    """The graph as it is, and not compiled."""
    return compute(Graph(DEVICE, False), False, change)'''

_LOAD_LAST = """\
    expected, beside = in_float64(), in_eager()
    kernels = load_kernels()  # they stay as long as this name
"""
_LOAD_FIRST = """\
    kernels = load_kernels()  # they stay as long as this name
    expected, beside = in_float64(), in_eager()
"""

_MAIN = '''\
DEVICE = "cpu"


def main(argv=None):
    """Compare the compiled graph with eager and float64; 1 if the fault is there."""
    global DEVICE
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default=DEVICE)
    parser.add_argument("--backend", default=<backend>)
    chosen = parser.parse_args(argv)
    DEVICE = chosen.device
    configure()
    <order>
    model = Graph(DEVICE, False)
    if chosen.backend == "eager":
        beside = [None] * len(expected)  # what is judged is eager itself
    else:
        model = torch.compile(model, backend=chosen.backend, dynamic=<dynamic>)
    actual = compute(model, False)
    del kernels
    return verdict(limits(), actual, expected, beside)'''
