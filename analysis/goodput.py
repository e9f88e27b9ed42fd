"""Turns a second that kept the promise, against the load: python analysis/goodput.py [--sweep ID]

Needs a sweep with slo.ttft_ms or slo.tpot_ms. One value a trial: an interval is due from five seeds on.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from any folder, installed or not

from analysis import throughput_latency
from analysis.drawing import command_line, style
from analysis.drawing.command_line import Figure
from analysis.drawing.curves import LOADS, along_load, draw_curve, load_axis
from analysis.drawing.estimates import FEWEST_SEEDS, over_seeds
from analysis.drawing.publish import Drawing, arrange, columns, publish
from analysis.drawing.source import Cell, Panel, Source, number
from pensieve.statistics import Estimate

NAME = "goodput"
TITLE = "Goodput against load"
COMMAND = throughput_latency.COMMAND.replace(" -m", " slo.ttft_ms=200 slo.tpot_ms=50 -m")


@dataclass(frozen=True, slots=True)
class Point:
    """One baseline at one load. goodput, throughput: requests/s, those that kept the promise and all."""

    cell: Cell
    load: float
    goodput: Estimate
    throughput: Estimate


def applies(source: Source) -> bool:
    return load_axis(source) is not None and source.has_metric("goodput_req_s")


def read(source: Source) -> list[tuple[Panel, list[Point]]]:
    """Points in the order of the load. Raises MissingSeries and MixedPanel."""
    return along_load(source, "goodput", _point)


def draw(source: Source, folder: Path) -> list[Drawing]:
    axis = load_axis(source) or ""
    return [_draw(panel, points, axis, folder) for panel, points in read(source)]


def _point(cell: Cell, load: str) -> Point | None:
    good, every, at = cell.metric("goodput_req_s"), cell.metric("throughput_req_s"), number(load)
    return Point(cell, at, over_seeds(good), over_seeds(every)) if good and every and at is not None else None


def promise(panel: Panel) -> str:
    """What the sweep's slo asks for."""
    slo = panel.cells[0].trials[0].config.get("slo") or {}
    names = {"ttft_ms": "first token", "tpot_ms": "each further token"}
    kept = [f"{text} within {slo[name]:g} ms" for name, text in names.items() if slo.get(name) is not None]
    return " and ".join(kept) or "a promise that was not recorded"


def _draw(panel: Panel, points: Sequence[Point], axis: str, folder: Path) -> Drawing:
    figure, axes = style.new_figure(height_in=3.0)
    ends = []
    for baseline in reversed(panel.baselines):
        own = [point for point in points if point.cell.baseline == baseline]
        axes.plot(
            [point.load for point in own], [point.throughput.value for point in own], color=style.colour(baseline),
            linewidth=0.9, linestyle=(0, (1, 1.5)), gid=f"{baseline}/all",
        )  # fmt: skip
        draw_curve(axes, baseline, [(point.load, point.goodput) for point in own])
        ends.append((baseline, own[-1].load, own[-1].goodput.value))
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.set_xlabel(LOADS[axis])
    axes.set_ylabel("goodput (requests/s)")
    lead = f"Solid: turns with {promise(panel)}; dotted: all turns; means over seeds"
    fewest = min(point.goodput.groups for point in points)
    if fewest < FEWEST_SEEDS:
        lead += f", n = {fewest}, no interval"
    arrange(figure, panel, TITLE, lead, left=0.5, right=style.name_room(panel.baselines))
    style.label_ends(axes, ends)
    return publish(figure, panel, NAME, TITLE, lead, [_row(point, axis) for point in points], folder)


def _row(point: Point, axis: str) -> dict[str, Any]:
    return {
        "baseline": point.cell.baseline,
        axis: point.load,
        **columns("goodput_req_s", point.goodput),
        "throughput_req_s": point.throughput.value,
        "trials": point.cell.ids,
    }


FIGURE = Figure(NAME, "turns a second within slo.ttft_ms and slo.tpot_ms, against the load", COMMAND, applies, draw)


def main(argv: Sequence[str] | None = None) -> int:
    return command_line.main(FIGURE, argv)


if __name__ == "__main__":
    sys.exit(main())
