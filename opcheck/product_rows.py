"""Rows of a large product that are computed again and judged by the rule of any product."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from opcheck.arrays import Array
from opcheck.calls import Call
from opcheck.flushing import nearer
from opcheck.passes import Scratch, rows_times
from opcheck.projection import Product
from opcheck.records import Metrics
from opcheck.references import host_array
from opcheck.sampled import Criterion
from opcheck.verdicts import Outcome, Rule, judge_allclose, judge_baseline, judge_golden

__all__ = ["ExactRows", "edge_rows"]

NUM_RANDOM_ROWS = 4
_BORDERS = (128, 64, 16)
"""Tile sizes: the last full tile of each and what follows it are always looked at."""


def edge_rows(rows: int, rng: np.random.Generator) -> Array:
    """First, last, both sides of the last border of 128, 64 and 16 rows, and some at random."""
    found = {0, rows - 1}
    for tile in _BORDERS:
        border = (rows - 1) // tile * tile
        found |= {place for place in (border - 1, border) if 0 <= place < rows}
    found |= {int(place) for place in rng.integers(0, rows, NUM_RANDOM_ROWS)}
    return np.array(sorted(found), dtype=np.int64)


class ExactRows:
    """Rows of a product computed again and judged by the rule of any product."""

    def __init__(
        self, call: Call, product: Product, rows: Array, times_b: Tensor, criterion: Criterion
    ) -> None:
        """Judge.

        Args:
            call: that the product is of.
            product: of which the rows are.
            rows: their positions.
            times_b: these rows of a, times b, in the golden dtype; it is written to.
            criterion: what judges.
        """
        self.rows, self.product = rows, product
        self._call = call
        self.dtype = str(product.y.dtype).removeprefix("torch.")
        golden = times_b if product.alpha == 1.0 else times_b.mul_(product.alpha)
        index = torch.from_numpy(rows)
        if product.added is not None:
            some = product.added.expand(product.y.shape)
            some = some.index_select(0, index.to(some.device)).to("cpu")
            golden += some.to(golden.dtype) * product.beta
        self.golden: Array = np.from_dlpack(golden.to(torch.float64))
        y = product.y.index_select(0, index.to(product.y.device)).to("cpu")
        self.actual = host_array(y)
        if product.lost:
            self.actual = nearer(self.actual, self.golden, self.golden, product.lost)
        self.outcome = self._judge(criterion)

    def _judge(self, criterion: Criterion) -> Outcome:
        product = self.product
        drift = 2.0**-24 * product.depth / 16.0 if product.other_hardware else 0.0
        drift += 2.0 * product.factor_step
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
        moved: Array = self.golden + 1.2 * self._spread()
        return moved

    def _spread(self) -> Array:
        """How far inputs moved by one spacing move the rows, for random signs."""
        product = self.product
        eps = 2.0 * product.factor_step or float(torch.finfo(product.a.dtype).eps)
        left = product.rows_of_a(self.rows).to(product.golden_dtype).square_()
        squares = rows_times(left, product.b, Scratch(), squared=True).to(torch.float64)
        spread: Array = eps * abs(product.alpha) * np.sqrt(squares.numpy())
        return spread

    def _baseline(self) -> Array:
        """The same rows in the dtype of the call, by torch's own kernel on the CPU."""
        product = self.product
        if product.a.dtype in (torch.float16, torch.float64):  # 16 times slower than its golden
            rounded = torch.from_numpy(self.golden).to(torch.float32).to(product.y.dtype)
            return host_array(rounded if product.is_half else torch.from_numpy(self.golden))
        found = torch.mm(product.rows_of_a(self.rows), product.b.to("cpu")) * product.alpha
        if product.added is not None:
            index = torch.from_numpy(self.rows)
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
