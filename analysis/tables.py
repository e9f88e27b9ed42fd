"""Tables: the same cells drawn for a page and printed in a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.table import Table as MatplotlibTable
from rich.console import Console
from rich.table import Table as RichTable

from analysis import style
from pensieve.statistics import Estimate, PairedRatio

Table = Sequence[Mapping[str, str]]
"""Lines of cells by column, all with the same columns, of which the first names the line."""
LINE_IN = 0.12
SIZE = 6.4
WIDTH = 120  # of a terminal that does not say
NONE = "–"


def estimated(found: Estimate | PairedRatio | None) -> str:
    """A value, its interval below it; a dash where there is none."""
    if found is None:
        return NONE
    value = found.value if isinstance(found, Estimate) else found.ratio
    digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    if found.ci_low is None or found.ci_high is None:
        return _text(value, digits)
    return f"{_text(value, digits)}\n[{_text(found.ci_low, digits)}, {_text(found.ci_high, digits)}]"


def draw(table: Table) -> Figure:
    """The table as a picture of one column's width, in letters as large as fit."""
    heads = list(table[0])
    texts = [heads, *([line[head] for head in heads] for line in table)]
    tall = [max(cell.count("\n") + 1 for cell in line) + 0.6 for line in texts]
    figure, axes = style.new_axes(sum(tall) * LINE_IN)
    axes.set_axis_off()
    drawn = MatplotlibTable(axes, loc="upper left")
    drawn.auto_set_font_size(False)
    for row, line in enumerate(texts):
        for column, text in enumerate(line):
            side = "right" if column else "left"
            cell = drawn.add_cell(row, column, 1.0, tall[row] / sum(tall), text=text, loc=side)
            cell.set_linewidth(0.7)
            cell.visible_edges = "open" if row else "B"
            cell.PAD = 0.08 if column else 0.0
            cell.get_text().set(gid=f"{row - 1}/{heads[column]}", linespacing=1.15, fontsize=SIZE)
            if row == 0:
                cell.get_text().set_color(style.GREY)
            elif column == 0:
                cell.get_text().set(color=style.colour(text), fontweight="bold")
    drawn.auto_set_column_width(range(len(heads)))
    axes.add_table(drawn)
    drawn.set_in_layout(False)
    figure.draw_without_rendering()
    width = drawn.get_window_extent().width
    room = figure.bbox.width - 4 * style.MARGIN_IN * figure.dpi
    if width > room:
        for cell in drawn.get_celld().values():
            cell.get_text().set_fontsize(0.97 * SIZE * room / width)
    return figure


def show(table: Table, title: str, note: str, console: Console | None = None) -> None:
    """Print it. console: where to; by default standard output, WIDTH columns wide where that is not a terminal."""
    where = console or Console(highlight=False)
    if console is None and not where.is_terminal:
        where.width = WIDTH
    found = RichTable(title=title, title_justify="left")
    for index, column in enumerate(table[0]):
        found.add_column(column, justify="left" if index == 0 else "right")
    for line in table:
        found.add_row(*line.values())
    where.print(found)
    where.print(note, markup=False)


def _text(value: float, digits: int) -> str:
    return f"{round(value, digits) + 0.0:,.{digits}f}".replace("-", "−")  # + 0.0: no negative zero
