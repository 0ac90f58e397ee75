"""A whole module run again in float64, without copying it and without anybody noticing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from opcheck import _torch
from opcheck.golden_rules import wider

__all__ = ["OpTrace", "run_module", "runs_again"]

OpTrace = list[tuple[Any, Any]]
"""(overload, result) of every op that the run dispatched, in order."""

_PLAIN = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


def runs_again(args: Any, kwargs: Any) -> bool:
    """True when every input is a tensor or a plain value, so that a second run changes nothing.

    A cache object among the inputs would grow twice.
    """
    return all(
        isinstance(leaf, (Tensor, *_PLAIN)) for leaf in _torch.tree_leaves((args, dict(kwargs)))
    )


class _Trace(_torch.TorchDispatchMode):
    def __init__(self, trace: OpTrace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._trace = trace

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        # a later in-place op must not rewrite what this one gave
        self._trace.append((func, _torch.tree_map(_copied, out)))
        return out


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


class _Forward(nn.Module):
    """Calls `forward` and not `__call__`, so that no hook of the module runs again."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.forward(*args, **kwargs)


def run_module(
    module: nn.Module, args: Any, kwargs: Any, *, convert: Callable[[Tensor], Tensor] | None = None
) -> tuple[Any, OpTrace]:
    """Run `module` on its inputs with state and inputs converted, float64 by default.

    Parameters, buffers, hooks, attributes, RNG and fast paths are as before afterwards.

    Args:
        module: any module; it is not copied.
        args: positional inputs, tensors of any dtype.
        kwargs: keyword inputs.
        convert: what happens to each tensor of state and inputs; must give own memory.

    Returns:
        The outputs and the trace of dispatched ops.

    Raises:
        Whatever the module raises in that dtype.
    """
    convert = convert or widened
    state = {name: convert(tensor) for name, tensor in _state(module)}
    args, kwargs = _torch.tree_map(
        lambda leaf: convert(leaf) if isinstance(leaf, Tensor) else leaf, (args, dict(kwargs))
    )
    trace: OpTrace = []
    holder = _Forward(module)
    with _quietly(module), _Trace(trace):
        out = torch.func.functional_call(
            holder, {f"inner.{name}": tensor for name, tensor in state.items()}, args, kwargs
        )
    return out, trace


def widened(tensor: Tensor) -> Tensor:
    """A float64 (complex128) copy with own memory; integers are copied as they are."""
    return tensor.detach().to(wider(tensor.dtype), copy=True)


def own_copy(tensor: Tensor) -> Tensor:
    """A copy in the same dtype with own memory."""
    return tensor.detach().clone()


def _state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


@contextmanager
def _quietly(module: nn.Module) -> Iterator[None]:
    fast_path = torch.backends.mha.get_fastpath_enabled()
    random_state = torch.get_rng_state()
    with _torch.outside_everything(), torch.no_grad(), _torch.modules_undisturbed(module):
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast_path)
            torch.set_rng_state(random_state)
