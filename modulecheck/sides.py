"""One run of a step on a copy of the model: what every wrapped module got and gave in it."""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from modulecheck import _torch, trees
from modulecheck.attributes import attribute_tensors
from modulecheck.buffers import all_buffers, copied_buffers
from modulecheck.compilations import Compiled, CompileLog
from modulecheck.goldens import Key, array_of
from modulecheck.hooks import Boundary
from modulecheck.keeping import Keeper
from modulecheck.region_gradients import RegionGradients
from modulecheck.replay import replaying
from modulecheck.selection import Target
from modulecheck.snapshot import Snapshot, arguments, copied_together
from modulecheck.versions import Version, own_versions
from opcheck.errors import ArgumentError, ArgumentTypeError

__all__ = ["Side", "SideCall", "as_float", "run_side", "same_inputs", "same_random"]

Array = npt.NDArray[Any]
RunStep = Callable[[nn.Module], Any]


def as_float(loss: Any) -> float:
    """A loss as a number.

    Raises:
        ArgumentError: a tensor of several numbers.
        ArgumentTypeError: neither a tensor nor a number.
    """
    if isinstance(loss, Tensor):
        if loss.numel() != 1:
            raise ArgumentError(f"loss: expected one number, got a tensor of {tuple(loss.shape)}")
        return float(loss.detach())
    try:
        return float(loss)
    except (TypeError, ValueError):
        raise ArgumentTypeError(
            f"loss: expected a tensor of one number or a float, got {type(loss).__name__}"
        ) from None


# ---- a call -------------------------------------------------------------------------------------


@dataclass(eq=False)
class SideCall:
    """One call of a wrapped module; copies only, so that nothing moves when the step goes on."""

    snapshot: Snapshot
    region: RegionGradients
    is_recompute: bool
    training: dict[str, bool]
    """Train or eval mode of each submodule."""
    moved: bool
    """The step wrote to parameters of the module before this call, or put others there."""
    started: int = 0
    output: Any = None
    after: dict[str, Any] = field(default_factory=dict)
    """Arguments after the call, positional ones by number."""
    buffers: dict[str, Tensor] = field(default_factory=dict)
    attributes: dict[str, Tensor] = field(default_factory=dict)
    """Tensors in plain attributes after the call."""
    random_after: Tensor | None = None
    compiled: Compiled | None = None
    """Set when the call has returned."""
    error: str = ""

    @property
    def inputs(self) -> list[Tensor]:
        """What the call got, before it could change it."""
        return trees.tensors((self.snapshot.args, self.snapshot.kwargs))

    @property
    def arguments(self) -> dict[str, Any]:
        """What the call got, by name."""
        return arguments(self.snapshot.args, self.snapshot.kwargs)

    def results(self) -> Iterator[tuple[Key, Tensor]]:
        """Everything that is compared, by key."""
        for place, tensor in enumerate(self.inputs):
            yield ("received", place), tensor
        for place, (_, tensor) in enumerate(trees.named_tensors(self.output)):
            yield ("output", place), tensor
        for name, tensor in trees.named_tensors(self.after):
            yield ("argument", name), tensor
        for name, tensor in self.buffers.items():
            yield ("buffer", name), tensor
        for name, tensor in self.attributes.items():
            yield ("attribute", name), tensor
        yield from self.gradients().items()

    def gradients(self) -> dict[Key, Tensor]:
        """Of inputs, parameters and outputs, as the call itself made or got them."""
        found = self.region.found
        of_inputs: dict[Key, Tensor] = {
            ("grad_input", place): found["input", place]
            for place in range(len(self.inputs))
            if ("input", place) in found
        }
        of_outputs: dict[Key, Tensor] = {
            ("grad_output", f"{what} {place}"): tensor
            for (what, place), tensor in self.region.of_outputs.items()
        }
        of_parameters: dict[Key, Tensor] = {
            ("param", name): found["parameter", name]
            for name in self.snapshot.parameter_versions
            if ("parameter", name) in found
        }
        return {**of_inputs, **of_outputs, **of_parameters}

    def release(self) -> None:
        """Let go of every tensor."""
        self.region.release()
        self.output, self.after, self.buffers, self.attributes = None, {}, {}, {}


