"""Frozen results of a comparison of two implementations; nothing here holds a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from modulecheck.tensor_report import report_lines
from opcheck.records import Metrics, Verdict
from opcheck.validation import a_count

__all__ = ["ModuleFinding", "NameMismatch", "Site", "TensorCheckResult", "TensorRecord", "overall"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where in a model a tensor was seen."""

    module: str
    """Its name, "" for the root, after `rename=`."""
    role: str
    """"param", "buffer", "input", "output", or "buffer_after": a buffer that the call wrote to."""
    call: int = 0
    """n-th call of the module, from 0."""
    parent: tuple[str, int] | None = None
    """The module call around it, as (module, call)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRecord:
    """What became of one tag."""

    tag: str
    """As registered; `#2` and so on for later ones of one side under the same tag."""
    verdict: Verdict
    """INCONCLUSIVE: there was nothing to compare it with."""
    reason: str = ""
    """One sentence, "" for PASS."""
    notes: tuple[str, ...] = ()
    metrics: Metrics = field(default_factory=Metrics)
    num_tensors: int = 0
    sides: tuple[str, ...] = ()
    """Who registered, the reference first."""
    missing_sides: tuple[str, ...] = ()
    failing_side: str = ""
    """Whose tensor the numbers are of: the first one that fails."""
    descriptions: tuple[str, ...] = ()
    """`(2, 3):float32` by side."""
    num_elements: int = 0
    num_differing: int = 0
    first_index: tuple[int, ...] | None = None
    """First element, in C order, that the criterion refuses."""
    reference_at: Any = None
    actual_at: Any = None
    neighbourhood: tuple[tuple[tuple[int, ...], Any, Any], ...] = ()
    """(index, reference, actual) around it, along the last dimension."""
    max_ulp: int | None = None
    site: Site | None = None
    index: int = 0
    """Place in the order of execution."""
    criterion: str = "equal"
    rtol: float = 0.0
    atol: float = 0.0
    word: str = "equal"

    @property
    def share_differing(self) -> float:
        """Of the elements, 0 to 1."""
        return self.num_differing / self.num_elements if self.num_elements else 0.0

    @property
    def line(self) -> str:
        """The documented line; the tag as it is."""
        what = {Verdict.PASS: self.word, Verdict.FAIL: f"not {self.word}"}.get(self.verdict)
        if what is None:
            plural = "" if self.num_tensors == 1 else "s"
            return f"TensorChecker: {self.num_tensors} tensor{plural} not compared in {self.tag}"
        return f"TensorChecker: {self.num_tensors} tensors {what} in {self.tag}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleFinding:
    """What a module call has to do with a difference."""

    module: str
    call: int
    kind: str
    """"origin": inputs agree, outputs do not, and nothing inside explains it. "inherited": the
    inputs differ already. "contains": the origin is a module inside. "unclear": outputs differ and
    no input could be compared."""
    reason: str
    tag: str
    """The first tag of the call that differs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NameMismatch:
    """A module of one side that the other has not."""

    side: str
    name: str
    other_side: str
    closest: tuple[str, ...]
    """Names of the other side that look like it, best first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorCheckResult:
    """What a check found; true only for PASS."""

    verdict: Verdict
    reason: str = ""
    """Why FAIL or INCONCLUSIVE; "" for PASS."""
    records: tuple[TensorRecord, ...] = ()
    """One per tag, in the order of execution of the reference."""
    findings: tuple[ModuleFinding, ...] = ()
    """Module calls whose outputs differ, in the order in which they ended."""
    name_mismatches: tuple[NameMismatch, ...] = ()
    problems: tuple[str, ...] = ()
    """Crashes of the checker's own, with traceback; they never reach the step."""
    not_registered: tuple[tuple[str, str], ...] = ()
    """(tag, type) of what modules took or gave and holds no numbers."""
    excluded: int = 0
    """Tensors left out by `exclude=`."""
    not_run: tuple[str, ...] = ()
    """Modules of the reference that ran on no side: only their parameters were compared."""
    criterion: str = "equal"
    rtol: float = 0.0
    atol: float = 0.0
    sides: tuple[str, ...] = ()
    repros: tuple[str, ...] = ()
    """Paths of the reproducers that were written."""
    repro_notes: tuple[str, ...] = ()
    """Why one was not."""

    def __bool__(self) -> bool:
        return self.verdict is Verdict.PASS

    @property
    def failures(self) -> list[TensorRecord]:
        """The FAIL records, first divergence first."""
        return self._with(Verdict.FAIL)

    @property
    def unmatched(self) -> list[TensorRecord]:
        """Records of tags that had nothing to be compared with."""
        return self._with(Verdict.INCONCLUSIVE)

    @property
    def first_divergence(self) -> TensorRecord | None:
        """The first tag in time that differs."""
        return next(iter(self.failures), None)

    @property
    def origins(self) -> list[str]:
        """Names of the modules where a difference was born, first in time first."""
        names = [found.module for found in self.findings if found.kind == "origin"]
        return list(dict.fromkeys(names))

    def find(self, tag: str) -> TensorRecord:
        """The record of a tag.

        Raises:
            KeyError: there is none.
        """
        for record in self.records:
            if record.tag == tag:
                return record
        raise KeyError(tag)

    def _with(self, verdict: Verdict) -> list[TensorRecord]:
        return [record for record in self.records if record.verdict is verdict]

    def __str__(self) -> str:
        return self.report()

    def report(self, *, width: int = 100) -> str:
        """Verdict, first divergence, origins, what was not compared."""
        a_count("width", width, least=1)
        return "\n".join(report_lines(self, width=width))


def overall(
    records: Sequence[TensorRecord], *, crashes: int, gaps: Sequence[str], word: str
) -> tuple[Verdict, str]:
    """The verdict of a whole check and, unless it is PASS, the reason in one sentence.

    Args:
        records: of all tags.
        crashes: of the checker itself.
        gaps: what else was not looked at.
        word: "equal" or "close".
    """
    failed = sum(record.verdict is Verdict.FAIL for record in records)
    alone = sum(record.verdict is Verdict.INCONCLUSIVE for record in records)
    compared = len(records) - alone
    if failed:
        return Verdict.FAIL, f"{failed} of {compared} compared tags are not {word}"
    if crashes:
        return Verdict.INCONCLUSIVE, f"the checker itself crashed {crashes} times"
    if not records:
        return Verdict.INCONCLUSIVE, "nothing was registered"
    if gaps:
        more = len(gaps) - 1
        others = f"; {more} more reason{'s' * (more > 1)}" if more else ""
        return Verdict.INCONCLUSIVE, gaps[0] + others
    if alone:
        return Verdict.INCONCLUSIVE, f"{alone} of {len(records)} tags have no counterpart"
    if not any(record.num_elements for record in records):
        return Verdict.INCONCLUSIVE, "no tensor has any elements"
    return Verdict.PASS, ""
