"""Born, inherited or amplified, for a person: a tree of the modules, and a picture of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from opcheck.blame import MARKS, BlameStep, Point, Unit, blame_step, decades, largest, units
from opcheck.printing import Style
from opcheck.records import PHASES
from opcheck.report import short_op
from opcheck.review import Run

__all__ = ["render_blame"]

MAX_LINES = 40
"""Modules of a tree; deeper ones are drawn where something happened in them."""
MAX_NAMED = 5
MAX_OP = 20
"""Characters of an op's name in the tree; the summary has it in full."""
_WITH_TREE = ("forward", "backward")


@dataclass(slots=True)
class Node:
    """A module in one phase, its children included."""

    name: str
    points: list[Point] = field(default_factory=list)
    children: dict[str, Node] = field(default_factory=dict)

    @property
    def marks(self) -> list[Point]:
        """Calls that made an error or magnified one."""
        return [point for point in self.points if point.blame.word in MARKS]


def _tree(points: Iterable[Point]) -> Node:
    root = Node("<root>")
    for point in points:
        node = root
        node.points.append(point)
        for part in point.module.split(".") if point.module else ():
            node = node.children.setdefault(part, Node(part))
            node.points.append(point)
    return root


def _depth_to_draw(root: Node) -> int:
    """The deepest level that can be drawn whole."""
    level, total, depth = [root], 0, 0
    while level:
        total += len(level)
        if total > MAX_LINES:
            return max(depth - 1, 1)
        level = [child for node in level for child in node.children.values()]
        depth += 1
    return depth


@dataclass(slots=True)
class _Drawing:
    depth: int
    rows: list[list[str]] = field(default_factory=list)
    red: list[bool] = field(default_factory=list)
    hidden: int = 0


def _draw(drawing: _Drawing, node: Node, style: Style, stem: str, depth: int) -> None:
    branches = "".join(style.glyph(stem[at : at + 3]) for at in range(0, len(stem), 3))
    worst = max(node.points, key=lambda point: point.blame.born)
    drawing.rows.append(
        [
            branches + style.text(node.name, 80),
            share(node.points[0].blame.inputs),
            share(worst.blame.born),
            share(node.points[-1].blame.total),
            _words(node),
        ]
    )
    drawing.red.append(any(point.blame.word == "born" for point in node.points))
    below = stem.replace("├─ ", "│  ").replace("└─ ", "   ")
    shown = [
        child
        for child in node.children.values()
        if depth < drawing.depth or (child.marks and len(drawing.rows) < 2 * MAX_LINES)
    ]
    drawing.hidden += sum(map(_size, node.children.values())) - sum(map(_size, shown))
    for child in shown:
        branch = "└─ " if child is shown[-1] else "├─ "
        _draw(drawing, child, style, below + branch, depth + 1)


def _size(node: Node) -> int:
    return 1 + sum(map(_size, node.children.values()))


def _words(node: Node) -> str:
    """What happened in a module itself, or how often below it."""
    inside = sum(len(child.marks) for child in node.children.values())
    own = node.marks if not inside else [p for p in node.marks if _is_own(node, p)]
    words = []
    ops = list(dict.fromkeys(short_op(p.op) for p in own if p.blame.word == "born"))
    if ops:
        more = f" +{len(ops) - 1}" if len(ops) > 1 else ""
        words.append(f"born: {ops[0][:MAX_OP]}{more}")
    if any(point.blame.word == "amplified" for point in own):
        words.append("amplified")
    return ", ".join(words)


def _is_own(node: Node, point: Point) -> bool:
    return all(point not in child.points for child in node.children.values())


def share(value: float) -> str:
    """`1.2e-07`; 0 for nothing; `lost` where no digit is right."""
    if value >= 1.0:
        return "lost"
    return f"{value:.1e}" if value else "0"


# ---- along the step -----------------------------------------------------------------------------


