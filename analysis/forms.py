"""The forms of figures: tables, lines over an axis, and lying bars, whole or of parts, with their values beside them. A
figure's file in conf/figure says where its rows come from and how they are drawn; the CSV is those rows.

The map of analysis/sizes.py is a form of its own.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import floor, log10
from pkgutil import resolve_name
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator
from pydantic import BaseModel

from analysis import style
from analysis.quantities import Found, Quantity, columns, size
from analysis.registry import Plot, Row
from analysis.sweep import LOADS, Source
from pensieve.lab.metrics import Slo
from pensieve.lab.results.frame import Cell
from pensieve.lab.statistics import Estimate, estimated
from pensieve.units import NO_VALUE, Table, in_order, number

DASHED: dict[str, Any] = {"linewidth": 1.0, "linestyle": (0, (3, 1.5))}
Points = Sequence[tuple[float, Estimate]]


class Axis(BaseModel, frozen=True, extra="forbid"):
    """axis: a swept field, or a column of the rows. name: its column in the CSV. says: what the axis is called. log: a
    logarithm, with a tick at each value. whole: its values are counts; named: they are names, as they were given."""

    axis: str
    name: str = ""
    says: str = ""
    log: bool = False
    whole: bool = False
    named: bool = False

    @property
    def column(self) -> str:
        return self.name or self.axis

    def value(self, cell: Cell) -> Any:
        """As the CSV has it: a number, or a name."""
        found = None if self.named else number(cell.at[self.axis])
        return cell.at[self.axis] if found is None else int(found) if self.whole else found


class Form(BaseModel, extra="forbid"):
    """A table; and what all forms share.

    rows: a function(source, form) that yields plots without lead and picture, by its dotted name; by default a row a cell, of
    the `quantities`, along the axis `along` where it was swept (of several, or LOADS, the first that was), and `by`. facets:
    names that stand for {} in their `where` and `label`, a row each where a cell has something of it; facet: their column in
    the CSV. keys: what the table calls the columns before the quantities.
    """

    lead: str
    rows: str = "analysis.forms.cells"
    quantities: list[Quantity] = []
    along: Axis | list[Axis] | Literal["load"] | None = None
    by: Axis | None = None
    facet: str = ""
    facets: list[str] = [""]
    keys: dict[str, str] = {}

    def plots(self, source: Source) -> Iterator[Plot]:
        for plot in resolve_name(self.rows)(source, self):
            lead = self.lead.format(objective=objective(source), **plot.words) + plot.said
            csv, table = self.csv(plot.rows), self.table(plot.rows)
            yield replace(plot, rows=csv, lead=lead, table=table, picture=self.drawn(plot.rows))

    def drawn(self, rows: Sequence[Row]) -> Picture | None:
        return None

    @property
    def every(self) -> Sequence[Quantity]:
        return self.quantities

    @property
    def axes(self) -> list[Axis]:
        if self.along == "load":
            return [Axis(axis=field, says=says, whole=says.endswith("at once")) for field, says in LOADS.items()]
        return self.along if isinstance(self.along, list) else [self.along] if self.along else []

    def axis(self, source: Source) -> Axis | None:
        return next((axis for axis in self.axes if source.several(axis.axis)), None)

    def numbers(self, source: Source, cell: Cell, facet: str) -> Row:
        those = (
            one.model_copy(update={"where": one.where.replace("{}", facet), "label": one.label.replace("{}", facet)})
            for one in self.every
        )
        key = {self.facet: facet} if self.facet else {}
        return key | {one.name: one.found(source, cell) for one in those}

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

    def table(self, rows: Sequence[Row]) -> Table:
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


def objective(source: Source) -> str:
    """What the sweep's slo asks of a turn."""
    slo = Slo.of_sweep(source.sweep.overrides)
    asked = {"first token": slo.ttft_ms, "each further token": slo.tpot_ms}
    return " and ".join(f"{text} within {most:g} ms" for text, most in asked.items() if most is not None)


def _columns(quantity: Quantity | None, name: str, found: Any) -> Row:
    if quantity is not None:
        return quantity.columns(found)
    return columns(name, found) if isinstance(found, Estimate) else {name: found}


def _word(key: Any) -> str:
    return f"{key:,g}" if isinstance(key, float | int) else str(key)


