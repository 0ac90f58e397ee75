"""What applies to one result, and what came of judging it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from opcheck import tolerances as tol
from opcheck.allowances import Allowance, Inputs
from opcheck.arrays import Array
from opcheck.records import Metrics

__all__ = ["Outcome", "Rule"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What applies to one result."""

    dtype: str
    """Of the result itself, real component: "float32", "float64", "bfloat16", "float16"."""
    op_class: str = "std"
    reduction_length: float = 1.0
    """Terms summed for one element of the result."""
    exact: bool = False
    """Must equal the expected value rounded to dtype, up to NaN payload and the sign of zero."""
    limit_factor: float = 1.0
    """A named allowance: the element limit, and in 16 bit the rms limit, times this."""
    shift_factor: float = 1.0
    """A named allowance: the limit of the mean shift times this."""
    test_rms: bool = True
    """False, a named allowance: the rms of a 16-bit result is not tested."""
    extra: Array | None = None
    """A named allowance added to the allowance of each element, same shape."""
    bound: Array | float | None = None
    """A named allowance that replaces the rule: |actual - golden| <= bound, no mean or rms test."""
    rtol: float = tol.OP_RTOL
    atol: float = tol.OP_ATOL
    """The documented tolerances that apply."""

    def __post_init__(self) -> None:
        """Refuse what the tables do not hold.

        Raises:
            ValueError: unknown dtype or class.
        """
        if self.dtype not in tol.EPS:
            raise ValueError(f"dtype: expected one of {sorted(tol.EPS)}, got {self.dtype!r}")
        if self.op_class not in tol.CLASS_LIMITS:
            known = sorted(tol.CLASS_LIMITS)
            raise ValueError(f"op_class: expected one of {known}, got {self.op_class!r}")

    @property
    def is_half(self) -> bool:
        """The result has 16 bits."""
        return self.dtype in tol.HALF_DTYPES

    def with_allowance(self, allowance: Allowance, *, inputs: Inputs, golden: Array) -> Rule:
        """This rule with a named allowance; its formulas see the float64 inputs and the golden."""
        with np.errstate(all="ignore"):
            extra, bound = (
                None if formula is None else formula(inputs, golden, self.dtype)
                for formula in (allowance.extra, allowance.bound)
            )
        return replace(
            self,
            limit_factor=allowance.limit_factor,
            shift_factor=allowance.shift_factor,
            test_rms=allowance.test_rms,
            extra=None if extra is None else np.broadcast_to(extra, golden.shape),
            bound=bound,
        )

    @property
    def element_limit(self) -> float:
        """Largest distance of an element, in allowances."""
        if self.is_half:
            return tol.CLASS_LIMITS[self.op_class].max_q * self.limit_factor
        return tol.ELEMENT_LIMIT * tol.length_factor(self.reduction_length) * self.limit_factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Verdict of one result, with its numbers."""

    passed: bool
    stage: str
    """The test that settled it: "empty", "bits", "quick", "golden", "bound", "nonfinite", "exact",
    "allclose"."""
    why: str = ""
    """"" if passed, else "elem", "bias", "rmse", "nonfinite", "exact", "allclose"."""
    reason: str = ""
    """One sentence for a person, with numbers; "" if passed."""
    metrics: Metrics
    compared: int
    """Elements compared; 0 is no evidence for a PASS."""
    finite: bool = True
    """Actual and expected are finite everywhere; False on a PASS: they share NaN or Inf."""
