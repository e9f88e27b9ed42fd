"""Attention by backend, case by case, beside what the memory allows: python analysis/kernel.py [--sweep ID]"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from any folder, installed or not

from analysis.drawing import benchmarks
from analysis.drawing.benchmarks import BenchCase, Timed
from analysis.drawing.command_line import Figure
from analysis.drawing.publish import Drawing, publish
from analysis.drawing.source import Source

NAME = "kernel"
TITLE = "Attention, by backend"
TARGET = "kernel"
LEAD = "Median over the limit measured in the same run (red), with the 95 % interval of the median; "


def applies(source: Source) -> bool:
    return benchmarks.applies(source, TARGET)


def draw(source: Source, folder: Path) -> list[Drawing]:
    found = benchmarks.read(source, TARGET)
    figure, lead = benchmarks.draw_cases(found, TITLE, LEAD, _text, margin_in=1.35)
    return [publish(figure, found.panel, NAME, TITLE, lead, benchmarks.rows(found), folder)]


def _text(case: BenchCase, one: Timed) -> str:
    """The time, and how many times the limit it is."""
    return f"{benchmarks.digits(one.time.value)} {one.unit} ({benchmarks.digits(one.time.value / case.floor)}×)"


FIGURE = Figure(NAME, "attention by backend beside its limit", benchmarks.command(TARGET), applies, draw)


def main(argv: Sequence[str] | None = None) -> int:
    return benchmarks.main(FIGURE, TARGET, argv)


if __name__ == "__main__":
    sys.exit(main())