def _cell(one: Quantity, row: Row) -> str:
    found = row[one.name]
    return estimated(found) if isinstance(found, Estimate | None) else one.shown(found)


def shown(name: str, row: Row) -> Found:
    """What is drawn of a column."""
    found: Found = row.get(f"_{name}", row.get(name))
    return found


def value_of(found: Found) -> float | None:
    return found.value if isinstance(found, Estimate) else found


def estimate(found: Found) -> Estimate:
    return found if isinstance(found, Estimate) else Estimate(found or 0.0, None, None, 0, 0)


def cells(source: Source, form: Form) -> Iterator[Plot]:
    """A row a cell and facet, line by line in the order of the axis. Raises MissingSeries where no cell has a number."""
    along, by = form.axis(source), form.by
    axes = [axis for axis in (by, along) if axis]
    for panel in source.panels(*(axis.axis for axis in axes)):
        for some in [panel.of(name) for name in panel.baselines] if by else [panel.cells]:
            some = [cell for cell in some if cell.baseline not in {one.against for one in form.every}]
            lines = sorted({cell.at[by.axis] for cell in some}) if by else panel.baselines
            order = panel.values(along.axis) if along else []
            rows: list[Row] = []
            for line in lines:
                own = [cell for cell in some if (cell.at[by.axis] if by else cell.baseline) == line]
                for cell in sorted(own, key=lambda cell: order.index(cell.at[along.axis]) if along else 0):
                    at = {axis.column: axis.value(cell) for axis in axes}
                    found = [form.numbers(source, cell, facet) for facet in form.facets]
                    rows += [
                        {"baseline": cell.baseline, **at, **own, "_line": line, "_cell": cell, "trials": cell.ids}
                        for own in found if not form.facet or _known(own, form.every)
                    ]  # fmt: skip
            if form.every and not any(_known(row, form.every) for row in rows):
                raise source.lacks("turn that counts here")
            yield Plot(panel, rows)


# Lines


class Lines(Form):
    """A line a baseline, or a value of the axis `by`. Each quantity that `says` something has axes of its own, in each facet.

    over: what they stand over, where that is not `along`. log: never from zero; False: always; else where only a logarithm
    shows all. crosses: a count among the quantities, and its name: a line has a cross at the
    first above 0.
    """

    over: Axis | None = None
    log: bool | None = None
    crosses: tuple[str, str] | None = None

    def drawn(self, rows: Sequence[Row]) -> Picture:
        axis = self.over or next((one for one in self.axes if one.column in rows[0]), Axis(axis=""))
        rows = [row for row in rows if shown(axis.column, row) is not None]
        names = list(dict.fromkeys(row.get("_line", row["baseline"]) for row in rows))
        panes = [
            (own, one, one.says.replace("{}", facet))
            for facet in self.facets
            if (own := [row for row in rows if not self.facet or row[self.facet] == facet])
            for one in self.quantities
            if one.says and any(shown(one.name, row) is not None for row in own)
        ]
        picture, grid = style.new_grid(max(2.0, 0.6 + len(panes)), len(panes), sharex=True)
        at = _steps(rows, axis)
        for [axes], (own, one, says) in zip(grid, panes, strict=True):
            axes.set_ymargin(0.12)  # the highest marker whole
            axes.set_ylabel(says)
            self._lines(axes, own, names, one, [at[str(shown(axis.column, row))] for row in own])
        grid[-1][0].set_xlabel(axis.says)
        _ticks(grid[-1][0], at, any(isinstance(row.get(axis.column), str) for row in rows), axis)
        style.legend(picture)
        return picture

    def _lines(self, axes: Axes, rows: Sequence[Row], names: Sequence[str], one: Quantity, xs: Sequence[float]) -> None:
        known = [
            (row, x, found) for row, x in zip(rows, xs, strict=True) if (found := shown(one.name, row)) is not None
        ]
        for order, (name, look) in enumerate(style.looks(names).items()):
            own = [(row, x, estimate(found)) for row, x, found in known if row.get("_line", row["baseline"]) == name]
            if own:
                _line(axes, name, [(x, found) for _, x, found in own], look, order)
            count, text = self.crosses or ("", "")
            for x, found in [(x, found) for row, x, found in own if count and value_of(row[count])][:1]:
                axes.plot(x, found.value, "x", color=look[0], markersize=9, gid=f"{name}/{text}", label=text)
        if self.log or (self.log is None and wide([estimate(found).value for *_, found in known])):
            plain_log(axes)
        else:
            axes.set_ylim(bottom=0)


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


