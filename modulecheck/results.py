"""What a comparison found: plain data, no tensors."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modulecheck.culprit import Culprit
from modulecheck.plain import from_plain, to_plain
from modulecheck.recorded_files import calls_from_file, calls_to_file
from modulecheck.recording import RecordedCall
from modulecheck.tensor_container import (
    TensorReader,
    TensorTable,
    read_container,
    write_container,
)
from opcheck.records import Metrics, Verdict
from opcheck.validation import a_path

__all__ = ["CompareResult", "ModuleDiff", "TensorDiff", "merged", "worst"]

SCHEMA = "modulecheck.result"
SCHEMA_VERSION = 1
_SEVERITY = {Verdict.PASS: 0, Verdict.INCONCLUSIVE: 1, Verdict.FAIL: 2}


def worst(verdicts: Any, default: Verdict = Verdict.PASS) -> Verdict:
    """FAIL before INCONCLUSIVE before PASS."""
    return max(verdicts, key=_SEVERITY.__getitem__, default=default)


@dataclass
class TensorDiff:
    """One tensor on both sides."""

    max_abs: float
    mean_abs: float
    max_rel: float
    allclose: bool
    """The documented criterion, whichever one judges."""
    shape: tuple[int, ...]
    verdict: Verdict | None = None
    """By the criterion in force; None, as in a result built by hand: `allclose` decides."""
    metrics: Metrics | None = None
    name: str = ""
    """Which tensor: the place in the output, the parameter, the argument."""
    reason: str = ""
    """Why not PASS."""
    notes: tuple[str, ...] = ()

    @property
    def judged(self) -> Verdict:
        """The verdict, by `allclose` where there is none."""
        if self.verdict is not None:
            return Verdict(self.verdict)
        return Verdict.PASS if self.allclose else Verdict.FAIL

    def __str__(self) -> str:
        mark = "[OK]" if self.judged == Verdict.PASS else "[!!]"
        return (
            f"{mark} max_abs={self.max_abs:.3e}  mean_abs={self.mean_abs:.3e}"
            f"  max_rel={self.max_rel:.3e}  shape={tuple(self.shape)}"
        )


@dataclass
class ModuleDiff:
    """One module, or one call of it."""

    name: str
    fwd_input: list[TensorDiff] | None = None
    fwd_output: list[TensorDiff] | None = None
    grad_input: list[TensorDiff] | None = None
    grad_output: list[TensorDiff] | None = None
    note: str = ""
    """A documented marker such as `IGNORED`, or why nothing could be compared."""
    param_grads: list[TensorDiff] | None = None
    mutated: list[TensorDiff] | None = None
    """Arguments and buffers that the call changed."""
    calls: list[ModuleDiff] = field(default_factory=list)
    """One for each call, in order; the fields above are those of the worst one."""
    inconclusive: bool = False
    """Something could not be compared, and `note` says what."""
    inherited: tuple[str, ...] = ()
    """"forward", "backward": what differs there came in with the inputs or the output gradients."""

    def tensors(self) -> list[tuple[str, int, TensorDiff]]:
        """(check type, index, diff) of every tensor compared."""
        groups = (
            ("fwd_input", self.fwd_input),
            ("fwd_output", self.fwd_output),
            ("mutated", self.mutated),
            ("grad_input", self.grad_input),
            ("grad_output", self.grad_output),
            ("param_grad", self.param_grads),
        )
        return [
            (kind, index, diff) for kind, diffs in groups for index, diff in enumerate(diffs or ())
        ]

    @property
    def skipped(self) -> bool:
        """Left out on purpose; does not count against the result."""
        return not self.calls and self.note.startswith(("IGNORED", "SKIP_"))

    @property
    def compared(self) -> int:
        """Tensors of what the module computed that were held against a reference."""
        calls = self.calls or [self]
        return sum(
            kind != "fwd_input" and diff.judged != Verdict.INCONCLUSIVE
            for call in calls
            for kind, _, diff in call.tensors()
        )

    @property
    def verdict(self) -> Verdict:
        """Of all calls."""
        if self.skipped:
            return Verdict.PASS
        parts = [call.verdict for call in self.calls]
        if not self.calls:
            parts = [diff.judged for _, _, diff in self.tensors()]
        if self.inconclusive or self.note.startswith("MISSING_"):
            parts.append(Verdict.INCONCLUSIVE)
        return worst(parts)

    def begins(self, phase: str) -> bool:
        """True when a tensor of this phase failed in a call that did not inherit it."""
        kinds = FORWARD if phase == "forward" else BACKWARD
        return any(
            phase not in call.inherited
            and any(
                kind in kinds and diff.judged == Verdict.FAIL for kind, _, diff in call.tensors()
            )
            for call in (self.calls or [self])
        )


def merged(name: str, calls: list[ModuleDiff]) -> ModuleDiff:
    """A module's diff: its worst call's tensors, and all calls."""
    worst = max(calls, key=lambda call: _SEVERITY[call.verdict])
    return ModuleDiff(
        name,
        fwd_input=worst.fwd_input,
        fwd_output=worst.fwd_output,
        grad_input=worst.grad_input,
        grad_output=worst.grad_output,
        note=worst.note,
        param_grads=worst.param_grads,
        mutated=worst.mutated,
        calls=calls,
        inherited=worst.inherited,
    )


FORWARD = ("fwd_output", "mutated")
BACKWARD = ("grad_input", "grad_output", "param_grad")


@dataclass
class CompareResult:
    """Both sides of a step, module by module."""

    loss_eager: float
    loss_compiled: float
    diffs: list[ModuleDiff] = field(default_factory=list)
    cast_dtype: Any = None
    loss_recorded: bool = True
    """False: nobody gave a loss, and `loss_compiled` is NaN for that reason."""
    criterion: str = "calibrated"
    atol: float = 1e-4
    rtol: float = 1e-3
    notes: list[str] = field(default_factory=list)
    """What a reader should know: settings that were on, how finely was compiled."""
    problem: str = ""
    """Why no PASS can be given although nothing failed."""
    nonfinite_module: str = ""
    """The first module whose compiled output was not finite."""
    repros: list[str] = field(default_factory=list)
    """Paths of the reproducers that were written."""
    backward_order: list[str] = field(default_factory=list)
    """Names in the order in which backward reached them."""
    show_input: bool = True
    single_pass: bool | None = None
    """None, as in a result built by hand: it is where there is no eager loss."""
    loss_verdict: Verdict | None = None
    """By the criterion in force; None: the documented one decides."""
    loss_reason: str = ""
    recordings: list[RecordedCall] = field(
        default_factory=list, repr=False, compare=False, metadata={"plain": False}
    )
    """Failing calls with all that a drill-down needs, at most one a module and phase."""

    culprits: list[Culprit] = field(default_factory=list)
    """What a drill-down found, first divergence first."""

    # ---- files ----

    def save(self, path: str | Path) -> None:
        """Write the result and its recordings to a file, whole or not at all.

        The file is a zip of JSON and of the bytes of tensors; there is no pickle in it. A recording
        that has no form in a file is left out, which a note of the saved result says.

        Raises:
            LogWriteError: it cannot be written.
        """
        table = TensorTable()
        rows, left_out = calls_to_file(self.recordings, table)
        result = dataclasses.replace(self, notes=[*self.notes, *left_out])
        index = {
            "schema": SCHEMA,
            "version": SCHEMA_VERSION,
            "result": to_plain(result),
            "recordings": rows,
        }
        write_container(a_path("path", path), index, table)

    @classmethod
    def load(cls, path: str | Path) -> CompareResult:
        """Read what `save` wrote; no code of the file is run.

        Raises:
            ArgumentError: it is no such file, is damaged, or was written by a newer version.
        """

        def build(index: dict[str, Any], reader: TensorReader) -> CompareResult:
            result: CompareResult = from_plain(cls, index["result"])
            result.recordings, left_out = calls_from_file(index["recordings"], reader)
            result.notes += left_out
            return result

        return read_container(a_path("path", path), SCHEMA, SCHEMA_VERSION, build)

    # ---- verdict ----

    @property
    def loss_diff(self) -> float:
        """|eager - compiled|; NaN where there is no eager loss."""
        return abs(self.loss_eager - self.loss_compiled)

    @property
    def is_single_pass(self) -> bool:
        """There is no eager run of the whole network."""
        return math.isnan(self.loss_eager) if self.single_pass is None else self.single_pass

    @property
    def compared(self) -> int:
        """Tensors that were compared."""
        return sum(diff.compared for diff in self.diffs)

    @property
    def judgement(self) -> tuple[Verdict, str]:
        """The verdict and, unless it is PASS, the reason."""
        failed = [diff.name or "<root>" for diff in self.diffs if diff.verdict == Verdict.FAIL]
        if failed:
            where = next((name or "<root>" for name, _ in self.suspects), failed[0])
            return Verdict.FAIL, f"{len(failed)} of {len(self.diffs)} modules: {where}"
        verdict, reason = self._judge_loss()
        if verdict == Verdict.FAIL:
            return verdict, reason
        if self.problem:
            return Verdict.INCONCLUSIVE, self.problem
        open_ones = [diff for diff in self.diffs if diff.verdict == Verdict.INCONCLUSIVE]
        if open_ones:
            first = open_ones[0]
            return Verdict.INCONCLUSIVE, f"{first.name or '<root>'}: {_why_open(first)}"
        if verdict != Verdict.PASS:
            return verdict, reason
        if not self.compared:
            return Verdict.INCONCLUSIVE, "nothing was compared"
        return Verdict.PASS, ""

    def _judge_loss(self) -> tuple[Verdict, str]:
        if not self.loss_recorded:
            return Verdict.PASS, ""
        if self.is_single_pass:
            if math.isfinite(self.loss_compiled):
                return Verdict.PASS, ""
            where = (
                f"the first module with NaN or Inf in its output is {self.nonfinite_module}"
                if self.nonfinite_module
                else "no compared module has NaN or Inf in its output"
            )
            return Verdict.INCONCLUSIVE, f"the loss is {self.loss_compiled}; {where}"
        if self.loss_verdict is not None:
            return self.loss_verdict, self.loss_reason
        close = self.loss_diff <= self.atol + self.rtol * abs(self.loss_compiled)
        if close or self.loss_eager == self.loss_compiled:
            return Verdict.PASS, ""
        return Verdict.FAIL, f"loss: eager {self.loss_eager}, compiled {self.loss_compiled}"

    @property
    def verdict(self) -> Verdict:
        """PASS only when something was compared, and nothing failed, was missing or crashed."""
        return self.judgement[0]

    @property
    def all_pass(self) -> bool:
        """The verdict is PASS."""
        return self.verdict == Verdict.PASS

    @property
    def suspects(self) -> list[tuple[str, str]]:
        """(module, "forward" or "backward") where a difference begins, first divergence first."""
        forward = [(diff.name, "forward") for diff in self.diffs if diff.begins("forward")]
        reached = {name: place for place, name in enumerate(self.backward_order)}
        late = sorted(
            (diff for diff in self.diffs if diff.begins("backward")),
            key=lambda diff: reached.get(diff.name, len(reached)),
        )
        return forward + [(diff.name, "backward") for diff in late]


def _why_open(diff: ModuleDiff) -> str:
    for call in [diff, *diff.calls]:
        if call.note:
            return call.note
        for _, _, item in call.tensors():
            if item.judged == Verdict.INCONCLUSIVE:
                return item.reason
    return "could not be compared"
