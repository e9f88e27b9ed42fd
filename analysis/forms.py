"""The forms of figures: tables, lines over an axis, and the bars of analysis/bars.py. A figure's file in conf/figure says
where its rows come from and how they are drawn; the CSV is those rows.

The map of analysis/sizes.py is a form of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator
from pydantic import BaseModel

from analysis import style
from analysis.quantities import Found, Quantity, columns
from analysis.registry import Plot, Row
from analysis.sweep import NO_VALUE, Cell, Panel, Source, in_order, number
from pensieve.lab import tables
from pensieve.lab.metric_registry import PERCENTILES
from pensieve.lab.results.trials import field_of
from pensieve.lab.statistics import Estimate, enough_for

DOTTED: dict[str, Any] = {"linewidth": 0.9, "linestyle": (0, (1, 1.5))}
DASHED: dict[str, Any] = {"linewidth": 1.0, "linestyle": (0, (3, 1.5))}
Points = Sequence[tuple[float, Estimate]]


class Axis(BaseModel, frozen=True, extra="forbid"):
    """axis: a swept field, or a column of the rows. name: its column in the CSV. says: what the axis is called. log: a
    logarithm, with a tick at each value. per: so many of it are one there. whole: its values are counts."""

    axis: str
    name: str = ""
    says: str = ""
    log: bool = False
    per: float = 1.0
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
    dotted line. look: on the axes of the quantity before, "dotted", or "thin" and grey, once for all lines."""

    over: Axis | None = None
    diagonal: bool = False
    look: str = ""


@dataclass(frozen=True, slots=True)
class Data:
    """What is drawn of one panel. rows: a mapping a point with the same keys, its columns in the CSV. An Estimate becomes
    several of them. What begins with _ is for the drawing alone:

    _line, _section, _name, _colour, _text: of the line or the bar. _X: what is drawn in place of column X.

    words: for {} in the lead; said: goes behind it. more: the title's end. table: where it is not that of the form.
    """

    panel: Panel
    rows: Sequence[Row]
    said: str = ""
    words: Mapping[str, str] = field(default_factory=dict)
    more: str = ""
    table: tables.Table | None = None


