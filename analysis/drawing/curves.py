"""A line a baseline over a swept load, with whiskers, and what the axis is called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from matplotlib.axes import Axes

from analysis.drawing import style
from analysis.drawing.source import Cell, Panel, Source
from pensieve.statistics import Estimate

P = TypeVar("P")

LOADS = {
    "workload.request_rate": "offered rate (requests/s)",
    "workload.users": "users at once",
    "workload.agents": "agents at once",
    "workload.request_interval": "mean seconds between arrivals",
    "workload.time_scale": "recorded seconds stretched by",
}
"""Fields that make a load heavier or lighter, and the label of their axis."""


def load_axis(source: Source) -> str | None:
    """The load that the sweep runs through; the first of LOADS where there are several."""
    return next((axis for axis in LOADS if len(source.swept(axis)) > 1), None)


def along_load(source: Source, what: str, point_of: Callable[[Cell, str], P | None]) -> list[tuple[Panel, list[P]]]:
    """`point_of(cell, load)` of every cell, in the order of the load.

    Raises MissingSeries where it is None, saying that `what` is not there, and what Source.panels raises.
    """
    axis = load_axis(source)
    assert axis is not None, "asked only where it applies"
    found = []
    for panel in source.panels(axis):
        points = []
        for cell in sorted(panel.cells, key=lambda cell: panel.values(axis).index(cell.at[axis])):
            point = point_of(cell, cell.at[axis])
            if point is None:
                raise source.lacks(f"{what} of {cell.baseline} with {axis}={cell.at[axis]}")
            points.append(point)
        found.append((panel, points))
    return found


def draw_curve(axes: Axes, baseline: str, points: Sequence[tuple[float, Estimate]]) -> None:
    """Points in the order of the load, joined; the line's gid is the baseline, the whiskers' `baseline/interval`."""
    colour = style.colour(baseline)
    axes.plot(
        [x for x, _ in points], [estimate.value for _, estimate in points], color=colour, marker=style.marker(baseline),
        markersize=3.4, linewidth=1.3, gid=baseline,
    )  # fmt: skip
    known = [(x, one.ci_low, one.ci_high) for x, one in points if one.ci_low is not None and one.ci_high is not None]
    if known:
        whiskers = axes.vlines(*zip(*known, strict=True), color=colour, linewidth=0.9, alpha=0.7)
        whiskers.set_gid(f"{baseline}/interval")


def wide(values: Sequence[float]) -> bool:
    """Whether values span so much that only a logarithmic axis shows all of them."""
    positive = [value for value in values if value > 0]
    return bool(positive) and len(positive) == len(values) and max(positive) > 20 * min(positive)
