"""One tensor of a module before its verdict: the distances, and how a finding is put into words."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from modulecheck.compared import Array, Compared, Documented, References, flat
from opcheck import tolerances as tol
from opcheck.arrays import classes, fill_of, rms_apart, typical_size, usual_size
from opcheck.records import Metrics, Verdict
from opcheck.verdicts import rms, round_to, spacing_of

__all__ = ["LIMITS", "SENSITIVE_DRAWS", "Limits", "Measured", "Trial"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Largest values that a correct result takes."""

    q: float
    rms_ratio: float
    shift: float


LIMITS = MappingProxyType(
    {
        "bfloat16": Limits(7.0, 3.0, 0.1),
        "float16": Limits(12.0, 3.0, 0.1),
        "float32": Limits(32.0, 64.0, 2.0),
        "float64": Limits(32.0, 64.0, 2.0),
    }
)
"""Measured on correct inductor code on CPU (GPT-2, Qwen2, Llama, MiniLM, MLP, ResNet18; outputs,
input and parameter gradients): largest q 6.7 float32, 4.9 bfloat16, 6.3 float16; largest rms ratio
1.1 in half, 21 in float32 (a running mean of BatchNorm at q 4.6; a limit of 16 alarmed on it)."""
AUTOCAST_FACTOR = 2.0
"""Under autocast a product is rounded and then added up in float32: 8.5 on a correct step of MiniLM
with real weights."""
SHIFT_BY_CHANCE = 3.0
"""Errors of the size of the allowance, independent of each other, have a mean of this many over the
root of their number at most, three sigma: a bias gradient of 384 float16 elements leaned 0.21."""
SHIFT_OF_EAGER = 2.0
"""And so many times the mean shift of eager on top."""
FAR_FROM_GOLDEN = 0.05
"""Eager that is further from the golden than this share of its rms is no part of an interval."""
SENSITIVE_DRAWS = 2
NOISE_PEAK = 8.0
"""Largest element of rounding noise, in noise floors."""


@dataclass(slots=True)
class Measured:
    """The distance of one tensor to what it should be."""

    q: float
    worst: int
    num_out: int
    rms_ratio: float
    rms_unit: float
    """The rms error of which it is a multiple."""
    shift: float
    shift_limit: float
    allowed: Array

    def why(self, limits: Limits, size: int) -> str:
        """Which limit is passed: "elem", "rms", "shift" or ""."""
        if self.q > limits.q:
            return "elem"
        if size >= tol.MIN_ELEMENTS and self.rms_ratio > limits.rms_ratio:
            return "rms"
        return "shift" if abs(self.shift) > self.shift_limit else ""


