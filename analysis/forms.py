"""How figures are drawn whose numbers are quantities of cells: lines over an axis, and bars. A figure's file in conf/figure
gives what is drawn; its `form` names a function here, or any other one by its dotted name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import floor, log10
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator
from pydantic import BaseModel

from analysis import marks, style
from analysis.marks import Bar, Group
from analysis.quantities import Found, Quantity, columns, size
from analysis.registry import Plot, Row
from analysis.sweep import NO_VALUE, Cell, Panel, Source, number
from pensieve.lab import tables
from pensieve.lab.metric_registry import PERCENTILES
from pensieve.lab.results.trials import field_of
from pensieve.lab.statistics import Estimate, enough_for


class Axis(BaseModel, frozen=True, extra="forbid"):
    """axis: a swept field. name: its column in the CSV. says: what the axis is called. log: a logarithm, with a tick
    at each value. per: so many of it are one there. whole: its values are counts."""

    axis: str
    name: str = ""
    says: str = ""
    log: bool = False
    per: float = 1.0
    whole: bool = False

    def value(self, cell: Cell) -> Any:
        """As the CSV has it: a number, or a name."""
        found = number(cell.at[self.axis])
        return cell.at[self.axis] if found is None else int(found) if self.whole else found


@dataclass(frozen=True, slots=True)
class Point:
    """One cell, in one facet. x: where it stands. found: by quantity."""

    cell: Cell
    line: str
    x: float
    facet: str
    found: Mapping[Quantity, Found]


class Lines(BaseModel, extra="forbid"):
    """A line a baseline, or a value of the axis `by`, over the axis `along`: of several the one that was swept.

    Each quantity that `says` something has axes of its own, in each of the `facets`: names that stand for {} in its `where`;
    facet: their column in the CSV. beside: axes next to each other. log: never from zero. crosses: a count of a cell; the
    line has a cross where it is first above 0. more: a field of the trials, and what its values add to the title. lacks:
    what a cell without numbers has none of.
    """

    along: Axis | list[Axis]
    quantities: list[Quantity]
    lead: str
    by: Axis | None = None
    facet: str = ""
    facets: list[str] = [""]
    beside: bool = False
    partial: bool = False
    log: bool = False
    crosses: Quantity | None = None
    more: dict[str, str] = {}
    lacks: str = "turn that counts"

    def plots(self, source: Source) -> Iterator[Plot]:
        every = self.along if isinstance(self.along, list) else [self.along]
        along = next((axis for axis in every if source.several(axis.axis)), every[0])
        by, cross = self.by, self.crosses
        for panel in source.panels(*(axis.axis for axis in (by, along) if axis), partial=self.partial):
            for cells in [panel.of(name) for name in panel.baselines] if by else [panel.cells]:
                points = self._points(source, panel, cells, along, by)
                picture = self._drawn(panel, points, along)
                lead, counts = self.lead + _thin(points), {}
                if cross:
                    counts = {id(cell): _value(cross.found(source, cell)) or 0 for cell in cells}
                    _cross(picture, points, counts, cross.says)
                    lead += f"; × {cross.says}" if any(counts.values()) else ""
                style.legend(picture)
                rows = [
                    {
                        **self._key(point, along, by),
                        **_columns(point.found),
                        **({cross.name: counts[id(point.cell)]} if cross else {}),
                        "trials": point.cell.ids,
                    }
                    for point in points
                ]
                table = [self._cells(point, along, by) for point in points]
                yield Plot(panel, picture, lead, rows, table, self._more(cells))

    def _points(self, source: Source, panel: Panel, cells: Sequence[Cell], along: Axis, by: Axis | None) -> list[Point]:
        """Line by line, in the order of the axis."""
        at = places(panel.values(along.axis))
        found = []
        for cell in cells:
            for facet in self.facets:
                own = {
                    one: one.model_copy(update={"where": one.where.replace("{}", facet)}).found(source, cell)
                    for one in self.quantities
                }
                line = cell.at[by.axis] if by else cell.baseline
                found.append(Point(cell, line, at[cell.at[along.axis]], facet, own))
            if all(one is None for point in found[-len(self.facets) :] for one in point.found.values()):
                raise source.lacks(f"{self.lacks} of {cell.baseline} with {along.axis}={cell.at[along.axis]}")
        order = sorted({point.line for point in found}) if by else panel.baselines
        return sorted(found, key=lambda point: (order.index(point.line), point.x))

    def _drawn(self, panel: Panel, points: Sequence[Point], along: Axis) -> Picture:
        panes = [(facet, one) for facet in self._seen(points) for one in self.quantities if one.says]
        shape = (1, len(panes)) if self.beside else (len(panes), 1)
        picture, grid = style.new_grid(max(2.0, 0.6 + shape[0]), *shape, sharex=True, sharey=self.beside)
        for axes, (facet, one) in zip(picture.axes, panes, strict=True):
            own = [point for point in points if point.facet == facet and _value(point.found[one]) is not None]
            axes.set_ymargin(0.12)  # the highest marker whole
            for order, (name, look) in enumerate(style.looks(point.line for point in points).items()):
                drawn = [(point.x, _estimate(point.found[one])) for point in own if point.line == name]
                if drawn:
                    marks.line(axes, name, drawn, order=order, look=look)
            if self.log:
                marks.plain_log(axes, "y")
            else:
                marks.from_zero(axes, [_estimate(point.found[one]).value for point in own])
            if axes in [row[0] for row in grid]:
                axes.set_ylabel(one.says.replace("{}", facet))
            if self.beside and facet:
                axes.set_title(facet, fontweight="bold", color=style.GREY)
            if axes in grid[-1]:
                axes.set_xlabel(along.says)
        ticks(picture.axes, panel.values(along.axis), along)
        return picture

    def _seen(self, points: Sequence[Point]) -> list[str]:
        """Facets that any cell has."""
        known = {point.facet for point in points if any(one is not None for one in point.found.values())}
        return [facet for facet in self.facets if facet in known]

    def _key(self, point: Point, along: Axis, by: Axis | None) -> Row:
        places = {axis.name or axis.axis: axis.value(point.cell) for axis in (by, along) if axis}
        return {"baseline": point.cell.baseline, **places, **({self.facet: point.facet} if self.facet else {})}

    def _cells(self, point: Point, along: Axis, by: Axis | None) -> Mapping[str, str]:
        """Of the table: what is drawn, and what is only counted."""
        place = along.value(point.cell)
        at = place if isinstance(place, str) else f"{place:,}" if along.whole else f"{place:,g}"
        line = {along.name or along.axis: at, ((by.name or by.axis) if by else "baseline"): point.line}
        for one, found in point.found.items():
            head = " ".join((one.says.replace("{}", point.facet) or one.name.replace("_", " ")).split())
            line[head] = tables.estimated(found) if isinstance(found, Estimate | None) else one.shown(found)
        return {**({self.facet: point.facet} if self.facet else {}), **line}

    def _more(self, cells: Sequence[Cell]) -> str:
        found = {
            name: {field_of(trial, name) for cell in cells for trial in cell.trials} - {None} for name in self.more
        }
        each = {name: " or ".join(f"{value:g}" for value in sorted(map(float, own))) for name, own in found.items()}
        return "".join(self.more[name].format(text) for name, text in each.items() if text)


def lines(source: Source, **given: Any) -> Iterator[Plot]:
    return Lines(**given).plots(source)


def _value(found: Found) -> float | None:
    return found.value if isinstance(found, Estimate) else found


def _estimate(found: Found) -> Estimate:
    return found if isinstance(found, Estimate) else Estimate(found or 0.0, None, None, 0, 0)


def places(values: Sequence[str]) -> dict[str, float]:
    """Where the values of an axis stand: numbers there, and values of which one is no number at equal distances."""
    numbers = [number(value) for value in values]
    return {
        value: float(at) if None in numbers else one or 0.0
        for at, (value, one) in enumerate(zip(values, numbers, strict=True))
    }


def ticks(every: Sequence[Axes], values: Sequence[str], along: Axis) -> None:
    numbers = [number(value) for value in values]
    for axes in every:
        if None in numbers:
            axes.set_xticks(range(len(values)), ["unlimited" if value == NO_VALUE else value for value in values])
        elif along.log:
            marks.mark_counts(axes, [one for one in numbers if one is not None])
        else:
            axes.set_xlim(left=0)
        if along.per != 1:
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / along.per:.2g}"))


def _thin(points: Sequence[Point]) -> str:
    """What a 99th percentile of few turns is worth."""
    every = [found for point in points for one, found in point.found.items() if one.how == "p99"]
    enough, fewest = (
        enough_for(PERCENTILES["p99"]),
        min((one.n for one in every if isinstance(one, Estimate)), default=None),
    )
    if fewest is None or fewest >= enough:
        return ""
    return f" (a p99 of fewer than {enough:,} turns rests on less than ten; the fewest here are {fewest})"


def _cross(picture: Picture, points: Sequence[Point], counts: Mapping[int, float], says: str) -> None:
    """Where a line's count is first above 0: on the line, or where it would go on."""
    for axes, facet in zip(picture.axes, dict.fromkeys(point.facet for point in points), strict=True):
        for name, (colour, _) in style.looks(point.line for point in points).items():
            own = [point for point in points if (point.line, point.facet) == (name, facet)]
            first = next((point.x for point in own if counts[id(point.cell)]), None)
            if first is None:
                continue
            known = [
                (abs(point.x - first), value) for point in own for one in point.found.values() if (value := _value(one))
            ]
            axes.plot(
                [first], [min(known)[1] if known else 1.0], marker="x", markersize=7, markeredgewidth=1.6,
                color=colour, linestyle="none", gid=f"{name}/{says}", label=says,
            )  # fmt: skip