def _frozen(tensor: Tensor) -> Tensor:
    twin = tensor.detach().clone()
    return twin.requires_grad_() if tensor.requires_grad else twin


# ---- a run --------------------------------------------------------------------------------------


@dataclass(eq=False)
class Side:
    """What one run of the step did.

    Attributes:
        calls: by name of the module, in order.
        order: names in the order of their first call.
        backward_order: names in the order in which backward reached them.
        loss: what the step returned; NaN where that was None.
    """

    calls: dict[str, list[SideCall]] = field(default_factory=dict)
    order: dict[str, None] = field(default_factory=dict)
    backward_order: dict[str, None] = field(default_factory=dict)
    loss: float = math.nan
    loss_recorded: bool = False
    root_inputs: list[Array] | None = None
    """Of the first call of the root; None: it was not called."""
    original_called: bool = False
    errors: list[str] = field(default_factory=list)
    """Our own failures before a call could be taken down."""
    notes: list[str] = field(default_factory=list)
    """On what was compiled."""

    @property
    def was_called(self) -> bool:
        """The step called the copy, or a wrapped module of it."""
        return self.root_inputs is not None or any(self.calls.values())

    def release(self) -> None:
        """Let go of every tensor."""
        for call in itertools.chain.from_iterable(self.calls.values()):
            call.release()
        self.calls.clear()


