"""Correct kernels that are not the CPU's own: other orders, widths, formulas, paths.

Each takes one call with what the CPU kernel gave, and computes the same results in another way that
some device, library or instruction set computes them in. Where a way applies is found out by
probing in float64 (permuted along a dimension, is the result the same? is the op linear in a
tensor?), never from a list of ops.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.other_process import OtherProcess
from benchmarks.probing import Linear, Moves, is_sum, linear_arguments, orders
from benchmarks.subjects import HALF, NotHereError, Subject
from opcheck import kernel_table
from opcheck.calls import Call
from opcheck.expected import Leaf, leaves_of
from opcheck.factors import factor_step
from opcheck.golden_rules import READS_STORAGE
from opcheck.large_table import is_pointwise
from opcheck.references import Result
from opcheck.tolerances import op_class

__all__ = ["VARIANTS", "Variant"]

_FEW = 32
"""So many elements are computed one by one; more of them in pieces of odd sizes."""
_ODD = (1, 7, 13, 5)
_SHARED = 32768
"""ATen gives a thread no fewer elements than this."""


def _leaves(result: Result) -> list[Leaf]:
    return [*leaves_of(result.out), *leaves_of(result.written)]


# ---- other widths -------------------------------------------------------------------------------


def float64_rounded(subject: Subject) -> Iterator[Result]:
    """The op in float64, rounded once."""
    yield subject.rounded(subject.reference.golden())


def float32_rounded(subject: Subject) -> Iterator[Result]:
    """The op in float32 on 16-bit inputs; Python numbers are not rounded to 16 bit."""
    if not subject.is_half:
        raise NotHereError("no 16-bit tensor")
    yield subject.in_float32()


# ---- other formulas -----------------------------------------------------------------------------


@functools.cache
def _formulas(func: Any) -> tuple[Any, ...]:
    """Decompositions that torch has for an overload, each once."""
    found = [kernel_table.decomposition(func), _inductor_table().get(func)]
    return tuple({id(item): item for item in found if item is not None}.values())


@functools.cache
def _inductor_table() -> dict[Any, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch._inductor.decomposition import select_decomp_table
    return dict(select_decomp_table())


def _decomposed(subject: Subject, run: Callable[[Any], Result]) -> Iterator[Result]:
    formulas = _formulas(subject.call.func)
    if not formulas:
        raise NotHereError("no decomposition")
    for formula in formulas:
        result = run(formula)
        if any(leaf.value is NotImplemented for leaf in leaves_of(result.out)):
            continue
        yield result


def decomposition(subject: Subject) -> Iterator[Result]:
    """Torch's own decomposition, in the dtype of the call."""
    return _decomposed(subject, lambda formula: subject.run(func=formula))


def decomposition_in_float32(subject: Subject) -> Iterator[Result]:
    """Torch's own decomposition on inputs widened to float32, rounded once."""
    if not subject.is_half:
        raise NotHereError("no 16-bit tensor")
    return _decomposed(subject, subject.in_float32)


# ---- other orders -------------------------------------------------------------------------------


def other_order(subject: Subject) -> Iterator[Result]:
    """Elements permuted along dimensions that are reduced or free, results permuted back."""
    for moves in orders(subject.reference, subject.tensors(), subject.rng):
        yield _moved(subject, moves)


def _moved(subject: Subject, moves: Moves) -> Result:
    result = subject.run(lambda tensor: moves.move(tensor, subject.before(tensor)))
    leaves = iter(moves.back([leaf.value for leaf in _leaves(result)]))
    return Result(_refilled(result.out, leaves), _refilled(result.written, leaves))


def _refilled(value: Any, leaves: Iterator[Any]) -> Any:
    if isinstance(value, (list, tuple)):
        return [_refilled(item, leaves) for item in value]
    return next(leaves)


def split(subject: Subject) -> Iterator[Result]:
    """Sums in two or four blocks; of 16-bit products the blocks are rounded to 16 bit (split-K)."""
    narrow = op_class(subject.call.traits.base) == "mm"
    run = subject.run if narrow else functools.partial(_wide_part, subject)
    yield from _in_parts(subject, run, _blocks)


