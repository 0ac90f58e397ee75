"""One call of an op with what the CPU kernel gave, to be computed again in another way."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opcheck import _torch
from opcheck.calls import Call
from opcheck.expected import leaves_of
from opcheck.golden_rules import ADJUST, KEPT_DTYPE
from opcheck.references import Reference, Result
from opcheck.snapshots import copy_strided

__all__ = ["HALF", "NotHereError", "Subject"]

HALF = (torch.float16, torch.bfloat16)


class NotHereError(Exception):
    """This way of computing it does not apply; the message says why, in few words."""


@dataclass(slots=True)
class Subject:
    """One call of an op, with what torch's own kernel gave."""

    call: Call
    out: Any
    reference: Reference
    """Beside the CPU kernel; its golden serves for probing."""
    rng: np.random.Generator

    @property
    def dtype(self) -> torch.dtype:
        """Of the first floating result."""
        found: torch.dtype = self.call.out_dtype
        return found

    @property
    def is_half(self) -> bool:
        """Some floating argument or result has 16 bits."""
        return any(dtype in HALF for dtype in (*self.call.signature[1::2], self.dtype))

    def before(self, tensor: Tensor) -> Tensor:
        """An argument as it was before the op ran.

        Resolved: what variants compute with it runs below the keys that look at a conjugate bit.
        """
        return self.call.before.get(id(tensor), tensor).resolve_conj().resolve_neg()

    def tensors(self) -> list[Tensor]:
        """The distinct tensor arguments, those in lists included."""
        leaves = _torch.tree_leaves((self.call.args, self.call.kwargs))
        return list({id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}.values())

    def run(
        self, convert: Callable[[Tensor], Tensor] | None = None, func: Any = None, **changes: Any
    ) -> Result:
        """Run the op, or a formula for it, on arguments of its own.

        Args:
            convert: gives another tensor for an argument, as it was before the call; one with own
                memory where the op writes to it.
            func: instead of the op.
            changes: other values of parameters.
        """
        call, made = self.call, {}

        def one(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if id(value) not in made:
                given = self.before(value)
                new = given if convert is None else convert(value)
                made[id(value)] = copy_strided(new) if new is given and call.traits.mutates else new
            return made[id(value)]

        names = {param.name for param, _ in call.traits.bound(call.args, call.kwargs)}
        args, kwargs = _torch.tree_map(one, (call.args, call.kwargs))
        if changes:
            bound = {param.name: value for param, value in call.traits.bound(args, kwargs)}
            bound.update({name: value for name, value in changes.items() if name in names})
            args, kwargs = call.traits.spread(bound)
        out = (func or call.func)(*args, **kwargs)
        if not call.traits.mutates:
            out = _torch.tree_map(_resolved, out)
        written = [
            value
            for param, value in call.traits.bound(args, kwargs)
            if param.mutated and value is not None
        ]
        return Result(out, written)

    def in_float32(self, func: Any = None) -> Result:
        """The op on inputs widened to float32, Python numbers as they are, results rounded."""
        call = self.call
        kept = KEPT_DTYPE.get(call.traits.base, frozenset())
        stay = {
            id(leaf)
            for param, value in call.traits.bound(call.args, call.kwargs)
            if param.name in kept
            for leaf in _torch.tree_leaves(value)
        }

        def wide(tensor: Tensor) -> Tensor:
            given = self.before(tensor)
            return given if id(tensor) in stay or given.dtype not in HALF else given.float()

        bound = {param.name: value for param, value in call.traits.bound(call.args, call.kwargs)}
        changes = {
            name: torch.float32
            for name, value in bound.items()
            if isinstance(value, torch.dtype) and value in HALF
        }
        adjust = ADJUST.get(call.traits.base)
        if adjust is not None:
            adjusted = dict(bound)
            with contextlib.suppress(RuntimeError, TypeError):
                adjust(call, adjusted)
            changes |= {
                name: value
                for name, value in adjusted.items()
                if not isinstance(value, Tensor) and value is not bound.get(name)
            }
        return self.rounded(self.run(wide, func, **changes))

    def rounded(self, result: Result) -> Result:
        """A result in the dtypes that the kernel gave."""
        written = [
            value
            for param, value in self.call.traits.bound(self.call.args, self.call.kwargs)
            if param.mutated and value is not None
        ]
        return Result(_cast(result.out, self.out), _cast(result.written, written))

    def judged_as(self, result: Result) -> tuple[Call, Any]:
        """The call and its output as if the op had given this result."""
        call = self.call
        if not call.traits.mutates:
            return call, result.out
        swap: dict[int, Tensor] = {}
        number = iter(result.written)
        for param, value in call.traits.bound(call.args, call.kwargs):
            if param.mutated and value is not None:
                olds, news = _torch.tree_leaves(value), _torch.tree_leaves(next(number))
                swap |= {id(old): new for old, new in zip(olds, news, strict=True)}

        def swapped(value: Any) -> Any:
            return swap.get(id(value), value)

        new = _with_arguments(call, *_torch.tree_map(swapped, (call.args, call.kwargs)))
        olds, leaves = leaves_of(self.out), leaves_of(result.out)
        if len(olds) != len(leaves):
            return new, result.out
        out = [swap.get(id(old.value), leaf.value) for old, leaf in zip(olds, leaves, strict=True)]
        return new, out[0] if len(out) == 1 and not isinstance(self.out, (list, tuple)) else out


def _resolved(value: Any) -> Any:
    return value.resolve_conj().resolve_neg() if isinstance(value, Tensor) else value


def _with_arguments(call: Call, args: Any, kwargs: Any) -> Call:
    return replace(call, args=tuple(args), kwargs=kwargs)


def _cast(value: Any, like: Any) -> Any:
    if isinstance(value, (list, tuple)) and isinstance(like, (list, tuple)):
        if len(value) != len(like):
            raise NotHereError("it gives another number of results")
        return [_cast(item, other) for item, other in zip(value, like, strict=True)]
    if isinstance(value, Tensor) and isinstance(like, Tensor):
        return value.to(like.dtype)
    return value
