"""What a changed prefix costs, a bar for a hit and one for a miss: python analysis/invalidation_cost.py [--sweep ID]

Median times to first token of [A, B, Q] and [B, Q] after [A, B] was warmed, for each split of the prefix that was swept.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from any folder, installed or not

from analysis.drawing import command_line, style
from analysis.drawing.bars import Bar, Group, draw_groups, height_in, place_values, signed
from analysis.drawing.command_line import Figure
from analysis.drawing.invalidation import COMMAND, applies, degradation_pct, named, steps_of, ttft
from analysis.drawing.publish import Drawing, Row, arrange, columns, publish
from analysis.drawing.source import Panel, Source

NAME = "invalidation_cost"
TITLE = "What a changed prefix costs"
LEAD = (
    "Median time to first token and its 95 % interval, of [A, B, Q] (hit) and of [B, Q] (miss) after [A, B] was warmed; "
    "in brackets the miss over the hit, of means"
)


def draw(source: Source, folder: Path) -> list[Drawing]:
    return [_draw(source, panel, folder) for panel in source.panels("workload.blocks")]


def _draw(source: Source, panel: Panel, folder: Path) -> Drawing:
    groups: list[Group] = []
    rows: list[Row] = []
    for blocks in panel.values("workload.blocks"):
        for index, cell in enumerate(cell for cell in panel.cells if cell.at["workload.blocks"] == blocks):
            steps = steps_of(source, cell)
            bars, colour = [], style.colour(cell.baseline)
            change = degradation_pct(steps)
            for kind in ("hit", "miss"):
                estimate = ttft(named(steps, kind))
                more = f" ({signed(change.ratio)} %)" if kind == "miss" else ""
                gid = f"{cell.baseline}/{blocks}/{kind}"
                bars.append(Bar(estimate, colour, f"{kind} {estimate.value:,.1f}{more}", gid, kind == "miss"))
                rows.append(
                    {
                        "baseline": cell.baseline,
                        "blocks": blocks,
                        "query": kind,
                        **columns("ttft_ms_median", estimate),
                        "degradation_pct": change.ratio if kind == "miss" else None,
                        "degradation_ci_low": change.ci_low if kind == "miss" else None,
                        "degradation_ci_high": change.ci_high if kind == "miss" else None,
                        "trials": cell.ids,
                    }
                )
            groups.append(Group(cell.baseline, colour, bars, f"A/B = {blocks} tokens" if index == 0 else ""))
    figure, axes = style.new_figure(height_in=height_in(groups) + 1.25)
    draw_groups(axes, groups)
    axes.set_xlabel("time to first token (ms)")
    arrange(figure, panel, TITLE, LEAD, left=0.10 + style.name_room(panel.baselines), right=0.08)
    place_values(figure, axes, groups)
    return publish(figure, panel, NAME, TITLE, LEAD, rows, folder)


FIGURE = Figure(NAME, "what a changed prefix costs: hit against miss", COMMAND, applies, draw)


def main(argv: Sequence[str] | None = None) -> int:
    return command_line.main(FIGURE, argv)


if __name__ == "__main__":
    sys.exit(main())