def atomics(subject: Subject) -> Iterator[Result]:
    """Additions in 16 bit, one by one and in random order."""
    if subject.dtype not in HALF or op_class(subject.call.traits.base) != "atom":
        raise NotHereError("no device adds it up in 16 bit")
    yield from _in_parts(subject, subject.run, _single_elements)


def _wide_part(subject: Subject, convert: Callable[[Tensor], Tensor]) -> Result:
    def wide(tensor: Tensor) -> Tensor:
        new = convert(tensor)
        return new.float() if new.dtype in HALF else new

    return subject.run(wide)


_Masks = Callable[[Tensor, np.random.Generator], Iterator[list[Tensor]]]


def _blocks(tensor: Tensor, rng: np.random.Generator) -> Iterator[list[Tensor]]:
    """Partitions of a tensor's elements into 2 to 4 blocks along each dimension."""
    for dim, size in enumerate(tensor.shape):
        count = min(size, int(rng.integers(2, 5)))
        if count > 1:
            place = torch.arange(size) * count // size
            shape = [size if other == dim else 1 for other in range(tensor.dim())]
            yield [(place == k).reshape(shape).expand(tensor.shape) for k in range(count)]


def _single_elements(tensor: Tensor, rng: np.random.Generator) -> Iterator[list[Tensor]]:
    """Its elements in random order, at most 48 groups."""
    count = min(tensor.numel(), 48)
    if count > 1:
        place = torch.from_numpy(rng.permutation(tensor.numel()) % count).reshape(tensor.shape)
        yield [place == k for k in range(count)]


def _in_parts(subject: Subject, run: Callable[[Any], Result], masks: _Masks) -> Iterator[Result]:
    for linear in linear_arguments(subject.reference, subject.tensors()):
        for parts in masks(linear.tensor, subject.rng):
            if is_sum(subject.reference, linear, parts):
                yield subject.rounded(_summed(subject, run, linear, parts))


def _summed(
    subject: Subject, run: Callable[[Any], Result], linear: Linear, parts: list[Tensor]
) -> Result:
    """Add up the op on parts of one tensor; what is added once only is in the first part."""

    def part(mask: Tensor, *, is_first: bool) -> Result:
        def convert(tensor: Tensor) -> Tensor:
            given = subject.before(tensor)
            if tensor is linear.tensor:
                return torch.where(mask, given, torch.zeros_like(given))
            if tensor is linear.once and not is_first:
                return torch.zeros_like(given)
            return given

        return run(convert)

    total = part(parts[0], is_first=True)
    for mask in parts[1:]:
        total = _added(total, part(mask, is_first=False))
    return total


def _added(left: Result, right: Result) -> Result:
    return Result(_plus(left.out, right.out), _plus(left.written, right.written))


def _plus(left: Any, right: Any) -> Any:
    if isinstance(left, (list, tuple)):
        return [_plus(one, other) for one, other in zip(left, right, strict=True)]
    floating = isinstance(left, Tensor) and (left.is_floating_point() or left.is_complex())
    return left + right if floating else left


_STEP = MappingProxyType(
    {"cumsum": torch.add, "cumprod": torch.mul, "logcumsumexp": torch.logaddexp}
)
"""What a scan does at each element."""


_LONGEST_SCAN = 256
"""Beyond it a running sum of one sign stops growing: in bf16 at 256 of 1,024."""


def narrow_scan(subject: Subject) -> Iterator[Result]:
    """A scan that keeps its running value in 16 bit: from end to end, and in blocks."""
    call = subject.call
    step = _STEP.get(call.traits.base.strip("_"))
    if step is None or subject.dtype not in HALF:
        raise NotHereError("no scan with a 16-bit result")
    source = call.args[0]
    given = subject.before(source).to(subject.dtype)
    if not given.dim() or not given.numel():
        raise NotHereError("nothing to scan")
    dim = int(call.args[1]) % given.dim()
    if given.shape[dim] > _LONGEST_SCAN:
        raise NotHereError("too long to be kept in 16 bit")
    for width in {given.shape[dim], 4}:
        out = _scanned(step, given, dim, width)
        yield Result(out, [out] if call.traits.mutates else [])


