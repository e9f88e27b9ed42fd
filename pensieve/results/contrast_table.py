"""A contrast as a terminal shows it."""

from __future__ import annotations

from collections.abc import Callable

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pensieve.results.contrast import Contrast, Contrasts


def contrast_table(found: Contrasts, wanted: Callable[[str], bool]) -> RenderableType:
    """One table a group, of the metrics whose name is wanted; the notes below."""
    rows = [row for row in found.rows if wanted(row.metric)]
    parts: list[RenderableType] = []
    for group in dict.fromkeys(row.group for row in rows):
        table = Table(title=group or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("metric", no_wrap=True)
        for name in ("A", "B", "A / B", "95 % interval", "n"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("verdict", no_wrap=True)
        for row in rows:
            if row.group == group:
                table.add_row(*_cells(row))
        parts.append(table)
    if not rows:
        parts.append(Text("No metric of that name is in both."))
    return Group(*parts, *(Text(note) for note in found.notes))


def _cells(row: Contrast) -> tuple[str, ...]:
    name = f"{row.metric} [{row.label}]" if row.label else row.metric
    interval = "–" if row.ci_low is None or row.ci_high is None else f"{row.ci_low:.3g} to {row.ci_high:.3g}"
    ratio = "–" if row.ratio is None else f"{row.ratio:.3g}"
    # Text, since square brackets would be markup.
    return (
        name.replace("[", "\\["),
        f"{row.a:,.4g}",
        f"{row.b:,.4g}",
        ratio,
        interval,
        f"{row.n} {row.n_unit if row.n != 1 else row.n_unit.removesuffix('s')}",
        row.verdict,
    )
