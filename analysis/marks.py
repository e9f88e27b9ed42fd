"""The marks that figures share: a line a baseline, bars with their values beside them, and stacked parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from analysis import style
from pensieve.lab.statistics import Estimate

BAR_IN = 0.14  # one bar and its value
LABEL_SIZE = 6.0
_GROUP_GAP = 0.45  # bars
BOUND: dict[str, Any] = {"color": "black", "marker": "|", "markersize": 6, "linewidth": 0, "clip_on": False}
Points = Sequence[tuple[float, Estimate]]


def line(
    axes: Axes,
    name: str,
    points: Points,
    *,
    order: int = 0,
    band: bool = False,
    joined: bool = True,
    look: tuple[str, str] | None = None,
) -> None:
    """Points with whiskers, or a band, where an estimate has an interval; a lower order lies on top. joined: False where x
    is a category, since nothing lies between two of them. look: colour and marker, by default those of a baseline.

    The line's gid is `name`, the interval's `name/interval`.
    """
    (colour, marker), above = look or (style.colour(name), style.marker(name)), 3 - order / 100
    axes.plot(
        [x for x, _ in points], [one.value for _, one in points], color=colour, marker=marker,
        markersize=3.5, linewidth=1.3 if joined else 0, gid=name, label=name, zorder=above,
        clip_on=False,  # a marker at the top of the axes is whole
    )  # fmt: skip
    known = [(x, one.ci_low, one.ci_high) for x, one in points if one.ci_low is not None and one.ci_high is not None]
    if not known:
        return
    xs, low, high = zip(*known, strict=True)
    if band:
        axes.fill_between(xs, low, high, color=colour, alpha=0.16, linewidth=0, gid=f"{name}/interval")
    else:
        axes.vlines(xs, low, high, color=colour, linewidth=0.9, alpha=0.7, zorder=above, gid=f"{name}/interval")


def wide(values: Sequence[float]) -> bool:
    """Whether values span so much that only a logarithmic axis shows all of them."""
    return bool(values) and min(values) > 0 and max(values) > 20 * min(values)


def from_zero(axes: Axes, values: Sequence[float]) -> None:
    """A y axis from zero, or a logarithmic one where only that shows all of the values."""
    if wide(values):
        plain_log(axes, "y")
    else:
        axes.set_ylim(bottom=0)


def rows(axes: Axes, names: Sequence[str], colours: Sequence[str]) -> None:
    """Named rows from the top down, each in its colour."""
    axes.grid(visible=False)
    axes.tick_params(axis="y", length=0)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    for label, colour in zip(axes.get_yticklabels(), colours, strict=False):  # axes to the right may have none
        label.set(color=colour, fontweight="bold")


def mark_counts(axes: Axes, counts: Sequence[float]) -> None:
    """A logarithmic x axis with a tick at each of these numbers and nowhere else."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(counts))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def plain_log(axes: Axes, which: str, subs: Sequence[float] = (1.0, 2.0, 5.0)) -> None:
    """A logarithmic axis whose ticks are plain numbers. which: "x" or "y"."""
    getattr(axes, f"set_{which}scale")("log")
    axis = getattr(axes, f"{which}axis")
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar. text: stands beside its end. hatched: a second kind of the same colour. gid: names it in the drawing."""

    estimate: Estimate
    colour: str
    text: str
    gid: str
    hatched: bool = False


@dataclass(frozen=True, slots=True)
class Group:
    """Bars that belong together, under one name beside the axis. room: bars it has room for, where it has fewer."""

    name: str
    colour: str
    bars: Sequence[Bar]
    room: int = 0

    @property
    def height(self) -> int:
        return max(self.room, len(self.bars))


def bar_grid(sections: Sequence[Sequence[Group]], columns: int = 1) -> tuple[Figure, list[list[Axes]]]:
    """Axes as high as the groups of each section need, one section under the other."""
    rows = [_height(groups) for groups in sections]
    height = (sum(rows) + 1.2 * (len(rows) - 1)) * BAR_IN + 0.35
    return style.new_grid(height, len(rows), columns, height_ratios=rows, sharex="col")


def bars(axes: Axes, groups: Sequence[Group], *, names: bool = True, origin: float = 0.0) -> None:
    """Lying bars from the top down, each with its interval and its text. origin: where bars begin."""
    axes.set_ylim(_height(groups), 0)
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x", color="#E3E3E3", linewidth=0.6)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.axvline(origin, color="black", linewidth=0.7)
    top, middles = _GROUP_GAP / 2, []
    for group in groups:
        first = top + (group.height - len(group.bars)) / 2 + 0.5
        for index, bar in enumerate(group.bars):
            draw_bar(axes, bar, first + index, origin)
        middles.append(top + group.height / 2)
        top += group.height + _GROUP_GAP
    axes.set_yticks(middles, [group.name if names else "" for group in groups])
    for label, group in zip(axes.get_yticklabels(), groups, strict=True):
        label.set(color=group.colour, fontweight="bold")


def draw_bar(axes: Axes, one: Bar, y: float, origin: float = 0.0) -> None:
    found, error = one.estimate, None
    if found.ci_low is not None and found.ci_high is not None:
        error = [[max(0.0, found.value - found.ci_low)], [max(0.0, found.ci_high - found.value)]]
    drawn = axes.barh(
        y, found.value - origin, left=origin, height=0.84, linewidth=0.7, edgecolor=one.colour, xerr=error,
        facecolor="white" if one.hatched else one.colour, hatch="//////" if one.hatched else None,
        error_kw={"linewidth": 0.9},
    )  # fmt: skip
    drawn[0].set_gid(one.gid)
    end = max(
        origin, found.value, found.value if found.ci_high is None else found.ci_high
    )  # clear of names and interval
    ground = {"facecolor": "white", "edgecolor": "none", "pad": 0.4}  # a line of the axes does not cross the number
    axes.annotate(one.text, (end, y), (2, 0), textcoords="offset points", va="center", fontsize=LABEL_SIZE, bbox=ground)


def _height(groups: Sequence[Group]) -> float:
    return sum(group.height for group in groups) + _GROUP_GAP * len(groups)


def stacked(
    axes: Axes,
    place: float,
    parts: Mapping[str, float],
    name: str,
    *,
    across: bool,
    colours: Mapping[str, str] = style.PARTS,
) -> float:
    """One bar of parts one upon the other; gids `name/part`. across: lying. Returns where it ends."""
    start = 0.0
    for part, length in parts.items():
        look: dict[str, Any] = {"color": colours[part], "edgecolor": style.EDGE, "linewidth": 0.4}
        if across:
            [patch] = axes.barh([place], [length], left=[start], height=0.76, **look)
        else:
            [patch] = axes.bar([place], [length], bottom=[start], width=0.76, **look)
        patch.set_gid(f"{name}/{part}")
        start += length
    return start
