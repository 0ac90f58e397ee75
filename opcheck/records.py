"""Frozen results: what every reader (logs, report, review, drill-down) is built on.

Nothing here holds a tensor or imports torch. A record is made once, after its call was judged, and
never changes. `record_json` knows how it looks in a log.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

__all__ = [
    "EXIT_STATUS",
    "PHASES",
    "SCHEMA",
    "SCHEMA_VERSION",
    "Birth",
    "Blame",
    "CallCount",
    "Coverage",
    "Metrics",
    "OpRecord",
    "Overhead",
    "RepeatDifference",
    "Sample",
    "SkipReason",
    "UncheckedSignature",
    "Verdict",
    "session_verdict",
]

SCHEMA = "opcheck.log"
SCHEMA_VERSION = 1
PHASES = ("forward", "recompute", "backward", "optimizer", "other")


class Verdict(str, Enum):
    """Of a call, a module, or a session."""

    PASS = "PASS"
    FAIL = "FAIL"
    INCONCLUSIVE = "INCONCLUSIVE"

    def __str__(self) -> str:
        return self.value


EXIT_STATUS = {Verdict.PASS: 0, Verdict.FAIL: 1, Verdict.INCONCLUSIVE: 3}
"""Exit status of the commands by verdict; 2 is wrong usage."""


class SkipReason(str, Enum):
    """Why a call was seen and not checked."""

    LAYOUT = "layout"
    """Views, layout and memory ops: nothing is computed."""
    RANDOM = "random"
    """The op drew random numbers."""
    UNINITIALIZED = "uninitialized"
    """The result is memory that nobody has written yet (`empty`, `resize_`)."""
    OUT_VARIANT = "out_variant"
    NO_CPU_KERNEL = "no_cpu_kernel"
    """The op is of another namespace and has no kernel for the CPU."""
    SIDE_EFFECT = "side_effect"
    """Running the op again would do something outside the step (collectives, profiler marks)."""
    BUDGET_USED_UP = "budget_used_up"
    OUT_OF_TIME = "out_of_time"
    """Checking it would have taken more than `max_overhead` leaves."""
    ALREADY_LOGGED = "already_logged"
    """`log_once`: a registered kernel is not checked again after its first logged failure."""
    TOO_LARGE = "too_large"
    UNSUPPORTED_TYPE = "unsupported_type"
    """Sparse, quantized, nested, fake, meta tensors, subclasses, dtypes without a float64 twin."""
    UNWRAPPED = "unwrapped"
    """Of a wrapper (DTensor, jagged): the calls on what it holds are seen one by one."""
    EXCLUDED = "excluded"
    """By `include` or `exclude`."""
    OUTSIDE_MODULES = "outside_modules"
    OUTSIDE_STEPS = "outside_steps"
    REFERENCE_NOT_AVAILABLE = "reference_not_available"
    """No kernel computes the reference for these arguments."""
    NO_INDEPENDENT_REFERENCE = "no_independent_reference"
    """Only the kernel under test itself could play the reference (integers on CPU, mostly)."""
    OVERLAPPING = "overlapping"
    """The op writes to a tensor several of whose elements are the same memory: undefined."""
    NOTHING_TO_COMPARE = "nothing_to_compare"
    """The op gives no value back (assertions, empty results)."""
    OP_RAISED = "op_raised"
    """The op itself raised; the exception went on to the caller."""
    INTERRUPTED = "interrupted"
    """Ctrl-C came while the call was being checked."""
    INSIDE_COMPILED_REGION = "inside_compiled_region"
    """A compiled region ran; its fused kernels cannot be seen one by one."""
    NOT_CHECKABLE = "not_checkable"

    def __str__(self) -> str:
        return self.value

    @property
    def is_computation(self) -> bool:
        """False when the skipped call computes nothing that could be wrong."""
        return self not in (
            SkipReason.LAYOUT,
            SkipReason.UNWRAPPED,
            SkipReason.UNINITIALIZED,
            SkipReason.NOTHING_TO_COMPARE,
            SkipReason.OP_RAISED,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """Numbers of one comparison, of the worst output where a call has several."""

    max_abs: float = 0.0
    """Largest |actual - expected| over elements finite on both sides."""
    mean_abs: float = 0.0
    max_rel: float = 0.0
    """Largest |actual - expected| / (|expected| + 1e-8)."""
    q: float = 0.0
    """Largest error as a share of what is allowed there: above 1 the element fails."""
    rmse_ratio: float | None = None
    """RMS error beside that of a correctly rounded result or of the same-dtype reference."""
    mean_shift: float | None = None
    """Mean signed error, in units of the spacing of the dtype (half) or of the allowance."""
    num_out: int = 0
    """Elements beyond their allowance."""
    num_elements: int = 0
    """Elements compared."""
    num_nonfinite: int = 0
    """Elements whose class (finite, NaN, +Inf, -Inf) differs from the reference's."""
    worst_index: tuple[int, ...] | None = None
    worst_output: int = 0
    """Which output (or mutated argument) of the call the numbers are of."""
    actual_at: float | complex | int | bool | None = None
    expected_at: float | complex | int | bool | None = None
    allowed_at: float | None = None
    """Largest |actual - expected| that passes at `worst_index`."""
    expected_rms: float | None = None
    allclose: bool | None = None
    """The documented criterion, computed whichever criterion judges."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """Where the error of a call's result came from, with `blame=True`.

    Each is an rms error as a share of the rms of the expected values, of the output where it is
    largest (of norms and attention the first): 1e-3 is three right digits, 1 is none. NaN and Inf
    are left out.
    """

    born: float = 0.0
    """Of the result beside the reference on the inputs that the call got."""
    inherited: float = 0.0
    """What the errors of the inputs make of the result: the reference on the actual inputs beside
    the reference on the float64 ones."""
    total: float = 0.0
    """Of the result beside the chain of float64 references from the beginning of the step."""
    inputs: float = 0.0
    """Of the worst input beside that chain."""
    word: str = ""
    """"born": the call FAILs; "amplified": it makes much more of the error of its inputs;
    "inherited": most came with the inputs; "rounding": most is the rounding of a right call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Birth:
    """The first call that made NaN or Inf of finite inputs, checked or not.

    Or that was seen to get NaN with its inputs, made where nobody looked.
    """

    op: str
    module: str = ""
    phase: str = "other"
    step: int = 0
    index: int = 0
    source: str = ""
    value: str = ""
    """"nan", "inf" or "-inf"."""
    output: int = 0
    place: tuple[int, ...] = ()
    """Index of the first such element of that output."""
    inputs: tuple[str, ...] = ()
    """Each tensor input: its value at the place where it has one, and its range."""
    verdict: str = ""
    """Of the call, "" where it was not checked."""
    arrived: bool = False
    """It came with the inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """What `max_overhead` allowed, and what was done with it."""

    own_seconds: float = 0.0
    """The step's own time in the context."""
    allowed_seconds: float = 0.0
    """`max_overhead` times that."""
    spent_seconds: float = 0.0
    """In the checker: looking at calls, dispatching them to it, and checking."""
    num_places: int = 0
    """Calls that could be checked, by module, phase, op and argument types."""
    num_left: int = 0
    """Of these, dropped for time whenever they came."""
    steps_left: int | None = 0
    """Steps, at the rate so far, in which those come up once; None where no rate is known."""
    counting_seconds: float = 0.0
    """Of what was spent: looking at calls, checked or not."""
    setup_seconds: float = 0.0
    """Entering for the first time: imports, tables, log files. Not part of what was spent."""
    num_steps: int = 0
    """Steps that ended and whose calls were looked at."""
    num_rests: int = 0
    """Steps that ended and that nobody looked at, because that alone takes too much of what is
    allowed. Their calls are not in any count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatDifference:
    """Calls of one op, module and phase that did not give the same bits a second time."""

    op: str
    module: str = ""
    phase: str = "other"
    calls: int = 0
    first: int = 0
    """Index of the first such call."""
    max_abs: float = 0.0
    """Largest difference of the two results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What of a large call was looked at."""

    strategy: str
    """"sampled_elements", "sampled_rows", "projection", "adjoint_probe" or "exact_full"."""
    seed: int = 0
    """With the settings' seed and the index of the call, what chose the sample."""
    num_elements: int = 0
    """Elements of the results that were compared one by one."""
    share: float = 0.0
    """Of the elements of the results."""
    covers_all: bool = False
    """Every element had a part in the verdict, in sums with others where not one by one."""
    detail: str = ""
    """`130 of 65,536 rows`."""
    tile: tuple[int, ...] | None = None
    """First row, last row, first column, last column of what a projection found wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRecord:
    """One checked call (or one whose checking crashed)."""

    op: str
    """Full overload name, `aten.gelu.default`."""
    module: str = ""
    """FQN of the module that ran it, "" for the root or for none."""
    phase: str = "other"
    index: int = 0
    """n-th dispatched call of the run, from 0."""
    step: int = 0
    occurrence: int = 0
    """n-th call of this op in this step, module and phase, from 0."""
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    verdict: Verdict = Verdict.PASS
    metrics: Metrics = field(default_factory=Metrics)
    source: str = ""
    reason: str = ""
    """Why FAIL or INCONCLUSIVE, one sentence; "" for PASS."""
    notes: tuple[str, ...] = ()
    criterion: str = "calibrated"
    rtol: float = 1e-4
    atol: float = 1e-5
    """The documented tolerances that apply to the call, widened ones included."""
    reference: str = "float64"
    error: str | None = None
    """Traceback of a crash of ours; the verdict is then INCONCLUSIVE."""
    blame: Blame | None = None
    """With `blame=True`, for floating results."""
    repeats: bool | None = None
    """With `repeat=True`: the kernel gave the same bits again. None: it was not run again."""
    sample: Sample | None = None
    """Of a call above `max_numel`: what was looked at. None: every element was compared."""
    run_id: str = ""
    rank: int = 0

    @property
    def short_op(self) -> str:
        """The documented spelling: `gelu`, `add.Tensor`."""
        name = self.op.split(".", 1)[1] if "." in self.op else self.op
        return name.removesuffix(".default")


@dataclass(frozen=True, slots=True, kw_only=True)
class UncheckedSignature:
    """A computing op with argument types that was seen and never checked."""

    op: str
    signature: str
    """Dtypes and layout classes of the tensor arguments, `float32:contiguous, int64:contiguous`."""
    reason: SkipReason
    calls: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CallCount:
    """Calls of one op in one module and phase."""

    module: str
    phase: str
    op: str
    seen: int = 0
    checked: int = 0
    failed: int = 0
    errors: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """What was seen, and what became of it: `seen == checked + sum(skipped) + errors`."""

    seen: int = 0
    checked: int = 0
    failed: int = 0
    errors: int = 0
    skipped: Mapping[SkipReason, int] = field(default_factory=dict)
    elements_seen: int = 0
    """Elements of the results of computing ops."""
    elements_checked: int = 0
    """Compared one by one, or covered by a projection."""
    elements_sampled: int = 0
    """Compared one by one in results of which the rest stayed unseen."""
    signatures_seen: int = 0
    """Computing ops with distinct argument types."""
    signatures_checked: int = 0
    unchecked_signatures: tuple[UncheckedSignature, ...] = ()
    calls: tuple[CallCount, ...] = ()
    counting_stopped_at: int | None = None
    """Index of the last call before the session stopped looking: every budget was used up."""
    left_by: str = ""
    """The exception that cut the step short, and after which call: what followed did not run."""
    steps: int = 0
    check_seconds: float = 0.0
    """Time spent in checking, beside the step's own."""
    check_peak_bytes: int = 0
    """By how much checks raised the peak memory of the process, beyond all that was before; with
    workers, what they held at most is added."""
    overhead: Overhead | None = None
    """With `max_overhead`."""
    first_nonfinite: Birth | None = None
    """The first call that made NaN or Inf of finite inputs, right or wrong."""
    shadow: Mapping[str, int] = field(default_factory=dict)
    """With `blame=True`: calls followed, calls after which the chain began again from the actual
    values (by reason), bytes held at most and allowed."""
    repeat: Mapping[str, int] = field(default_factory=dict)
    """With `repeat=True`: calls run twice, and by reason those that were not."""
    unrepeatable: tuple[RepeatDifference, ...] = ()

    @property
    def elements_unseen(self) -> int:
        """Elements of results that had no part in any verdict."""
        return max(0, self.elements_seen - self.elements_checked - self.elements_sampled)

    @property
    def adds_up(self) -> bool:
        """True when every call is accounted for."""
        return self.seen == self.checked + sum(self.skipped.values()) + self.errors


def session_verdict(coverage: Coverage) -> tuple[Verdict, str]:
    """The verdict of a whole session and, unless it is PASS, the reason in one sentence."""
    if coverage.failed:
        return Verdict.FAIL, f"{coverage.failed} of {coverage.checked} checked calls failed"
    if coverage.errors:
        return Verdict.INCONCLUSIVE, f"checking crashed in {coverage.errors} calls"
    regions = coverage.skipped.get(SkipReason.INSIDE_COMPILED_REGION, 0)
    if regions:
        return (
            Verdict.INCONCLUSIVE,
            f"{regions} compiled regions or higher-order ops ran whose kernels cannot be seen one"
            " by one; compare them with modulecheck",
        )
    if not coverage.checked:
        return Verdict.INCONCLUSIVE, "nothing was compared"
    return Verdict.PASS, ""
