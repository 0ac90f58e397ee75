"""Large products of matrices whose sides are long: projected, and some rows computed again."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opcheck.arrays import Array
from opcheck.calls import Call
from opcheck.compare import Judgement
from opcheck.drift import shift_of
from opcheck.factors import factor_step
from opcheck.flushing import NOTE, lost_sums, may_flush, without_subnormals
from opcheck.golden_rules import argument
from opcheck.passes import Scratch, borrowed_scratch, rows_times
from opcheck.product_rows import ExactRows, edge_rows
from opcheck.projection import Product, Residual, project
from opcheck.records import Metrics
from opcheck.references import host_array
from opcheck.sampled import Criterion, Judged, rng_of, sample_of

__all__ = ["FACTORS", "is_product", "judge_projection", "products_of"]

FACTORS = {
    "mm": ("self", "mat2"),
    "addmm": ("mat1", "mat2"),
    "addmm_": ("mat1", "mat2"),
    "_addmm_activation": ("mat1", "mat2"),
    "bmm": ("self", "mat2"),
    "baddbmm": ("batch1", "batch2"),
    "baddbmm_": ("batch1", "batch2"),
    "linear": ("input", "weight"),
    "matmul": ("self", "other"),
}
"""Op base name -> its two factors. `linear` takes the second one transposed."""
_PROJECTED = ("mm", "addmm", "bmm", "baddbmm", "linear", "matmul")

LONG = 1024
"""Shortest side of a product that is projected."""
NUM_WORST_ROWS = 4
_RMS_SUSPECT, _RMS_FAIL = 2.5, 4.0
_Z_FAIL = 16.0
_SCALE_FAIL = 8.0
_SCALE_SIGMAS = 6.0
_ONE_SIDED = 0.2
_OUT_OF_LARGEST = 0.05
"""Columns whose error is such a share of the largest one belong to the fault."""
_MIN_DISTINCT = 16
_EPS = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def is_product(call: Call) -> bool:
    """Has an entry in `FACTORS` and factors of the right number of dimensions."""
    names = FACTORS.get(call.traits.base)
    if names is None:
        return False
    first, second = (argument(call, name) for name in names)
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return False
    if call.traits.base == "linear":
        return first.dim() >= 2 and second.dim() == 2
    return first.dim() == second.dim() and first.dim() in (2, 3)


def products_of(call: Call, out: Any) -> list[Product]:
    """The products of a call that can be projected; none where a side is short."""
    base = call.traits.base
    if base not in _PROJECTED or not isinstance(out, Tensor):
        return []
    a, b = (argument(call, name) for name in FACTORS[base])
    if base == "linear":
        a, b = a.reshape(-1, a.shape[-1]) if a.is_contiguous() else a, b.t()
    y = out.reshape(-1, out.shape[-1]) if base == "linear" and out.is_contiguous() else out
    tensors = (a, b, y)
    if any(item.dim() not in (2, 3) or item.dtype is not y.dtype for item in tensors):
        return []
    if len({item.dim() for item in tensors}) > 1 or y.dtype.is_complex:
        return []
    if not y.dtype.is_floating_point or min(*a.shape[-2:], b.shape[-1]) < LONG:
        return []
    added = argument(call, "bias" if base == "linear" else "self")
    common = Product(
        a=a, b=b, y=y,
        added=added if isinstance(added, Tensor) and base not in ("mm", "bmm", "matmul") else None,
        alpha=float(argument(call, "alpha", 1)), beta=float(argument(call, "beta", 1)),
        factor_step=factor_step(call, a), other_hardware=call.on_device or y.device.type != "cpu",
    )  # fmt: skip
    if y.dim() == 2:
        return [common]
    full = None if common.added is None else common.added.expand(y.shape)
    return [
        replace(
            common, a=a[number], b=b[number], y=y[number],
            added=None if full is None else full[number],
        )
        for number in range(y.shape[0])
    ]  # fmt: skip


def judge_projection(
    call: Call, out: Tensor, products: list[Product], criterion: Criterion
) -> Judged:
    """Judge a product by its projection and some rows that are computed again."""
    rng = rng_of(call, criterion.seed)
    looked_at = 0
    worst: Judgement | None = None
    with borrowed_scratch() as scratch:
        for number, product in enumerate(products):
            found = _judge_product(call, product, criterion, rng, scratch)
            looked_at += found.compared
            found = replace(found, metrics=_placed(found.metrics, out, number))
            if worst is None or not found.passed or found.metrics.q > worst.metrics.q:
                worst = found
            if not found.passed:
                break
    if worst is None:
        raise ValueError("products: expected at least one")
    rows = looked_at // max(products[0].y.shape[1], 1)
    detail = f"all elements in sums of 1/16 of a row, {rows:,} rows one by one"
    sample = sample_of("projection", out, criterion.seed, detail, covers_all=True)(looked_at)
    tile = worst.sample.tile if worst.sample is not None else None
    found = replace(worst, compared=out.numel(), sample=replace(sample, tile=tile))
    return Judged(found, "float64 projection")


def _placed(metrics: Metrics, out: Tensor, number: int) -> Metrics:
    """Row and column of one product as an index of the result."""
    if metrics.worst_index is None or out.dim() == 2:
        return metrics
    row, column = metrics.worst_index
    if (out.dim() == 3 and number) or len(metrics.worst_index) != 2:
        return replace(metrics, worst_index=(number, row, column))
    lead = np.unravel_index(row, tuple(out.shape[:-1]))
    return replace(metrics, worst_index=(*(int(item) for item in lead), column))


def _scale_limit(product: Product, residual: Residual) -> float:
    if product.is_half:
        limit = _EPS[product.y.dtype] / 8.0
    elif product.factor_step:
        limit = 4.1 * product.factor_step
    else:
        limit = 2.0**-24 * (64.0 + product.depth / 16.0)
    return limit + _SCALE_SIGMAS * residual.scale_sigma


def _judge_product(
    call: Call,
    product: Product,
    criterion: Criterion,
    rng: np.random.Generator,
    scratch: Scratch,
) -> Judgement:
    again_rng = copy.deepcopy(rng)  # other sums would be another chance for any fault
    found = _judge_as_it_is(call, product, criterion, rng, scratch)
    if found.passed or criterion.name == "allclose" or not may_flush(call):
        return found
    flushed = replace(
        product, a=without_subnormals(product.a), b=without_subnormals(product.b),
        lost=lost_sums(call, product.depth),
    )  # fmt: skip
    again = _judge_as_it_is(call, flushed, criterion, again_rng, scratch)
    return replace(again, notes=(*again.notes, NOTE)) if again.passed else found


def _judge_as_it_is(
    call: Call,
    product: Product,
    criterion: Criterion,
    rng: np.random.Generator,
    scratch: Scratch,
) -> Judgement:
    rows = edge_rows(product.y.shape[0], rng)
    left = product.rows_of_a(rows).to(product.golden_dtype)
    found = project(product, rng, left=left, scratch=scratch)
    residual, times_b = found.residual, found.rows
    limit = _scale_limit(product, residual)
    if _is_suspect(residual, limit):
        more = np.setdiff1d(residual.worst_rows(NUM_WORST_ROWS), rows)
        left = product.rows_of_a(more).to(product.golden_dtype)
        times_b = torch.cat([times_b, rows_times(left, product.b, scratch)])
        rows = np.concatenate([rows, more])
    exact = ExactRows(call, product, rows, times_b, criterion)
    outcome = exact.outcome
    if outcome.passed and criterion.name == "calibrated":
        reason = _hard_failure(product, residual, limit)
        if reason:
            return _failed(exact, residual, reason, limit, has_element=False)
    if outcome.passed:
        notes: tuple[str, ...] = ()
        if residual.num_nonfinite:
            notes = (
                f"{residual.num_nonfinite:,} of {residual.z.size:,} sums are not finite: what they"
                " cover rests on the rows that were computed again",
            )
        return Judgement(
            passed=True,
            metrics=exact.metrics(),
            notes=notes,
            compared=outcome.compared,
            shift=shift_of(exact.actual, exact.golden, dtype=exact.dtype),
        )
    return _failed(exact, residual, outcome.reason, limit, has_element=outcome.why == "elem")


def _is_suspect(residual: Residual, scale_limit: float) -> bool:
    return bool(
        residual.suspects.any()
        or residual.num_nonfinite
        or residual.rms > _RMS_SUSPECT
        or abs(residual.scale_error) > scale_limit
    )


def _hard_failure(product: Product, residual: Residual, limit: float) -> str:
    """What the projection alone is sure of."""
    if abs(residual.scale_error) > _SCALE_FAIL * limit:
        text = "sums are shifted by more than rounding explains"
    elif residual.rms > _RMS_FAIL:
        text = f"sums are off by {residual.rms:.3g} times what rounding explains (rms)"
    elif residual.largest > _Z_FAIL:
        text = f"a sum is off by {residual.largest:.3g} times what rounding explains"
    else:
        return ""
    rows, columns = product.y.shape
    some = product.y[:: max(1, rows // 64), :: max(1, columns // 64)]
    # rounding shared by all elements, as in a constant result, is no fault
    return text if np.unique(host_array(some)).size >= _MIN_DISTINCT else ""


def _failed(
    exact: ExactRows, residual: Residual, reason: str, scale_limit: float, *, has_element: bool
) -> Judgement:
    has_element = has_element or exact.outcome.metrics.num_nonfinite > 0
    metrics = exact.metrics() if has_element else exact.largest_error()
    rows, columns = exact.product.y.shape
    is_scaled = abs(residual.scale_error) > scale_limit and abs(residual.agreement) > _ONE_SIDED
    tile = (0, rows - 1, 0, columns - 1) if is_scaled else _tile(exact, residual, metrics)
    if has_element:
        inner = exact.outcome.metrics.worst_index
        reason = reason.replace(f"element {inner}", f"element {metrics.worst_index}", 1)
    else:
        reason = (
            f"{reason}; element {metrics.worst_index} is {metrics.actual_at:.9g},"
            f" expected {metrics.expected_at:.9g}"
        )
    text = ""
    if is_scaled:
        text = f"; all elements seem to be off by a factor of {1 + residual.scale_error:.6g}"
    elif tile is not None:
        first, last, left, right = tile
        text = f"; the fault lies in rows {first} to {last}, columns {left} to {right}"
    sample = sample_of("projection", exact.product.y, 0, "")(0)
    return Judgement(
        passed=False,
        reason=reason + text,
        metrics=metrics,
        compared=exact.outcome.compared,
        sample=replace(sample, tile=tile),
    )


def _tile(exact: ExactRows, residual: Residual, metrics: Metrics) -> tuple[int, ...] | None:
    """Rows and columns around the worst element that the projection suspects."""
    if metrics.worst_index is None:
        return None
    row, column = metrics.worst_index
    block = column // residual.block
    suspect = residual.suspects
    if not suspect.any():
        return None
    if not suspect[row, block]:
        row, block = residual.worst
    first, last = _run(suspect[:, block], row)
    left, right = _run(suspect[row], block)
    columns = exact.product.y.shape[1]
    left, right = left * residual.block, min(columns, (right + 1) * residual.block) - 1
    here = np.flatnonzero((exact.rows >= first) & (exact.rows <= last))
    if here.size:  # computed again: the columns are known to the element
        error = np.absolute(exact.actual - exact.golden)[here, left : right + 1]
        top = np.max(error, initial=0.0, where=error < math.inf)
        out = np.flatnonzero((~(error <= _OUT_OF_LARGEST * top)).any(axis=0))
        if out.size:
            left, right = left + int(out[0]), left + int(out[-1])
    return first, last, left, right


def _run(flags: Array, start: int) -> tuple[int, int]:
    """First and last of the flagged places around `start`; sums may hide one or two by luck."""
    first = last = start
    places = np.flatnonzero(flags)
    for place in places[places > last]:
        if place - last > 3:
            break
        last = int(place)
    for place in places[places < first][::-1]:
        if first - place > 3:
            break
        first = int(place)
    return first, last
