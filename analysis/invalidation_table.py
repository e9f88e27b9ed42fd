"""A changing prefix in numbers, a line an engine: python analysis/invalidation_table.py [--sweep ID]"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from any folder, installed or not

from analysis.drawing import tables
from analysis.drawing.command_line import Figure
from analysis.drawing.invalidation import COMMAND, QUANTITIES, applies, summaries
from analysis.drawing.publish import Drawing, columns
from analysis.drawing.source import Source
from analysis.drawing.tables import Table

NAME = "invalidation_table"
TITLE = "A changing prefix, engine by engine"
LEAD = (
    "Hit, miss: medians of times to first token over conversations, with 95 % intervals; degradation: (miss − hit) / hit "
    "of means, paired by round; overhead: when streaming minus when not, paired by round; decoding: output tokens over "
    "the latency of the throughput step; warm-up: [A, B] for one token"
)


def read(source: Source) -> list[Table]:
    """A table for each split of the prefix."""
    found = []
    for panel, engines in summaries(source):
        lines, rows = [], []
        for one in engines:
            cells = {title: tables.estimated(one.quantities[name]) for name, title in QUANTITIES.items()}
            lines.append({"engine": tables.named(one.baseline), **cells})
            rows += [
                {"baseline": one.baseline, "quantity": name, **columns("value", estimate), "trials": one.cell.ids}
                for name, estimate in one.quantities.items()
                if estimate is not None
            ]
        found.append(Table(panel, NAME, TITLE, LEAD, lines, rows))
    return found


def draw(source: Source, folder: Path) -> list[Drawing]:
    return [tables.draw(table, folder) for table in read(source)]


FIGURE = Figure(NAME, "hit, miss, throughput, warm-up and degradation, a line an engine", COMMAND, applies, draw)


def main(argv: Sequence[str] | None = None) -> int:
    return tables.main(FIGURE, read, argv)


if __name__ == "__main__":
    sys.exit(main())
