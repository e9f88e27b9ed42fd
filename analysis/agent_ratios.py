"""How many agents each baseline carries, and how fast beside the first: python analysis/agent_ratios.py [--sweep ID]"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from any folder, installed or not

from analysis.drawing import tables
from analysis.drawing.agents import AXIS, COMMAND, STAGES, Scaling, latency_ratio, read, stage_ratio
from analysis.drawing.agents import applies as is_agents
from analysis.drawing.command_line import Figure
from analysis.drawing.publish import Drawing
from analysis.drawing.source import Source
from analysis.drawing.tables import Cell, Table
from pensieve.statistics import PairedRatio

NAME = "agent_ratios"
TITLE = "Agents: density and latency"


def applies(source: Source) -> bool:
    return is_agents(source) and len(source.swept(AXIS)) > 1


def tables_of(source: Source) -> list[Table]:
    found = []
    for panel, scalings in read(source):
        first = scalings[0]
        together = [
            load.agents
            for load in first.loads
            if all(scaling.at(load.agents).latency_ms[stage] for scaling in scalings for stage in STAGES)
        ]
        most = max(together, default=None)
        said = (
            "Carries: the largest number of agents of this sweep at which no turn was refused or failed for want of memory; "
            f"density: that number over {first.baseline}'s; "
            + (
                f"latency: of a baseline over {first.baseline} with {most} agents, geometric mean of the pairs of one seed "
                f"and agent, with its 95 % interval; reason / reflect: of the same baseline with {most} agents"
                if most is not None
                else "at no number of agents do all baselines complete turns of both stages"
            )
        )
        lines = [_line(scaling, first, most) for scaling in scalings]
        rows = [_row(scaling, first, most) for scaling in scalings]
        found.append(Table(panel, NAME, TITLE, said, lines, rows))
    return found


def draw(source: Source, folder: Path) -> list[Drawing]:
    return [tables.draw(table, folder) for table in tables_of(source)]


def density_ratio(one: Scaling, other: Scaling) -> tuple[float | None, str]:
    """Agents that `one` carries over those that `other` does, and as text: a bound where one of them met no limit."""
    if not one.density or not other.density:
        return None, "–"
    ratio = one.density / other.density
    if one.out_of_memory_at is None and other.out_of_memory_at is None:
        return None, "–" if one is not other else "1"
    bound = "≥ " if one.out_of_memory_at is None else "≤ " if other.out_of_memory_at is None else ""
    return ratio, f"{bound}{ratio:.3g}"


def _ratios(scaling: Scaling, first: Scaling, most: int | None) -> dict[str, PairedRatio | None]:
    if most is None:
        return dict.fromkeys((*STAGES, "stages"))
    ours, theirs = scaling.at(most), first.at(most)
    return {**{stage: latency_ratio(ours, theirs, stage) for stage in STAGES}, "stages": stage_ratio(ours)}


def _line(scaling: Scaling, first: Scaling, most: int | None) -> dict[str, Cell]:
    found = _ratios(scaling, first, most)
    limit = scaling.out_of_memory_at
    carried = "none" if scaling.density is None else f"{scaling.density}" if limit else f"≥ {scaling.density}"
    return {
        "baseline": tables.named(scaling.baseline),
        "carries\nagents": Cell(carried),
        "out of\nmemory at": Cell("none" if limit is None else str(limit)),
        "density\n(×)": Cell(density_ratio(scaling, first)[1]),
        **{
            f"{stage}\nlatency (×)": Cell("1") if scaling is first and most else tables.ratio(found[stage])
            for stage in STAGES
        },
        "reason /\nreflect (×)": tables.ratio(found["stages"]),
    }


def _row(scaling: Scaling, first: Scaling, most: int | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "baseline": scaling.baseline,
        "reference": first.baseline,
        "carries_agents": scaling.density,
        "out_of_memory_at": "none" if scaling.out_of_memory_at is None else scaling.out_of_memory_at,
        "density_ratio": density_ratio(scaling, first)[0],
        "density_ratio_text": density_ratio(scaling, first)[1],
        "compared_at_agents": most,
    }
    names = {"reason": "reason_latency_ratio", "reflect": "reflect_latency_ratio", "stages": "reason_over_reflect"}
    for key, one in _ratios(scaling, first, most).items():
        row[names[key]] = one and one.ratio
        row[f"{names[key]}_ci_low"] = one and one.ci_low
        row[f"{names[key]}_ci_high"] = one and one.ci_high
        row[f"{names[key]}_n"] = one and one.n
    return {**row, "trials": " ".join(load.cell.ids for load in scaling.loads)}


FIGURE = Figure(NAME, "how many agents a baseline carries, and how fast beside the first", COMMAND, applies, draw)


def main(argv: Sequence[str] | None = None) -> int:
    return tables.main(FIGURE, tables_of, argv)


if __name__ == "__main__":
    sys.exit(main())
