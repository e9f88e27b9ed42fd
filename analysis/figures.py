"""Every figure that a sweep supports, in one go: python analysis/figures.py [--sweep ID] [--all]

What a sweep does not support is named in a line, with the command that makes it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from any folder, installed or not

from sqlalchemy import select

from analysis import (
    ablation,
    agent_ratios,
    agent_scaling,
    agent_table,
    batch_size_confound,
    cache_architecture,
    cascade,
    decode_cost,
    goodput,
    hit_rates,
    hotness,
    hotness_load,
    invalidation_cost,
    invalidation_table,
    kernel,
    prefix_overview,
    speedup,
    swap,
    throughput_latency,
    ttft_by_turn,
    ttft_vs_recomputed,
)
from analysis.drawing.command_line import (
    Figure,
    chosen_source,
    chosen_store,
    guarded,
    parser,
    show,
)
from analysis.drawing.publish import Drawing
from analysis.drawing.source import Source
from pensieve.errors import MissingSeries, ResultsError
from pensieve.results.schema import Sweep
from pensieve.results.store import ResultsStore

FIGURES: tuple[Figure, ...] = (
    ttft_by_turn.FIGURE,
    speedup.FIGURE,
    hit_rates.FIGURE,
    throughput_latency.FIGURE,
    goodput.FIGURE,
    hotness.FIGURE,
    hotness_load.FIGURE,
    *ablation.FIGURES,
    invalidation_cost.FIGURE,
    ttft_vs_recomputed.FIGURE,
    cache_architecture.FIGURE,
    cascade.FIGURE,
    batch_size_confound.FIGURE,
    prefix_overview.FIGURE,
    invalidation_table.FIGURE,
    decode_cost.FIGURE,
    agent_scaling.FIGURE,
    agent_table.FIGURE,
    agent_ratios.FIGURE,
    kernel.FIGURE,
    swap.FIGURE,
)
"""In the order in which a report shows them."""


def draw_all(source: Source, folder: Path) -> tuple[list[Drawing], list[str]]:
    """The drawings of the figures that apply to the sweep, and a sentence for each figure that could not be drawn though
    it applies (a series is missing, or trials must not be mixed)."""
    drawings: list[Drawing] = []
    problems = []
    for figure in FIGURES:
        if figure.applies(source):
            try:
                drawings += figure.draw(source, folder)
            except ResultsError as error:
                problems.append(f"{figure.name}: {error}")
    return drawings, problems


def not_drawn(source: Source) -> list[str]:
    """The figures that the sweep does not support, a line for each command that makes some of them."""
    names: dict[str, list[str]] = {}
    for figure in FIGURES:
        if not figure.applies(source):
            names.setdefault(figure.command, []).append(figure.name)
    return [f"not drawn: {', '.join(found)}; run `{command}`" for command, found in names.items()]


def main(argv: Sequence[str] | None = None) -> int:
    options_of = parser("Draw every figure that the latest sweep, one sweep, or each sweep supports.")
    options_of.add_argument("--all", action="store_true", help="every sweep of the database, a folder each")
    options_of.add_argument(
        "--quiet", action="store_true", help="do not name the figures that the sweep does not support"
    )
    options = options_of.parse_args(argv)
    problems: list[str] = []

    def draw(source: Source, folder: Path) -> None:
        for one, place in _sources(source, folder, options):
            drawings, failed = draw_all(one, place)
            show(drawings)
            problems.extend(failed)
            if not options.quiet and not options.all:
                for line in not_drawn(one):
                    print(line, file=sys.stderr)
            if not drawings and not failed and not options.all:
                raise MissingSeries(f"Sweep {one.sweep.id} supports no figure; run `{one.command}` to complete it.")

    status = guarded(options, draw)
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else status


def _sources(first: Source, folder: Path, options: argparse.Namespace) -> list[tuple[Source, Path]]:
    if not options.all:
        return [(first, folder)]
    store = chosen_store(options)
    return [(chosen_source(store, options, one), folder / f"sweep-{one}") for one in _sweeps(store)]


def _sweeps(store: ResultsStore) -> list[int]:
    with store.database.reading() as connection:
        return list(connection.execute(select(Sweep.id).order_by(Sweep.id)).scalars())


if __name__ == "__main__":
    sys.exit(main())
