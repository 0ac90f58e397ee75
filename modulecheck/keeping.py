"""The user's model, and what a step may write to beside it, as it was before the step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from modulecheck import _torch, trees
from modulecheck.outer_state import OuterState
from modulecheck.snapshot import RandomState, copied_together
from opcheck.exits import uncut
from opcheck.golden import CannotRunAgainError, contents_kept

__all__ = ["Keeper"]


@dataclass(frozen=True, slots=True)
class _Kept:
    """A tensor, its memory, and the values in it."""

    tensor: Tensor
    memory: Tensor
    values: Tensor

    @classmethod
    def of(cls, tensor: Tensor) -> _Kept:
        return cls(tensor, tensor.data, tensor.detach().clone())

    def restore(self) -> None:
        # versions do not tell: a write through `.data` is not counted
        if self.tensor.data_ptr() != self.memory.data_ptr() or _differs(self.tensor, self.memory):
            self.tensor.data = self.memory
        if not torch.equal(_bits(self.tensor), _bits(self.values)):
            with torch.inference_mode(self.tensor.is_inference()), torch.no_grad():
                self.tensor.copy_(self.values)


_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(tensor: Tensor) -> Tensor:
    """As integers, so that NaN is NaN and every dtype can be compared."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    same_size = _SAME_SIZE.get(plain.element_size())
    return plain if same_size is None else plain.view(same_size)


def _differs(tensor: Tensor, other: Tensor) -> bool:
    return tensor.shape != other.shape or tensor.dtype != other.dtype


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_quantized


class _Tensors:
    """Tensors and the gradients of leaves among them."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._kept: dict[int, _Kept] = {}
        self._grads: dict[int, tuple[Tensor, Tensor | None, _Kept | None]] = {}
        self._wants_grad: list[tuple[Tensor, bool]] = []
        self.add(tensors)

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self._kept

    def add(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if tensor in self or not _is_plain(tensor):
                continue
            self._kept[id(tensor)] = _Kept.of(tensor)
            if tensor.is_leaf:
                self._wants_grad.append((tensor, tensor.requires_grad))
                grad = tensor.grad
                plain = grad is not None and _is_plain(grad)
                kept = _Kept.of(grad) if grad is not None and plain else None
                self._grads[id(tensor)] = tensor, grad, kept

    def restore(self) -> None:
        for kept in self._kept.values():
            kept.restore()
        for tensor, grad, kept_grad in self._grads.values():
            tensor.grad = grad
            if kept_grad is not None:
                kept_grad.restore()
        for tensor, wants in self._wants_grad:
            if tensor.requires_grad != wants:
                tensor.requires_grad_(wants)


class Keeper:
    """Puts back, after every run of a step on a copy, what the step wrote to beside the copy.

    That is the original (parameters, buffers, gradients, modes, attributes), the optimizers that
    were stepped and their parameters, the model's inputs with their gradients, and all generators.

    Attributes:
        notes: what a reader of the result should know.
    """

    def __init__(self, model: nn.Module) -> None:
        """Copy the values of the model."""
        self._model = model
        self._outer = OuterState.of(model.modules(), copied_together)
        written, self._arrays = self._outer.written()
        self._state = _Tensors([*model.parameters(), *model.buffers(), *written])
        self._random = RandomState.now()
        self._stack = contextlib.ExitStack()
        self._beside = _Tensors([])
        self._optimizers: list[Optimizer] = []
        self._own: dict[int, Tensor] = {}
        self.notes: list[str] = []

    @contextlib.contextmanager
    def one_run(self, twin: nn.Module) -> Iterator[None]:
        """Begin with the generators as they were, and put back everything at the end."""
        self._random.restore()
        self._beside, self._optimizers = _Tensors([]), []
        self._own = {id(item): item for item in twin.parameters()}
        handle = register_optimizer_step_pre_hook(self._before_step)
        try:
            with contextlib.ExitStack() as self._stack:
                self._keep_contents([vars(item) for item in self._model.modules()])
                yield
        finally:
            handle.remove()
            self._own, self._optimizers = {}, []
            uncut(self._put_back)

    def _put_back(self) -> None:
        with _torch.no_modes():
            self._state.restore()
            self._beside.restore()
        self._outer.put_back()
        for array, values in self._arrays:
            array[...] = values
        self._random.restore()

    def hold(self, values: Any) -> None:
        """Inputs of the model: what the run does to them is undone."""
        self._keep(trees.tensors(values))
        self._keep_contents([values])

    def say(self, note: str) -> None:
        """A note, once."""
        if note not in self.notes:
            self.notes.append(note)

    def _keep(self, tensors: Iterable[Tensor]) -> None:
        self._beside.add(item for item in tensors if item not in self._state)

    def _keep_contents(self, values: list[Any]) -> None:
        try:
            self._stack.enter_context(contents_kept(values))
        except CannotRunAgainError as error:
            self.say(f"not everything that the step may change in place can be put back: {error}")

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        parameters = [item for group in optimizer.param_groups for item in group["params"]]
        if any(id(item) in self._own for item in parameters):
            return
        self._keep(parameters)  # each time: it may have been given more since
        if any(optimizer is item for item in self._optimizers):
            return
        self._optimizers.append(optimizer)
        for state in optimizer.state.values():
            self._keep(trees.tensors(state))
        self._keep_contents([vars(optimizer)])
        self.say(
            f"run_step steps an optimizer ({type(optimizer).__name__}) that does not hold the"
            " parameters of the copies which are compared: what it wrote to was put back"
        )
