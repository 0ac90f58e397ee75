"""Ops that torch itself computes in two ways with two results, both of them right.

`pow(x, 0.5)` is a square root in the CPU kernels of float32, float64 and bfloat16 and a power in
that of float16, and the two differ at -Inf (NaN and Inf) and, for -0.5, at -0. Where a result is of
another class than the golden, the other spelling of the op is asked in float64, and where that has
the class of the result, it is the golden there. A NaN that neither spelling gives stays a FAIL.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from opcheck.arrays import Array, classes, round_to
from opcheck.golden_rules import Bound
from opcheck.kernel_table import call_kernel, kernels
from opcheck.references import Reference, Result

__all__ = ["has_equivalent", "nearest_class", "spelled_otherwise"]


def _power(base: Any, exponent: Any) -> Any:
    """By the kernel of an exponent that is a tensor, which knows no special exponents."""
    kernel = kernels().original("aten::pow.Tensor_Tensor")
    return call_kernel(kernel, (base, torch.tensor(exponent, dtype=torch.float64)), {})


def _of_one(bound: Bound) -> Any:
    return _power(bound["self"], bound["exponent"])


def _of_list(bound: Bound) -> Any:
    return [_power(item, bound["exponent"]) for item in bound["self"]]


_SPELLINGS: Mapping[str, Callable[[Bound], Any]] = MappingProxyType(
    {
        "aten.pow.Tensor_Scalar": _of_one,
        "aten.pow_.Scalar": _of_one,
        "aten._foreach_pow.Scalar": _of_list,
        "aten._foreach_pow_.Scalar": _of_list,
    }
)
_SPECIAL = (0.5, -0.5)


def has_equivalent(reference: Reference) -> bool:
    """The call has another spelling, and its numbers are real."""
    call = reference.call
    if call.traits.name not in _SPELLINGS or any(item.is_complex for item in call.signature[1::2]):
        return False
    given = {param.name: value for param, value in call.traits.bound(call.args, call.kwargs)}
    return given["exponent"] in _SPECIAL


def spelled_otherwise(reference: Reference) -> Result:
    """The same op in float64 by its other spelling."""
    bound, _, _ = reference.golden_arguments()
    out = _SPELLINGS[reference.call.traits.name](bound)
    return Result(out, [out] if reference.call.traits.mutates else [])


def nearest_class(actual: Array, golden: Array, other: Array, dtype: str) -> Array:
    """The golden, with the other spelling's value where that alone has the class of the result.

    Args:
        actual: the result.
        golden: float64, of the same shape.
        other: likewise, by the other spelling.
        dtype: of the result.
    """
    with np.errstate(all="ignore"):
        got, want, also = (classes(item) for item in (
            actual, round_to(golden, dtype), round_to(other, dtype)))  # fmt: skip
    found: Array = np.where((got != want) & (got == also), other, golden)
    return found
