"""First tokens of hot, warm and cold users against the load, a row a class: python analysis/hotness_load.py [--sweep ID]

The load is the interval between a user's requests, or the number of users.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from any folder, installed or not

from analysis.drawing import command_line, style
from analysis.drawing.command_line import Figure
from analysis.drawing.curves import draw_curve, load_axis
from analysis.drawing.estimates import percentile
from analysis.drawing.publish import Drawing, arrange, columns, publish
from analysis.drawing.source import BySession, Cell, Panel, Source, number
from analysis.hotness import CLASSES
from pensieve.statistics import Estimate

NAME = "hotness_load"
TITLE = "First token by how often users return"
LEAD = "Median over completed turns, with the 95 % interval"
COMMAND = "python runners/run.py experiment=hotness_interval -m"
AXES = {
    "workload.request_interval": "seconds between a user's requests (hot × 0.3, cold × 2.5)",
    "workload.users": "users at once, a third of each class",
}


@dataclass(frozen=True, slots=True)
class Point:
    """One baseline at one load. ttft_ms: of each class that occurs."""

    cell: Cell
    load: float
    ttft_ms: dict[str, Estimate]


def applies(source: Source) -> bool:
    return load_axis(source) in AXES and any(source.has_metric("ttft_ms_p50", label) for label in CLASSES)


def read(source: Source) -> list[tuple[Panel, list[Point]]]:
    """Points from the lowest value on. Raises MissingSeries and MixedPanel."""
    axis = load_axis(source)
    assert axis is not None, "asked only where it applies"
    found = []
    for panel in source.panels(axis):
        points = []
        for value in panel.values(axis):
            at = number(value)
            assert at is not None, f"{axis}={value} is not a number"
            points += [Point(cell, at, _by_class(source, cell)) for cell in panel.cells if cell.at[axis] == value]
        for point in points:
            if not point.ttft_ms:
                raise source.lacks(f"hot, warm or cold turn of {point.cell.baseline} with {axis}={point.load:g}")
        found.append((panel, points))
    return found


def draw(source: Source, folder: Path) -> list[Drawing]:
    axis = load_axis(source) or ""
    return [_draw(panel, points, axis, folder) for panel, points in read(source)]


def _by_class(source: Source, cell: Cell) -> dict[str, Estimate]:
    values: dict[str, BySession] = {}
    for trial in cell.trials:
        for row in source.turns(trial, "session", "label", "ttft_ms"):
            if row.label in CLASSES and row.ttft_ms is not None:
                key = (trial.seed, f"{row.session}/{trial.repeat}")
                values.setdefault(row.label, {}).setdefault(key, []).append(row.ttft_ms)
    return {label: percentile(values[label], 0.5) for label in CLASSES if label in values}


def _draw(panel: Panel, points: Sequence[Point], axis: str, folder: Path) -> Drawing:
    labels = [label for label in CLASSES if any(label in point.ttft_ms for point in points)]
    figure, grid = style.new_grid(1.2 + 1.15 * len(labels), len(labels), 1, sharex=True)
    ends: list[list[tuple[str, float, float]]] = []
    for label, [axes] in zip(labels, grid, strict=True):
        ends.append([])
        for baseline in reversed(panel.baselines):
            own = [point for point in points if point.cell.baseline == baseline and label in point.ttft_ms]
            draw_curve(axes, baseline, [(point.load, point.ttft_ms[label]) for point in own])
            if own:
                ends[-1].append((baseline, own[-1].load, own[-1].ttft_ms[label].value))
        axes.set_ylim(bottom=0)
        axes.set_ylabel(f"{label} users")
    figure.axes[-1].set_xlim(left=0)
    figure.axes[-1].set_xlabel(AXES[axis], fontsize=7)
    lead = f"Time to first token in ms. {LEAD}"
    arrange(figure, panel, f"{TITLE} (ms)", lead, left=0.56, right=style.name_room(panel.baselines))
    figure.subplots_adjust(hspace=0.16)
    for [axes], own_ends in zip(grid, ends, strict=True):
        style.label_ends(axes, own_ends)
    rows = [
        {
            "baseline": point.cell.baseline,
            axis: point.load,
            "class": label,
            **columns("ttft_ms_median", estimate),
            "trials": point.cell.ids,
        }
        for point in points
        for label, estimate in point.ttft_ms.items()
    ]
    return publish(figure, panel, NAME, TITLE, lead, rows, folder)


FIGURE = Figure(
    NAME, "first tokens of hot, warm and cold users against their number or interval", COMMAND, applies, draw
)


def main(argv: Sequence[str] | None = None) -> int:
    return command_line.main(FIGURE, argv)


if __name__ == "__main__":
    sys.exit(main())
