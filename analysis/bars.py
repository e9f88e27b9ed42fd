"""Figures of lying bars, whole or of parts, with their values beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import floor, log10
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator
from pydantic import BaseModel

from analysis import style
from analysis.forms import DASHED, Form, estimate, shown, value_of, wide
from analysis.quantities import Quantity, size
from analysis.registry import Row
from pensieve.lab.statistics import Estimate

BOUND = "offline bound"
BAR_IN = 0.14  # one bar and its value
LABEL_SIZE = 6.0
_GAP = 0.45  # bars between two groups
_MARK: dict[str, Any] = {
    "color": "black", "marker": "|", "markersize": 8, "markeredgewidth": 1.4, "linewidth": 0, "clip_on": False,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Bar:
    """text: stands beside its end. hatched: a second kind of the same colour. parts: what it is made of, from its beginning
    on, by their names in style.PARTS; ends: boundaries between them that have an interval. gid: names it in the drawing,
    `gid/part` a part."""

    found: Estimate
    text: str
    gid: str
    hatched: bool = False
    parts: Mapping[str, float] = field(default_factory=dict)
    ends: Sequence[Estimate] = ()


class Side(BaseModel, extra="forbid"):
    """Axes of a figure of bars: the quantities that share a scale, or parts that stand one behind the other.

    parts: by label, their columns; or the one column that holds the labels, where a bar's parts are rows. per: so many of a
    part are one. ends: what has an interval between two parts. mark: a column whose value is marked on the bar. line: a value
    at which a line stands; line_says: its name. origin: where bars begin. limits: of the axes; least: what they show at most
    below the origin. nothing: stands where a baseline has none of them, or all are 0.
    """

    says: str
    quantities: list[Quantity] = []
    parts: dict[str, str] | str = {}
    per: float = 1.0
    ends: list[str] = []
    mark: str = ""
    line: float | None = None
    line_says: str = ""
    origin: float = 0.0
    limits: tuple[float, float] | None = None
    least: float | None = None
    nothing: str = ""

    def bars(self, rows: Sequence[Row], at: str) -> list[Bar]:
        """Of one group; `at` names it."""
        if self.parts:
            return [self._stack(rows, at)]
        found = []
        for row, one in ((row, one) for row in rows for one in self.quantities if one.drawn):
            own, gid, hatched = shown(one.name, row), f"{at}/{one.name}", row.get("_hatched", one.hatched)
            if own is not None and (value_of(own) or not self.nothing):
                found.append(Bar(estimate(own), row.get(f"_{one.name}_text", one.shown(own)), gid, hatched))
        return found or ([Bar(estimate(None), self.nothing, f"{at}/nothing")] if self.nothing else [])

    def _stack(self, rows: Sequence[Row], gid: str) -> Bar:
        if isinstance(self.parts, str):
            [one] = self.quantities
            found = {row[self.parts]: value_of(row[one.name]) for row in rows}
            gid = f"{gid}/{one.name}"
        else:
            found = {label: rows[0].get(column) for label, column in self.parts.items()}
        parts = {label: value / self.per for label, value in found.items() if value is not None}
        ends = dict.fromkeys(rows[0].get(end) for end in self.ends)
        text = rows[0].get("_text", "" if parts else "not reported")
        return Bar(estimate(None), text, gid, parts=parts, ends=[one for one in ends if one is not None])

    def scale(self, axes: Axes, values: Sequence[float], most: int) -> None:
        """most: ticks.

        From 0 on, and linear, unless only a logarithm shows both the smallest and the largest. The bars have their values
        beside them: one tick is enough to read a logarithm by, and more run into each other in half a column.
        """
        log = self.origin == 0 and not self.parts and wide(values)
        axes.set_xlabel(f"{self.says}{' (log)' if log else ''}")
        if log:
            axes.set_xscale("symlog", linthresh=1.0)
            axes.set_xticks([0, 10 ** floor(log10(max(values)))])
            axes.xaxis.set_minor_locator(NullLocator())
        elif values or self.parts:
            axes.xaxis.set_major_locator(MaxNLocator(most))
        else:
            axes.set_xticks([0])
        unit = self.quantities[0].unit if self.quantities else ""
        axes.xaxis.set_major_formatter(
            FuncFormatter(lambda value, _: size(value) if unit == "bytes" else f"{value:,.4g}")
        )
        if self.limits:
            axes.set_xlim(*self.limits)
        elif self.line is not None or self.origin:
            axes.margins(x=0.2)  # for the numbers beyond the intervals
            axes.autoscale_view()
        if self.least is not None:
            axes.set_xlim(left=max(self.least, axes.get_xlim()[0]))  # what loses more would leave all others no width


Groups = Mapping[str, Sequence[Row]]
"""By their names."""


class Bars(Form):
    """A group of bars a baseline, or a `_name`, in each of the `sides`; one below the other for each `_section`."""

    sides: list[Side]

    @property
    def every(self) -> Sequence[Quantity]:
        of_sides = (one for side in self.sides for one in side.quantities)
        return list({one.name: one for one in (*self.quantities, *of_sides)}.values())

    @property
    def needed(self) -> Sequence[Quantity]:
        return self.sides[0].quantities

    def drawn(self, rows: Sequence[Row]) -> Picture:
        sections: dict[str, dict[str, list[Row]]] = {}
        for row in rows:
            sections.setdefault(row.get("_section", ""), {}).setdefault(_name(row), []).append(row)
        sides = self.sides
        rooms = {
            section: [max(1, *(len(side.bars(own, "")) for side in sides)) for own in groups.values()]
            for section, groups in sections.items()
        }
        heights = [sum(room) + _GAP * len(room) for room in rooms.values()]
        picture, grid = style.new_grid(
            (sum(heights) + 1.2 * (len(heights) - 1)) * BAR_IN + 0.35, len(heights), len(sides),
            height_ratios=heights, sharex="col",
        )  # fmt: skip
        values: dict[str, list[float]] = {side.says: [] for side in sides}
        for line, height, (section, groups) in zip(grid, heights, sections.items(), strict=True):
            line[0].set_title(section, fontsize=6.5)
            for axes, side in zip(line, sides, strict=True):
                axes.set_ylim(height, 0)
                values[side.says] += self._groups(axes, side, section, groups, rooms[section], names=axes is line[0])
                _line(axes, side)
        for axes, side in zip(grid[-1], sides, strict=True):
            side.scale(axes, [one for one in values[side.says] if one], 3 if len(sides) > 1 else 5)
        marked = any(row.get(side.mark) is not None for side in sides for row in rows)
        handles: list[Any] = list(style.parts_key([part for part in style.PARTS if part in _parts(sides, rows)]))
        handles += [Line2D([], [], **_MARK, label=BOUND)] * marked
        named = dict.fromkeys(side.line_says for side in sides if side.line_says)
        handles += [Line2D([], [], color="black", label=name, **DASHED) for name in named]
        if handles:
            style.legend(picture, handles)
        return picture

    def _groups(
        self, axes: Axes, side: Side, section: str, groups: Groups, rooms: Sequence[int], *, names: bool
    ) -> list[float]:
        """From the top down. Returns the values of the bars."""
        axes.grid(visible=False, axis="y")
        axes.grid(visible=True, axis="x", color="#E3E3E3", linewidth=0.6)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.axvline(side.origin, color="black", linewidth=0.7)
        top, middles, values = _GAP / 2, [], []
        for (name, rows), room in zip(groups.items(), rooms, strict=True):
            bars, row = side.bars(rows, "/".join(filter(None, [section, name]))), rows[0]
            colour = row["_colour"] if "_colour" in row else style.colour(row["baseline"])
            first = top + (room - len(bars)) / 2 + 0.5
            for index, bar in enumerate(bars):
                _bar(axes, bar, first + index, side.origin, colour)
                values.append(bar.found.value)
            middles.append(top + room / 2)
            if side.mark and row.get(side.mark) is not None:
                axes.plot([row[side.mark]], middles[-1:], **_MARK, gid=f"{section}/{name}/bound")
            top += room + _GAP
        axes.set_yticks(middles, list(groups) if names else [""] * len(groups))
        for label, rows in zip(axes.get_yticklabels(), groups.values(), strict=True):
            ink = (
                "black" if "_name" in rows[0] else style.colour(rows[0]["baseline"])
            )  # a baseline's name has its colour
            label.set(color=ink, fontweight="bold")
        return values


def _name(row: Row) -> str:
    return str(row["_name"] if "_name" in row else row["baseline"])


def _parts(sides: Sequence[Side], rows: Sequence[Row]) -> set[str]:
    """Their labels."""
    return {part for side in sides for row in rows if side.parts for bar in side.bars([row], "") for part in bar.parts}


def _line(axes: Axes, side: Side) -> None:
    if side.line is not None and side.line_says:
        axes.axvline(side.line, color="black", gid="line", zorder=0, **DASHED)
    elif side.line is not None:
        axes.axvline(side.line, color=style.WARNING, linewidth=1.1, gid="limit")


def _bar(axes: Axes, one: Bar, y: float, origin: float, colour: str) -> None:
    found, error, start = one.found, None, origin
    if found.ci_low is not None and found.ci_high is not None:
        error = [[max(0.0, found.value - found.ci_low)], [max(0.0, found.ci_high - found.value)]]
    for part, length in one.parts.items():
        [patch] = axes.barh(
            y, length, left=start, height=0.84, color=style.PARTS[part], edgecolor=style.EDGE, linewidth=0.4
        )
        patch.set_gid(f"{one.gid}/{part}")
        start += length
    for end, aside in zip(one.ends, (0.12, -0.12), strict=False):
        if end.ci_low is not None and end.ci_high is not None and end.ci_high > end.ci_low:
            axes.hlines(y + aside, end.ci_low, end.ci_high, color="black", linewidth=0.8)
    if not one.parts:
        [patch] = axes.barh(
            y, found.value - origin, left=origin, height=0.84, linewidth=0.7, edgecolor=colour, xerr=error,
            facecolor="white" if one.hatched else colour, hatch="//////" if one.hatched else None,
            error_kw={"linewidth": 0.9},
        )  # fmt: skip
        patch.set_gid(one.gid)
    if one.text:
        end_x = max(start, found.value, found.ci_high or found.value)  # clear of the interval
        ground = {"facecolor": "white", "edgecolor": "none", "pad": 0.4}  # a line of the axes does not cross the number
        axes.annotate(
            one.text, (end_x, y), (2, 0), textcoords="offset points", va="center", fontsize=LABEL_SIZE, bbox=ground
        )
