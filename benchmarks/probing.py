"""What is an op invariant to, and in which tensors is it linear? Asked of it, in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opcheck.expected import leaves_of
from opcheck.golden_rules import wider
from opcheck.references import Reference, Result

__all__ = ["Linear", "Moves", "is_sum", "linear_arguments", "orders"]

_MOST_PROBES = 24
_MOST_ORDERS = 3
_EQUAL = 1e-9
"""Share of a value, or of the smallest one; float64 in another order is 1e-16 * length off."""


def _values(result: Result) -> list[Any]:
    return [leaf.value for leaf in (*leaves_of(result.out), *leaves_of(result.written))]


def _same(left: Any, right: Any) -> bool:
    if not (isinstance(left, Tensor) and isinstance(right, Tensor)):
        return left is None and right is None
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if not (left.is_floating_point() or left.is_complex()):
        return torch.equal(left, right)
    size = right[right.isfinite() & (right != 0)].abs()
    # not the largest: beside a mask of -3e38 any two numbers would be the same
    least = float(size.min()) if size.numel() else 0.0
    return torch.allclose(left, right, rtol=_EQUAL, atol=_EQUAL * least, equal_nan=True)


def _resolved(reference: Reference, tensor: Tensor) -> Tensor:
    return reference.call.before.get(id(tensor), tensor).resolve_conj().resolve_neg()


# ---- permutations -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Moves:
    """Elements of some arguments are permuted along one dimension each."""

    dims: dict[int, int]
    """id of a tensor of the call -> its dimension."""
    order: Tensor
    results: tuple[int | None, ...]
    """For each result the dimension that is permuted with them, None if there is none."""

    def move(self, tensor: Tensor, given: Tensor) -> Tensor:
        """An argument, permuted."""
        dim = self.dims.get(id(tensor))
        return given if dim is None else given.index_select(dim, self.order)

    def back(self, values: list[Any]) -> list[Any]:
        """Results, permuted back."""
        inverse = torch.argsort(self.order)
        return [
            value
            if dim is None or not isinstance(value, Tensor)
            else value.index_select(dim, inverse)
            for value, dim in zip(values, self.results, strict=True)
        ]


def orders(
    reference: Reference, tensors: list[Tensor], rng: np.random.Generator
) -> Iterator[Moves]:
    """Permutations that leave the results alone, or permute them along one dimension.

    Those that leave them alone come first: there another order of summing is what changes.
    """
    golden = _values(reference.golden())
    later: list[Moves] = []
    count = 0
    for dims in _candidates(tensors):
        size = next(tensor.shape[dim] for tensor, dim in dims)
        for order in (torch.from_numpy(rng.permutation(size)), torch.arange(size).flip(0)):
            moves = Moves({id(tensor): dim for tensor, dim in dims}, order, ())
            found = _effect(reference, golden, moves)
            if found is None:
                continue
            moves = Moves(moves.dims, order, found)
            if all(dim is None for dim in found):
                count += 1
                yield moves
            else:
                later.append(moves)
            break
        if count >= _MOST_ORDERS:
            return
    yield from later[: _MOST_ORDERS - count]


def _candidates(tensors: list[Tensor]) -> Iterator[list[tuple[Tensor, int]]]:
    """Which dimensions of which tensors may belong together: those of one size.

    int32 tensors are the pivots of LAPACK, which writes out of bounds where they make no sense.
    """
    tensors = [tensor for tensor in tensors if tensor.dtype is not torch.int32]
    axes = [
        (tensor, dim) for tensor in tensors for dim, size in enumerate(tensor.shape) if size > 2
    ]
    together = [
        [(tensor, dim) for tensor in tensors if tensor.shape == tensors[0].shape]
        for dim, size in enumerate(tensors[0].shape if tensors else ())
        if size > 2
    ]
    pairs = [
        [one, other]
        for one, other in combinations(axes, 2)
        if one[0] is not other[0] and one[0].shape[one[1]] == other[0].shape[other[1]]
    ]
    tried = [[axis] for axis in axes] + pairs + [item for item in together if len(item) > 2]
    yield from tried[:_MOST_PROBES]


def _effect(reference: Reference, golden: list[Any], moves: Moves) -> tuple[int | None, ...] | None:
    """What a permutation of arguments does to each result; None: something else."""

    def moved(tensor: Tensor) -> Tensor | None:
        if id(tensor) not in moves.dims:
            return None
        given = _resolved(reference, tensor)
        return moves.move(tensor, given).to(wider(given.dtype)).contiguous()

    try:
        found = _values(reference.on(moved))
    except (RuntimeError, ValueError, IndexError):
        return None
    if len(found) != len(golden):
        return None
    effects: list[int | None] = []
    for value, want in zip(found, golden, strict=True):
        if _same(value, want):
            effects.append(None)
            continue
        dim = _permuted_dim(value, want, moves.order)
        if dim is None:
            return None
        effects.append(dim)
    return tuple(effects)


def _permuted_dim(value: Any, want: Any, order: Tensor) -> int | None:
    if not isinstance(value, Tensor) or not isinstance(want, Tensor) or value.shape != want.shape:
        return None
    for dim, size in enumerate(want.shape):
        if size == len(order) and _same(value, want.index_select(dim, order)):
            return dim
    return None


# ---- linearity ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Linear:
    """The op is linear in `tensor`, beside what `once` adds."""

    tensor: Tensor
    once: Tensor | None


def linear_arguments(reference: Reference, tensors: list[Tensor]) -> Iterator[Linear]:
    """Tensors whose parts may be given one after the other, the results added up.

    A guess, from halves of each tensor; `is_sum` says whether it holds for given parts.
    """
    floating = [item for item in tensors if item.is_floating_point() or item.is_complex()]
    for tensor in floating:
        if tensor.numel() < 2:
            continue
        halves = (torch.arange(tensor.numel()) % 2 == 0).reshape(tensor.shape)
        for once in (None, *(item for item in floating if item is not tensor)):
            linear = Linear(tensor, once)
            if is_sum(reference, linear, [halves, ~halves]):
                yield linear
                break


def is_sum(reference: Reference, linear: Linear, parts: list[Tensor]) -> bool:
    """In float64, are the results of the parts of one tensor together the result of the whole?"""
    try:
        total: list[Any] = []
        for number, mask in enumerate(parts):

            def choose(item: Tensor, mask: Tensor = mask, number: int = number) -> Tensor | None:
                given = _resolved(reference, item)
                if item is linear.tensor:
                    wide = given.to(wider(given.dtype))
                    return torch.where(mask, wide, torch.zeros_like(wide))
                if item is linear.once and number:
                    return torch.zeros(given.shape, dtype=wider(given.dtype))
                return None

            found = _values(reference.on(choose))
            total = _sum(total, found) if number else found
    except (RuntimeError, ValueError, IndexError):
        return False
    golden = _values(reference.golden())
    return (
        any(_inexact(value) for value in golden)
        and all(not _inexact(value) or bool(value.isfinite().all()) for value in golden)
        and all(_same(value, want) for value, want in zip(total, golden, strict=True))
    )


def _sum(left: list[Any], right: list[Any]) -> list[Any]:
    return [
        one + other if _inexact(one) and one.shape == other.shape else one
        for one, other in zip(left, right, strict=True)
    ]


def _inexact(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
