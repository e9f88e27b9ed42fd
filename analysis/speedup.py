"""Speed-up of the first token at turns 1, 5, 10 and on average, as a table: python analysis/speedup.py [--sweep ID]

Stateless over this baseline, paired by seed and conversation; printed, drawn and written as CSV.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from any folder, installed or not

from analysis.drawing import tables
from analysis.drawing.command_line import Figure
from analysis.drawing.paired import LEAD, by_turn, has_reference, speed_up, ttfts
from analysis.drawing.publish import Drawing
from analysis.drawing.source import DEFAULT_COMMAND, Cell, Panel, Source
from analysis.drawing.tables import Table
from pensieve.results.summary import REFERENCE
from pensieve.statistics import PairedRatio

NAME = "speedup"
TITLE = "Speed-up of the first token over stateless"
TURNS = (1, 5, 10)
AVERAGE = "average"


@dataclass(frozen=True, slots=True)
class Row:
    """One baseline. at: by "turn 1", ..., and AVERAGE over the turns of a conversation; None: no such turn."""

    cell: Cell
    at: Mapping[str, PairedRatio | None]


def applies(source: Source) -> bool:
    return has_reference(source) and source.has_turns


def ratios(source: Source) -> list[tuple[Panel, list[Row]]]:
    """Every baseline but stateless. Raises MissingSeries and MixedPanel."""
    found = []
    for panel in source.panels():
        rows = {cell.baseline: ttfts(source, cell) for cell in panel.cells}
        reference = rows.pop(REFERENCE, [])
        table = []
        for cell in panel.cells:
            if cell.baseline == REFERENCE:
                continue
            at: dict[str, PairedRatio | None] = {}
            for turn in TURNS:
                sides = [
                    by_turn([one for one in side if one[1].turn == turn]) for side in (reference, rows[cell.baseline])
                ]
                at[f"turn {turn}"] = speed_up(*sides)
            at[AVERAGE] = speed_up(by_turn(reference), by_turn(rows[cell.baseline]))
            if at[AVERAGE] is None:
                raise source.lacks(f"turn that {cell.baseline} shares with {REFERENCE}")
            table.append(Row(cell, at))
        found.append((panel, table))
    return found


def read(source: Source) -> list[Table]:
    return [
        Table(
            panel,
            NAME,
            TITLE,
            LEAD,
            [
                {"baseline": tables.named(row.cell.baseline), **{at: tables.ratio(one) for at, one in row.at.items()}}
                for row in rows
            ],
            [line for row in rows for line in _csv(row)],
        )
        for panel, rows in ratios(source)
    ]


def draw(source: Source, folder: Path) -> list[Drawing]:
    return [tables.draw(table, folder) for table in read(source)]


def _csv(row: Row) -> list[dict[str, Any]]:
    return [
        {
            "baseline": row.cell.baseline,
            "at": head,
            "ttft_speed_up": ratio.ratio,
            "ci_low": ratio.ci_low,
            "ci_high": ratio.ci_high,
            "n_conversations": ratio.n,
            "n_seeds": ratio.n_seeds,
            "trials": row.cell.ids,
        }
        for head, ratio in row.at.items()
        if ratio is not None
    ]


FIGURE = Figure(NAME, "speed-up of the first token at turns 1, 5, 10 and on average", DEFAULT_COMMAND, applies, draw)


def main(argv: Sequence[str] | None = None) -> int:
    return tables.main(FIGURE, read, argv)


if __name__ == "__main__":
    sys.exit(main())
