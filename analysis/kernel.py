"""Attention by backend, case by case, beside what the memory allows: python analysis/kernel.py [--sweep ID]"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from any folder, installed or not

from analysis.drawing import benchmarks, style
from analysis.drawing.bars import Group, height_in
from analysis.drawing.benchmarks import Benchmark, Timed
from analysis.drawing.command_line import Figure
from analysis.drawing.publish import Drawing, arrange, publish
from analysis.drawing.source import Source

NAME = "kernel"
TITLE = "Attention, by backend"
TARGET = "kernel"
LEAD = "Median over the limit measured in the same run (red), with the 95 % interval of the median; "


def applies(source: Source) -> bool:
    return benchmarks.applies(source, TARGET)


def draw(source: Source, folder: Path) -> list[Drawing]:
    return [draw_target(benchmarks.read(source, TARGET), NAME, TITLE, folder)]


def draw_target(found: Benchmark, name: str, title: str, folder: Path) -> Drawing:
    """Every case with all its backends, as multiples of its limit; the times stand beside the bars."""
    groups: list[Group] = []
    for case in found.cases:
        groups += benchmarks.floor_group(case, {one.backend: _text(one, case.floor) for one in case.timed})
    figure, axes = style.new_figure(height_in=height_in(groups) + 1.35)
    lead = f"{LEAD}{benchmarks.small_print(found)}"
    left = 0.10 + style.name_room(found.backends)
    benchmarks.draw_cases(
        figure, axes, found, groups, lambda: arrange(figure, found.panel, title, lead, left=left, right=0.08)
    )
    return publish(figure, found.panel, name, title, lead, benchmarks.rows(found), folder)


def _text(one: Timed, floor: float) -> str:
    return f"{benchmarks.digits(one.time.value)} {one.unit} ({benchmarks.digits(one.time.value / floor)}×)"


FIGURE = Figure(NAME, "attention by backend beside its limit", benchmarks.command(TARGET), applies, draw)


def main(argv: Sequence[str] | None = None) -> int:
    return benchmarks.main(FIGURE, TARGET, argv)


if __name__ == "__main__":
    sys.exit(main())