class _Recorder:
    """Takes down the calls of one run."""

    def __init__(self, side: Side, *, cast_dtype: Any, log: CompileLog) -> None:
        self._side, self._cast_dtype, self._log = side, cast_dtype, log
        self._versions: dict[str, dict[str, Version]] = {}
        """Of each module's own parameters: to look at all of them in every call would take the
        number of modules squared."""
        self._count = itertools.count()

    def around(self, name: str, module: nn.Module) -> Callable[[Any, Any, Any], Any]:
        calls = self._side.calls.setdefault(name, [])
        self._versions[name] = own_versions(module)
        running = threading.local()

        def around(run: Any, args: Any, kwargs: Any) -> Any:
            if getattr(running, "outer", False):  # it calls itself: compiled, that is one call
                return run(*args, **kwargs)
            call = self._before(name, module, args, kwargs)
            running.outer = True
            try:
                with self._log.call(name, module) as found:
                    output = run(*args, **kwargs)
            finally:
                running.outer = False
            if call is not None:
                call.compiled = found
                self._after(name, module, call, output)
                calls.append(call)
            return output

        return around

    @_torch.not_by_dynamo
    def _before(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> SideCall | None:
        self._side.order.setdefault(name)
        try:
            snapshot = Snapshot.take(module, args, kwargs, cast_dtype=self._cast_dtype)
            return SideCall(
                snapshot,
                RegionGradients(module, args, kwargs, copies=True),
                is_recompute=_torch.inside_autograd(),
                training={key: item.training for key, item in module.named_modules()},
                moved=snapshot.parameter_versions != self._versions[name],
                started=next(self._count),
            )
        except Exception as error:  # noqa: BLE001 - whatever it is, the step goes on
            self._side.errors.append(f"{name or '<root>'}: {type(error).__name__}: {error}")
            return None

    @_torch.not_by_dynamo
    def _after(self, name: str, module: nn.Module, call: SideCall, output: Any) -> None:
        try:
            call.random_after = torch.get_rng_state()
            with _torch.no_modes():
                call.output = trees.rebuilt(output, _frozen)
                call.after = trees.rebuilt(call.region.arguments, _frozen)
                call.buffers = copied_buffers(all_buffers(module), copied_together)
                attributes = attribute_tensors(module)
                call.attributes = trees.rebuilt(attributes, _frozen)
            call.region.attach(
                output, attributes, on_first=lambda: self._reached(name), on_done=_nothing
            )
            call.region.forget_inputs()
        except Exception as error:  # noqa: BLE001 - whatever it is, the step goes on
            call.error = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"

    def _reached(self, name: str) -> None:
        self._side.backward_order.setdefault(name)


def _nothing() -> None:
    """All is read when the run is over."""


@contextlib.contextmanager
def _around(module: nn.Module, around: Callable[[Any, Any, Any], Any]) -> Iterator[None]:
    """Every call of the module goes through `around(run, args, kwargs)`, for a while."""
    before = module.__dict__.get(_torch.COMPILED_CALL)
    inner = _torch.call_impl(module) if before is None else before

    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or replaying():
            return inner(*args, **kwargs)
        return around(inner, args, kwargs)

    module.__dict__[_torch.COMPILED_CALL] = call
    try:
        yield
    finally:
        if before is None:
            module.__dict__.pop(_torch.COMPILED_CALL, None)
        else:
            module.__dict__[_torch.COMPILED_CALL] = before


def run_side(
    run_step: RunStep,
    twin: nn.Module,
    targets: Sequence[Target],
    *,
    original: nn.Module,
    keeper: Keeper,
    backend: Any = None,
    cast_dtype: torch.dtype | None = None,
    convert: Callable[[Tensor], Tensor] | None = None,
) -> Side:
    """Run the step on a copy, and take down what its wrapped modules got and gave.

    Args:
        run_step: of the user; may return the loss.
        twin: a copy of the original.
        targets: modules of the copy.
        original: is not called, and it is noticed if it is.
        keeper: undoes what the step does beside the copy.
        backend: of `torch.compile`; None: eager.
        cast_dtype: autocast in the targets.
        convert: applied to floating tensors among the inputs of the copy.

    Raises:
        Whatever `run_step` raises; what is no loss is an ArgumentError or an ArgumentTypeError.
    """
    side = Side()
    boundaries: list[Boundary] = []

    @_torch.not_by_dynamo
    def arrives(args: Any, kwargs: Any) -> Any:
        keeper.hold((args, kwargs))
        if side.root_inputs is None:
            side.root_inputs = [array_of(item).copy() for item in trees.tensors((args, kwargs))]
        return (args, kwargs) if convert is None else trees.rebuilt((args, kwargs), convert)

    def at_root(run: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = arrives(args, kwargs)
        return run(*args, **kwargs)

    def at_original(run: Any, args: Any, kwargs: Any) -> Any:
        side.original_called = True
        return run(*args, **kwargs)

    with contextlib.ExitStack() as stack:
        stack.enter_context(keeper.one_run(twin))
        log = stack.enter_context(CompileLog().listening())
        recorder = _Recorder(side, cast_dtype=cast_dtype, log=log)
        stack.enter_context(_around(original, at_original))
        for target in targets:
            around = recorder.around(target.name, target.module) if target.checked else None
            boundary = Boundary(
                target.module, backend, cast_dtype=cast_dtype, around=around,
                num_modules=len(targets),
            )  # fmt: skip
            boundaries.append(boundary)
            stack.callback(boundary.remove)
            boundary.put_on()
        with _around(twin, at_root):
            loss = run_step(twin)
        if loss is not None:
            side.loss, side.loss_recorded = as_float(loss), True
        side.notes = log.notes()
    for call in itertools.chain.from_iterable(side.calls.values()):
        call.region.settle()
    return side


def same_inputs(one: Side, other: Side) -> bool:
    """The first call of the root got the same values in both runs."""
    left, right = one.root_inputs, other.root_inputs
    if left is None or right is None:
        return left is right
    return len(left) == len(right) and all(
        mine.shape == theirs.shape and mine.dtype == theirs.dtype and _equal(mine, theirs)
        for mine, theirs in zip(left, right, strict=True)
    )


def same_random(one: SideCall, other: SideCall) -> bool:
    """Both calls found the generator in one state, and left it in one."""
    pairs = (
        (one.snapshot.random.torch_cpu, other.snapshot.random.torch_cpu),
        (one.random_after, other.random_after),
    )
    return all(
        mine is None or theirs is None or torch.equal(mine, theirs) for mine, theirs in pairs
    )


def _equal(one: Array, other: Array) -> bool:
    return np.array_equal(one, other, equal_nan=one.dtype.kind in "fc")