class Side(BaseModel, extra="forbid"):
    """Axes of a figure of bars: the quantities that share a scale.

    nothing: stands where a baseline has none of them, or all are 0. lead: of the caption; without: in its place where no
    baseline has any, and the axes are left out.
    """

    says: str
    quantities: list[Quantity]
    nothing: str = ""
    lead: str = ""
    without: str = ""

    @property
    def drawn(self) -> list[Quantity]:
        return [one for one in self.quantities if one.drawn]

    def has(self, found: Mapping[Quantity, Found]) -> bool:
        return any(_value(own) or (own is None and one.missing) for one, own in found.items() if one in self.quantities)

    def group(self, cell: Cell, found: Mapping[Quantity, Found], room: int) -> Group:
        colour, bars = style.colour(cell.baseline), []
        for one in self.drawn:
            own = found[one]
            if own is None and one.missing:
                bars.append(Bar(_estimate(None), colour, one.missing, f"{cell.baseline}/{one.name}", one.hatched))
            elif own is not None and (_value(own) or not self.nothing):
                bars.append(Bar(_estimate(own), colour, one.shown(own), f"{cell.baseline}/{one.name}", one.hatched))
        nothing = [Bar(_estimate(None), colour, self.nothing, f"{cell.baseline}/nothing")] if self.nothing else []
        return Group(cell.baseline, colour, bars or nothing, room)

    def scale(self, axes: Axes, values: Sequence[float]) -> None:
        """From 0 on, and linear, unless only a logarithm shows both the smallest and the largest. The bars have their values
        beside them: one tick is enough to read a logarithm by, and more run into each other in half a column."""
        wide = marks.wide(values)
        axes.set_xlabel(f"{self.says}{' (log)' if wide else ''}")
        if wide:
            axes.set_xscale("symlog", linthresh=1.0)
            axes.set_xticks([0, 10 ** floor(log10(max(values)))])
            axes.xaxis.set_minor_locator(NullLocator())
        elif values:
            axes.xaxis.set_major_locator(MaxNLocator(3))
        else:
            axes.set_xticks([0])
        unit = self.quantities[0].unit
        axes.xaxis.set_major_formatter(
            FuncFormatter(lambda value, _: size(value) if unit == "bytes" else f"{value:,.4g}")
        )


