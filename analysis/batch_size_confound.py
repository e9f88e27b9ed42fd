"""Does the prefill batch decide what a miss costs? python analysis/batch_size_confound.py [--sweep ID]

Median time to first token of a miss against the positions that an iteration may compute.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from any folder, installed or not

from matplotlib.ticker import FixedLocator, NullLocator

from analysis.drawing import command_line, style
from analysis.drawing.command_line import Figure
from analysis.drawing.invalidation import Step, named, steps_of, ttft
from analysis.drawing.invalidation import applies as is_invalidation
from analysis.drawing.publish import Drawing, arrange, columns, publish
from analysis.drawing.source import Cell, Panel, Source, number
from pensieve.statistics import Estimate, PairedRatio, paired_ratio

NAME = "batch_size_confound"
TITLE = "A miss against the prefill batch"
AXIS = "scheduler.max_batch_tokens"
COMMAND = "python runners/run.py experiment=prefix_invalidation_batch -m"


@dataclass(frozen=True, slots=True)
class Series:
    """One baseline. misses: median time to first token in ms by batch size. effect: the largest batch over the smallest,
    paired by seed and conversation."""

    baseline: str
    misses: Mapping[int, Estimate]
    effect: PairedRatio
    cells: Sequence[Cell]


def applies(source: Source) -> bool:
    return is_invalidation(source) and len(source.swept(AXIS)) > 1


def read(source: Source) -> list[tuple[Panel, list[Series]]]:
    found = []
    for panel in source.panels(AXIS):
        sizes = sorted(int(number(value) or 0) for value in panel.values(AXIS))
        series = []
        for name in panel.baselines:
            cells = {int(number(cell.at[AXIS]) or 0): cell for cell in panel.of(name)}
            steps = {size: named(steps_of(source, cells[size]), "miss") for size in sizes}
            effect = paired_ratio(_values(steps[sizes[-1]]), _values(steps[sizes[0]]))
            misses = {size: ttft(steps[size]) for size in sizes}
            series.append(Series(name, misses, effect, [cells[size] for size in sizes]))
        found.append((panel, series))
    return found


def draw(source: Source, folder: Path) -> list[Drawing]:
    return [_draw(panel, series, folder) for panel, series in read(source)]


def _draw(panel: Panel, series: Sequence[Series], folder: Path) -> Drawing:
    figure, axes = style.new_figure(height_in=2.7)
    ends = []
    for index, one in enumerate(reversed(series)):  # the first one lies on top, thinner, so that an equal one is seen
        sizes, estimates = list(one.misses), list(one.misses.values())
        low, high = style.interval_ends(estimates)
        colour = style.colour(one.baseline)
        width = 1.3 + 1.1 * (len(series) - 1 - index)
        axes.fill_between(sizes, low, high, color=colour, alpha=0.16, linewidth=0)
        axes.plot(
            sizes, [estimate.value for estimate in estimates], color=colour, marker=style.marker(one.baseline),
            markersize=2.4 + width, linewidth=width, gid=one.baseline,
        )  # fmt: skip
        ends.append((one.baseline, float(sizes[-1]), estimates[-1].value))
    sizes = list(series[0].misses)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(sizes))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([f"{size:,}" for size in sizes])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("positions an iteration may compute")
    axes.set_ylabel("first token of a miss (ms)")
    effects = "; ".join(f"{one.baseline} {_ratio(one.effect)}" for one in series)
    lead = (
        f"Median over misses and its 95 % interval; batch of {sizes[-1]:,} over {sizes[0]:,}, paired by seed and "
        f"conversation: {effects}"
    )
    arrange(figure, panel, TITLE, lead, left=0.62, right=style.name_room(panel.baselines))
    style.label_ends(axes, ends)
    rows = [
        {
            "baseline": one.baseline,
            "max_batch_tokens": size,
            **columns("miss_ttft_ms_median", estimate),
            "largest_over_smallest": one.effect.ratio,
            "effect_ci_low": one.effect.ci_low,
            "effect_ci_high": one.effect.ci_high,
            "trials": cell.ids,
        }
        for one in series
        for (size, estimate), cell in zip(one.misses.items(), one.cells, strict=True)
    ]
    return publish(figure, panel, NAME, TITLE, lead, rows, folder)


def _values(steps: Sequence[Step]) -> dict[tuple[int, str], float]:
    return {step.key: step.ttft_ms for step in steps}


def _ratio(found: PairedRatio) -> str:
    between = "" if found.ci_low is None else f" [{found.ci_low:.2f}, {found.ci_high:.2f}]"
    return f"{found.ratio:.2f}{between}"


FIGURE = Figure(NAME, "time to first token of a miss against the prefill batch", COMMAND, applies, draw)


def main(argv: Sequence[str] | None = None) -> int:
    return command_line.main(FIGURE, argv)


if __name__ == "__main__":
    sys.exit(main())
