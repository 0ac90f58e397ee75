"""Gradients at the boundary of one call, read in the real backward.

They are those that the nodes of the call produced themselves, before they meet what other users of
the same tensor add.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from modulecheck import _torch, trees
from modulecheck.replay import arguments, replaying

__all__ = ["RegionGradients"]

Key = tuple[str, int | str]
"""("input", place), ("parameter", name), ("output", place)."""


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
        self._copies = copies
        self.arguments = arguments(args, kwargs)
        self.inputs = trees.tensors((args, kwargs))
        self._input_keys: dict[Any, Key] = {}
        self._before = [(item.grad_fn, item.output_nr) for item in self.inputs]
        for place, item in enumerate(self.inputs):
            if item.requires_grad:
                self._input_keys.setdefault(_identity(item), ("input", place))
        self._parameters: dict[int, tuple[Key, Tensor]] = {
            id(item): (("parameter", name), item) for name, item in module.named_parameters()
        }
        """Held until `attach`: the call may drop one and make another leaf, with its id."""
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
        self,
        output: Any,
        attributes: Mapping[str, Tensor],
        *,
        on_first: Callable[[], None],
        on_done: Callable[[], None],
    ) -> bool:
        """Listen to the nodes that the call has made.

        Args:
            output: of the call.
            attributes: tensors in plain attributes of the module after it.
            on_first: called when the backward first reaches the call.
            on_done: called when every node of the call has run.

        Returns:
            False: no gradient can come.
        """
        self._on_first, self._on_done = on_first, on_done
        outputs = self._gradient_sources(output, attributes)
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
        self._parameters.clear()
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
        self.settle()
        for container in (self.found, self._arrived, self._from_inside, self._source_keys):
            container.clear()
        self.arguments = {}

    def changed_inputs(self) -> list[tuple[int, Tensor]]:
        """Inputs that the call changed in place in a way that autograd follows."""
        return [
            (place, item)
            for place, (item, (node, _)) in enumerate(zip(self.inputs, self._before, strict=True))
            if item.grad_fn is not None and item.grad_fn is not node
        ]

    def _gradient_sources(
        self, output: Any, attributes: Mapping[str, Tensor]
    ) -> list[tuple[Key, Tensor]]:
        """Outputs that carry a gradient of their own into the call, each once."""
        changed = self.changed_inputs()
        found: list[tuple[Key, Tensor]] = [(("input", place), item) for place, item in changed]
        taken = {_identity(item) for _, item in changed}
        roots = list(self.inputs)
        for source, tensor in self._given(output, attributes):
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

    def _given(self, output: Any, attributes: Mapping[str, Tensor]) -> Iterator[tuple[Key, Tensor]]:
        """Outputs, and what the call has put into its arguments and into attributes."""
        for place, (_, tensor) in enumerate(trees.named_tensors(output)):
            yield ("output", place), tensor
        for name, tensor in trees.named_tensors(self.arguments):
            yield ("argument", name), tensor
        for name, tensor in attributes.items():
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
                parameter, _ = self._parameters.get(id(variable), (None, None))
                key = self._input_keys.get(id(variable)) or parameter
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
