"""Large products of matrices: projected where both sides are long, sampled in a grid elsewhere."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opcheck import _torch
from opcheck.arrays import Array
from opcheck.calls import Call
from opcheck.compare import Judgement
from opcheck.drift import shift_of
from opcheck.golden_rules import argument
from opcheck.projection import SUSPECT, Product, Residual, product_rows, project
from opcheck.records import Metrics, SkipReason
from opcheck.references import host_array, uses_tf32
from opcheck.sampled import (
    Criterion,
    Judged,
    judge_parts,
    nonfinite_rows,
    rng_of,
    sample_of,
)
from opcheck.slices import Kept, Pick, Space, part_of_slices, strata
from opcheck.verdicts import Outcome, Rule, judge_allclose, judge_baseline, judge_golden

__all__ = ["FACTORS", "is_product", "judge_grid", "judge_projection", "pick_grid", "products_of"]

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
GRID_STEP = 32
"""One element in so many of a product that is sampled."""
MAX_FACTOR = 1 << 21
"""Elements of a factor's slices: 16 MiB in float64."""
MAX_GRID = 1 << 18
"""Elements of a grid, unless 16 columns have more: judging one takes longer than computing it."""
NUM_RANDOM_ROWS = 4
NUM_WORST_ROWS = 4
_BORDERS = (128, 64, 16)
"""Tile sizes: the last full tile of each and what follows it are always looked at."""

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


# ---- projection ---------------------------------------------------------------------------------


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
        tf32=uses_tf32(call, a), other_hardware=y.device.type != "cpu",
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
    for number, product in enumerate(products):
        found = _judge_product(call, product, criterion, rng)
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
    elif product.has_tf32:
        limit = 2e-3
    else:
        limit = 2.0**-24 * (64.0 + product.depth / 16.0)
    return limit + _SCALE_SIGMAS * residual.scale_sigma


def edge_rows(rows: int, rng: np.random.Generator) -> Array:
    """First, last, both sides of the last border of 128, 64 and 16 rows, and some at random."""
    found = {0, rows - 1}
    for tile in _BORDERS:
        border = (rows - 1) // tile * tile
        found |= {place for place in (border - 1, border) if 0 <= place < rows}
    found |= {int(place) for place in rng.integers(0, rows, NUM_RANDOM_ROWS)}
    return np.array(sorted(found), dtype=np.int64)


def _judge_product(
    call: Call, product: Product, criterion: Criterion, rng: np.random.Generator
) -> Judgement:
    residual = project(product, rng)
    limit = _scale_limit(product, residual)
    flagged = (
        residual.largest > SUSPECT
        or residual.num_nonfinite > 0
        or residual.rms > _RMS_SUSPECT
        or abs(residual.scale_error) > limit
    )
    rows = edge_rows(product.y.shape[0], rng)
    if flagged:
        rows = np.union1d(rows, residual.worst_rows(NUM_WORST_ROWS))
    exact = _Rows(call, product, rows, criterion)
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


class _Rows:
    """Rows of a product computed again and judged by the rule of any product."""

    def __init__(self, call: Call, product: Product, rows: Array, criterion: Criterion) -> None:
        self.rows, self.product = rows, product
        self._call = call
        self.dtype = str(product.y.dtype).removeprefix("torch.")
        golden_dtype = torch.float32 if product.is_half else torch.float64
        golden = product_rows(product, rows, golden_dtype).mul_(product.alpha)
        index = torch.from_numpy(rows)
        if product.added is not None:
            some = product.added.expand(product.y.shape)
            some = some.index_select(0, index.to(some.device)).to("cpu")
            golden += some.to(golden_dtype) * product.beta
        self.golden = golden.to(torch.float64).numpy()
        y = product.y.index_select(0, index.to(product.y.device)).to("cpu")
        self.actual = host_array(y)
        self.outcome = self._judge(criterion)

    def _judge(self, criterion: Criterion) -> Outcome:
        product = self.product
        drift = 2.0**-24 * product.depth / 16.0 if product.other_hardware else 0.0
        drift += 2.0**-10 if product.has_tf32 else 0.0
        rule = Rule(
            dtype=self.dtype,
            op_class="mm",
            reduction_length=float(product.depth),
            extra=drift * np.absolute(self.golden) if drift else None,
            rtol=criterion.rtol,
            atol=criterion.atol,
        )
        if criterion.name == "allclose":
            return judge_allclose(self.actual, self.golden, rule=rule)
        found = judge_golden(self.actual, self.golden, perturbed=self._moved, rule=rule)
        if found.passed or not (self._call.on_device or self._call.in_kernel):
            return found
        return judge_baseline(
            self.actual, self._baseline(), golden=lambda: self.golden, perturbed=self._moved,
            rule=rule,
        )  # fmt: skip

    def _moved(self, _draw: int) -> Array:
        """The golden moved by what inputs moved by one spacing explain, to first order."""
        product = self.product
        eps = 2.0**-10 if product.has_tf32 else float(torch.finfo(product.a.dtype).eps)
        dtype = torch.float32 if product.is_half else torch.float64
        squares = product_rows(product, self.rows, dtype, squared=True).to(torch.float64)
        spread: Array = 1.2 * eps * abs(product.alpha) * np.sqrt(squares.numpy())
        return self.golden + spread

    def _baseline(self) -> Array:
        """The same rows in the dtype of the call, by torch's own kernel on the CPU."""
        product = self.product
        if product.a.dtype in (torch.float16, torch.float64):  # 16 times slower than its golden
            rounded = torch.from_numpy(self.golden).to(torch.float32).to(product.y.dtype)
            return host_array(rounded if product.is_half else torch.from_numpy(self.golden))
        index = torch.from_numpy(self.rows)
        a = product.a.index_select(0, index.to(product.a.device)).to("cpu")
        found = torch.mm(a, product.b.to("cpu")) * product.alpha
        if product.added is not None:
            some = product.added.expand(product.y.shape)
            found += some.index_select(0, index.to(some.device)).to("cpu") * product.beta
        return host_array(found.to(product.y.dtype))

    def metrics(self) -> Metrics:
        """Those of the rows, at the place of the worst element in the product."""
        metrics = self.outcome.metrics
        if metrics.worst_index is None:
            return metrics
        row, column = metrics.worst_index
        return replace(metrics, worst_index=(int(self.rows[row]), column))

    def largest_error(self) -> Metrics:
        """The element that differs most, where no single one is out."""
        error = np.absolute(self.actual - self.golden)
        error = np.where(np.isfinite(error), error, 0.0)
        row, column = np.unravel_index(int(np.argmax(error)), error.shape)
        return replace(
            self.outcome.metrics,
            worst_index=(int(self.rows[row]), int(column)),
            actual_at=float(self.actual[row, column]),
            expected_at=float(self.golden[row, column]),
        )