@dataclass(slots=True)
class Trial:
    """One tensor before the rule; arrays are flat, float64, of the elements finite everywhere."""

    shape: tuple[int, ...]
    dtype: str
    actual: Array
    eager: Array
    golden: Array
    keep: Array
    references: References
    has_golden: bool
    num_wrong: int
    first_wrong: int
    all_actual: Array
    all_golden: Array
    is_complex: bool
    eager_alone_wrong: bool

    @classmethod
    def of(
        cls, actual: Array, eager: Array, golden: Array | None, dtype: str, references: References
    ) -> Trial:
        """Take the elements that are finite everywhere."""
        shape, is_complex = actual.shape, actual.dtype.kind == "c"
        y, c = flat(actual).astype(np.float64), flat(eager).astype(np.float64)
        g = c if golden is None else flat(golden).astype(np.float64)
        rounded = classes(g, tol.ROUNDS_TO_INF[dtype])
        of_actual, of_eager = classes(y), classes(c)
        wrong = (of_actual != of_eager) & (of_actual != rounded)
        keep = (of_actual == 0) & (of_eager == 0) & (rounded == 0)
        alone = bool(((of_eager != rounded) & (of_actual == rounded)).any())
        return cls(
            shape, dtype, y[keep], c[keep], g[keep], keep, references, golden is not None,
            int(np.count_nonzero(wrong)), int(np.argmax(wrong)), y, g, is_complex, alone,
        )  # fmt: skip

    def where_eager_died(self) -> Trial | None:
        """The elements that are NaN or Inf in eager alone; None: there are none."""
        if not self.eager_alone_wrong:
            return None
        rounded = classes(self.all_golden, tol.ROUNDS_TO_INF[self.dtype])
        place = (classes(self.all_actual) == 0) & (rounded == 0)
        place[np.flatnonzero(self.keep)] = False
        if not place.any():
            return None
        return replace(
            self, actual=self.all_actual[place], eager=self.all_golden[place],
            golden=self.all_golden[place], keep=place,
        )  # fmt: skip

    # ---- numbers ----

    def sensitivity(self, source: Callable[[int], Array | None], draws: int) -> Array:
        """Largest change of each element over some draws."""
        moved = np.zeros_like(self.golden)
        for draw in range(draws):
            other = source(draw)
            if other is None or other.size * (1 + self.is_complex) != self.keep.size:
                continue
            base = self.golden if self.has_golden else self.eager
            change = np.abs(flat(other).astype(np.float64)[self.keep] - base)
            np.maximum(moved, np.where(np.isfinite(change), change, 0.0), out=moved)
        return moved

    def measure(self, eager: Array, golden: Array, moved: Array) -> Measured:
        """Hold `actual` against the interval of two results; they may be the same one."""
        own = eager - golden
        share = tol.PERTURBED_SHARE_HALF if self.half else tol.PERTURBED_SHARE
        typical = typical_size(golden, rms(golden))
        allowed = self.spacing(golden, moved) + rms_apart(own, fill_of(golden))
        low, high = np.minimum(eager, golden), np.maximum(eager, golden)
        distance = np.maximum(np.maximum(low - self.actual, self.actual - high), 0.0)
        q = distance / allowed
        error = self.actual - golden
        floor = max(tol.ROUNDING_RMS * tol.EPS[self.dtype] * typical, rms(share * moved))
        sign = np.sign(golden)
        limits = self.limits
        rms_unit = max(rms(own), floor, 1e-300)
        shift, shift_of_eager = (float(np.mean(item / allowed * sign)) for item in (error, own))
        return Measured(
            float(q.max()),
            int(q.argmax()),
            int(np.count_nonzero(q > limits.q)),
            rms(error) / rms_unit,
            rms_unit,
            shift if self.tests_shift() else 0.0,
            limits.shift
            + SHIFT_OF_EAGER * abs(shift_of_eager)
            + SHIFT_BY_CHANCE / math.sqrt(golden.size),
            allowed,
        )

    @property
    def limits(self) -> Limits:
        """Of the dtype in which the tensor was computed."""
        limits = LIMITS[self.dtype]
        if self.references.is_of_autocast:
            return replace(limits, q=limits.q * AUTOCAST_FACTOR)
        return limits

    @property
    def half(self) -> bool:
        """16-bit results."""
        return self.dtype in tol.HALF_DTYPES

    def spacing(self, golden: Array, moved: Array) -> Array:
        """What rounding alone explains, of each element."""
        share = tol.PERTURBED_SHARE_HALF if self.half else tol.PERTURBED_SHARE
        allowed = spacing_of(golden, self.dtype) + tol.ALLOWED_UNDERFLOW[self.dtype]
        allowed += share * np.maximum(moved, tol.LOCAL_FLOOR * rms_apart(moved, fill_of(golden)))
        allowed += tol.compute_eps(self.dtype) * usual_size(golden)
        return np.asarray(allowed)

    def tests_shift(self) -> bool:
        """There are elements enough, of different values, for a mean to say something."""
        if self.golden.size < tol.MIN_ELEMENTS:
            return False
        sample = round_to(self.golden[: tol.DISTINCT_SAMPLE], self.dtype)
        return len(np.unique(sample)) >= tol.MIN_DISTINCT

    def is_noise(self) -> bool:
        """A gradient that eager's rounding buries, and no more than such rounding on this side."""
        floor = self.references.noise_floor
        if not self.has_golden or rms(self.eager - self.golden) < rms(self.golden):
            return False
        error = self.actual - self.golden
        sizes = max(rms(self.eager), rms(error)), float(np.abs(error).max())
        return sizes[0] <= floor and sizes[1] <= NOISE_PEAK * floor

    def apart(self) -> bool:
        """Eager and golden are not two roundings of one result."""
        if not self.has_golden or not self.golden.size:
            return False
        gap = rms(self.eager - self.golden)
        return gap > FAR_FROM_GOLDEN * rms(self.golden) and gap > self.references.noise_floor

    def is_strained(self, moved: Array) -> bool:
        """The allowance is more than rounding, and might be that of a jump."""
        if not self.has_golden:
            return False
        limit = self.limits.q
        bare = self.spacing(self.golden, np.zeros_like(moved))
        allowed = self.spacing(self.golden, moved)
        own = np.abs(self.eager - self.golden)
        return bool((own > limit * allowed).any() or (allowed > limit * bare).any())

    # ---- in words ----

    def nearer(self) -> list[str]:
        """A note on the side that float64 takes."""
        if self.eager_alone_wrong:
            return ["eager is the wrong side: NaN or Inf where float64 and compiled have none"]
        if not self.has_golden:
            return []
        mine, theirs = rms(self.actual - self.golden), rms(self.eager - self.golden)
        return ["compiled is nearer to float64"] if mine < theirs else []

    def nonfinite(self, numbers: Documented, notes: list[str]) -> Compared:
        """FAIL: NaN or Inf on one side."""
        index, place = self.index(self.first_wrong)
        reason = (
            f"{place} is {self.all_actual[self.first_wrong]:.9g},"
            f" expected {self.all_golden[self.first_wrong]:.9g}; NaN or Inf differ in"
            f" {self.num_wrong} of {self.keep.size} elements"
        )
        metrics = Metrics(
            q=math.inf, num_out=self.num_wrong, num_nonfinite=self.num_wrong,
            num_elements=self.keep.size, worst_index=index, max_abs=numbers.max_abs,
            allclose=numbers.allclose,
        )  # fmt: skip
        return Compared(
            verdict=Verdict.FAIL, reason=reason, notes=tuple(notes), documented=numbers,
            metrics=metrics,
        )  # fmt: skip

    def reason(self, found: Measured, why: str) -> str:
        """The limit that was passed, where and by how much."""
        side = self._side()
        if why == "shift":
            return f"all elements lean to one side by {found.shift:.3g} of what is allowed{side}"
        if why == "rms":
            return f"rms error is {found.rms_ratio:.3g} times that of eager{side}"
        _, place = self.index(int(np.flatnonzero(self.keep)[found.worst]))
        actual, eager = self.actual[found.worst], self.eager[found.worst]
        return (
            f"{place} is {actual:.9g}, eager gives {eager:.9g}, float64"
            f" {self.golden[found.worst]:.9g}; {found.num_out} of {self.golden.size} elements"
            f" are out (q {found.q:.3g}){side}"
        )

    def _side(self) -> str:
        if not self.has_golden:
            return ""
        mine, theirs = rms(self.actual - self.golden), rms(self.eager - self.golden)
        return (
            "; eager is nearer to float64" if theirs <= mine else "; compiled is nearer to float64"
        )

    def index(self, flat: int) -> tuple[tuple[int, ...], str]:
        """Of an element in the tensor, and in words."""
        flat = flat // 2 if self.is_complex else flat
        index = tuple(int(item) for item in np.unravel_index(flat, self.shape))
        return index, f"element {index}" if index else "the value"

    def done(
        self, verdict: Verdict, reason: str, notes: list[str], numbers: Documented,
        found: Measured | None,
    ) -> Compared:  # fmt: skip
        """With the numbers of what was measured."""
        metrics = Metrics(
            max_abs=numbers.max_abs, mean_abs=numbers.mean_abs, max_rel=numbers.max_rel,
            num_elements=self.keep.size, allclose=numbers.allclose,
        )  # fmt: skip
        if found is not None:
            place = int(np.flatnonzero(self.keep)[found.worst])
            limit = self.limits.q
            metrics = Metrics(
                max_abs=numbers.max_abs, mean_abs=numbers.mean_abs, max_rel=numbers.max_rel,
                q=found.q / limit, rmse_ratio=found.rms_ratio, mean_shift=found.shift,
                num_out=found.num_out, num_elements=self.keep.size,
                worst_index=self.index(place)[0], actual_at=float(self.actual[found.worst]),
                expected_at=float(self.golden[found.worst]),
                allowed_at=float(found.allowed[found.worst] * limit),
                expected_rms=rms(self.golden), allclose=numbers.allclose,
            )  # fmt: skip
        return Compared(
            verdict=verdict, reason=reason, notes=tuple(notes), documented=numbers,
            metrics=metrics,
        )  # fmt: skip