def _scanned(step: Any, given: Tensor, dim: int, width: int) -> Tensor:
    done: list[Tensor] = []
    for block in given.split(width, dim):
        rows = list(block.unbind(dim))
        for number in range(1, len(rows)):
            rows[number] = step(rows[number - 1], rows[number])
        carried = done[-1] if done else None
        done += rows if carried is None else [step(carried, row) for row in rows]
    return torch.stack(done, dim)


# ---- other inputs -------------------------------------------------------------------------------


def tf32_inputs(subject: Subject) -> Iterator[Result]:
    """Factors rounded to 10 bits of mantissa, products added up in float32."""
    call = subject.call
    call.device_type = "cuda"
    factors = [tensor for tensor in subject.tensors() if factor_step(call, tensor)]
    bound = call.traits.bound(call.args, call.kwargs)
    added = [value for param, value in bound if param.name in _ADDED.get(_family(call), ())]
    if not factors:
        raise NotHereError("no product of float32")
    chosen = {id(item) for item in factors} - {id(item) for item in added}
    yield subject.run(
        lambda tensor: (
            _to_tf32(subject.before(tensor)) if id(tensor) in chosen else subject.before(tensor)
        )
    )


_ADDED = MappingProxyType({"add": ("self",), "conv": ("bias",)})
"""Arguments that are added to the product and not multiplied."""


def _family(call: Call) -> str:
    base = call.traits.base.lstrip("_")
    return "conv" if "conv" in base else "add" if base.startswith(("add", "badd")) else ""


def _to_tf32(tensor: Tensor) -> Tensor:
    bits = tensor.contiguous().view(torch.int32)
    rounded = ((bits + 0x1000) & ~0x1FFF).view(torch.float32)
    return torch.where(tensor.isfinite(), rounded, tensor)


# ---- other paths --------------------------------------------------------------------------------


def other_layout(subject: Subject) -> Iterator[Result]:
    """The same values with other strides: transposed memory, unaligned, gaps, channels last."""
    if subject.call.traits.base in READS_STORAGE:
        raise NotHereError("reads strides")
    changed = _of_any_layout(subject)
    if not changed:
        raise NotHereError("no floating tensor that may have any layout")
    layouts = [_transposed, _unaligned, _spaced]
    if {tensor.dim() for tensor in subject.tensors()} & {4, 5}:
        layouts.append(_channels_last)
    for layout in layouts:
        yield subject.run(
            lambda tensor, layout=layout: (
                layout(subject.before(tensor)) if id(tensor) in changed else subject.before(tensor)
            )
        )


def _of_any_layout(subject: Subject) -> frozenset[int]:
    """Ids of floating tensors; in backward of those that are like the gradient.

    Kernels take what their own forward saved (statistics, indices) without looking at its strides.
    """
    tensors = subject.tensors()
    if "backward" in subject.call.traits.base:
        tensors = [tensor for tensor in tensors if tensor.shape == tensors[0].shape]
    return frozenset(id(tensor) for tensor in tensors if tensor.dtype.is_floating_point
                     or tensor.dtype.is_complex)  # fmt: skip


def _transposed(tensor: Tensor) -> Tensor:
    order = tuple(reversed(range(tensor.dim())))
    return tensor.permute(order).clone(memory_format=torch.contiguous_format).permute(order)


def _unaligned(tensor: Tensor) -> Tensor:
    room = torch.empty(tensor.numel() + 3, dtype=tensor.dtype)
    return room[1 : 1 + tensor.numel()].view(tensor.shape).copy_(tensor)


def _spaced(tensor: Tensor) -> Tensor:
    room = torch.empty((*tensor.shape, 2), dtype=tensor.dtype)
    return room[..., 1].copy_(tensor)