def bars(
    source: Source,
    *,
    sides: Sequence[Mapping[str, Any]],
    lead: str,
    long: bool = False,
    lacks: str = "turn that counts",
) -> Iterator[Plot]:
    """A group of bars a baseline, in each of the `sides`. long: the CSV has a line a quantity. lacks: see Lines."""
    for panel in source.panels():
        every = [Side(**one) for one in sides]
        found = {
            cell.baseline: {one: one.found(source, cell) for side in every for one in side.quantities}
            for cell in panel.cells
        }
        for name, own in found.items():
            if all(one is None for one in list(own.values())[: len(every[0].quantities)]):
                raise source.lacks(f"{lacks} of {name}")
        shown = [side for side in every if not side.without or any(side.has(own) for own in found.values())]
        room = max(len(side.drawn) for side in shown)
        groups = [[side.group(cell, found[cell.baseline], room) for cell in panel.cells] for side in shown]
        picture, [grid] = marks.bar_grid(groups[:1], columns=len(shown))
        for axes, side, every_group in zip(grid, shown, groups, strict=True):
            marks.bars(axes, every_group, names=axes is grid[0])
            side.scale(axes, [bar.estimate.value for group in every_group for bar in group.bars if bar.estimate.value])
        said = "".join(side.lead if side in shown else side.without for side in every)
        rows = [{**row, "trials": cell.ids} for cell in panel.cells for row in _rows(cell, found[cell.baseline], long)]
        yield Plot(panel, picture, lead + said, rows)


def _rows(cell: Cell, found: Mapping[Quantity, Found], long: bool) -> list[Row]:
    if not long:
        return [{"baseline": cell.baseline, **_columns(found)}]
    empty = {"n": 0, "n_seeds": 0}
    return [
        {"baseline": cell.baseline, "quantity": one.name, **columns("value", own), **({} if own else empty)}
        for one, own in found.items()
        if isinstance(own, Estimate | None)
    ]


def _columns(found: Mapping[Quantity, Found]) -> Row:
    return {name: value for one, own in found.items() for name, value in one.columns(own).items()}
