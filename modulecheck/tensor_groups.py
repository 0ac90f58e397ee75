"""Registered tensors -> groups that belong together, in the order of execution.

A tensor registered with a side (by name, or by a model that runs) belongs to that side: the n-th of
one side under a tag is held against the n-th of the others. Tensors without a side are one group
per tag, in the order in which they came.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from modulecheck.tensor_records import NameMismatch, Site
from modulecheck.tensor_store import Stored

__all__ = [
    "UNNAMED",
    "Entry",
    "Group",
    "group_entries",
    "label_of",
    "mismatches",
    "output_tag",
    "tag_matches",
]

UNNAMED = "(no side)"
"""The side of tensors without one, under a tag where others have one."""
_MAX_SEARCHED = 50
"""Names for which the closest ones are looked up: that is quadratic."""


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One registered tensor."""

    tag: str
    side: str | None
    number: int
    """n-th of its side under its tag, from 0."""
    stored: Stored
    site: Site | None = None
    precision: str | None = None
    """Coarsest floating dtype that its side has shown so far."""
    device: str = "cpu"
    """Where it came from; it is compared on the CPU."""

    @property
    def place(self) -> tuple[str, str] | None:
        """Module and role: module `a_input_0` and input 0 of module `a` have the same tag."""
        return None if self.site is None else (self.site.module, self.site.role)


@dataclass(slots=True)
class Group:
    """The tensors to be compared, the reference first."""

    tag: str
    """For people: later ones of a side carry their number."""
    entries: list[Entry] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    """Of the sides, one per entry."""
    missing: tuple[str, ...] = ()
    """Sides that registered tags of this sort, but not this one."""


def label_of(tag: str, number: int) -> str:
    """`tag`, and `tag#2` for the second one of a side."""
    return f"{tag}#{number + 1}" if number else tag


def group_entries(entries: Sequence[Entry], sides: Sequence[str]) -> list[Group]:
    """Groups in the order of execution of the reference side.

    Args:
        entries: in the order of registration.
        sides: all named ones, the reference first.
    """
    named_tags = {entry.tag for entry in entries if entry.side is not None}
    rank = {side: place for place, side in enumerate([*sides, UNNAMED])}
    groups: dict[object, Group] = {}
    expected: dict[bool, set[str]] = {True: set(), False: set()}
    for entry in entries:
        has_side = entry.tag in named_tags
        number = entry.number if has_side else 0
        key = (entry.tag, number, entry.place)
        group = groups.setdefault(key, Group(label_of(entry.tag, number)))
        group.entries.append(entry)
        name = f"tensor {len(group.entries) - 1}"
        if has_side:
            name = UNNAMED if entry.side is None else entry.side
            if entry.side is not None:
                expected[entry.site is not None].add(entry.side)
        group.names.append(name)
    for group in groups.values():
        if group.entries[0].tag not in named_tags:
            continue
        order = sorted(range(len(group.entries)), key=lambda place: rank[group.names[place]])
        group.entries = [group.entries[place] for place in order]
        group.names = [group.names[place] for place in order]
        wanted = expected[group.entries[0].site is not None]
        if UNNAMED not in group.names or len(group.entries) < 2:
            group.missing = tuple(side for side in sides if side in wanted - {*group.names})
    return _in_order(entries, list(groups.values()), sides)


def _in_order(entries: Sequence[Entry], groups: list[Group], sides: Sequence[str]) -> list[Group]:
    """By the reference; what only others have comes after what precedes it there."""
    place = {id(entry): number for number, entry in enumerate(entries)}
    rank = {side: number for number, side in enumerate(sides)}
    group_of = {id(entry): group for group in groups for entry in group.entries}
    by_side: dict[int, list[Group]] = {}
    for group in groups:
        side = group.entries[0].side
        by_side.setdefault(0 if side is None else rank[side], []).append(group)
    ordered = sorted(by_side.pop(0, []), key=lambda group: place[id(group.entries[0])])
    for number in sorted(by_side):
        after = _predecessors(entries, by_side[number], group_of, sides[number])
        woven = after.pop(0, [])
        for group in ordered:
            woven += [group, *after.get(id(group), ())]
        ordered = woven
    return ordered


def _predecessors(
    entries: Sequence[Entry], own: list[Group], group_of: Mapping[int, Group], side: str
) -> dict[int, list[Group]]:
    """Groups that only this side has, by the id of the shared group that they come after."""
    alone = {id(group) for group in own}
    after: dict[int, list[Group]] = {}
    last = 0
    for entry in entries:
        if entry.side != side:
            continue
        group = group_of[id(entry)]
        if id(group) in alone:
            after.setdefault(last, []).append(group)
        else:
            last = id(group)
    return after


# ---- tags ----------------------------------------------------------------------------------------


def output_tag(module: str) -> str:
    """The tag of a module's output: `checker_conv_in`."""
    return f"checker_{module or '<root>'}"


def tag_matches(tag: str, pattern: str) -> bool:
    """Glob over a tag, with or without `checker_`."""
    return fnmatch.fnmatchcase(tag, pattern) or fnmatch.fnmatchcase(
        tag.removeprefix("checker_"), pattern
    )


# ---- names of modules ---------------------------------------------------------------------------


def mismatches(names: Mapping[str, Iterable[str]]) -> tuple[NameMismatch, ...]:
    """Modules that the reference or another side has alone, with the closest names of the other.

    Args:
        names: of the modules, by side, the reference first.
    """
    sides = list(names)
    found: list[NameMismatch] = []
    for other in sides[1:]:
        pair = {sides[0]: list(names[sides[0]]), other: list(names[other])}
        for side, against in ((sides[0], other), (other, sides[0])):
            known, own = set(pair[against]), set(pair[side])
            for name in pair[side]:
                if name not in known:
                    searched = len(found) < _MAX_SEARCHED
                    closest = _closest(name, pair[against], own) if searched else ()
                    found.append(
                        NameMismatch(side=side, name=name, other_side=against, closest=closest)
                    )
    return tuple(found)


def _closest(name: str, others: list[str], own: set[str]) -> tuple[str, ...]:
    """Names of the other side that look like it, those without a counterpart first."""
    free = [other for other in others if other and other not in own]
    found = difflib.get_close_matches(name, free, n=3, cutoff=0.5)
    if not found:
        found = difflib.get_close_matches(name, [other for other in others if other], n=3)
    return tuple(found)