def _line(axes: Axes, name: str, points: Points, look: tuple[str, str], order: int) -> None:
    """Points with whiskers where an estimate has an interval; a lower order lies on top. look: colour and marker.

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


# Bars


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
    part are one. ends: what has an interval between two parts. mark: a column whose value is marked on the bar. origin: where
    bars begin. limits: of the axes.
    """

    says: str
    quantities: list[Quantity] = []
    parts: dict[str, str] | str = {}
    per: float = 1.0
    ends: list[str] = []
    mark: str = ""
    origin: float = 0.0
    limits: tuple[float, float] | None = None

    def bars(self, rows: Sequence[Row], at: str) -> list[Bar]:
        """Of one group; `at` names it."""
        if self.parts:
            return [self._stack(rows, at)]
        found = []
        for row, one in ((row, one) for row in rows for one in self.quantities if one.drawn):
            own, gid, hatched = shown(one.name, row), f"{at}/{one.name}", row.get("_hatched", one.hatched)
            if own is not None:
                found.append(Bar(estimate(own), row.get(f"_{one.name}_text", one.shown(own)), gid, hatched))
        return found

    def _stack(self, rows: Sequence[Row], gid: str) -> Bar:
        if isinstance(self.parts, str):
            [one] = self.quantities
            found = {row[self.parts]: value_of(row[one.name]) for row in rows}
            gid = f"{gid}/{one.name}"
        else:
            found = {label: value_of(rows[0].get(column)) for label, column in self.parts.items()}
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
        elif self.origin:
            axes.margins(x=0.2)  # for the numbers beyond the intervals
            axes.autoscale_view()


Groups = Mapping[str, Sequence[Row]]
"""By their names."""


class Bars(Form):
    """A group of bars a baseline, in each of the `sides`; along an axis one for each of its values, a section a baseline.
    Rows of one's own name their groups by `_name` and `_section`."""

    sides: list[Side]

    @property
    def every(self) -> Sequence[Quantity]:
        of_sides = (one for side in self.sides for one in side.quantities)
        return list({one.name: one for one in (*self.quantities, *of_sides)}.values())

    def drawn(self, rows: Sequence[Row]) -> Picture:
        sections: dict[str, dict[str, list[Row]]] = {}
        for row in rows:
            section, name = self._place(row)
            sections.setdefault(section, {}).setdefault(name, []).append(row)
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
        for axes, side in zip(grid[-1], sides, strict=True):
            side.scale(axes, [one for one in values[side.says] if one], 3 if len(sides) > 1 else 5)
        style.legend(picture)
        return picture

    def _place(self, row: Row) -> tuple[str, str]:
        """Section and name."""
        axis = next((one for one in self.axes if one.column in row), None)
        if axis is not None:
            return ", ".join(filter(None, [row["baseline"], axis.says])), row[axis.column].removesuffix(" tokens")
        return row.get("_section", row.get(self.facet, "")), str(row["_name"] if "_name" in row else row["baseline"])

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
                axes.plot([row[side.mark]], middles[-1:], **_MARK, label=BOUND, gid=f"{section}/{name}/bound")
            top += room + _GAP
        axes.set_yticks(middles, list(groups) if names else [""] * len(groups))
        for label, (name, rows) in zip(axes.get_yticklabels(), groups.items(), strict=True):
            baseline = rows[0].get("baseline")  # whose name has its colour
            label.set(color=style.colour(name) if name == baseline else "black", fontweight="bold")
        return values


def _bar(axes: Axes, one: Bar, y: float, origin: float, colour: str) -> None:
    found, error, start = one.found, None, origin
    if found.ci_low is not None and found.ci_high is not None:
        error = [[max(0.0, found.value - found.ci_low)], [max(0.0, found.ci_high - found.value)]]
    for part, length in one.parts.items():
        [patch] = axes.barh(
            y, length, left=start, height=0.84, color=style.PARTS[part], edgecolor=style.EDGE, linewidth=0.4,
            label=part.replace("_", " "),
        )  # fmt: skip
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