class Form(BaseModel, extra="forbid"):
    """A table; and what all forms share.

    rows: a function(source, form) that yields Data, by its dotted name; by default a row a cell, of the `quantities`, along
    the axis `along` (of several the one that was swept) and `by`, in each of the `facets`: names that stand for {} in their
    `where`; facet: their column in the CSV. keys: what the table calls the columns before the quantities. lacks: what a cell
    without numbers has none of. more: a field of the trials, and what its values add to the title.
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
    more: dict[str, str] = {}
    given: dict[str, Any] = {}

    def plots(self, source: Source) -> Iterator[Plot]:
        for data in resolve_name(self.rows)(source, self, **self.given):
            picture, said = self.drawn(data.rows)
            lead = self.lead.format(**data.words) + said + data.said
            table = self.table(data.rows) if data.table is None else data.table
            yield Plot(data.panel, picture, lead, self.csv(data.rows), table, data.more)

    def drawn(self, rows: Sequence[Row]) -> tuple[Picture | None, str]:
        """The picture, and what it adds to the caption."""
        return None, ""

    @property
    def every(self) -> Sequence[Quantity]:
        return self.quantities

    @property
    def needed(self) -> Sequence[Quantity]:
        """A cell without any of them is missing."""
        return self.every

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

    def table(self, rows: Sequence[Row]) -> tables.Table | None:
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


def cells(source: Source, form: Form) -> Iterator[Data]:
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
            yield Data(panel, rows, more=_more(form.more, some))


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


def _more(fields: Mapping[str, str], cells: Sequence[Cell]) -> str:
    found = {name: {field_of(trial, name) for cell in cells for trial in cell.trials} - {None} for name in fields}
    each = {name: " or ".join(f"{value:g}" for value in sorted(map(float, own))) for name, own in found.items()}
    return "".join(fields[name].format(text) for name, text in each.items() if text)


# Lines


class Lines(Form):
    """A line a baseline, or a value of the axis `by`. Each quantity that `says` something has axes of its own, in each facet.

    beside: axes next to each other. log: never from zero; False: always; else where only a logarithm shows all. band: an
    interval is a band. joined: False: nothing lies between two values of the axis. crosses: a count of a cell; the line has a
    cross where it is first above 0. even: a level, and its name.
    """

    beside: bool = False
    log: bool | None = None
    band: bool = False
    joined: bool = True
    crosses: Quantity | None = None
    even: tuple[float, str] | None = None

    @property
    def every(self) -> Sequence[Quantity]:
        return [*self.quantities, *([self.crosses] if self.crosses else [])]

    @property
    def needed(self) -> Sequence[Quantity]:
        return self.quantities

    def drawn(self, rows: Sequence[Row]) -> tuple[Picture, str]:
        names = list(dict.fromkeys(row.get("_line", row["baseline"]) for row in rows))
        every = self.along if isinstance(self.along, list) else [self.along]
        along = next((axis for axis in every if axis and axis.column in rows[0]), Axis(axis=""))
        facets = [one for one in self.facets if any(_known(row, self.quantities) for row in self._in(rows, one))]
        panes = [
            (facet, one, one.over or along)
            for facet in facets
            for one in self.quantities
            if one.says and not one.look and (one.over is None or all(shown(one.over.column, row) for row in rows))
        ]
        panes.sort(key=lambda pane: pane[1].diagonal)  # last, wherever the CSV has it
        shape = (1, len(panes)) if self.beside else (len(panes), 1)
        shared = len({axis.column for *_, axis in panes}) == 1
        picture, grid = style.new_grid(max(2.0, 0.6 + shape[0]), *shape, sharex=shared, sharey=self.beside)
        for place, (axes, (facet, one, axis)) in enumerate(zip(picture.axes, panes, strict=True)):
            axes.set_ymargin(0.12)  # the highest marker whole
            with_it = [other for other in self.quantities if other is one or (other.look and one.over is None)]
            self._lines(axes, self._in(rows, facet), names, with_it, axis)
            if not self.joined:
                axes.set_xlim(-0.45, len(_steps(rows, axis)) - 0.55)
            if axes in [row[0] for row in grid]:
                axes.set_ylabel(one.says.replace("{}", facet))
            if self.beside and facet:
                axes.set_title(facet, fontweight="bold", color=style.GREY)
            if axes in grid[-1] or axis != panes[place + 1][2]:
                axes.set_xlabel(axis.says)
            named = any(isinstance(row.get(axis.column), str) for row in rows)
            _ticks(axes, _steps(rows, axis), named, axis)
        said = _thin(rows, self.quantities)
        if self.crosses and any(value_of(row[self.crosses.name]) for row in rows):
            for axes, facet in zip(picture.axes, facets, strict=True):
                self._cross(axes, self._in(rows, facet), along, self.crosses)
            said += f"; × {self.crosses.says}"
        style.legend(picture)
        return picture, said

    def _in(self, rows: Sequence[Row], facet: str) -> list[Row]:
        return [row for row in rows if not self.facet or row[self.facet] == facet]

    def _lines(self, axes: Axes, rows: Sequence[Row], names: Sequence[str], ones: Sequence[Series], axis: Axis) -> None:
        at, apart = _steps(rows, axis), 0.0 if self.joined else min(0.18, 0.6 / len(names))
        drawn: list[float] = []
        for order, (name, look) in enumerate(style.looks(names).items()):
            own = [row for row in rows if row.get("_line", row["baseline"]) == name]
            aside = (order - (len(names) - 1) / 2) * apart
            for one in ones:
                known = [(row, found) for row in own if (found := shown(one.name, row)) is not None]
                points = [(at[str(shown(axis.column, row))] + aside, estimate(found)) for row, found in known]
                if not points or (one.look == "thin" and order):
                    continue
                xy = zip(*((x, found.value) for x, found in points), strict=True)
                if one.look == "thin":
                    axes.plot(*xy, color=style.GREY, linewidth=0.7, label=one.text, gid=one.text)
                elif one.look:
                    axes.plot(*xy, color=look[0], gid=f"{name}/{one.text}", **DOTTED)
                else:
                    _line(axes, name, points, look, order=order, band=self.band, joined=self.joined)
                drawn += [found.value for _, found in points]
        for one in ones:
            if one.look == "dotted":
                axes.plot([], [], color=style.GREY, label=one.text, **DOTTED)
            if one.diagonal:
                most = [0, max(at.values())]
                axes.plot(most, most, color=style.GREY, gid="all offered", **DOTTED)
        if self.even:
            level, name = self.even
            axes.axhline(level, color=style.colour(name), label=name, **DASHED)
        if self.log or (self.log is None and wide(drawn)):
            plain_log(axes, "y")
        else:
            axes.set_ylim(bottom=0)

    def _cross(self, axes: Axes, rows: Sequence[Row], along: Axis, cross: Quantity) -> None:
        """Where a line's count is first above 0: on the line, or where it would go on."""
        at = _steps(rows, along)
        for name, (colour, _) in style.looks(row["_line"] for row in rows).items():
            own = [row for row in rows if row["_line"] == name]
            first = next((at[str(row[along.column])] for row in own if value_of(row[cross.name])), None)
            if first is None:
                continue
            known = [
                (abs(at[str(row[along.column])] - first), value)
                for row in own for one in self.quantities if (value := value_of(row[one.name]))
            ]  # fmt: skip
            axes.plot(
                [first], [min(known)[1] if known else 1.0], marker="x", markersize=7, markeredgewidth=1.6,
                color=colour, linestyle="none", gid=f"{name}/{cross.says}", label=cross.says,
            )  # fmt: skip


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
        _mark_counts(axes, sorted(steps.values())[:: 1 + len(steps) // 9])
    elif axis.whole:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    else:
        axes.set_xlim(left=0)
    if axis.per != 1:
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / axis.per:.2g}"))


def _thin(rows: Sequence[Row], quantities: Sequence[Quantity]) -> str:
    """What a 99th percentile of few turns is worth."""
    every = [row[one.name] for row in rows for one in quantities if one.how == "p99"]
    fewest = min((one.n for one in every if isinstance(one, Estimate)), default=None)
    enough = enough_for(PERCENTILES["p99"])
    if fewest is None or fewest >= enough:
        return ""
    return f" (a p99 of fewer than {enough:,} turns rests on less than ten; the fewest here are {fewest})"


def _line(
    axes: Axes, name: str, points: Points, look: tuple[str, str], *, order: int = 0, band: bool = False, joined: bool = True
) -> None:  # fmt: skip
    """Points with whiskers, or a band, where an estimate has an interval; a lower order lies on top. joined: False where x
    is a category, since nothing lies between two of them. look: colour and marker.

    The line's gid is `name`, the interval's `name/interval`.
    """
    (colour, marker), above = look, 3 - order / 100
    if name == style.IDEAL:
        axes.plot(
            [x for x, _ in points], [one.value for _, one in points], color=colour, gid=name, label=name, **DASHED
        )
        return
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


def _mark_counts(axes: Axes, counts: Sequence[float]) -> None:
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
