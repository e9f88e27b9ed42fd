"""How much sooner hot, warm and cold users see their first token than without a cache: python analysis/hotness.py

Stateless over this baseline, paired by seed and conversation, for each class of users.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from any folder, installed or not

from analysis.drawing import command_line, style
from analysis.drawing.command_line import Figure
from analysis.drawing.paired import LEAD, by_turn, has_reference, others, speed_up, ttfts
from analysis.drawing.publish import Drawing, arrange, publish
from analysis.drawing.source import Cell, Panel, Source
from pensieve.results.summary import REFERENCE
from pensieve.statistics import PairedRatio

NAME = "hotness"
TITLE = "Speed-up by how often users return"
COMMAND = "python runners/run.py experiment=hotness -m"
CLASSES = ("hot", "warm", "cold")


@dataclass(frozen=True, slots=True)
class Series:
    """One baseline: the speed-up of each class that occurs."""

    cell: Cell
    classes: dict[str, PairedRatio]


def applies(source: Source) -> bool:
    return has_reference(source) and any(source.has_metric("ttft_ms_p50", label) for label in CLASSES)


def read(source: Source) -> list[tuple[Panel, list[Series]]]:
    """Every baseline but stateless. Raises MissingSeries and MixedPanel."""
    found = []
    for panel in source.panels():
        rows = {cell.baseline: ttfts(source, cell, "label") for cell in panel.cells}
        series = []
        for cell in panel.cells:
            if cell.baseline == REFERENCE:
                continue
            classes = {}
            for label in CLASSES:
                sides = [by_turn(rows[name], lambda row: row.label == label) for name in (REFERENCE, cell.baseline)]  # noqa: B023
                ratio = speed_up(*sides)
                if ratio is not None:
                    classes[label] = ratio
            if not classes:
                raise source.lacks(f"hot, warm or cold turn that {cell.baseline} shares with {REFERENCE}")
            series.append(Series(cell, classes))
        found.append((panel, series))
    return found


def draw(source: Source, folder: Path) -> list[Drawing]:
    return [_draw(panel, series, folder) for panel, series in read(source)]


def _draw(panel: Panel, series: Sequence[Series], folder: Path) -> Drawing:
    figure, axes = style.new_figure(height_in=2.9)
    labels = [label for label in CLASSES if any(label in one.classes for one in series)]
    apart = min(0.18, 0.6 / len(series))
    ends = []
    for index, one in enumerate(series):
        name, colour = one.cell.baseline, style.colour(one.cell.baseline)
        aside = (index - (len(series) - 1) / 2) * apart
        own = [label for label in labels if label in one.classes]
        xs = [labels.index(label) + aside for label in own]
        ratios = [one.classes[label] for label in own]
        axes.plot(
            xs, [ratio.ratio for ratio in ratios], color=colour, marker=style.marker(name), markersize=4,
            linewidth=0.8, alpha=0.9, gid=name,
        )  # fmt: skip
        for x, ratio in zip(xs, ratios, strict=True):
            if ratio.ci_low is not None and ratio.ci_high is not None:
                axes.vlines(x, ratio.ci_low, ratio.ci_high, color=colour, linewidth=1.1).set_gid(f"{name}/interval")
        ends.append((name, len(labels) - 1 + (len(series) - 1) / 2 * apart, ratios[-1].ratio))
    axes.axhline(1.0, color=style.colour(REFERENCE), linewidth=0.9, linestyle=(0, (3, 1.5)))
    ends.append((REFERENCE, len(labels) - 1 + (len(series) - 1) / 2 * apart, 1.0))
    axes.set_xlim(-0.45, len(labels) - 1 + (len(series) - 1) / 2 * apart + 0.06)
    axes.set_xticks(range(len(labels)), [f"{label} users" for label in labels])
    axes.set_ylim(bottom=0)
    axes.set_ylabel("speed-up of the first token (×)")
    arrange(figure, panel, TITLE, LEAD, left=0.45, right=style.name_room([*others(panel), REFERENCE]), gap=0.26)
    style.label_ends(axes, ends)
    return publish(figure, panel, NAME, TITLE, LEAD, [row for one in series for row in _rows(one)], folder)


def _rows(one: Series) -> list[dict[str, Any]]:
    return [
        {
            "baseline": one.cell.baseline,
            "class": label,
            "ttft_speed_up": ratio.ratio,
            "ci_low": ratio.ci_low,
            "ci_high": ratio.ci_high,
            "n_conversations": ratio.n,
            "n_seeds": ratio.n_seeds,
            "trials": one.cell.ids,
        }
        for label, ratio in one.classes.items()
    ]


FIGURE = Figure(NAME, "speed-up of hot, warm and cold users over stateless serving", COMMAND, applies, draw)


def main(argv: Sequence[str] | None = None) -> int:
    return command_line.main(FIGURE, argv)


if __name__ == "__main__":
    sys.exit(main())