def _failed(
    exact: _Rows, residual: Residual, reason: str, scale_limit: float, *, has_element: bool
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


def _tile(exact: _Rows, residual: Residual, metrics: Metrics) -> tuple[int, ...] | None:
    """Rows and columns around the worst element that the projection suspects."""
    if metrics.worst_index is None:
        return None
    row, column = metrics.worst_index
    block = column // residual.block
    suspect = ~(residual.z <= SUSPECT)
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


# ---- a grid of rows and columns -----------------------------------------------------------------


def _grid_spaces(call: Call) -> list[Space]:
    """Batches, rows of the first and columns of the second factor."""
    base = call.traits.base
    left, right = FACTORS[base]
    a, b = argument(call, left), argument(call, right)
    is_linear = base == "linear"
    rows = tuple(range(a.dim() - 1)) if is_linear else (a.dim() - 2,)
    columns = 0 if is_linear else b.dim() - 1
    out_dims = a.dim()
    sizes = tuple(a.shape[dim] for dim in rows)
    added = argument(call, "bias" if is_linear else "self")
    has_added = isinstance(added, Tensor) and base not in ("mm", "bmm", "matmul")
    with_rows: dict[str, tuple[int, ...]] = {left: rows}
    with_columns: dict[str, tuple[int, ...]] = {right: (columns,)}
    if has_added:
        name = "bias" if is_linear else "self"
        if not is_linear and added.dim() >= 2 and added.shape[-2] == sizes[-1]:
            with_rows[name] = (added.dim() - 2,)
        if added.dim() >= 1 and added.shape[-1] == b.shape[columns]:
            with_columns[name] = (added.dim() - 1,)
    spaces = [
        Space(sizes=sizes, tensors=with_rows, outputs={0: rows}),
        Space(sizes=(b.shape[columns],), tensors=with_columns, outputs={0: (out_dims - 1,)}),
    ]
    if a.dim() == 3 and not is_linear:
        batches = {left: (0,), right: (0,)}
        if has_added and added.dim() == 3 and added.shape[0] == a.shape[0]:
            batches["self"] = (0,)
        spaces.append(Space(sizes=(a.shape[0],), tensors=batches, outputs={0: (0,)}))
    return spaces


def pick_grid(call: Call, rng: np.random.Generator, out: Any = None) -> list[Pick]:
    """About one element in 32 of a product: some rows times some columns, in every batch.

    Rows and columns of the first NaN and Inf of `out` are added.
    """
    spaces = _grid_spaces(call)
    depth = argument(call, FACTORS[call.traits.base][0]).shape[-1]
    rows, columns = spaces[0].count, spaces[1].count
    batches = spaces[2].count if len(spaces) > 2 else 1
    taken = min(batches, max(1, MAX_FACTOR // (16 * max(depth, 1))))
    most = max(1, MAX_FACTOR // (max(depth, 1) * taken))
    num_rows = min(rows, most, max(16, round(rows / math.sqrt(GRID_STEP))))
    num_columns = min(columns, most, max(16, round(columns * rows / (GRID_STEP * num_rows))))
    num_columns = min(num_columns, max(16, MAX_GRID // (num_rows * taken)))
    picks = []
    for space, count in zip(spaces, (num_rows, num_columns, taken), strict=False):
        flat = strata(space.count, count, rng)
        if flat.size < space.count:
            index = np.stack(np.unravel_index(flat, space.sizes))
            bad = nonfinite_rows(space, out) if isinstance(out, Tensor) else ()
            if bad:
                index = np.unique(np.concatenate([index, np.stack(bad)], axis=1), axis=1)
            picks.append(Pick(space, tuple(np.asarray(item, dtype=np.int64) for item in index)))
    if not picks:  # so few that all are taken
        index = np.stack(np.unravel_index(np.arange(rows), spaces[0].sizes))
        picks.append(Pick(spaces[0], tuple(index)))
    return picks


def judge_grid(
    call: Call, out: Any, picks: list[Pick], kept: Kept | None, criterion: Criterion
) -> Judged | SkipReason:
    """Judge rows times columns of a product by the rule of any product."""
    part = part_of_slices(call, out, picks, kept)
    counts = " x ".join(f"{pick.count:,} of {pick.space.count:,}" for pick in picks)
    leaf = next(leaf for leaf in _torch.tree_leaves(out) if isinstance(leaf, Tensor))
    sample = sample_of("sampled_rows", leaf, criterion.seed, f"{counts} rows x columns")
    return judge_parts([part], criterion, sample)
