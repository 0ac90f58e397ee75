"""Products that are not projected: some rows times some columns, about one element in 32."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from torch import Tensor

from opcheck import _torch
from opcheck.calls import Call
from opcheck.golden_rules import argument
from opcheck.products import FACTORS
from opcheck.records import SkipReason
from opcheck.sampled import Criterion, Judged, judge_parts, nonfinite_rows, sample_of
from opcheck.slices import Kept, Pick, Space, part_of_slices, strata

__all__ = ["judge_grid", "pick_grid"]

GRID_STEP = 32
"""One element in so many of a product that is sampled."""
MAX_FACTOR = 1 << 21
"""Elements of a factor's slices: 16 MiB in float64."""
MAX_GRID = 1 << 18
"""Elements of a grid, unless 16 columns have more: judging one takes longer than computing it."""


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
