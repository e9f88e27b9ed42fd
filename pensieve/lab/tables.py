"""Tables: the same cells as Markdown in a file, and printed in a terminal."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from pensieve.lab.statistics import Estimate
from pensieve.units import NONE as NONE  # told to whoever makes a table

Table = Sequence[Mapping[str, str]]
"""Lines of cells by column, all with the same columns, of which the first names the line."""
WIDTH = 120  # of a terminal that does not say


def estimated(found: Estimate | None) -> str:
    """A value, its interval below it; a dash where there is none."""
    if found is None:
        return NONE
    digits = 0 if abs(found.value) >= 99.95 else 1 if abs(found.value) >= 9.995 else 2
    if found.ci_low is None or found.ci_high is None:
        return _text(found.value, digits)
    return f"{_text(found.value, digits)}\n[{_text(found.ci_low, digits)}, {_text(found.ci_high, digits)}]"


def markdown(table: Table, title: str, note: str) -> str:
    """The table as a page of Markdown: title, cells in one line each, note."""
    heads = list(table[0])
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *([line[head] for head in heads] for line in table)]
    rows = ["| " + " | ".join(_one_line(cell) for cell in line) + " |" for line in lines]
    return "\n".join([f"# {title}", "", *rows, "", note, ""])


def grid(
    table: Table, title: str = "", left: Collection[str] = (), heads: bool = True, fold: bool = False
) -> RichTable:
    """For a terminal, without lines between the cells; texts are markup. left: columns that are not of numbers, beside the
    first. fold: a cell may take several lines."""
    found = RichTable(
        title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=not fold,
        show_header=heads,
    )  # fmt: skip
    for place, column in enumerate(table[0]):
        found.add_column(column, justify="left" if place == 0 or column in left else "right", no_wrap=not fold)
    for line in table:
        found.add_row(*line.values())
    return found


def show(table: Table, title: str, note: str, console: Console | None = None) -> None:
    """Print it. console: where to; by default standard output, WIDTH columns wide where that is not a terminal."""
    where = console or Console(highlight=False)
    if console is None and not where.is_terminal:
        where.width = WIDTH
    where.print(grid(table, title, fold=True))
    where.print(note, markup=False)


def _one_line(cell: str) -> str:
    """Of a cell or a head; "degra-\\ndation" is one word again."""
    return cell.replace("-\n", "").replace("\n", " ").replace("|", "\\|")


def _text(value: float, digits: int) -> str:
    return f"{round(value, digits) + 0.0:,.{digits}f}".replace("-", "−")  # + 0.0: no negative zero
