"""Restoring KV from CPU memory: one after the other, or pipelined with compute: python analysis/swap.py [--sweep ID]"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from any folder, installed or not

from analysis.drawing import benchmarks
from analysis.drawing.benchmarks import BenchCase, Benchmark, Timed
from analysis.drawing.command_line import Figure
from analysis.drawing.publish import Drawing, publish
from analysis.drawing.source import Source
from pensieve.statistics import PairedRatio, paired_ratio

NAME = "swap"
TITLE = "Restoring KV: in sequence, and pipelined"
TARGET = "swap"
SEQUENTIAL, PIPELINED = "sequential", "pipelined"
LEAD = (
    "Median over the limit measured in the same run (red), with the 95 % interval of the median; faster: sequential over "
    "pipelined, repetition by repetition; overlap: as the benchmark counted it; "
)


def applies(source: Source) -> bool:
    return benchmarks.applies(source, TARGET)


def draw(source: Source, folder: Path) -> list[Drawing]:
    return [_draw(benchmarks.read(source, TARGET, (SEQUENTIAL, PIPELINED)), folder)]


def speed_up(case: BenchCase) -> PairedRatio:
    """How many times as long the sequential one takes, paired by repetition, since the two were interleaved."""
    sequential, pipelined = case.of(SEQUENTIAL), case.of(PIPELINED)
    assert sequential is not None and pipelined is not None, "read has made sure of both"
    sides = [{(0, str(place)): value for place, value in enumerate(one.values)} for one in (sequential, pipelined)]
    return paired_ratio(*sides)


def _draw(found: Benchmark, folder: Path) -> Drawing:
    figure, lead = benchmarks.draw_cases(found, TITLE, LEAD, _text, margin_in=1.45)
    speeds = {case.label: speed_up(case) for case in found.cases}
    rows = [
        {
            **row,
            "speed_up": speeds[str(row["case"])].ratio,
            "speed_up_ci_low": speeds[str(row["case"])].ci_low,
            "speed_up_ci_high": speeds[str(row["case"])].ci_high,
        }
        for row in benchmarks.rows(found)
    ]
    return publish(figure, found.panel, NAME, TITLE, lead, rows, folder)


def _text(case: BenchCase, one: Timed) -> str:
    said = f"{benchmarks.digits(one.time.value)} {one.unit}"
    if one.backend != PIPELINED:
        return said
    said += f", {speed_up(case).ratio:.2f}× faster"
    overlap = one.figures.get("overlap_pct")
    return said if overlap is None or overlap.value is None else f"{said}, {overlap.value:.0f} % overlap"


FIGURE = Figure(NAME, "swapping in sequence and pipelined, beside its limit", benchmarks.command(TARGET), applies, draw)


def main(argv: Sequence[str] | None = None) -> int:
    return benchmarks.main(FIGURE, TARGET, argv)


if __name__ == "__main__":
    sys.exit(main())
