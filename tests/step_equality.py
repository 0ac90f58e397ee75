"""Does a checked step leave behind exactly what the unchecked step leaves behind?

`assert_same_step` runs a step twice from the same seed, under an empty dispatch mode and under the
context to be judged, and compares bit for bit. The empty mode is the yardstick because ATen takes
another formula in a few places as soon as any mode is active; `plain=nullcontext` asks for more.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import (  # noqa: TID251 - tests look at modes from outside
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
)

from opcheck.lazy_bits import lazy_bits
from tests.models import Workload

Session = TypeVar("Session")
OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Step = Callable[[Workload, torch.optim.Optimizer | None], Any]


class EmptyMode(TorchDispatchMode):
    """Pass every call on, and note which ones there were."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.ops.append(str(func))
        # without them torch loses conjugate bits under any mode; `test_lazy_bits` asks for plain
        with lazy_bits():
            return func(*args, **(kwargs or {}))


def empty_mode(model: nn.Module | None = None) -> AbstractContextManager[EmptyMode]:
    """Return a mode that does nothing; the model is ignored, for the signature's sake."""
    del model
    return EmptyMode()


def no_mode(model: nn.Module | None = None) -> AbstractContextManager[None]:
    """Return a context that does nothing at all."""
    del model
    return nullcontext()


def active_modes() -> list[Any]:
    """Return the dispatch modes that are active in this thread."""
    return list(_get_current_dispatch_mode_stack())


GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_hooks_always_called",
    "_global_forward_hooks_with_kwargs",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
    "_global_buffer_registration_hooks",
    "_global_module_registration_hooks",
    "_global_parameter_registration_hooks",
)
OPTIMIZER_HOOKS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
MODULE_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
)


def global_hooks() -> dict[str, int]:
    """Count the hooks that apply to every module or optimizer."""
    from torch.nn.modules import module
    from torch.optim import optimizer

    counts = {name: len(getattr(module, name)) for name in GLOBAL_HOOKS}
    counts.update({name: len(getattr(optimizer, name)) for name in OPTIMIZER_HOOKS})
    return counts


@dataclass(frozen=True)
class TensorState:
    """A copy of a tensor with what else a later step could notice of it."""

    value: Tensor
    strides: tuple[int, ...]
    version: int
    requires_grad: bool
    num_hooks: int

    @classmethod
    def of(cls, tensor: Tensor) -> TensorState:
        return cls(
            value=tensor.detach().clone(),
            strides=tensor.stride(),
            version=tensor._version,
            requires_grad=tensor.requires_grad,
            num_hooks=len(tensor._backward_hooks or ()),
        )


@dataclass(frozen=True)
class StepState:
    """Everything of a step that outlives it."""

    tensors: dict[str, TensorState]
    flags: dict[str, Any]


def _named_tensors(
    workload: Workload, optimizer: torch.optim.Optimizer | None
) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    names = {}
    for name, parameter in workload.model.named_parameters():
        names[parameter] = name
        tensors[f"parameter {name}"] = parameter
        if parameter.grad is not None:
            tensors[f"gradient of {name}"] = parameter.grad
    for name, buffer in workload.model.named_buffers():
        tensors[f"buffer {name}"] = buffer
    for position, tensor in enumerate(workload.batch):
        tensors[f"batch[{position}]"] = tensor
        if tensor.grad is not None:
            tensors[f"gradient of batch[{position}]"] = tensor.grad
    for parameter, state in (optimizer.state if optimizer else {}).items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer {key} of {names[parameter]}"] = value
    return tensors


def _flags(model: nn.Module) -> dict[str, Any]:
    flags: dict[str, Any] = {f"global {name}": count for name, count in global_hooks().items()}
    for name, module in model.named_modules():
        flags[f"training of {name!r}"] = module.training
        flags[f"attributes of {name!r}"] = sorted(vars(module))
        for kind in MODULE_HOOKS:
            flags[f"{kind} of {name!r}"] = len(getattr(module, kind))
    flags["active modes"] = len(active_modes())
    flags["grad mode"] = torch.is_grad_enabled()
    flags["inference mode"] = torch.is_inference_mode_enabled()
    flags["autocast"] = torch.is_autocast_enabled("cpu")
    flags["threads"] = torch.get_num_threads()
    flags["default dtype"] = torch.get_default_dtype()
    flags["Python's random state"] = random.getstate()
    flags["NumPy's random state"] = repr(np.random.get_state())  # noqa: NPY002 - the global one
    return flags


