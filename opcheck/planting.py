"""Faults as real kernels have them: a right result in, a wrong one out.

Each fault gives None where it does not apply or would change nothing, so that what is planted is
always wrong. Nothing here writes to what it is given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from opcheck.arrays import Array
from opcheck.calls import Call
from opcheck.tensor_kinds import HALF

__all__ = ["FAULTS", "Fault", "Subject"]

_WRONG_DTYPE = MappingProxyType(
    {
        torch.float64: torch.float32,
        torch.float32: torch.float16,
        torch.float16: torch.float32,
        torch.bfloat16: torch.float32,
        torch.complex64: torch.complex128,
        torch.complex128: torch.complex64,
        torch.int64: torch.int32,
        torch.int32: torch.int64,
        torch.bool: torch.uint8,
    }
)
_NO_ARITHMETIC = (torch.uint16, torch.uint32, torch.uint64)
_BIAS_OF = MappingProxyType(
    {"addmm": "self", "addmv": "self", "convolution": "bias", "native_layer_norm": "bias"}
)
"""Which argument is added last, so that a kernel may forget it."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A right result of one call."""

    call: Call
    value: Tensor
    """The result; strided, on any device."""
    golden: Callable[[], Array | None]
    """The same result in float64."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One way to be wrong."""

    kind: str
    gross: bool
    """Nobody could take it for rounding, in any dtype."""
    spoil: Callable[[Subject], Tensor | None]

    def planted(self, subject: Subject) -> Tensor | None:
        """A wrong result with own memory, None where this fault is none here."""
        wrong = self.spoil(subject)
        if wrong is None or _equal(wrong, subject.value):
            return None
        return wrong


