"""The calibrated rule for two implementations: as near as their precision explains.

No float64 run and no perturbed one is at hand, as they are at op level: both sides are results of a
chain of roundings. What is judged is the error in eps of the coarser precision, by element, in all,
and as a change of scale.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from opcheck import tolerances as tol
from opcheck.arrays import fill_of, usual_size
from opcheck.verdicts import Outcome, Rule, judge_golden, rms

__all__ = [
    "COARSENESS",
    "Limits",
    "allowed_errors",
    "coarsest",
    "components",
    "judge_calibrated",
    "limits_for",
    "rule_dtype",
]

Array: TypeAlias = npt.NDArray[Any]

COARSENESS = {
    "float64": tol.EPS["float64"],
    "float32": tol.EPS["float32"],
    "float16": tol.EPS["float16"],
    "bfloat16": tol.EPS["bfloat16"],
    "float8_e4m3fn": 2.0**-3,
    "float8_e4m3fnuz": 2.0**-3,
    "float8_e5m2": 2.0**-2,
    "float8_e5m2fnuz": 2.0**-2,
}
"""eps by dtype, finest first."""


@dataclass(frozen=True, slots=True)
class Limits:
    """In eps of the coarser precision of the two sides."""

    element: float
    """Largest error, relative to max(|reference|, rms of the reference)."""
    rms: float
    """rms of the error, relative to that of the reference."""
    scale: float
    """Distance from 1 of the factor that best maps the reference to the actual tensor."""


LIMITS = Limits(element=192.0, rms=24.0, scale=10.0)
"""float32, float64. Measured on every input and output of 10 models (GPT-2 and Llama with 12
layers, Qwen2, BERT, MiniLM with its real weights, ResNet18, MLP, a plain transformer, LSTM, GRU),
float32 beside float64: element 86, rms 10.3, scale 4.5 at most, all three in MiniLM."""
LIMITS_HALF = Limits(element=32.0, rms=4.0, scale=1.0)
"""16 and 8 bit. The same models, bfloat16 and float16 beside float32: element 15.8, rms 1.93,
scale 0.74 at most. Of faults planted in 505 outputs (GPT-2, Llama, MiniLM, ResNet18), found in
float32 and bfloat16: x1.01, zeros, sign, shift, one element off by the rms: all; last column zero:
505, 500; one element off by 0.1 rms: 505, 0; an offset of 0.02 rms: 505, 41."""


def components(array: Array) -> Array:
    """Flat; complex numbers as pairs."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(flat.real.dtype) if flat.dtype.kind == "c" else flat


def coarsest(*dtypes: str | None) -> str:
    """The one with the largest eps; float32 where none has one."""
    real = {"complex128": "float64", "complex64": "float32", "complex32": "float16"}
    known = [real.get(dtype, dtype) for dtype in dtypes if dtype is not None]
    order = list(COARSENESS)
    places = [order.index(dtype) for dtype in known if dtype in COARSENESS]
    return order[max(places)] if places else "float32"


def limits_for(precision: str) -> Limits:
    """Of a dtype's name."""
    return LIMITS if precision in ("float64", "float32") else LIMITS_HALF


def allowed_errors(reference: Array, precision: str) -> Array:
    """The error that each element (each component of a complex one) may have; flat float64."""
    expected = components(reference).astype(np.float64)
    size = np.absolute(np.where(np.isfinite(expected), expected, 0.0))
    least = tol.ALLOWED_UNDERFLOW[rule_dtype(precision)]
    step = limits_for(precision).element * COARSENESS[precision]
    allowed: Array = step * np.maximum(size, usual_size(size)) + least
    return allowed


def rule_dtype(precision: str) -> str:
    """The dtype whose range applies; 8-bit ones have that of bfloat16."""
    return precision if precision in tol.EPS else "bfloat16"


def judge_calibrated(actual: Array, reference: Array, precision: str) -> tuple[Outcome, Array]:
    """The rule for two implementations, no float64 run at hand: element, rms, scale."""
    allowed = allowed_errors(reference, precision)
    bound = allowed.reshape(-1, 2).min(axis=1) if reference.dtype.kind == "c" else allowed
    rule = Rule(dtype=rule_dtype(precision), bound=bound.reshape(reference.shape))
    outcome = judge_golden(actual, reference, perturbed=None, rule=rule)
    expected = components(reference).astype(np.float64)
    if not outcome.passed or expected.size < tol.MIN_ELEMENTS:
        return outcome, allowed
    eps, limits = COARSENESS[precision], limits_for(precision)
    return _whole_tensor(outcome, components(actual), expected, eps, limits), allowed


def _whole_tensor(
    outcome: Outcome, actual: Array, expected: Array, eps: float, limits: Limits
) -> Outcome:
    """The two tests that see a small error spread over all elements."""
    finite = np.isfinite(expected) & np.isfinite(actual)
    fill = fill_of(np.where(finite, expected, 0.0))
    if fill is not None:  # no measure of the others; each of its elements has been judged
        finite &= ~fill
    expected = expected[finite]
    size = rms(expected)
    if not expected.size or not size:
        return outcome
    unit = np.divide(expected, size)
    error = np.subtract(actual[finite], expected, dtype=np.float64) / (size * eps)
    error_rms = rms(error)
    scale = float(np.dot(error, unit)) / float(np.dot(unit, unit))
    metrics = replace(outcome.metrics, rmse_ratio=error_rms, mean_shift=scale)
    if error_rms > limits.rms:
        why, detail = "rmse", f"rms error {error_rms:.3g} eps, {limits.rms:g} are allowed"
    elif abs(scale) > limits.scale:
        why, detail = "bias", f"scaled by {1 + scale * eps:.6g}, {limits.scale:g} eps are allowed"
    else:
        return replace(outcome, metrics=metrics)
    return replace(outcome, passed=False, why=why, reason=detail, metrics=metrics)
