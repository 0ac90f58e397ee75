"""The growth of errors along a step as a picture file; needs matplotlib (extra `plot`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opcheck.blame import MARKS, BlameStep, Point, decades, units
from opcheck.errors import PlotError
from opcheck.printing import visible
from opcheck.report import short_op
from opcheck.whole_files import write_new

__all__ = ["SUFFIXES", "save_plot"]

SUFFIXES = (".png", ".svg", ".pdf")
_PANELS = {
    "forward": "#e8f0fb", "recompute": "#f3ecfa", "backward": "#fdf3e4", "optimizer": "#f2f3f5",
    "other": "#f2f3f5",
}  # fmt: skip
_ALWAYS = ("forward", "recompute", "backward")
"""Other phases have a panel where something happened in them, or where there is nothing else."""
_MAX_TICKS = 14
_MAX_NAMED = 4


def save_plot(found: BlameStep, path: Path) -> None:
    """Draw total and born error of every call in the order of dispatch, on a log scale.

    Raises:
        PlotError: matplotlib is missing, the suffix is none of `SUFFIXES`, or the file is there
            already or cannot be written.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise PlotError(f"{path}: a picture ends in {', '.join(SUFFIXES)}")
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotError(
            f"a picture needs matplotlib ({error}); pip install 'opcheck[plot]'"
        ) from error
    with mpl.rc_context({"svg.hashsalt": "opcheck", "svg.fonttype": "none"}):
        figure = Figure(figsize=(11, 5), layout="constrained")
        _draw(figure, found)
        try:
            suffix = path.suffix[1:].lower()
            metadata = {"Date": None} if suffix == "svg" else None
            write_new(
                path,
                lambda file: figure.savefig(file, format=suffix, dpi=150, metadata=metadata),
            )
        except OSError as error:
            raise PlotError(f"{path}: {error.strerror or error}") from error


def _draw(figure: Any, found: BlameStep) -> None:
    chosen = _panels(found)
    every = [point for _, points in chosen for point in points]
    low, high = decades(v for point in every for v in (point.blame.born, point.blame.total))
    bounds = 10.0**low, 10.0**high
    widths = [max(len(points), len(every) / 5) for _, points in chosen]
    panels = figure.subplots(1, len(chosen), sharey=True, squeeze=False, width_ratios=widths)[0]
    for axes, (phase, points) in zip(panels, chosen, strict=True):
        axes.set_facecolor(_PANELS[phase])
        axes.set_title(f"{phase}: {len(points):,} calls", fontsize=9)
        axes.grid(axis="y", color="#d5d8dd", linewidth=0.6)
        _curves(axes, points, bounds)
        _name_origins(axes, points, bounds)
        _name_modules(axes, points, share=len(points) / len(every) if len(chosen) > 1 else 1.0)
    panels[0].set_yscale("log")
    panels[0].set_ylim(bounds[0] / 1.5, bounds[1] * 4)
    panels[0].set_ylabel("rms error, share of the expected size")
    handles = {
        label: handle
        for axes in panels
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside upper right", ncols=4, fontsize=8)
    figure.suptitle(f"Error along step {found.step}", x=0.01, ha="left", fontsize=11)


def _panels(found: BlameStep) -> list[tuple[str, list[Point]]]:
    parts = {phase: found.of(phase) for phase in _PANELS}
    shown = [
        (phase, points)
        for phase, points in parts.items()
        if points and (phase in _ALWAYS or any(point.blame.word in MARKS for point in points))
    ]
    return shown or [(phase, points) for phase, points in parts.items() if points]


def _clipped(values: Sequence[float], bounds: tuple[float, float]) -> list[float]:
    """Exact results have no place on a log scale and are left out; Inf lies on the upper edge."""
    return [min(max(value, bounds[0]), bounds[1]) if value else math.nan for value in values]


def _curves(axes: Any, points: Sequence[Point], bounds: tuple[float, float]) -> None:
    for name, style in (
        ("total", {"color": "#1f4e8c", "linewidth": 1.1, "label": "total", "zorder": 3}),
        ("born", {"color": "#8a8f98", "linewidth": 0, "marker": ".", "markersize": 4,
                  "label": "born in the call", "zorder": 2}),
    ):  # fmt: skip
        heights = _clipped([getattr(point.blame, name) for point in points], bounds)
        shown = [(at, height) for at, height in enumerate(heights) if height == height]
        axes.plot([at for at, _ in shown], [height for _, height in shown], **style)
    for word, field, color, marker, label in (
        ("amplified", "total", "#d98200", "^", "amplified"),
        ("born", "born", "#c62828", "o", "born beyond what the inputs explain"),
    ):
        marked = [(at, p) for at, p in enumerate(points) if p.blame.word == word]
        if marked:
            heights = _clipped([getattr(point.blame, field) for _, point in marked], bounds)
            axes.scatter(
                [at for at, _ in marked], heights, s=36, color=color, marker=marker, label=label,
                zorder=4,
            )  # fmt: skip


def _name_origins(axes: Any, points: Sequence[Point], bounds: tuple[float, float]) -> None:
    named: list[str] = []
    for at, point in enumerate(points):
        text = f"{short_op(point.op)}\n{point.module or '<root>'}"
        if point.blame.word != "born" or text in named or len(named) == _MAX_NAMED:
            continue
        named.append(text)
        beyond = at > 0.6 * len(points)
        axes.annotate(
            _plain(text), (at, _clipped([point.blame.born or bounds[0]], bounds)[0]),
            xytext=(-8 if beyond else 8, 8), textcoords="offset points",
            ha="right" if beyond else "left", fontsize=8, color="#c62828", zorder=5,
        )  # fmt: skip


def _name_modules(axes: Any, points: Sequence[Point], *, share: float) -> None:
    """The modules as ticks where they begin."""
    places = {point.index: place for place, point in enumerate(points)}
    pieces = units(points)
    apart = len(points) / max(2 * _MAX_TICKS * share, 4)
    shown: list[tuple[int, str]] = []
    for unit in pieces:
        at = places[unit.first]
        if not shown or at - shown[-1][0] >= apart:
            shown.append((at, _plain(unit.label)))
    axes.set_xticks(
        [at for at, _ in shown], [name for _, name in shown], rotation=45, ha="right", fontsize=7
    )
    axes.set_xlim(-0.5, max(len(points) - 0.5, 0.5))


def _plain(text: str) -> str:
    """Text of a log as it is: no control character, no formula."""
    return "\n".join(visible(line[:60]) for line in text.split("\n")).replace("$", r"\$")