def _channels_last(tensor: Tensor) -> Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return tensor.clone(memory_format=formats.get(tensor.dim(), torch.preserve_format))


def without_mkldnn(subject: Subject) -> Iterator[Result]:
    """ATen's own loops instead of oneDNN's."""
    with torch.backends.mkldnn.flags(enabled=False):
        yield subject.run()


def two_threads(subject: Subject) -> Iterator[Result]:
    """Two threads, which divide long sums in another way."""
    if max((tensor.numel() for tensor in subject.tensors()), default=0) < _SHARED:
        raise NotHereError("too small for two threads")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        yield subject.run()
    finally:
        torch.set_num_threads(before)


def other_instructions(subject: Subject) -> Iterator[Result]:
    """The same kernels without vector instructions, in a process that was started so."""
    answer = _plain_cpu().run(subject)
    if isinstance(answer, str):
        raise NotHereError(answer)
    yield answer


@functools.cache
def _plain_cpu() -> OtherProcess:
    return OtherProcess(
        ATEN_CPU_CAPABILITY="default", ONEDNN_MAX_CPU_ISA="SSE41", MKL_ENABLE_INSTRUCTIONS="SSE4_2"
    )


def in_pieces(subject: Subject) -> Iterator[Result]:
    """A pointwise op on one element at a time, or on pieces of odd sizes: scalar tails."""
    call = subject.call
    if not is_pointwise(call):
        raise NotHereError("not pointwise")
    shapes = [tensor.shape for tensor in subject.tensors() if tensor.dim()]
    shape = torch.broadcast_shapes(*shapes) if shapes else torch.Size()
    if len(shape) == 0 or shape.numel() < 2:
        raise NotHereError("one element")
    outs = [leaf.value for leaf in leaves_of(subject.out) if isinstance(leaf.value, Tensor)]
    if any(out.shape != shape for out in outs):
        raise NotHereError("results of another shape")
    pieces: list[Result] = []
    start = 0
    while start < shape.numel():
        width = 1 if shape.numel() <= _FEW else _ODD[len(pieces) % len(_ODD)]
        pieces.append(subject.run(functools.partial(_piece, subject, shape, start, start + width)))
        start += width
    yield Result(
        _joined([piece.out for piece in pieces], shape),
        _joined([piece.written for piece in pieces], shape),
    )


def _piece(subject: Subject, shape: torch.Size, start: int, stop: int, tensor: Tensor) -> Tensor:
    given = subject.before(tensor)
    return given.expand(shape).reshape(-1)[start:stop].clone() if given.dim() else given


def _joined(values: list[Any], shape: torch.Size) -> Any:
    first = values[0]
    if isinstance(first, (list, tuple)):
        return [_joined(list(items), shape) for items in zip(*values, strict=True)]
    return torch.cat(values).reshape(shape) if isinstance(first, Tensor) else first


# ---- the table ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to compute what another kernel computes."""

    name: str
    run: Callable[[Subject], Iterator[Result]]
    on_cpu: bool = False
    """The CPU's own kernel on another path: float64 alone has to call it right as well."""
    takes_tf32: bool = False
    """Right where TF32 is allowed."""


VARIANTS = (
    Variant("float64, rounded", float64_rounded),
    Variant("float32, rounded", float32_rounded),
    Variant("decomposition", decomposition),
    Variant("decomposition in float32", decomposition_in_float32),
    Variant("other order", other_order, on_cpu=True),
    Variant("sums in blocks", split),
    Variant("16-bit atomics", atomics),
    Variant("16-bit scan", narrow_scan),
    Variant("TF32 inputs", tf32_inputs, takes_tf32=True),
    Variant("other layout", other_layout, on_cpu=True),
    Variant("other instructions", other_instructions, on_cpu=True),
    Variant("two threads", two_threads, on_cpu=True),
    Variant("without oneDNN", without_mkldnn, on_cpu=True),
    Variant("in pieces", in_pieces, on_cpu=True),
)
