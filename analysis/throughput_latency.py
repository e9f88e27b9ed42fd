"""Normalized latency against the rate that was achieved, a line a baseline: python analysis/throughput_latency.py

Mean and 90th percentile: the paper gives both. The rate is the measured one, since under load that waits for replies a
slow baseline is asked less; points are joined in the order of the offered load.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from any folder, installed or not

from analysis.drawing import command_line, style
from analysis.drawing.command_line import Figure
from analysis.drawing.curves import LOADS, along_load, draw_curve, load_axis, wide
from analysis.drawing.estimates import mean, over_seeds, percentile
from analysis.drawing.publish import Drawing, arrange, columns, publish
from analysis.drawing.source import Cell, Panel, Source
from pensieve.statistics import Estimate

NAME = "throughput_latency"
TITLE = "Latency against throughput"
LEAD = "Latency over output tokens, with the 95 % interval; rate: mean over seeds"
COMMAND = (
    "python runners/run.py model=llama3_8b cache=small hardware=sim_a100_80g workload=sharegpt workload.conversations=60 "
    "workload.think_time_s=5 workload.request_rate=1,2,4,8 -m"
)
STATISTICS = ("mean", "p90")


@dataclass(frozen=True, slots=True)
class Point:
    """One baseline at one load. rate: achieved requests/s. latency: ms a token, by statistic."""

    cell: Cell
    load: str
    rate: Estimate
    latency: dict[str, Estimate]


def applies(source: Source) -> bool:
    return load_axis(source) is not None and source.has_metric("throughput_req_s")


def read(source: Source) -> list[tuple[Panel, list[Point]]]:
    """Points in the order of the load. Raises MissingSeries and MixedPanel."""
    return along_load(source, "throughput and latency", partial(_point, source))


def draw(source: Source, folder: Path) -> list[Drawing]:
    axis = load_axis(source) or ""
    return [_draw(panel, points, axis, folder) for panel, points in read(source)]


def _point(source: Source, cell: Cell, load: str) -> Point | None:
    rates = cell.metric("throughput_req_s")
    values = source.latency_per_token(cell)
    if not rates or not values:
        return None
    return Point(cell, load, over_seeds(rates), {"mean": mean(values), "p90": percentile(values, 0.9)})


def _draw(panel: Panel, points: Sequence[Point], axis: str, folder: Path) -> Drawing:
    figure, grid = style.new_grid(4.1, len(STATISTICS), 1, sharex=True)
    ends: dict[str, list[tuple[str, float, float]]] = {}
    for statistic, [axes] in zip(STATISTICS, grid, strict=True):
        for baseline in reversed(panel.baselines):
            own = [point for point in points if point.cell.baseline == baseline]
            draw_curve(axes, baseline, [(point.rate.value, point.latency[statistic]) for point in own])
            last = max(own, key=lambda point: point.rate.value)
            ends.setdefault(statistic, []).append((baseline, last.rate.value, last.latency[statistic].value))
        if wide([point.latency[statistic].value for point in points]):
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        axes.set_ylabel(f"{statistic} latency (ms/token)")
    axes = grid[-1][0]
    axes.set_xlim(left=0)
    axes.set_xlabel("achieved rate (requests/s)")
    lead = f"{LEAD}; {LOADS[axis].split(' (')[0]}: {', '.join(panel.values(axis))}"
    arrange(figure, panel, TITLE, lead, left=0.56, right=style.name_room(panel.baselines))
    figure.subplots_adjust(hspace=0.12)
    for statistic, [axes] in zip(STATISTICS, grid, strict=True):
        style.label_ends(axes, ends[statistic])
    return publish(figure, panel, NAME, TITLE, lead, [_row(point, axis) for point in points], folder)


def _row(point: Point, axis: str) -> dict[str, Any]:
    p90 = point.latency["p90"]
    return {
        "baseline": point.cell.baseline,
        axis: point.load,
        "achieved_req_s": point.rate.value,
        **columns("normalized_latency_ms_mean", point.latency["mean"]),
        "normalized_latency_ms_p90": p90.value,
        "p90_ci_low": p90.ci_low,
        "p90_ci_high": p90.ci_high,
        "trials": point.cell.ids,
    }


FIGURE = Figure(NAME, "normalized latency, mean and 90th percentile, against the achieved rate", COMMAND, applies, draw)


def main(argv: Sequence[str] | None = None) -> int:
    return command_line.main(FIGURE, argv)


if __name__ == "__main__":
    sys.exit(main())
