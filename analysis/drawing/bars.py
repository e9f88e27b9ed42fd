"""Horizontal bars with their values beside them: many baselines under each other stay legible in one column."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath

from analysis.drawing import style
from pensieve.statistics import Estimate

ROW_IN = 0.125  # one bar and its value
LABEL_SIZE = 6.0


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
    """Bars that belong together, under one name beside the axis.

    heading: stands above it, over the axes. rows: room that they share, where it is more than they need. close: directly
    below the group before.
    """

    name: str
    colour: str
    bars: Sequence[Bar]
    heading: str = ""
    rows: int = 0
    close: bool = False

    @property
    def height(self) -> int:
        return max(self.rows, len(self.bars))

    def places(self, top: float) -> list[tuple[Bar, float]]:
        """Each bar and its middle, together in the middle of the group's room."""
        first = top + (self.height - len(self.bars)) / 2 + 0.5
        return [(bar, first + index) for index, bar in enumerate(self.bars)]


def height_in(groups: Sequence[Group]) -> float:
    """Inches that the axes need for these groups."""
    return _layout(groups)[1] * ROW_IN


def draw_groups(axes: Axes, groups: Sequence[Group], *, names: bool = True, origin: float = 0.0) -> None:
    """Bars from the top down, with whiskers where an estimate has an interval; values are placed by `place_values`.

    origin: where bars begin; not 0 on a logarithmic axis, whose scale is to be set before.
    """
    places, rows = _layout(groups)
    axes.set_ylim(rows, 0)
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x", color="#E3E3E3", linewidth=0.6)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.axvline(origin, color="black", linewidth=0.7)
    middles = []
    for group, top in zip(groups, places, strict=True):
        if group.heading:
            axes.annotate(
                group.heading, (0, top - 0.55), xycoords=("axes fraction", "data"), xytext=(2, 0),
                textcoords="offset points", fontsize=LABEL_SIZE + 0.5, fontweight="bold", color=style.GREY, va="center",
            )  # fmt: skip
        for bar, y in group.places(top):
            _draw(axes, bar, y, origin)
        middles.append(top + group.height / 2)
    axes.set_yticks(middles, [group.name if names else "" for group in groups])
    for label, group in zip(axes.get_yticklabels(), groups, strict=True):
        label.set_color(group.colour)
        label.set_fontweight("bold")


def draw_limit(axes: Axes, groups: Sequence[Group], value: float, gid: str) -> None:
    """A line across the bars at `value`, that leaves the headings free."""
    places = _layout(groups)[0]
    ends: list[list[float]] = []
    for group, top in zip(groups, places, strict=True):
        if group.heading or not ends:
            ends.append([top, top])
        ends[-1][1] = top + group.height
    xs = [value, value, float("nan")] * len(ends)
    ys = [y for low, high in ends for y in (low, high, float("nan"))]
    axes.plot(xs, ys, color=style.WARNING, linewidth=1.1, gid=gid)


def place_values(
    figure: Figure, axes: Axes, groups: Sequence[Group], size: float = LABEL_SIZE, origin: float = 0.0
) -> None:
    """Texts beside the bars' ends, with the axis made long enough for them; call it when the margins are final."""
    width = axes.get_position().width * figure.get_figwidth()
    scale = axes.xaxis.get_transform()  # linear or not
    ends = [(*scale.transform(list(_ends(bar.estimate))), bar.text) for group in groups for bar in group.bars]
    start = float(scale.transform([origin])[0])
    low, high = min(start, *(end[0] for end in ends)), max(start + 1e-9, *(end[1] for end in ends))
    for _ in range(8):  # a longer axis makes bars shorter, and leaves more room
        inch = (high - low) / width
        high = max(high, *(end + (text_in(text, size) + 0.05) * inch for _, end, text in ends))
    axes.set_xlim(*scale.inverted().transform([low - (0.02 * (high - low) if low < start - 1e-9 else 0.0), high]))
    for group, top in zip(groups, _layout(groups)[0], strict=True):
        for bar, y in group.places(top):
            axes.annotate(
                bar.text, (max(_ends(bar.estimate)[1], origin), y + 0.02), xytext=(2.5, 0),
                textcoords="offset points", fontsize=size, va="center", annotation_clip=False,
            )  # fmt: skip


def signed(value: float) -> str:
    """A change in whole numbers, with a sign as long as a digit."""
    return f"{value:+,.0f}".replace("-", "−")


def _draw(axes: Axes, bar: Bar, y: float, origin: float) -> None:
    [patch] = axes.barh(
        y, bar.estimate.value - origin, left=origin, height=0.84, linewidth=0.7, edgecolor=bar.colour,
        facecolor="white" if bar.hatched else bar.colour, hatch="//////" if bar.hatched else None,
    )  # fmt: skip
    patch.set_gid(bar.gid)
    if bar.estimate.ci_low is not None and bar.estimate.ci_high is not None:
        axes.plot(
            [bar.estimate.ci_low, bar.estimate.ci_high], [y, y], color="black", linewidth=0.9, solid_capstyle="butt"
        )


def _layout(groups: Sequence[Group]) -> tuple[list[float], float]:
    """Where each group begins, and where the last ends, in rows."""
    places, at = [], 0.25
    for index, group in enumerate(groups):
        at += (1.15 if index == 0 else 1.3) if group.heading else 0.45 if index and not group.close else 0.0
        places.append(at)
        at += group.height
    return places, at + 0.25


def _ends(estimate: Estimate) -> tuple[float, float]:
    ends = [estimate.value, *(end for end in (estimate.ci_low, estimate.ci_high) if end is not None)]
    return min(ends), max(ends)


@cache
def text_in(text: str, size: float, bold: bool = False) -> float:
    """Inches that a text takes, by the metrics of its font."""
    if not text:
        return 0.0
    font = FontProperties(family="DejaVu Sans", weight="bold" if bold else "normal", size=size)
    return float(TextPath((0, 0), text, prop=font, size=size).get_extents().width) / 72
