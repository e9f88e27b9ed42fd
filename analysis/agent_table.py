"""Agents in numbers: mean, median, 99th percentile, memory's limit: python analysis/agent_table.py [--sweep ID]"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from any folder, installed or not

from analysis.drawing import tables
from analysis.drawing.agents import COMMAND, STAGES, Load, applies, read
from analysis.drawing.command_line import Figure
from analysis.drawing.publish import Drawing, columns
from analysis.drawing.source import Source
from analysis.drawing.tables import Cell, Table
from pensieve.statistics import Estimate

NAME = "agent_table"
TITLE = "Latency of agents (ms)"
LEAD = (
    "Arrival to last token of completed turns, over seeds, agents and steps; percentiles by nearest rank; out of memory: "
    "turns refused or failed for want of it"
)


def tables_of(source: Source) -> list[Table]:
    found = []
    for panel, scalings in read(source):
        lines, rows = [], []
        for scaling in scalings:
            for load in scaling.loads:
                lines.append(_line(load, named=load is scaling.loads[0]))
                rows += [
                    {
                        "baseline": load.baseline,
                        "agents": load.agents,
                        "stage": stage,
                        "quantity": f"latency_ms_{name}",
                        **columns("value", estimate or Estimate(float("nan"), None, None, 0, 0)),
                        "out_of_memory_turns": load.out_of_memory,
                        "trials": load.cell.ids,
                    }
                    for stage in STAGES
                    for name, estimate in load.summary(stage).items()
                ]
        found.append(Table(panel, NAME, TITLE, LEAD, lines, rows))
    return found


def draw(source: Source, folder: Path) -> list[Drawing]:
    return [tables.draw(table, folder) for table in tables_of(source)]


def _line(load: Load, named: bool) -> dict[str, Cell]:
    cells = {"baseline": tables.named(load.baseline) if named else Cell(""), "agents": Cell(str(load.agents))}
    for stage in STAGES:
        for name, estimate in load.summary(stage).items():
            cells[f"{stage}\n{name}"] = tables.estimated(estimate) if name == "mean" else _plain(estimate)
    return {**cells, "out of\nmemory": Cell(str(load.out_of_memory) if load.out_of_memory else "–")}


def _plain(estimate: Estimate | None) -> Cell:
    return Cell(tables.estimated(estimate).text)  # a percentile's interval is in the CSV: six do not fit a column


FIGURE = Figure(NAME, "agents in numbers: mean, median, 99th percentile, memory's limit", COMMAND, applies, draw)


def main(argv: Sequence[str] | None = None) -> int:
    return tables.main(FIGURE, tables_of, argv)


if __name__ == "__main__":
    sys.exit(main())