def capture(
    workload: Workload, loss: Any, optimizer: torch.optim.Optimizer | None = None
) -> StepState:
    """Copy what the step left behind."""
    tensors = {
        name: TensorState.of(tensor) for name, tensor in _named_tensors(workload, optimizer).items()
    }
    tensors["RNG state"] = TensorState.of(torch.get_rng_state())
    if isinstance(loss, Tensor):
        tensors["loss"] = TensorState.of(loss)
    return StepState(tensors=tensors, flags=_flags(workload.model))


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Compare bytes, so that NaN equals itself and +0 is not -0; strides do not matter."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    if not first.numel():
        return True
    # not contiguous(): it keeps the stride of a dimension of size 1, which view() then refuses
    as_bytes = [
        tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
        for tensor in (first, second)
    ]
    return torch.equal(*as_bytes)


def _difference(name: str, plain: TensorState, checked: TensorState) -> str | None:
    if not same_bits(plain.value, checked.value):
        if plain.value.shape != checked.value.shape:
            return f"{name}: shape {tuple(plain.value.shape)} != {tuple(checked.value.shape)}"
        if plain.value.dtype != checked.value.dtype:
            return f"{name}: {plain.value.dtype} != {checked.value.dtype}"
        worst = (plain.value.double() - checked.value.double()).abs().max().item()
        return f"{name}: values differ by up to {worst:.3g}"
    for field in ("strides", "version", "requires_grad", "num_hooks"):
        before, after = getattr(plain, field), getattr(checked, field)
        if before != after:
            return f"{name}: {field} {before} != {after}"
    return None


def differences(plain: StepState, checked: StepState) -> list[str]:
    """List what differs, each in one line."""
    found = [f"{name}: only in one run" for name in plain.tensors.keys() ^ checked.tensors.keys()]
    for name in plain.tensors.keys() & checked.tensors.keys():
        line = _difference(name, plain.tensors[name], checked.tensors[name])
        if line:
            found.append(line)
    for name in plain.flags.keys() | checked.flags.keys():
        before, after = plain.flags.get(name), checked.flags.get(name)
        if before != after:
            found.append(f"{name}: {before} != {after}")
    return sorted(found)


def training_step(workload: Workload, optimizer: torch.optim.Optimizer | None) -> Tensor:
    """Run the usual step; the default of `assert_same_step`."""
    return workload.step(optimizer)


def evaluation(workload: Workload, optimizer: torch.optim.Optimizer | None) -> Tensor:
    """Run a forward without gradients."""
    del optimizer
    return workload.evaluate()


def _run(
    build: Callable[[], Workload],
    context: Callable[[nn.Module], AbstractContextManager[Session]],
    make_optimizer: OptimizerFactory | None,
    step: Step,
    num_steps: int,
) -> tuple[StepState, StepState, Session]:
    """Return the state after the steps, that after one more without any context, and `session`."""
    workload = build()
    optimizer = make_optimizer(workload.model.parameters()) if make_optimizer else None
    torch.manual_seed(1234)
    with context(workload.model) as session:
        for _ in range(num_steps):
            loss = step(workload, optimizer)
    state = capture(workload, loss, optimizer)
    next_loss = step(workload, optimizer)
    return state, capture(workload, next_loss, optimizer), session


def compare_steps(
    build: Callable[[], Workload],
    checked: Callable[[nn.Module], AbstractContextManager[Session]],
    *,
    plain: Callable[[nn.Module], AbstractContextManager[Any]] = empty_mode,
    make_optimizer: OptimizerFactory | None = None,
    step: Step = training_step,
    num_steps: int = 1,
) -> tuple[list[str], Session]:
    """Run the step under `plain` and under `checked` and compare all that it leaves, bit for bit.

    One more step follows outside the context, to see what a later step would see.

    Returns:
        A line for each difference, and what `checked(model)` gave on entering.
    """
    expected, expected_next, _ = _run(build, plain, make_optimizer, step, num_steps)
    actual, actual_next, session = _run(build, checked, make_optimizer, step, num_steps)
    found = differences(expected, actual)
    found += [f"in the next step: {line}" for line in differences(expected_next, actual_next)]
    return found, session


def assert_same_step(
    build: Callable[[], Workload],
    checked: Callable[[nn.Module], AbstractContextManager[Session]],
    **options: Any,
) -> Session:
    """`compare_steps`, whose options it takes; every difference is an AssertionError.

    Returns:
        What `checked(model)` gave on entering, so that the caller may go on to look at it.
    """
    found, session = compare_steps(build, checked, **options)
    assert not found, "the checked step differs from the unchecked one:\n" + "\n".join(found)
    return session
