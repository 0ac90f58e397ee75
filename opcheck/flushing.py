"""Products on units that take subnormal numbers for zeros, which bfloat16 ones do.

The dot products of bfloat16 in x86 CPUs (VDPBF16PS, AMX tiles) treat subnormal factors as zeros and
flush subnormal sums, whatever the mode of the process, and oneDNN's `mm` and convolutions run on
them where they are there. A result may therefore be that of factors without their subnormals, or
any between: of 64 by 128 factors in units of 2^-126 the kernels gave exactly the former. All that a
correct kernel may lose on top are the terms and sums that are subnormal themselves. None of this
touches numbers of normal size: where no factor is subnormal, some 1e-36 is allowed and no more.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from opcheck import tolerances as tol
from opcheck.arrays import Array
from opcheck.calls import Call
from opcheck.factors import factor_step, is_product
from opcheck.golden_rules import argument
from opcheck.tensor_kinds import tensors_within

__all__ = ["NOTE", "lost_sums", "may_flush", "nearer", "without_subnormals"]

NOTE = "numbers below 2^-126 count as zeros: this unit flushes them"

_SMALLEST_NORMAL = tol.SMALLEST_NORMAL["bfloat16"]
"""Of float32 too, in which terms are summed."""


def may_flush(call: Call) -> bool:
    """The op multiplies in bfloat16: its tensors are, or float32 ones may be rounded to it."""
    if not is_product(call.traits.base):
        return False
    return any(
        tensor.dtype is torch.bfloat16 or factor_step(call, tensor) > 0.0
        for tensor in tensors_within((call.args, call.kwargs))
    )


def without_subnormals(tensor: Tensor) -> Tensor:
    """The values with zeros for subnormal ones."""
    return torch.where(tensor.detach().abs() < _SMALLEST_NORMAL, 0.0, tensor.detach())


def lost_sums(call: Call, length: float) -> float:
    """The most that terms and sums which are subnormal themselves come to.

    Args:
        call: the product.
        length: terms of one element.
    """
    factors = (abs(float(argument(call, name, 1))) for name in ("alpha", "beta"))
    return max(1.0, *factors) * (2.0 * length + 2.0) * _SMALLEST_NORMAL


def nearer(actual: Array, golden: Array, flushed: Array, lost: float) -> Array:
    """The result as far from golden as it is from what lies between golden and flushed.

    Args:
        actual: the result.
        golden: in float64.
        flushed: the same of factors without subnormals.
        lost: what may be lost on top.
    """
    low, high = np.minimum(golden, flushed) - lost, np.maximum(golden, flushed) + lost
    moved: Array = golden + (actual - np.clip(actual, low, high))
    return np.where(np.isfinite(actual) & np.isfinite(golden), moved, actual)
