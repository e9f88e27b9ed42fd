"""Tables: printed in a terminal, and drawn for a page, with the same files as a figure beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table as RichTable

from analysis.drawing import command_line, style
from analysis.drawing.bars import text_in
from analysis.drawing.command_line import Figure
from analysis.drawing.provenance import footnote
from analysis.drawing.publish import Drawing, Row, arrange, publish
from analysis.drawing.source import Panel, Source
from pensieve.statistics import Estimate, PairedRatio

LINE_IN = 0.125
SIZE = 6.2
SMALL = 4.6
WIDTH = 120  # of a terminal that does not say


@dataclass(frozen=True, slots=True)
class Cell:
    """text: large; under: small, below it. colour: of the text."""

    text: str
    under: str = ""
    colour: str = "black"


@dataclass(frozen=True, slots=True)
class Table:
    """lines: cells by column, all with the same columns, of which the first names the line; line breaks in a column's name
    are kept. rows: the numbers behind it, for the CSV. lead: what a cell is."""

    panel: Panel
    name: str
    title: str
    lead: str
    lines: Sequence[Mapping[str, Cell]]
    rows: Sequence[Row]


def named(baseline: str) -> Cell:
    return Cell(baseline, colour=style.colour(baseline))


def estimated(found: Estimate | None) -> Cell:
    """A value with its interval under it; a dash where there is none."""
    if found is None:
        return Cell("–")
    digits = 0 if abs(found.value) >= 99.95 else 1 if abs(found.value) >= 9.995 else 2
    if found.ci_low is None or found.ci_high is None:
        return Cell(_text(found.value, digits))
    return Cell(_text(found.value, digits), f"[{_text(found.ci_low, digits)}, {_text(found.ci_high, digits)}]")


def ratio(found: PairedRatio | None) -> Cell:
    if found is None:
        return Cell("–")
    return estimated(Estimate(found.ratio, found.ci_low, found.ci_high, found.n, found.n_seeds))


def draw(table: Table, folder: Path) -> Drawing:
    """The table as a picture of one column's width."""
    heads = [column.split("\n") for column in table.lines[0]]
    deepest = max(len(head) for head in heads)
    rows = [2.0 if any(cell.under for cell in line.values()) else 1.25 for line in table.lines]
    height = (deepest + 0.5 + sum(rows)) * LINE_IN
    figure, axes = style.new_figure(height_in=height + 1.15)
    axes.grid(visible=False)
    axes.set_axis_off()
    axes.set_xlim(0, 1)
    axes.set_ylim(height / LINE_IN, 0)
    rights = _rights(table)
    for head, right in zip(heads, rights, strict=True):
        first = right is rights[0]
        for line, part in enumerate(reversed(head)):
            axes.text(
                0 if first else right, deepest - 0.15 - line, part, fontsize=SIZE, color=style.GREY, va="baseline",
                ha="left" if first else "right",
            )  # fmt: skip
    axes.plot([0, 1], [deepest + 0.2] * 2, color="black", linewidth=0.7)
    top = deepest + 0.4
    for number, (line, tall) in enumerate(zip(table.lines, rows, strict=True)):
        for index, ((column, cell), right) in enumerate(zip(line.items(), rights, strict=True)):
            side = {"ha": "left" if index == 0 else "right"}
            at = 0.0 if index == 0 else right
            axes.text(
                at, top + 0.6, cell.text, fontsize=SIZE, va="center", color=cell.colour,
                fontweight="bold" if index == 0 else "normal", gid=f"{number}/{column}", **side,
            )  # fmt: skip
            if cell.under:
                axes.text(at, top + 1.4, cell.under, fontsize=SMALL, va="center", color=style.GREY, **side)
        top += tall
    arrange(figure, table.panel, table.title, table.lead, left=0.06, right=0.06, gap=0.05)
    return publish(figure, table.panel, table.name, table.title, table.lead, table.rows, folder)


def main(figure: Figure, read: Callable[[Source], Sequence[Table]], argv: Sequence[str] | None = None) -> int:
    """As command_line.main, with the tables printed before the paths of their files."""

    def print_and_draw(source: Source, folder: Path) -> list[Drawing]:
        for table in read(source):
            show(table)
        return figure.draw(source, folder)

    return command_line.main(replace(figure, draw=print_and_draw), argv)


def show(table: Table, console: Console | None = None) -> None:
    """Print it. console: where to; by default standard output, WIDTH columns wide where that is not a terminal."""
    where = console or Console(highlight=False)
    if console is None and not where.is_terminal:
        where.width = WIDTH
    found = RichTable(title=" · ".join(filter(None, [table.title, table.panel.text])), title_justify="left")
    for index, column in enumerate(table.lines[0]):
        found.add_column(column, justify="left" if index == 0 else "right")
    for line in table.lines:
        found.add_row(*("\n".join(filter(None, (cell.text, cell.under))) for cell in line.values()))
    where.print(found)
    if table.panel.provenance.mixed:
        where.print(f"MIXED: {'; '.join(table.panel.provenance.mixed)}", markup=False)
    where.print(footnote(table.panel.provenance, table.lead), markup=False)


def _text(value: float, digits: int) -> str:
    return f"{round(value, digits) + 0.0:,.{digits}f}".replace("-", "−")  # + 0.0: no negative zero


def _rights(table: Table) -> list[float]:
    """Right edges of the columns as shares of the width: each as wide as its longest text, the rest shared out."""
    widths = []
    for index, column in enumerate(table.lines[0]):
        cells = [line[column] for line in table.lines]
        texts = max(text_in(cell.text, SIZE, bold=index == 0) for cell in cells)
        unders = max(text_in(cell.under, SMALL) for cell in cells)
        heads = max(text_in(part, SIZE) for part in column.split("\n"))
        widths.append(max(texts, unders, heads))
    room = style.WIDTH_IN - 0.12
    gap = (room - sum(widths)) / max(len(widths) - 1, 1)
    ends, at = [], 0.0
    for width in widths:
        at += width
        ends.append(at / room)
        at += gap
    return ends
