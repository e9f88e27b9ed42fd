"""Latency of agents against how many there are, a line a baseline: python analysis/agent_scaling.py [--sweep ID]"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from any folder, installed or not

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from analysis.drawing import command_line, style
from analysis.drawing.agents import AXIS, COMMAND, STAGES, Scaling, fewest_turns, read
from analysis.drawing.agents import applies as is_agents
from analysis.drawing.command_line import Figure
from analysis.drawing.curves import draw_curve
from analysis.drawing.publish import Drawing, arrange, columns, publish
from analysis.drawing.source import Panel, Source
from pensieve.metrics import PERCENTILES
from pensieve.statistics import Estimate, enough_for

NAME = "agent_scaling"
TITLE = "Latency against the number of agents"


def applies(source: Source) -> bool:
    return is_agents(source) and len(source.swept(AXIS)) > 1


def draw(source: Source, folder: Path) -> list[Drawing]:
    return [_draw(panel, scalings, folder) for panel, scalings in read(source)]


def lead(scalings: Sequence[Scaling]) -> str:
    """What a point is, and how much it says."""
    fewest, enough = fewest_turns(scalings), enough_for(PERCENTILES["p99"])
    thin = f" (a p99 of fewer than {enough:,} turns rests on less than ten; the fewest here are {fewest})"
    short = "; × memory ran out" if any(scaling.out_of_memory_at for scaling in scalings) else ""
    return f"99th percentile over turns, nearest rank, with its 95 % interval{thin if fewest < enough else ''}{short}"


def _draw(panel: Panel, scalings: Sequence[Scaling], folder: Path) -> Drawing:
    figure, grid = style.new_row(2.6, len(STAGES))
    rows = []
    ends: list[tuple[str, float, float]] = []
    for axes, stage in zip(grid, STAGES, strict=True):
        for scaling in reversed(scalings):  # the first one lies on top
            points: list[tuple[float, Estimate]] = []
            for load in scaling.loads:
                found = load.summary(stage)["p99"]
                if found is not None:
                    points.append((float(load.agents), found))
                rows.append(
                    {
                        "baseline": scaling.baseline,
                        "stage": stage,
                        "agents": load.agents,
                        **columns("latency_ms_p99", found or Estimate(float("nan"), None, None, 0, 0)),
                        "out_of_memory_turns": load.out_of_memory,
                        "trials": load.cell.ids,
                    }
                )
            if points:
                draw_curve(axes, scaling.baseline, points)
            if stage == STAGES[-1] and points:
                ends.append((scaling.baseline, points[-1][0], points[-1][1].value))
            _mark_limit(axes, scaling, dict(points))
        axes.annotate(stage, (0.04, 0.97), xycoords="axes fraction", fontweight="bold", color=style.GREY, va="top")
    _scale(grid, scalings)
    grid[0].set_ylabel("p99 latency (ms)")
    said = lead(scalings)
    arrange(figure, panel, TITLE, said, left=0.62, right=style.name_room(panel.baselines))
    figure.subplots_adjust(wspace=0.12)
    style.label_ends(grid[-1], ends)
    return publish(figure, panel, NAME, TITLE, said, rows, folder)


def _mark_limit(axes: Axes, scaling: Scaling, points: Mapping[float, Estimate]) -> None:
    """A cross at the first number of agents at which memory ran out: on the line, or where it would go on."""
    limit = scaling.out_of_memory_at
    if limit is None:
        return
    near = min(points, key=lambda agents: abs(agents - limit), default=None)
    height = points[near].value if near is not None else 1.0
    axes.plot(
        [limit], [height], marker="x", markersize=7, markeredgewidth=1.6, color=style.colour(scaling.baseline),
        linestyle="none", gid=f"{scaling.baseline}/out of memory",
    )  # fmt: skip


def _scale(grid: Sequence[Axes], scalings: Sequence[Scaling]) -> None:
    """Logarithmic both ways, the same for all."""
    agents = sorted({load.agents for scaling in scalings for load in scaling.loads})
    limits = []
    for axes in grid:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(agents))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xticklabels([str(count) for count in agents])
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("agents")
        limits.append(axes.get_ylim())
    for axes in grid:
        axes.set_ylim(min(low for low, _ in limits), max(high for _, high in limits) * 1.15)
    for axes in grid[1:]:
        axes.tick_params(axis="y", labelleft=False)


FIGURE = Figure(NAME, "99th percentile of latency against the number of agents, by stage", COMMAND, applies, draw)


def main(argv: Sequence[str] | None = None) -> int:
    return command_line.main(FIGURE, argv)


if __name__ == "__main__":
    sys.exit(main())
