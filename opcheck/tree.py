"""The module tree of a run: where the calls were, and where an eye should fall.

Numbers of a module include those of its children. Siblings with numbers for names and the same
shape of result become one line, `blocks.[0-11]`: their counts are added, their largest q is shown.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from opcheck.groups import Tally, worse
from opcheck.printing import Style
from opcheck.report import spans
from opcheck.review import Run

__all__ = ["Node", "module_tree", "render_tree"]

MAX_DEPTH = 32
_NUMBERS = frozenset({"seen", "checked", "failed", "max q"})


@dataclass
class Node:
    """A module with its own calls and its children."""

    name: str
    own: Tally
    children: dict[str, Node] = field(default_factory=dict)
    total: Tally = field(default_factory=lambda: Tally(name=""))
    members: int = 1
    """How many modules this line stands for."""

    @property
    def shape(self) -> tuple[object, ...]:
        """What two modules that are drawn as one have in common."""
        tally = self.own
        return (
            tuple(sorted(tally.failing_phases)),
            bool(tally.checked),
            bool(tally.errors),
            tuple(sorted(tally.failing_ranks)) if tally.failed else (),
            self.members if self.members > 1 else 0,
            tuple((name, child.shape) for name, child in sorted(self.children.items())),
        )


def module_tree(run: Run) -> Node:
    """The modules of a run as a tree in the order in which they ran, equal siblings together."""
    tallies = run.by_module()
    root = Node("", tallies.pop("", Tally(name="")))
    in_order = dict.fromkeys(count.module for count in run.coverage.calls)
    places = {name: place for place, name in enumerate(in_order)}
    for name in sorted(tallies, key=lambda name: (places.get(name, len(places)), _natural(name))):
        node = root
        for part in name.split(".", MAX_DEPTH):
            node = node.children.setdefault(part, Node(part, Tally(name=part)))
        node.own = tallies[name]
    _sum(root)
    _collapse(root)
    return root


def _natural(name: str) -> list[tuple[bool, int, str]]:
    return [
        (True, int(part), part) if _is_number(part) else (False, 0, part)
        for part in name.split(".")
    ]


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10


def _merge(into: Tally, other: Tally) -> None:
    if other.seen is not None:
        into.seen = (into.seen or 0) + other.seen
    for name in ("checked", "failed", "inconclusive", "errors"):
        setattr(into, name, getattr(into, name) + getattr(other, name))
    into.max_q = worse(into.max_q, other.max_q)
    into.phases |= other.phases
    into.failing_phases |= other.failing_phases
    into.failing_ranks |= other.failing_ranks


def _sum(node: Node) -> None:
    node.total = Tally(name=node.name)
    _merge(node.total, node.own)
    for child in node.children.values():
        _sum(child)
        _merge(node.total, child.total)


def _collapse(node: Node) -> None:
    """Draw siblings with the same shape as one, innermost first."""
    for child in node.children.values():
        _collapse(child)
    alike: dict[tuple[object, ...], list[Node]] = {}
    for name, child in node.children.items():
        if _is_number(name):
            alike.setdefault(child.shape, []).append(child)
    replaced: dict[str, Node] = {}
    for group in alike.values():
        if len(group) > 1:
            joined = _join(group)
            joined.name = f"[{spans(int(child.name) for child in group)}]"
            replaced |= {child.name: joined for child in group}
    drawn: dict[str, Node] = {}
    for name, child in node.children.items():
        kept = replaced.get(name, child)
        drawn.setdefault(kept.name, kept)
    node.children = drawn


def _join(nodes: list[Node]) -> Node:
    """Nodes of one shape, so their children have the same names."""
    joined = Node(nodes[0].name, Tally(name=""), members=len(nodes))
    for node in nodes:
        _merge(joined.own, node.own)
        _merge(joined.total, node.total)
    for name in nodes[0].children:
        children = [node.children[name] for node in nodes]
        joined.children[name] = _join(children)
        joined.children[name].members = children[0].members
    return joined


def render_tree(run: Run, style: Style) -> list[str]:
    """One line a module: calls seen, checked, failed, the largest q, and where it fails."""
    first = run.first_divergence
    path = None
    if first is not None:
        path = first.module.split(".", MAX_DEPTH) if first.module else []
    lines: list[_Line] = []
    _draw(lines, module_tree(run), "", path)
    arrow = style.glyph("←")
    rows = []
    for line in lines:
        node, total = line.node, line.node.total
        marks = [", ".join(sorted(node.own.failing_phases))]
        if line.is_first_divergence:
            marks.append(f"{arrow} first")
        if node.own.errors:
            marks.append(f"({node.own.errors:,} crashed)")
        name = style.text(node.name, 80) or "<root>"
        rows.append(
            [
                "".join(map(style.glyph, line.branches)) + name,
                "-" if total.seen is None else f"{total.seen:,}",
                f"{total.checked:,}",
                f"{total.failed:,}" if total.failed else "",
                f"{total.max_q:.3g}" if total.checked else "",
                " ".join(mark for mark in marks if mark),
            ]
        )
    head = ["module", "seen", "checked", "failed", "max q", "fails in"]
    red = [bool(line.node.total.failed) for line in lines]
    return style.table(head, rows, numbers=_NUMBERS, red=red)


@dataclass
class _Line:
    node: Node
    branches: list[str]
    is_first_divergence: bool


def _draw(lines: list[_Line], node: Node, stem: str, path: list[str] | None) -> None:
    """Add a node and what is below; `path` leads from it to the first divergence, if it does."""
    parts = [stem[at : at + 3] for at in range(0, len(stem), 3)]
    lines.append(_Line(node, parts, is_first_divergence=path == []))
    below = stem.replace("├─ ", "│  ").replace("└─ ", "   ")
    children = list(node.children.values())
    for child in children:
        branch = "└─ " if child is children[-1] else "├─ "
        inside = path[1:] if path and _stands_for(child.name, path[0]) else None
        _draw(lines, child, below + branch, inside)


def _stands_for(name: str, part: str) -> bool:
    if name == part:
        return True
    if not (name.startswith("[") and name.endswith("]") and _is_number(part)):
        return False
    for span in name[1:-1].split(", "):
        low, _, high = span.partition("-")
        if int(low) <= int(part) <= int(high or low):
            return True
    return False
