"""The forms of figures: tables, lines over an axis, and the bars of analysis/bars.py. A figure's file in conf/figure says
where its rows come from and how they are drawn; the CSV is those rows.

The map of analysis/sizes.py is a form of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pkgutil import resolve_name
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator
from pydantic import BaseModel

from analysis import style
from analysis.quantities import Found, Quantity, columns
from analysis.registry import Plot, Row
from analysis.sweep import NO_VALUE, Cell, Source, in_order, number
from pensieve.lab import tables
from pensieve.lab.statistics import Estimate

DOTTED: dict[str, Any] = {"linewidth": 0.9, "linestyle": (0, (1, 1.5))}
DASHED: dict[str, Any] = {"linewidth": 1.0, "linestyle": (0, (3, 1.5))}
Points = Sequence[tuple[float, Estimate]]


class Axis(BaseModel, frozen=True, extra="forbid"):
    """axis: a swept field, or a column of the rows. name: its column in the CSV. says: what the axis is called. log: a
    logarithm, with a tick at each value. whole: its values are counts."""

    axis: str
    name: str = ""
    says: str = ""
    log: bool = False
    whole: bool = False

    @property
    def column(self) -> str:
        return self.name or self.axis

    def value(self, cell: Cell) -> Any:
        """As the CSV has it: a number, or a name."""
        found = number(cell.at[self.axis])
        return cell.at[self.axis] if found is None else int(found) if self.whole else found


class Series(Quantity, frozen=True):
    """A quantity of a line. over: what it stands over, where that is not the figure's own axis; diagonal: both are equal on a
    dotted line. dotted: on the axes of the quantity before."""

    over: Axis | None = None
    diagonal: bool = False
    dotted: bool = False


class Form(BaseModel, extra="forbid"):
    """A table; and what all forms share.

    rows: a function(source, form) that yields plots without lead and picture, by its dotted name; by default a row a cell, of
    the `quantities`, along the axis `along` (of several the one that was swept) and `by`, in each of the `facets`: names that
    stand for {} in their `where`; facet: their column in the CSV. keys: what the table calls the columns before the
    quantities. lacks: what a cell without numbers has none of.
    """

    lead: str
    rows: str = "analysis.forms.cells"
    quantities: list[Series] = []
    along: Axis | list[Axis] | None = None
    by: Axis | None = None
    facet: str = ""
    facets: list[str] = [""]
    keys: dict[str, str] = {}
    partial: bool = False
    lacks: str = "turn that counts"
    given: dict[str, Any] = {}

    def plots(self, source: Source) -> Iterator[Plot]:
        for plot in resolve_name(self.rows)(source, self, **self.given):
            lead, table = self.lead.format(**plot.words) + plot.said, plot.table or self.table(plot.rows)
            yield replace(plot, rows=self.csv(plot.rows), lead=lead, table=table, picture=self.drawn(plot.rows))

    def drawn(self, rows: Sequence[Row]) -> Picture | None:
        return None

    @property
    def every(self) -> Sequence[Quantity]:
        return self.quantities

    @property
    def needed(self) -> Sequence[Quantity]:
        """A cell without any of them is missing."""
        return [one for one in self.every if one.says] or self.every

    def axis(self, source: Source) -> Axis | None:
        if not isinstance(self.along, list):
            return self.along
        return next((axis for axis in self.along if source.several(axis.axis)), None)

    def csv(self, rows: Sequence[Row]) -> list[Row]:
        known = {one.name: one for one in self.every}
        return [
            {
                column: value
                for name, own in row.items()
                if not name.startswith("_")
                for column, value in _columns(known.get(name), name, own).items()
            }
            for row in rows
        ]

    def table(self, rows: Sequence[Row]) -> tables.Table:
        """Keys and quantities; of these only what any row has."""
        counted = [one for one in self.every if any(row.get(one.name) is not None for row in rows)]
        names = {one.name for one in self.every}
        keys = self.keys or {
            key: key for key, value in rows[0].items()
            if key not in names and key[0] != "_" and not isinstance(value, Estimate) and key != "trials"
        }  # fmt: skip
        return [
            {head: _word(row[key]) for head, key in keys.items() if key in row}
            | {one.head(str(row.get(self.facet, ""))): _cell(one, row) for one in counted}
            for row in rows
        ]


def _columns(quantity: Quantity | None, name: str, found: Any) -> Row:
    if quantity is not None:
        return quantity.columns(found)
    return columns(name, found) if isinstance(found, Estimate) else {name: found}


def _word(key: Any) -> str:
    return f"{key:,g}" if isinstance(key, float | int) else str(key)


def _cell(one: Quantity, row: Row) -> str:
    found = row[one.name]
    return tables.estimated(found) if isinstance(found, Estimate | None) else one.shown(found)


def shown(name: str, row: Row) -> Found:
    """What is drawn of a column."""
    found: Found = row.get(f"_{name}", row.get(name))
    return found


def value_of(found: Found) -> float | None:
    return found.value if isinstance(found, Estimate) else found


def estimate(found: Found) -> Estimate:
    return found if isinstance(found, Estimate) else Estimate(found or 0.0, None, None, 0, 0)


def cells(source: Source, form: Form) -> Iterator[Plot]:
    """A row a cell and facet, line by line in the order of the axis. Raises MissingSeries where one has no number."""
    along, by = form.axis(source), form.by
    axes = [axis for axis in (by, along) if axis]
    for panel in source.panels(*(axis.axis for axis in axes), partial=form.partial):
        for some in [panel.of(name) for name in panel.baselines] if by else [panel.cells]:
            lines = sorted({cell.at[by.axis] for cell in some}) if by else panel.baselines
            order = panel.values(along.axis) if along else []
            rows: list[Row] = []
            for line in lines:
                own = [cell for cell in some if (cell.at[by.axis] if by else cell.baseline) == line]
                for cell in sorted(own, key=lambda cell: order.index(cell.at[along.axis]) if along else 0):
                    rows += _of_cell(source, form, cell, line, axes)
            yield Plot(panel, rows)


def _of_cell(source: Source, form: Form, cell: Cell, line: str, axes: Sequence[Axis]) -> list[Row]:
    at = {axis.column: axis.value(cell) for axis in axes}
    rows, has = list[Row](), False
    for facet in form.facets:
        found = {
            one.name: one.model_copy(update={"where": one.where.replace("{}", facet)}).found(source, cell)
            for one in form.every
        }
        has = has or any(found[one.name] is not None for one in form.needed)
        key = {"baseline": cell.baseline, **at, **({form.facet: facet} if form.facet else {})}
        rows.append({**key, **found, "_line": line, "_cell": cell, "trials": cell.ids})
    if form.needed and not has:
        where = f" with {axes[-1].axis}={cell.at[axes[-1].axis]}" if axes else ""
        raise source.lacks(f"{form.lacks} of {cell.baseline}{where}")
    return rows


# Lines


class Lines(Form):
    """A line a baseline, or a value of the axis `by`. Each quantity that `says` something has axes of its own, in each facet.

    beside: axes next to each other. log: never from zero; False: always; else where only a logarithm shows all. band: an
    interval is a band. crosses: a count among the quantities, and its name; a line has a cross where it is first above 0.
    """

    beside: bool = False
    log: bool | None = None
    band: bool = False
    crosses: tuple[str, str] | None = None

    def drawn(self, rows: Sequence[Row]) -> Picture:
        names = list(dict.fromkeys(row.get("_line", row["baseline"]) for row in rows))
        every = self.along if isinstance(self.along, list) else [self.along]
        along = next((axis for axis in every if axis and axis.column in rows[0]), Axis(axis=""))
        facets = [one for one in self.facets if any(_known(row, self.quantities) for row in self._in(rows, one))]
        panes = [
            (facet, one, one.over or along)
            for facet in facets
            for one in self.quantities
            if one.says and (one.over is None or all(shown(one.over.column, row) for row in rows))
        ]
        panes.sort(key=lambda pane: pane[1].diagonal)  # last, wherever the CSV has it
        shape = (1, len(panes)) if self.beside else (len(panes), 1)
        shared = len({axis.column for *_, axis in panes}) == 1
        picture, grid = style.new_grid(max(2.0, 0.6 + shape[0]), *shape, sharex=shared, sharey=self.beside)
        for place, (axes, (facet, one, axis)) in enumerate(zip(picture.axes, panes, strict=True)):
            axes.set_ymargin(0.12)  # the highest marker whole
            own = self._in(rows, facet)
            self._lines(axes, own, names, one, axis)
            if axes in [row[0] for row in grid]:
                axes.set_ylabel(one.says.replace("{}", facet))
            if self.beside and facet:
                axes.set_title(facet, fontweight="bold", color=style.GREY)
            if axes in grid[-1] or axis != panes[place + 1][2]:
                axes.set_xlabel(axis.says)
            _ticks(axes, _steps(rows, axis), any(isinstance(row.get(axis.column), str) for row in rows), axis)
        style.legend(picture)
        return picture

    def _in(self, rows: Sequence[Row], facet: str) -> list[Row]:
        return [row for row in rows if not self.facet or row[self.facet] == facet]

    def _lines(self, axes: Axes, rows: Sequence[Row], names: Sequence[str], one: Series, axis: Axis) -> None:
        at, dotted = _steps(rows, axis), [other for other in self.quantities if other.dotted]
        drawn: list[float] = []
        for order, (name, look) in enumerate(style.looks(names).items()):
            own = [row for row in rows if row.get("_line", row["baseline"]) == name]
            for other in (one, *dotted):
                known = [(row, found) for row in own if (found := shown(other.name, row)) is not None]
                points = [(at[str(shown(axis.column, row))], estimate(found)) for row, found in known]
                if points and other.dotted:
                    xy = zip(*((x, found.value) for x, found in points), strict=True)
                    axes.plot(*xy, color=look[0], gid=f"{name}/{other.text}", **DOTTED)
                elif points:
                    _line(axes, name, points, look, order, self.band)
                    self._cross(axes, name, look[0], known, points)
                drawn += [found.value for _, found in points]
        for other in dotted:
            axes.plot([], [], color=style.GREY, label=other.text, **DOTTED)
        if one.diagonal:
            most = [0, max(at.values())]
            axes.plot(most, most, color=style.GREY, gid="all offered", **DOTTED)
        if self.log or (self.log is None and wide(drawn)):
            plain_log(axes)
        else:
            axes.set_ylim(bottom=0)

    def _cross(
        self, axes: Axes, name: str, colour: str, known: Sequence[tuple[Row, Any]], points: Sequence[Any]
    ) -> None:
        count, text = self.crosses or ("", "")
        first = next(
            (point for (row, _), point in zip(known, points, strict=True) if count and value_of(row[count])), None
        )
        if first is not None:
            axes.plot(first[0], first[1].value, "x", color=colour, markersize=9, gid=f"{name}/{text}", label=text)


def _known(row: Row, quantities: Sequence[Quantity]) -> bool:
    return any(shown(one.name, row) is not None for one in quantities)


def _steps(rows: Sequence[Row], axis: Axis) -> dict[str, float]:
    """Where the values of an axis stand: numbers there, and values of which one is no number at equal distances."""
    found = {str(one): one for one in (shown(axis.column, row) for row in rows)}
    if any(isinstance(one, str) for one in found.values()):
        return {value: float(at) for at, value in enumerate(in_order(found))}
    return {value: value_of(one) or 0.0 for value, one in found.items()}


def _ticks(axes: Axes, steps: Mapping[str, float], named: bool, axis: Axis) -> None:
    if named:
        axes.set_xticks(range(len(steps)), ["unlimited" if value == NO_VALUE else value for value in steps])
    elif axis.log:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(sorted(steps.values())[:: 1 + len(steps) // 9]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    elif axis.whole:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    else:
        axes.set_xlim(left=0)


def _line(axes: Axes, name: str, points: Points, look: tuple[str, str], order: int, band: bool) -> None:
    """Points with whiskers, or a band, where an estimate has an interval; a lower order lies on top. look: colour and marker.

    The line's gid is `name`, the interval's `name/interval`.
    """
    (colour, marker), above = look, 3 - order / 100
    xs, values = [x for x, _ in points], [one.value for _, one in points]
    if name == style.IDEAL:
        axes.plot(xs, values, color=colour, gid=name, label=name, **DASHED)
        return
    axes.plot(
        xs, values, color=colour, marker=marker, markersize=3.5, linewidth=1.3, gid=name, label=name, zorder=above,
        clip_on=False,  # a marker at the top of the axes is whole
    )  # fmt: skip
    known = [(x, one.ci_low, one.ci_high) for x, one in points if one.ci_low is not None and one.ci_high is not None]
    if not known:
        return
    at, low, high = zip(*known, strict=True)
    if band:
        axes.fill_between(at, low, high, color=colour, alpha=0.16, linewidth=0, gid=f"{name}/interval")
    else:
        axes.vlines(at, low, high, color=colour, linewidth=0.9, alpha=0.7, zorder=above, gid=f"{name}/interval")


def wide(values: Sequence[float]) -> bool:
    """Whether values span so much that only a logarithmic axis shows all of them."""
    return bool(values) and min(values) > 0 and max(values) > 20 * min(values)


def plain_log(axes: Axes) -> None:
    """A logarithmic y axis whose ticks are plain numbers."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
