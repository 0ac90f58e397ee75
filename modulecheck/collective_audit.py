"""Did the ranks get of their collectives what they gave? First rank and collective are named.

Each rank notes digests of what it gave and got. At the end of the block they meet on rank 0,
through the store of the process group, where each collective is compared over its ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from modulecheck.collective_findings import CollectiveFinding, Compared, compare_ranks
from modulecheck.collective_rule import SUMS
from modulecheck.collective_watch import Watch
from modulecheck.replicas import replicas_of
from modulecheck.sidechannel import TIMEOUT_S, SideChannel
from opcheck.errors import ArgumentError
from opcheck.printing import visible
from opcheck.records import Verdict
from opcheck.validation import a_count, a_number, an_instance

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["CollectiveAudit", "audit_collectives"]

_numbers = itertools.count()
"""Audits of this process: the n-th belongs to the n-th of the other ranks."""


def audit_collectives(
    model: nn.Module | None = None, *, max_sums: int = SUMS, timeout_s: float = TIMEOUT_S
) -> CollectiveAudit:
    """Audit the collectives of the code in the `with` block; every rank enters one.

    All-gathers and broadcasts are compared with what the ranks gave, bit for bit; reduce-scatters
    and all-reduces of "sum" and "avg" with the float64 sum, "min" and "max" exactly; results of an
    all-reduce must have the same bits on all ranks. Others are counted by name. The step has no
    collective more than without.

    Args:
        model: its replicated parameters (DDP, `Replicate` of a DTensor) must have the same bits on
            all ranks at the end of the block.
        max_sums: numbers that are told of one tensor of a reduction. Larger tensors are compared
            in sums of several elements, with random signs: all of them take part.
        timeout_s: how long rank 0 waits for the others, and they for it.

    Raises:
        ArgumentError: `max_sums` or `timeout_s` is not positive.
        ArgumentTypeError: an argument has a type that is not allowed.
    """
    if model is not None:
        an_instance("model", model, nn.Module, "a torch.nn.Module or None")
    a_count("max_sums", max_sums, least=1)
    if not a_number("timeout_s", timeout_s, may_be_inf=True):
        raise ArgumentError(f"timeout_s: expected more than 0, got {timeout_s!r}")
    return CollectiveAudit(model, max_sums=max_sums, timeout_s=timeout_s)


@dataclass
class CollectiveAudit:
    """What an audit found; the same on every rank. Made by `audit_collectives`.

    Attributes:
        findings: what is wrong, the first collective first.
        compared: collectives that were compared over their ranks, by kind.
        not_understood: collectives that were only counted, by op.
        problems: why something could not be compared.
    """

    model: nn.Module | None = field(repr=False)
    max_sums: int
    timeout_s: float
    findings: list[CollectiveFinding] = field(default_factory=list)
    compared: dict[str, int] = field(default_factory=dict)
    not_understood: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    _watch: Watch | None = field(default=None, repr=False)

    # ---- the block ----

    def __enter__(self) -> Self:
        """Watch this rank.

        Raises:
            ArgumentError: it was entered before.
        """
        if self._watch is not None:
            raise ArgumentError("an audit is for one block: make another one")
        self._watch = Watch(self.max_sums)
        self._watch.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        watch = self._watch
        if watch is None:
            return
        watch.__exit__(kind, *rest)  # type: ignore[no-untyped-call]
        name = f"audit/{next(_numbers)}"
        if kind is not None:  # the others learn it by their timeout; nothing is waited for here
            self.problems.append(f"the block was left by {kind.__name__}")
            return
        watch.finish()
        self._conclude(watch, name)

    def _conclude(self, watch: Watch, name: str) -> None:
        channel = SideChannel.of_default_group(name, timeout_s=self.timeout_s)
        if channel is None:
            self.problems.append("there is no process group of several ranks")
            return
        own = {
            "seen": [seen.to_json() for seen in watch.seen],
            "not_understood": dict(watch.not_understood),
            "replicas": [] if self.model is None else replicas_of(self.model),
            "problems": watch.problems,
        }
        try:
            self._take(
                _on_rank_0(channel, own) if channel.rank == 0 else _from_rank_0(channel, own)
            )
        except RuntimeError as error:  # the store is gone, with the rank that keeps it
            self.problems.append(f"the ranks could not meet: {error}")

    def _take(self, compared: Compared) -> None:
        self.findings = compared.findings
        self.compared = compared.counts
        self.not_understood = compared.not_understood
        self.problems += compared.problems

    # ---- what came of it ----

    @property
    def verdict(self) -> Verdict:
        """FAIL with a finding; INCONCLUSIVE where nothing, or not all, was compared; else PASS."""
        if self.findings:
            return Verdict.FAIL
        if self.problems or not self.compared:
            return Verdict.INCONCLUSIVE
        return Verdict.PASS

    def report(self) -> str:
        """What to show a person."""
        return "\n".join(visible(line) for line in self._lines())

    def _lines(self) -> Iterator[str]:
        places = len({(item.group, item.index, item.op) for item in self.findings})
        total = sum(self.compared.values())
        yield f"collectives: {self.verdict}: {places} of {total} wrong"
        if self.findings:
            first = self.findings[0]
            yield "first"
            yield f"  collective  {first.place}"
            yield f"  rank        {first.rank}"
            yield f"  source      {first.source or 'not in Python'}"
            yield f"  reason      {first.reason}"
        for finding in self.findings[1:10]:
            yield f"also {finding.place}, rank {finding.rank}: {finding.reason}"
        if len(self.findings) > 10:
            yield f"and {len(self.findings) - 10} more"
        for kind, count in sorted(self.compared.items()):
            yield f"compared {count} {kind}"
        for op, count in sorted(self.not_understood.items()):
            yield f"not compared: {op}, {count} calls"
        yield from (f"problem: {problem}" for problem in self.problems)


def _on_rank_0(channel: SideChannel, own: dict[str, Any]) -> Compared:
    others = range(1, channel.world_size)
    came = {0: own, **channel.receive("seen", others)}
    compared = compare_ranks(came, channel.world_size)
    for rank in others:
        channel.send(f"result/{rank}", compared.to_json())
    return compared


def _from_rank_0(channel: SideChannel, own: dict[str, Any]) -> Compared:
    channel.send("seen", own)
    channel.timeout_s *= 2  # rank 0 may wait that long for another rank before it answers
    came = channel.receive(f"result/{channel.rank}", [0])
    if 0 not in came:
        return Compared([], {}, {}, ["rank 0 did not answer; has it left the block?"])
    return Compared.of_json(came[0])