def _picture(phase: str, found: list[Unit], style: Style) -> list[str]:
    low, high = decades(value for unit in found for value in (unit.born, unit.total))
    label = min(max(len(unit.label) for unit in found), style.width // 3)
    room = style.width - label - 13
    bar, dot = style.glyph("█"), style.glyph("●")

    def place(value: float) -> int:
        if not value:
            return 0
        part = (math.log10(min(value, 10.0**high)) - low) / (high - low)
        return max(1, round(part * room))

    lines = [
        style.paint(f"growth along the {phase}", "bold"),
        *style.wrap(
            f"{bar} total error after it, {dot} largest error born in it;"
            f" from 1e{low:+d} to 1e{high:+d}, each decade {room / (high - low):.0f} columns",
            "    ",
            "  ",
        ),
    ]
    for unit in found:
        length, born = place(unit.total), place(unit.born)
        row = [bar] * length + [" "] * (room - length)
        if born:
            row[born - 1] = dot
        text = f"  {style.cell(unit.label, label)}  {share(unit.total):>7}  {''.join(row)}"
        is_origin = any(point.blame.word == "born" for point in unit.marks)
        lines.append(style.paint(text.rstrip(), "red") if is_origin else text.rstrip())
    return lines


# ---- text ---------------------------------------------------------------------------------------


def render_blame(run: Run, style: Style) -> list[list[str]]:
    """Blocks of lines: the origin, a tree and a picture of each phase, what was followed."""
    found = blame_step(run)
    if found is None:
        return []
    blocks = [_summary(run, found, style)]
    for phase in _WITH_TREE:
        points = found.of(phase)
        if points:
            blocks += [_tree_lines(phase, points, style), _picture(phase, units(points), style)]
    others = [
        f"  {phase:<9}  {len(points):,} calls; largest born {share(largest(points, 'born'))},"
        f" largest total {share(largest(points, 'total'))}"
        for phase in PHASES
        if phase not in _WITH_TREE and (points := found.of(phase))
    ]
    if others:
        blocks.append([style.paint("other phases", "bold"), *others])
    return blocks


def _tree_lines(phase: str, points: Sequence[Point], style: Style) -> list[str]:
    root = _tree(points)
    drawing = _Drawing(_depth_to_draw(root))
    _draw(drawing, root, style, "", 0)
    head = ["module", "inherited", "born", "total", "what happened"]
    lines = [style.paint(f"errors by module, {phase}", "bold")]
    numbers = frozenset({"inherited", "born", "total"})
    lines += style.table(head, drawing.rows, numbers=numbers, red=drawing.red)
    if drawing.hidden:
        lines.append(f"  and {drawing.hidden:,} modules below these")
    return lines


def _line(name: str, text: str, style: Style) -> list[str]:
    return style.wrap(text, " " * 13, f"  {name:<11}")


def _where(point: Point, style: Style) -> str:
    at = f" at {style.text(point.source, 80)}" if point.source else ""
    return (
        f"{style.text(short_op(point.op), 80)} in {style.text(point.module, 120) or '<root>'},"
        f" {point.phase}, call {point.index}{at}"
    )


def _summary(run: Run, found: BlameStep, style: Style) -> list[str]:
    step = f"blame, step {found.step}"
    if found.num_steps > 1:
        step += f" of {found.num_steps} (--step N shows another)"
    lines = [style.paint(step, "bold")]
    text = (
        "errors are rms errors as shares of the expected size: 1e-3 is three right digits,"
        " 1 and above none (lost)"
    )
    lines += style.wrap(text, "  ")
    origins = found.origins
    for point in origins[:MAX_NAMED]:
        name = "origin" if point is origins[0] else ""
        lines += _line(name, f"{_where(point, style)}: born {share(point.blame.born)}", style)
    if len(origins) > MAX_NAMED:
        lines += _line("", f"and {len(origins) - MAX_NAMED:,} more calls", style)
    if not origins:
        text = "none: no checked call made an error that its inputs do not explain"
        lines += _line("origin", text, style)
    for point in found.amplifiers[:MAX_NAMED]:
        name = "amplified" if point is found.amplifiers[0] else ""
        text = f"{_where(point, style)}: {share(point.blame.inputs)} in the inputs became"
        text += f" {share(point.blame.inherited)}"
        lines += _line(
            name, text + (f" (x {point.gain:,.3g})" if point.blame.inputs else ""), style
        )
    lines += _growth(found, style)
    return lines + _followed(run, style)


def _growth(found: BlameStep, style: Style) -> list[str]:
    points = found.of("forward") or list(found.points)
    text = f"{share(points[-1].blame.total)} at the end of the {points[-1].phase}"
    origins = [point for point in found.origins if point.phase == points[0].phase]
    if origins:
        before = [point for point in points if point.index < origins[0].index]
        if before:
            text = f"{share(before[-1].blame.total)} before the origin, " + text
    backward = found.of("backward")
    if backward:
        text += f", {share(backward[-1].blame.total)} at the end of the backward"
    return _line("in total", text, style)


def _followed(run: Run, style: Style) -> list[str]:
    counts = run.coverage.shadow
    if not counts:
        return []
    text = f"{counts.get('followed', 0):,} calls in float64"
    if "limit bytes" in counts:
        peak, limit = _bytes(counts.get("peak bytes", 0)), _bytes(counts["limit bytes"])
        text += f", with at most {peak} of {limit}"
    lines = _line("followed", text, style)
    restarts = {
        name.partition(": ")[2]: count for name, count in counts.items() if ": " in name and count
    }
    if restarts:
        reasons = ", ".join(f"{style.text(name, 80)} {n:,}" for name, n in restarts.items())
        text = f"the chain began again from the actual values {sum(restarts.values()):,} times:"
        lines += _line("", f"{text} {reasons}", style)
    return lines


def _bytes(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"
