"""Collectives of all ranks -> what does not fit together. No torch."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from modulecheck.collective_rule import Digest, compare_sums

__all__ = ["CollectiveFinding", "Compared", "compare_ranks"]


@dataclass(frozen=True)
class CollectiveFinding:
    """A collective, or a replicated parameter, that is wrong on one rank.

    Attributes:
        rank: global rank on which it is.
        index: n-th collective of its group, from 0; -1 for a parameter.
        op: `c10d._reduce_scatter_base_`, or the name of the parameter.
        kind: "all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all", "gather",
            "scatter", "reduce", "recv", "order", "replica".
        group: name of the process group.
        ranks: global ranks of the group.
        source: line of the user's code that began it, "" where there is none.
        reason: one sentence.
    """

    rank: int
    index: int
    op: str
    kind: str
    group: str
    ranks: tuple[int, ...]
    source: str
    reason: str

    @property
    def place(self) -> str:
        """For a person."""
        if self.kind == "replica":
            return f"parameter {self.op} at the end"
        ranks = ", ".join(map(str, self.ranks))
        return f"{self.index} of group {self.group!r} (ranks {ranks}): {self.op}"


@dataclass
class Compared:
    """What the comparison of all ranks gave."""

    findings: list[CollectiveFinding]
    counts: dict[str, int]
    not_understood: dict[str, int]
    problems: list[str]

    def to_json(self) -> dict[str, Any]:
        """For the other ranks."""
        return dataclasses.asdict(self)

    @classmethod
    def of_json(cls, data: dict[str, Any]) -> Compared:
        """What `to_json` gave."""
        findings = [
            CollectiveFinding(**{**item, "ranks": tuple(item["ranks"])})
            for item in data["findings"]
        ]
        return cls(findings, data["counts"], data["not_understood"], data["problems"])


@dataclass(frozen=True)
class _Entry:
    """One collective of one rank, as it was sent."""

    rank: int
    data: dict[str, Any]

    def digests(self, side: str) -> list[list[Digest]]:
        return [[Digest.of_json(item) for item in part] for part in self.data[side]]

    @property
    def shape_of_it(self) -> tuple[Any, ...]:
        """What has to be the same on every rank."""
        sizes = [sum(item["numel"] for item in part) for part in self.data["given"]]
        if self.data["op"] == "c10d.allgather_":  # of lists, parts may be of several sizes
            sizes = [0 for _ in sizes]
        dtypes = [part[0]["dtype"] for part in self.data["given"]]
        if self.data["kind"] == "all_to_all":  # each pair of ranks has a size of its own
            sizes = [0 for _ in sizes]
        if self.data["kind"] == "scatter":  # one rank alone gives
            sizes, dtypes = [], []
        return self.data["kind"], self.data["reduction"], self.data["root"], sizes, dtypes


def compare_ranks(came: dict[int, dict[str, Any]], world_size: int) -> Compared:
    """Compare what the ranks sent.

    Args:
        came: by rank; of those that sent nothing there is no entry.
        world_size: ranks of the default group.
    """
    problems = [f"nothing came from rank {rank}" for rank in range(world_size) if rank not in came]
    groups: dict[str, dict[int, list[_Entry]]] = defaultdict(lambda: defaultdict(list))
    members: dict[str, tuple[int, ...]] = {}
    not_understood: Counter[str] = Counter()
    for rank, told in sorted(came.items()):
        not_understood.update(told["not_understood"])
        problems += [f"rank {rank}: {problem}" for problem in told["problems"]]
        for data in told["seen"]:
            if data["kind"] in ("send", "recv"):
                continue
            groups[data["group"]][rank].append(_Entry(rank, data))
            members[data["group"]] = tuple(data["ranks"])
    findings: list[CollectiveFinding] = []
    counts: Counter[str] = Counter()
    for found in itertools.chain(
        *(_group(members[name], by_rank, came) for name, by_rank in groups.items()),
        _messages(came),
    ):
        if isinstance(found, CollectiveFinding):
            findings.append(found)
        elif found.startswith("compared "):
            counts[found.removeprefix("compared ")] += 1
        else:
            problems.append(found)
    findings.sort(key=lambda item: (item.index, item.rank))
    replicas, num_replicas = _replicas(came)
    if num_replicas:
        counts["replicated parameters"] = num_replicas
    return Compared([*findings, *replicas], dict(counts), dict(not_understood), problems)


def _group(
    ranks: tuple[int, ...], by_rank: dict[int, list[_Entry]], came: dict[int, Any]
) -> Iterator[CollectiveFinding | str]:
    """Of one group: findings, "compared KIND", and problems."""
    present = [rank for rank in ranks if rank in came]
    if len(present) < len(ranks):
        yield f"group of ranks {', '.join(map(str, ranks))}: not all of them are here"
        return
    lengths = [len(by_rank.get(rank, ())) for rank in present]
    for index in range(max(lengths)):
        entries = [by_rank[rank][index] for rank in present if index < len(by_rank.get(rank, ()))]
        apart = _apart(index, ranks, entries)
        if apart is not None:
            yield apart
            return  # what follows is not paired any more
        yield from _one(index, ranks, entries)


def _apart(index: int, ranks: tuple[int, ...], entries: list[_Entry]) -> CollectiveFinding | None:
    """Ranks that do not do the same."""
    first = entries[0]
    for entry in entries[1:]:
        if entry.shape_of_it != first.shape_of_it:
            reason = f"{_told(entry)}, and rank {first.rank} {_told(first)}"
            return _finding(index, ranks, entry, "order", reason)
    if len(entries) < len(ranks):
        here = {entry.rank for entry in entries}
        missing = next(rank for rank in ranks if rank not in here)
        reason = f"has no such call, and rank {first.rank} {_told(first)}"
        finding = _finding(index, ranks, first, "order", reason)
        return dataclasses.replace(finding, rank=missing)
    return None


def _told(entry: _Entry) -> str:
    kind, reduction, _, sizes, dtypes = entry.shape_of_it
    parts = ", ".join(f"{size} x {dtype}" for size, dtype in zip(sizes, dtypes, strict=True))
    return f"calls {kind}{f' ({reduction})' if reduction else ''} of {parts}"


def _one(
    index: int, ranks: tuple[int, ...], entries: list[_Entry]
) -> Iterator[CollectiveFinding | str]:
    unread = [entry for entry in entries if entry.data["got"] is None]
    if unread:
        why = unread[0].data["problem"] or "its result was never there to be read"
        yield f"collective {index} ({unread[0].data['op']}), rank {unread[0].rank}: {why}"
        return
    rule = _RULES[entries[0].data["kind"]]
    unsaid = 0
    for rank, reason, num_unsaid in rule(ranks, entries):
        unsaid += num_unsaid
        if reason:
            entry = next(item for item in entries if item.rank == rank)
            yield _finding(index, ranks, entry, entry.data["kind"], reason)
    if unsaid:
        yield (
            f"collective {index} ({entries[0].data['op']}): {unsaid} sums say nothing: they"
            " hold NaN or Inf, are extremes of several elements, or of a reduction or dtype of"
            " which only the bits are known"
        )
    yield f"compared {entries[0].data['kind']}"


_NOT_GIVEN = "has not the bits that were given"
_Verdicts = Iterator[tuple[int, str, int]]
"""Rank, what is wrong or "", sums that say nothing."""


def _gathered(ranks: tuple[int, ...], entries: Sequence[_Entry]) -> _Verdicts:
    given = [entry.digests("given") for entry in entries]
    for entry in entries:
        for place, part in enumerate(entry.digests("got")):
            wrong = [
                ranks[source]
                for source, chunk in enumerate(part)
                if chunk.bits != given[source][place][0].bits
            ]
            if wrong:
                whose = f"rank {wrong[0]}" if len(wrong) == 1 else f"ranks {wrong[0]} and others"
                yield entry.rank, f"the part of {whose} {_NOT_GIVEN}", 0


def _at_root(entries: Sequence[_Entry]) -> _Entry:
    return next(entry for entry in entries if entry.rank == entry.data["root"])


def _broadcast(ranks: tuple[int, ...], entries: Sequence[_Entry]) -> _Verdicts:
    return _from_root(entries, [0 for _ in entries])


def _dealt(ranks: tuple[int, ...], entries: Sequence[_Entry]) -> _Verdicts:
    return _from_root(entries, range(len(entries)))


def _from_root(entries: Sequence[_Entry], chunks: Sequence[int]) -> _Verdicts:
    """Each rank has, of what the root gave, the chunk that is its own."""
    root = _at_root(entries)
    given = root.digests("given")
    for chunk, entry in zip(chunks, entries, strict=True):
        for place, part in enumerate(entry.digests("got")):
            if part[0].bits != given[place][chunk].bits:
                yield entry.rank, f"it has not the bits that rank {root.rank} gave", 0


def _exchanged(ranks: tuple[int, ...], entries: Sequence[_Entry]) -> _Verdicts:
    given = [entry.digests("given") for entry in entries]
    for own, entry in enumerate(entries):
        for place, part in enumerate(entry.digests("got")):
            for source, chunk in enumerate(part):
                if chunk.bits != given[source][place][own].bits:
                    yield entry.rank, f"the part of rank {ranks[source]} {_NOT_GIVEN}", 0


def _reduced_to_one(ranks: tuple[int, ...], entries: Sequence[_Entry]) -> _Verdicts:
    given = [entry.digests("given") for entry in entries]
    entry = _at_root(entries)
    for place, part in enumerate(entry.digests("got")):
        reason, unsaid = _off([item[place][0] for item in given], part[0], entry)
        yield entry.rank, reason, unsaid


def _reduced(ranks: tuple[int, ...], entries: Sequence[_Entry]) -> _Verdicts:
    given = [entry.digests("given") for entry in entries]
    reference: list[list[Digest]] = []
    for entry in entries:
        got = entry.digests("got")
        reference = reference or got
        for place, part in enumerate(got):
            reason, unsaid = _off([item[place][0] for item in given], part[0], entry)
            if not reason and part[0].bits != reference[place][0].bits:
                reason = f"its bits are not those of rank {entries[0].rank}"
            yield entry.rank, reason, unsaid


def _scattered(ranks: tuple[int, ...], entries: Sequence[_Entry]) -> _Verdicts:
    given = [entry.digests("given") for entry in entries]
    for entry in entries:
        own = ranks.index(entry.rank)
        for place, part in enumerate(entry.digests("got")):
            reason, unsaid = _off([item[place][own] for item in given], part[0], entry)
            yield entry.rank, reason, unsaid


def _off(given: list[Digest], got: Digest, entry: _Entry) -> tuple[str, int]:
    reduction = entry.data["reduction"]
    if got.dtype != given[0].dtype or got.numel != given[0].numel:
        was = f"{given[0].numel} x {given[0].dtype}"
        return f"it got {got.numel} x {got.dtype}, and {was} was given", 0
    if got.numel and not got.sums.size:
        return "", 1  # of this reduction or dtype only bits are known
    mismatch, unsaid = compare_sums(given, got, reduction)
    return "" if mismatch is None else str(mismatch), unsaid


_RULES = {
    "all_gather": _gathered,
    "broadcast": _broadcast,
    "all_reduce": _reduced,
    "reduce_scatter": _scattered,
    "all_to_all": _exchanged,
    "gather": _gathered,
    "scatter": _dealt,
    "reduce": _reduced_to_one,
}


def _messages(came: dict[int, dict[str, Any]]) -> Iterator[CollectiveFinding | str]:
    """What one rank sent to another: findings, "compared KIND", and problems."""
    routes: dict[tuple[Any, ...], dict[str, list[_Entry]]] = defaultdict(lambda: defaultdict(list))
    for rank, told in sorted(came.items()):
        for data in told["seen"]:
            if data["kind"] in ("send", "recv"):
                sends = data["kind"] == "send"
                source, target = (rank, data["root"]) if sends else (data["root"], rank)
                route = (data["group"], source, target, data["tag"])
                routes[route][data["kind"]].append(_Entry(rank, data))
    for (_, source, target, _), kinds in routes.items():
        sent, got = kinds["send"], kinds["recv"]
        if len(sent) != len(got) and not _takes_any(came.get(target)):
            yield (
                f"rank {source} sent {len(sent)} tensors to rank {target}, which received"
                f" {len(got)} of them in this block"
            )
        for index, (given, entry) in enumerate(zip(sent, got, strict=False)):
            yield _message(index, (source, target), given, entry)


def _takes_any(told: dict[str, Any] | None) -> bool:
    """The rank also receives from whoever sends: what went there cannot be told."""
    return told is None or any("recv_any_source" in name for name in told["not_understood"])


def _message(
    index: int, ranks: tuple[int, int], given: _Entry, entry: _Entry
) -> CollectiveFinding | str:
    if entry.data["got"] is None:
        why = entry.data["problem"] or "what it received was never there to be read"
        return f"receive {index} from rank {ranks[0]}, rank {entry.rank}: {why}"
    sent = [part[0].bits for part in given.digests("given")]
    if [part[0].bits for part in entry.digests("got")] == sent:
        return "compared send and receive"
    reason = f"it has not the bits that rank {ranks[0]} sent"
    return _finding(index, ranks, entry, "recv", reason)


def _finding(
    index: int, ranks: tuple[int, ...], entry: _Entry, kind: str, reason: str
) -> CollectiveFinding:
    data = entry.data
    return CollectiveFinding(
        entry.rank, index, data["op"], kind, data["group"], ranks, data["source"], reason
    )


def _replicas(came: dict[int, dict[str, Any]]) -> tuple[list[CollectiveFinding], int]:
    """Parameters of one name and key have the same bits."""
    first: dict[tuple[str, str], tuple[int, str]] = {}
    findings: list[CollectiveFinding] = []
    names: set[str] = set()
    for rank, told in sorted(came.items()):
        for name, key, bits in told["replicas"]:
            owner, expected = first.setdefault((name, key), (rank, bits))
            if owner != rank:
                names.add(name)
            if bits != expected:
                reason = f"its bits are not those of rank {owner}"
                findings.append(
                    CollectiveFinding(rank, -1, name, "replica", "", (owner, rank), "", reason)
                )
    return findings, len(names)
