"""The rule at module level: what the compiled module gave, what eager gave, and float64.

`actual` is the compiled side, `eager` the module in eager on the same inputs, `golden` the module
in float64, all NumPy arrays of one shape. An element is held against the interval between eager and
golden, in units of

    allowance = spacing + share * sensitivity + ec * typical size + rms(eager - golden)

where sensitivity is how far the golden moves when inputs and parameters move by one ulp. Where
eager is far from the golden, the two are apart by a fault or by other random numbers: then the
interval would hide everything, so the result has to agree with one of them on its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from modulecheck.compared import Array, Compared, Documented, References, classes_of, flat
from opcheck import tolerances as tol
from opcheck.records import Metrics, Verdict
from opcheck.verdicts import rms, round_to, spacing_of

__all__ = ["KINK_DRAWS", "LIMITS", "SENSITIVE_DRAWS", "Trial"]


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
SHIFT_OF_EAGER = 2.0
"""And so many times the mean shift of eager on top."""
FAR_FROM_GOLDEN = 0.05
"""Eager that is further from the golden than this share of its rms is no part of an interval."""
SENSITIVE_DRAWS = 2
KINK_DRAWS = 8


@dataclass(slots=True)
class _Measured:
    """The distance of one tensor to what it should be."""

    q: float
    worst: int
    num_out: int
    rms_ratio: float
    shift: float
    shift_limit: float
    allowed: Array

    def why(self, limits: Limits, size: int) -> str:
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
        rounded = classes_of(g, tol.ROUNDS_TO_INF[dtype])
        of_actual, of_eager = classes_of(y), classes_of(c)
        wrong = (of_actual != of_eager) & (of_actual != rounded)
        keep = (of_actual == 0) & (of_eager == 0) & (rounded == 0)
        alone = bool(((of_eager != rounded) & (of_actual == rounded)).any())
        return cls(
            shape, dtype, y[keep], c[keep], g[keep], keep, references, golden is not None,
            int(np.count_nonzero(wrong)), int(np.argmax(wrong)), y, g, is_complex, alone,
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

    def measure(self, eager: Array, golden: Array, moved: Array) -> _Measured:
        """Hold `actual` against the interval of two results; they may be the same one."""
        half = self.dtype in tol.HALF_DTYPES
        own = eager - golden
        size = rms(golden)
        nonzero = np.abs(golden[golden != 0.0])
        typical = (
            min(size, tol.MAX_RMS_OVER_MEDIAN * float(np.median(nonzero))) if nonzero.size else 0.0
        )
        share = tol.PERTURBED_SHARE_HALF if half else tol.PERTURBED_SHARE
        allowed = spacing_of(golden, self.dtype) + tol.ALLOWED_UNDERFLOW[self.dtype]
        allowed += share * np.maximum(moved, tol.LOCAL_FLOOR * rms(moved))
        allowed += tol.compute_eps(self.dtype) * typical + rms(own)
        low, high = np.minimum(eager, golden), np.maximum(eager, golden)
        distance = np.maximum(np.maximum(low - self.actual, self.actual - high), 0.0)
        q = distance / allowed
        error = self.actual - golden
        floor = max(tol.ROUNDING_RMS * tol.EPS[self.dtype] * typical, rms(share * moved))
        sign = np.sign(golden)
        limits = LIMITS[self.dtype]
        shift, shift_of_eager = (float(np.mean(item / allowed * sign)) for item in (error, own))
        return _Measured(
            float(q.max()),
            int(q.argmax()),
            int(np.count_nonzero(q > limits.q)),
            rms(error) / max(rms(own), floor, 1e-300),
            shift if self._tests_shift() else 0.0,
            limits.shift + SHIFT_OF_EAGER * abs(shift_of_eager),
            allowed,
        )

    def _tests_shift(self) -> bool:
        if self.golden.size < tol.MIN_ELEMENTS:
            return False
        sample = round_to(self.golden[: tol.DISTINCT_SAMPLE], self.dtype)
        return len(np.unique(sample)) >= tol.MIN_DISTINCT

    def apart(self) -> bool:
        """Eager and golden are not two roundings of one result."""
        if not self.has_golden or not self.golden.size:
            return False
        gap = rms(self.eager - self.golden)
        return gap > FAR_FROM_GOLDEN * rms(self.golden) and gap > self.references.noise_floor

    # ---- verdict ----

    def compared(self, numbers: Documented) -> Compared:
        """Judge."""
        notes = [] if self.has_golden else ["no float64 run: judged by the same dtype"]
        if self.num_wrong:
            return self._nonfinite(numbers, notes)
        if not self.golden.size:
            return self._done(Verdict.PASS, "", notes, numbers, None)
        limits = LIMITS[self.dtype]
        moved = self.sensitivity(self.references.moved, SENSITIVE_DRAWS)
        if self.apart():
            return self._apart(numbers, notes, moved)
        found = self.measure(self.eager, self.golden, moved)
        why = found.why(limits, self.golden.size)
        if why and self.references.across_kinks is not None:
            wider = self.sensitivity(self.references.across_kinks, KINK_DRAWS)
            again = self.measure(self.eager, self.golden, np.maximum(moved, wider))
            if not again.why(limits, self.golden.size):
                return self._done(Verdict.PASS, "", [*notes, "at a kink"], numbers, again)
        if why:
            return self._done(Verdict.FAIL, self._reason(found, why), notes, numbers, found)
        notes += self._nearer()
        return self._done(Verdict.PASS, "", notes, numbers, found)

    def _apart(self, numbers: Documented, notes: list[str], moved: Array) -> Compared:
        limits = LIMITS[self.dtype]
        with_golden = self.measure(self.golden, self.golden, moved)
        if not with_golden.why(limits, self.golden.size):
            note = "eager is the wrong side: compiled agrees with float64"
            return self._done(Verdict.PASS, "", [*notes, note], numbers, with_golden)
        with_eager = self.measure(self.eager, self.eager, moved)
        why = with_eager.why(limits, self.golden.size)
        note = "float64 is no judge here (it drew other random numbers, or eager is far off)"
        if why:
            reason = self._reason(with_eager, why)
            return self._done(Verdict.FAIL, reason, [*notes, note], numbers, with_eager)
        return self._done(Verdict.PASS, "", [*notes, note], numbers, with_eager)

    def _nearer(self) -> list[str]:
        if self.eager_alone_wrong:
            return ["eager is the wrong side: NaN or Inf where float64 and compiled have none"]
        if not self.has_golden:
            return []
        mine, theirs = rms(self.actual - self.golden), rms(self.eager - self.golden)
        return ["compiled is nearer to float64"] if mine < theirs else []

    def _nonfinite(self, numbers: Documented, notes: list[str]) -> Compared:
        index, place = self._index(self.first_wrong)
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

    def _reason(self, found: _Measured, why: str) -> str:
        side = self._side()
        if why == "shift":
            return f"all elements lean to one side by {found.shift:.3g} of what is allowed{side}"
        if why == "rms":
            return f"rms error is {found.rms_ratio:.3g} times that of eager{side}"
        _, place = self._index(int(np.flatnonzero(self.keep)[found.worst]))
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

    def _index(self, flat: int) -> tuple[tuple[int, ...], str]:
        flat = flat // 2 if self.is_complex else flat
        index = tuple(int(item) for item in np.unravel_index(flat, self.shape))
        return index, f"element {index}" if index else "the value"

    def _done(
        self, verdict: Verdict, reason: str, notes: list[str], numbers: Documented,
        found: _Measured | None,
    ) -> Compared:  # fmt: skip
        metrics = Metrics(
            max_abs=numbers.max_abs, mean_abs=numbers.mean_abs, max_rel=numbers.max_rel,
            num_elements=self.keep.size, allclose=numbers.allclose,
        )  # fmt: skip
        if found is not None:
            place = int(np.flatnonzero(self.keep)[found.worst])
            limit = LIMITS[self.dtype].q
            metrics = Metrics(
                max_abs=numbers.max_abs, mean_abs=numbers.mean_abs, max_rel=numbers.max_rel,
                q=found.q / limit, rmse_ratio=found.rms_ratio, mean_shift=found.shift,
                num_out=found.num_out, num_elements=self.keep.size,
                worst_index=self._index(place)[0], actual_at=float(self.actual[found.worst]),
                expected_at=float(self.golden[found.worst]),
                allowed_at=float(found.allowed[found.worst] * limit),
                expected_rms=rms(self.golden), allclose=numbers.allclose,
            )  # fmt: skip
        return Compared(
            verdict=verdict, reason=reason, notes=tuple(notes), documented=numbers,
            metrics=metrics,
        )  # fmt: skip
