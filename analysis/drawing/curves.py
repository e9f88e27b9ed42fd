"""A line a baseline over a swept load, with whiskers, and what the axis is called."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes

from analysis.drawing import style
from analysis.drawing.source import Source
from pensieve.statistics import Estimate

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
