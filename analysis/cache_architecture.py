"""How much slower a miss is than a hit, by the cache a baseline keeps: python analysis/cache_architecture.py [--sweep ID]"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from any folder, installed or not

from analysis.drawing import command_line, style
from analysis.drawing.bars import Bar, Group, draw_groups, height_in, place_values, signed
from analysis.drawing.command_line import Figure
from analysis.drawing.invalidation import COMMAND, applies, degradation_pct, steps_of
from analysis.drawing.publish import Drawing, Row, arrange, columns, publish
from analysis.drawing.source import Panel, Source
from pensieve.statistics import Estimate

NAME = "cache_architecture"
TITLE = "How much slower a miss is than a hit"
LEAD = (
    "(miss − hit) / hit of the mean times to first token and its 95 % interval, paired by round, for each A/B in tokens; "
    "below 0: the shorter prompt of a miss costs less, since a hit is computed too"
)


def draw(source: Source, folder: Path) -> list[Drawing]:
    return [_draw(source, panel, folder) for panel in source.panels("workload.blocks")]


def _draw(source: Source, panel: Panel, folder: Path) -> Drawing:
    groups: list[Group] = []
    rows: list[Row] = []
    for name in panel.baselines:
        bars, colour = [], style.colour(name)
        for cell in panel.of(name):
            blocks = cell.at["workload.blocks"]
            found = degradation_pct(steps_of(source, cell))
            estimate = Estimate(found.ratio, found.ci_low, found.ci_high, found.n, found.n_seeds)
            bars.append(Bar(estimate, colour, f"{signed(found.ratio)} %  ({blocks})", f"{name}/{blocks}"))
            rows.append(
                {"baseline": name, "blocks": blocks, **columns("degradation_pct", estimate), "trials": cell.ids}
            )
        groups.append(Group(name, colour, bars))
    figure, axes = style.new_figure(height_in=height_in(groups) + 1.4)
    draw_groups(axes, groups)
    axes.set_xlabel("time to first token of a miss over a hit (%)")
    arrange(figure, panel, TITLE, LEAD, left=0.10 + style.name_room(panel.baselines), right=0.08)
    place_values(figure, axes, groups)
    return publish(figure, panel, NAME, TITLE, LEAD, rows, folder)


FIGURE = Figure(NAME, "how much slower a miss is than a hit, a bar a baseline", COMMAND, applies, draw)


def main(argv: Sequence[str] | None = None) -> int:
    return command_line.main(FIGURE, argv)


if __name__ == "__main__":
    sys.exit(main())
