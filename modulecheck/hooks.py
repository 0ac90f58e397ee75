"""Module boundaries: a module compiled in place, and what the real step gives and gets there.

`Boundary` puts a compiled version into a module without touching the module tree, its class or its
hooks. `RegionGradients` reads, in the real backward, the gradients that the nodes of one call
produced themselves, before they meet what other users of the same tensor add.
"""

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
from torch import Tensor, nn

from modulecheck import _inductor, _torch, trees
from modulecheck.artifacts import Artifact, compiled_and_kept
from modulecheck.attributes import attribute_tensors
from modulecheck.backends import compiles_only_inlined, inlined, is_own_inductor, load_backend
from modulecheck.distributed import is_fsdp2
from modulecheck.node_origin import names_of
from modulecheck.replay import arguments, replaying

__all__ = ["Boundary", "Ran", "RegionGradients", "counted"]

Key = tuple[str, int | str]
"""("input", place), ("parameter", name), ("output", place)."""


# ---- compiling in place -------------------------------------------------------------------------


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
        return hash(self.backend) if isinstance(self.backend, str) else id(self.backend)

    def __call__(self, graph: Any, inputs: Any, **options: Any) -> Callable[..., Any]:
        artifact, version = None, _inductor.version_compiled_now()
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
    return _inductor.compiled_apart(
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
    """A compiled version inside a module, until `remove`."""

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
            module: runs compiled from now on.
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

        module.__dict__[self._place] = call

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


# ---- gradients of the real step -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Edge:
    """Where a node of the call hands a gradient to."""

    place: int
    child: Any
    key: Key
    inside: bool
    """To an output of the call that the call itself goes on with."""


class RegionGradients:
    """The gradients at the boundary of one call.

    Made before the call, because the call may change its inputs in place. `attach` after it.
    """

    def __init__(self, module: nn.Module, args: Any, kwargs: Any, *, copies: bool = False) -> None:
        """Take down who the inputs are.

        Args:
            module: the module that is called.
            args: positional inputs.
            kwargs: keyword inputs.
            copies: keep the gradients past the backward, which may write to them later.
        """
        self._copies, self._module = copies, module
        self.arguments = arguments(args, kwargs)
        self.inputs = trees.tensors((args, kwargs))
        self._input_keys: dict[Any, Key] = {}
        self._before = [(item.grad_fn, item.output_nr) for item in self.inputs]
        for place, item in enumerate(self.inputs):
            if item.requires_grad:
                self._input_keys.setdefault(_identity(item), ("input", place))
        self._parameters: dict[int, Key] = {
            id(item): ("parameter", name) for name, item in module.named_parameters()
        }
        self._first_nr = _torch.next_sequence_nr()
        self._handles: list[Any] = []
        self._waiting: set[Any] = set()
        self._on_done: Callable[[], None] | None = None
        self._on_first: Callable[[], None] | None = None
        self.found: dict[Key, Tensor] = {}
        """Own gradients of inputs and parameters."""
        self.sources: list[Key] = []
        """Outputs (and changed inputs) through which gradients come in."""
        self.not_asked: set[Key] = set()
        """Inputs and parameters whose gradients the backward was not asked for."""
        self._arrived: dict[Key, Tensor] = {}
        self._from_inside: dict[Key, Tensor] = {}
        self._source_keys: dict[Any, Key] = {}
        self._listened: list[tuple[Any, list[_Edge]]] = []
        self.has_unknown_edges = False
        """A gradient leaves the call for a tensor that is no input of it."""
        self.fired = False
        self.ran_again = False

    def attach(
        self, output: Any, *, on_first: Callable[[], None], on_done: Callable[[], None]
    ) -> bool:
        """Listen to the nodes that the call has made.

        Args:
            output: of the call.
            on_first: called when the backward first reaches the call.
            on_done: called when every node of the call has run.

        Returns:
            False: no gradient can come.
        """
        self._on_first, self._on_done = on_first, on_done
        outputs = self._gradient_sources(output)
        self.sources = [key for key, _ in outputs]
        self._source_keys = {
            _identity(tensor): key
            for key, tensor in outputs
            if tensor.grad_fn is not None and not self._is_outside(tensor.grad_fn)
        }
        todo = [tensor.grad_fn for _, tensor in outputs]
        seen: set[Any] = set()
        while todo:
            node = todo.pop()
            if node is None or node in seen or self._is_outside(node):
                continue
            seen.add(node)
            edges = self._edges(node)
            if edges:
                self._listen(node, edges)
            todo += [child for child, nr in node.next_functions if self._goes_on(child, nr)]
        for key, tensor in outputs:
            if tensor.grad_fn is not None and not self._is_outside(tensor.grad_fn):
                self._listen_to_output(key, tensor)
        return bool(self._waiting)

    @property
    def of_outputs(self) -> dict[Key, Tensor]:
        """What came in from outside; an output that the call goes on with gets more from inside."""
        return {
            key: grad - self._from_inside[key] if key in self._from_inside else grad
            for key, grad in self._arrived.items()
        }

    def wants(self, key: Key) -> bool:
        """False for a gradient that the backward was not asked for, and did not give."""
        return key in self.found or key not in self.not_asked

    def forget_inputs(self) -> None:
        """Let go of the user's tensors; what is needed in backward are their nodes."""
        self.arguments = {}
        self.inputs.clear()
        self._before.clear()

    def settle(self) -> None:
        """Nothing more comes: let go of the graph and of the parameters, what was found stays."""
        for handle in self._handles:
            handle.remove()
        for container in (
            self.inputs, self._input_keys, self._before, self._parameters, self._handles,
            self._waiting, self._listened,
        ):  # fmt: skip
            container.clear()
        self._on_done = self._on_first = None

    def release(self) -> None:
        """Let go of everything; hooks are taken off."""
        for handle in self._handles:
            handle.remove()
        for container in (
            self.inputs, self._input_keys, self._before, self._parameters, self._handles,
            self._waiting, self.found, self._arrived, self._from_inside, self._source_keys,
            self._listened,
        ):  # fmt: skip
            container.clear()
        self.arguments = {}
        self._on_done = self._on_first = None

    def changed_inputs(self) -> list[tuple[int, Tensor]]:
        """Inputs that the call changed in place in a way that autograd follows."""
        return [
            (place, item)
            for place, (item, (node, _)) in enumerate(zip(self.inputs, self._before, strict=True))
            if item.grad_fn is not None and item.grad_fn is not node
        ]

    def _gradient_sources(self, output: Any) -> list[tuple[Key, Tensor]]:
        """Outputs that carry a gradient of their own into the call, each once."""
        changed = self.changed_inputs()
        found: list[tuple[Key, Tensor]] = [(("input", place), item) for place, item in changed]
        taken = {_identity(item) for _, item in changed}
        roots = list(self.inputs)
        for source, tensor in self._given(output):
            key = _identity(tensor)
            if not tensor.requires_grad or key in taken or key in self._input_keys:
                continue
            base = _torch.base_of(tensor) if _torch.is_view(tensor) else None
            others = [*roots, *(item for _, item in found)]
            if base is not None and any(
                base is item or base is _torch.base_of(item) for item in others
            ):
                continue  # its gradient arrives through the other one
            taken.add(key)
            found.append((source, tensor))
        return found

    def _given(self, output: Any) -> Iterator[tuple[Key, Tensor]]:
        """Outputs, and what the call has put into its arguments and into attributes."""
        for place, (_, tensor) in enumerate(trees.named_tensors(output)):
            yield ("output", place), tensor
        for name, tensor in trees.named_tensors(self.arguments):
            yield ("argument", name), tensor
        for name, tensor in attribute_tensors(self._module).items():
            yield ("attribute", name), tensor

    def _is_outside(self, node: Any) -> bool:
        return bool(_torch.sequence_nr_of(node) < self._first_nr)

    def _goes_on(self, node: Any, nr: int) -> bool:
        return (
            node is not None
            and not hasattr(node, "variable")
            and (node, nr) not in self._input_keys
        )

    def _edges(self, node: Any) -> list[_Edge]:
        found = []
        for place, (child, nr) in enumerate(node.next_functions):
            if child is None:
                continue
            variable = getattr(child, "variable", None)
            key = self._input_keys.get((child, nr))
            source = None if key is not None else self._source_keys.get((child, nr))
            if key is None and variable is not None:
                key = self._input_keys.get(id(variable)) or self._parameters.get(id(variable))
            if source is not None:
                found.append(_Edge(place, child, source, inside=True))
            elif key is not None:
                found.append(_Edge(place, child, key, inside=False))
            elif variable is not None or self._is_outside(child):
                self.has_unknown_edges = True
        return found

    def _listen(self, node: Any, edges: list[_Edge]) -> None:
        self._waiting.add(node)
        self._listened.append((node, edges))

        def after(grad_inputs: Any, grad_outputs: Any) -> None:
            if self._on_done is None or replaying():
                return
            if node not in self._waiting:
                self.ran_again = True
                return
            if not self.fired:
                self.fired = True
                self._look_ahead()
                if self._on_first is not None:
                    self._on_first()
            for edge in edges:
                grad = grad_inputs[edge.place]
                if grad is not None:
                    grad, into = self._kept(grad), self._from_inside if edge.inside else self.found
                    into[edge.key] = into[edge.key] + grad if edge.key in into else grad
            self._waiting.discard(node)
            if not self._waiting and self._on_done is not None:
                self._on_done()

        self._handles.append(node.register_hook(after))

    def _look_ahead(self) -> None:
        """`backward(inputs=...)` and `torch.autograd.grad` run a part of the nodes."""
        known, asked = set[Key](), set[Key]()
        for node, edges in self._listened:
            runs = _torch.runs_in_this_backward(node)
            if not runs:
                self._waiting.discard(node)
            for edge in edges:
                if not edge.inside:
                    known.add(edge.key)
                    if runs and _torch.runs_in_this_backward(edge.child):
                        asked.add(edge.key)
        self.not_asked = known - asked

    def _kept(self, grad: Tensor) -> Tensor:
        return grad.detach().clone() if self._copies else grad.detach()

    def _listen_to_output(self, key: Key, tensor: Tensor) -> None:
        place = tensor.output_nr

        def before(grad_outputs: Any) -> None:
            if self._on_done is None or replaying():
                return
            if grad_outputs[place] is not None and key not in self._arrived:
                self._arrived[key] = self._kept(grad_outputs[place])

        node = tensor.grad_fn
        if node is not None:
            self._handles.append(node.register_prehook(before))


def _identity(tensor: Tensor) -> Any:
    if tensor.grad_fn is not None:
        return (tensor.grad_fn, tensor.output_nr)
    return id(tensor)
