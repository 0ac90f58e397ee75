"""The criterion of `TensorChecker`, worked out to limits that a file without it can apply."""

from __future__ import annotations

import math

import numpy as np

from modulecheck.tensor_compare import Criterion
from modulecheck.tensor_rule import (
    COARSENESS,
    Array,
    allowed_errors,
    coarsest,
    components,
    limits_for,
    rule_dtype,
)
from modulecheck.tensor_values import Snapshot, dtype_name, values_of
from opcheck import tolerances as tol
from opcheck.repro_limits import Limit
from opcheck.verdicts import rms

__all__ = ["limit_for"]


def limit_for(
    name: str, reference: Snapshot, actual: Snapshot, criterion: Criterion, precision: str | None
) -> Limit:
    """By which `repro_judge` judges `actual` as the criterion does.

    Args:
        name: of the result, for the reader.
        reference: the expected tensor.
        actual: the other one.
        criterion: what applies.
        precision: for "calibrated", the coarsest dtype of the two sides so far.
    """
    expected, found = reference.tensor, actual.tensor
    limit: Limit = {"name": name, "shape": tuple(expected.shape)}
    kinds = [(item.dtype.is_floating_point, item.dtype.is_complex) for item in (expected, found)]
    if (criterion.check_dtype or kinds[0] != kinds[1]) and not (
        reference.is_number or actual.is_number
    ):
        limit["dtype"] = str(expected.dtype)
    if criterion.name == "equal" or not any(kinds[0]) or expected.shape != found.shape:
        return {**limit, "rule": "exact"}
    if criterion.name == "allclose":
        return {**limit, "rule": "allclose", "atol": criterion.atol, "rtol": criterion.rtol}
    names = dtype_name(expected.dtype), dtype_name(found.dtype)
    return {**limit, **_calibrated(values_of(expected), coarsest(*names, precision))}


def _calibrated(reference: Array, precision: str) -> Limit:
    """Element, rms and scale, each in units of the values themselves."""
    limit: Limit = {
        "rule": "within",
        "overflow": tol.ROUNDS_TO_INF[rule_dtype(precision)],
        "allowed": allowed_errors(reference, precision),
    }
    expected = components(reference).astype(np.float64)
    size = rms(np.where(np.isfinite(expected), expected, 0.0))
    if expected.size < tol.MIN_ELEMENTS or not size:
        return limit
    eps, limits = COARSENESS[precision], limits_for(precision)
    with np.errstate(all="ignore"):
        # sum(error * expected) / sum(expected ** 2) as the mean of error * sign / unit
        unit = np.square(size) * eps / np.absolute(expected)
    return {
        **limit, "max_rms": limits.rms * size * eps, "max_shift": limits.scale, "unit": unit,
        "clamp": math.inf, "from_rounded": False,
    }  # fmt: skip