def _equal(left: Tensor, right: Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    floating = left.is_floating_point() or left.is_complex()
    return np.array_equal(_bits(left), _bits(right)) if floating else torch.equal(left, right)


def _bits(tensor: Tensor) -> Array:
    """Values with NaN equal to itself and the signs of zeros alike."""
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    found: Array = (tensor.detach().cpu().to(wide) + 0.0).numpy()
    return np.nan_to_num(found, nan=np.pi, posinf=np.inf, neginf=-np.inf)


def _inexact(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _rows(tensor: Tensor) -> Tensor | None:
    """An own copy as a matrix of its last dimension, with at least two rows."""
    if tensor.dim() < 1 or tensor.numel() < 4:
        return None
    width = tensor.shape[-1] if tensor.dim() > 1 else tensor.numel() // 2
    if tensor.numel() % max(width, 1) or tensor.numel() // max(width, 1) < 2:
        return None
    return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1, width)


# ---- the faults ---------------------------------------------------------------------------------


def _one_element(subject: Subject) -> Tensor | None:
    value = subject.value
    if not _inexact(value) or not value.numel():
        return None
    flat = value.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    places = (flat.isfinite() & (flat != 0)).nonzero().reshape(-1)
    if not places.numel():
        return None
    place = int(places[-1])
    flat[place] = flat[place] * 1.1
    return flat.reshape(value.shape)


def _last_row_zero(subject: Subject) -> Tensor | None:
    rows = _rows(subject.value)
    if rows is None:
        return None
    rows[-1] = 0
    return rows.reshape(subject.value.shape)


def _last_row_stale(subject: Subject) -> Tensor | None:
    rows = _rows(subject.value)
    if rows is None:
        return None
    rows[-1] = rows[-2]
    return rows.reshape(subject.value.shape)


def _shifted(subject: Subject) -> Tensor | None:
    value = subject.value
    if not value.dim() or value.shape[-1] < 2:
        return None
    return value.detach().roll(1, -1)


def _sign(subject: Subject) -> Tensor | None:
    value = subject.value
    signed = value.dtype != torch.bool and (_inexact(value) or value.dtype.is_signed)
    return -value.detach() if signed else None


def _scaled(factor: float) -> Callable[[Subject], Tensor | None]:
    def spoil(subject: Subject) -> Tensor | None:
        value = subject.value
        return value.detach() * factor if _inexact(value) else None

    return spoil


def _doubled_gradient(subject: Subject) -> Tensor | None:
    value = subject.value
    if subject.call.site.phase != "backward" or not _inexact(value):
        return None
    return value.detach() * 2


def _dropped_nan(subject: Subject) -> Tensor | None:
    value = subject.value
    if not _inexact(value) or not bool(value.isnan().any()):
        return None
    return torch.where(value.isnan(), torch.zeros_like(value), value)


def _clamped_inf(subject: Subject) -> Tensor | None:
    value = subject.value
    if not value.is_floating_point() or not bool(value.isinf().any()):
        return None
    largest = torch.finfo(value.dtype).max
    return value.detach().clamp(-largest, largest)


def _transposed(subject: Subject) -> Tensor | None:
    value = subject.value
    if value.dim() < 2 or min(value.shape[-2:]) < 2:
        return None
    return value.detach().mT.reshape(value.shape).clone()


def _wrong_dtype(subject: Subject) -> Tensor | None:
    other = _WRONG_DTYPE.get(subject.value.dtype)
    return None if other is None or subject.call.traits.mutates else subject.value.to(other)


def _sums_in_half(subject: Subject) -> Tensor | None:
    value = subject.value
    if value.dtype not in (torch.float32, torch.float64):
        return None
    return value.detach().to(torch.bfloat16).to(value.dtype)


def _truncated(subject: Subject) -> Tensor | None:
    """Rounded towards zero and not to nearest; in 32 bit no rule could tell."""
    golden = subject.golden() if subject.value.dtype in HALF else None
    if golden is None or golden.dtype.kind != "f" or golden.shape != tuple(subject.value.shape):
        return None
    exact = torch.from_numpy(np.ascontiguousarray(golden))
    nearest = exact.to(subject.value.dtype)
    too_large = nearest.double().abs() > exact.abs()
    zero = torch.zeros_like(nearest)
    wrong = torch.where(too_large, torch.nextafter(nearest, zero), nearest)
    return wrong.to(subject.value.device)


def _without_bias(subject: Subject) -> Tensor | None:
    call = subject.call
    wanted = _BIAS_OF.get(call.traits.base)
    if wanted is None:
        return None
    for param, argument in call.traits.bound(call.args, call.kwargs):
        if param.name == wanted and isinstance(argument, Tensor):
            bias = argument.detach().to(subject.value.dtype)
            if call.traits.base == "convolution":
                bias = bias.reshape(-1, *[1] * (subject.value.dim() - 2))
            return subject.value.detach() - bias
    return None


def _wrapped(subject: Subject) -> Tensor | None:
    value = subject.value
    if _inexact(value) or value.dtype == torch.bool:
        return None
    return value.detach().to(torch.int8).to(value.dtype)


def _off_by_one(subject: Subject) -> Tensor | None:
    value = subject.value
    if _inexact(value) or not value.numel() or value.dtype in _NO_ARITHMETIC:
        return None
    flat = value.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    flat[-1] = ~flat[-1] if value.dtype == torch.bool else flat[-1] + 1
    return flat.reshape(value.shape)


FAULTS = (
    Fault("sign flipped", gross=True, spoil=_sign),
    Fault("last row zero", gross=True, spoil=_last_row_zero),
    Fault("last row stale", gross=True, spoil=_last_row_stale),
    Fault("shifted by one", gross=True, spoil=_shifted),
    Fault("transposed", gross=True, spoil=_transposed),
    Fault("gradient doubled", gross=True, spoil=_doubled_gradient),
    Fault("bias forgotten", gross=True, spoil=_without_bias),
    Fault("NaN became 0", gross=True, spoil=_dropped_nan),
    Fault("Inf clamped", gross=True, spoil=_clamped_inf),
    Fault("other dtype", gross=True, spoil=_wrong_dtype),
    Fault("integers wrapped to 8 bit", gross=True, spoil=_wrapped),
    Fault("last integer off by one", gross=True, spoil=_off_by_one),
    Fault("all x1.01", gross=False, spoil=_scaled(1.01)),
    Fault("last element x1.1", gross=False, spoil=_one_element),
    Fault("rounded to bfloat16", gross=False, spoil=_sums_in_half),
    Fault("rounded towards zero", gross=False, spoil=_truncated),
)
