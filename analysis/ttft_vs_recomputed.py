"""Time to first token against what was recomputed, with a regression: python analysis/ttft_vs_recomputed.py [--sweep ID]

A point is one query, a hit or a miss, of any split of the prefix and any baseline of the sweep.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.transforms import ScaledTranslation

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from any folder, installed or not

from analysis.drawing import command_line, style
from analysis.drawing.command_line import Figure
from analysis.drawing.invalidation import COMMAND, Step, applies, named, steps_of
from analysis.drawing.publish import Drawing, arrange, publish
from analysis.drawing.source import Panel, Source
from pensieve.errors import MissingSeries
from pensieve.statistics import Line, fit_line

NAME = "ttft_vs_recomputed"
TITLE = "Time to first token against recomputed tokens"
ALL = "all"

Queries = Mapping[str, Sequence[tuple[str, Step]]]
"""Of each baseline: (blocks, query)."""


def read(source: Source) -> list[tuple[Panel, Queries]]:
    """Hits and misses of each baseline, every split of the prefix in one panel. Raises MissingSeries where a baseline's
    engine does not report what it recomputed."""
    found = []
    for panel in source.panels("workload.blocks"):
        queries: dict[str, list[tuple[str, Step]]] = {name: [] for name in panel.baselines}
        for cell in panel.cells:
            steps = named(steps_of(source, cell), "hit", "miss")
            if any(step.recomputed is None for step in steps):
                others = ",".join(name for name in panel.baselines if name != cell.baseline) or "pensieve"
                raise MissingSeries(
                    f"The engine of {cell.baseline} does not report what it recomputed; leave it out with "
                    f"--baselines {others}, which `{source.command}` has or makes."
                )
            queries[cell.baseline] += [(cell.at["workload.blocks"], step) for step in steps]
        found.append((panel, queries))
    return found


def fit(queries: Queries, *baselines: str) -> Line:
    """Milliseconds against recomputed tokens, over the queries of these baselines (none: of all)."""
    points = {
        (step.key[0], f"{name}/{blocks}/{step.key[1]}"): [(float(step.recomputed or 0), step.ttft_ms)]
        for name in baselines or tuple(queries)
        for blocks, step in queries[name]
    }
    return fit_line(points)


def draw(source: Source, folder: Path) -> list[Drawing]:
    return [_draw(panel, queries, folder) for panel, queries in read(source)]


def _draw(panel: Panel, queries: Queries, folder: Path) -> Drawing:
    figure, axes = style.new_figure(height_in=3.0)
    names = list(queries)
    for index, name in enumerate(names):
        aside = (index - (len(names) - 1) / 2) * 2.4 / 72  # inches: baselines that coincide stay apart
        [points] = axes.plot(
            [float(step.recomputed or 0) for _, step in queries[name]], [step.ttft_ms for _, step in queries[name]],
            linestyle="none", marker=style.marker(name), markersize=3.6, markerfacecolor="none", alpha=0.8,
            markeredgecolor=style.colour(name), markeredgewidth=0.8, gid=name, label=name,
        )  # fmt: skip
        points.set_transform(axes.transData + ScaledTranslation(aside, 0, figure.dpi_scale_trans))
    line = fit(queries)
    reach = (0.0, max(float(step.recomputed or 0) for found in queries.values() for _, step in found))
    axes.plot(
        reach, [line.intercept.value + line.slope.value * x for x in reach], color="black", linewidth=1.0,
        linestyle=(0, (4, 2)), zorder=1.5, gid=f"line/{ALL}",
    )  # fmt: skip
    axes.text(0.03, 0.97, describe(line), transform=axes.transAxes, fontsize=7, va="top", linespacing=1.3)
    highest = max(step.ttft_ms for found in queries.values() for _, step in found)
    axes.set_ylim(0, 1.28 * highest)  # the upper part is the text's
    axes.set_xlim(-0.06 * reach[1], 1.06 * reach[1])
    axes.legend(loc="lower right", frameon=False, handletextpad=0.2, labelspacing=0.25, labelcolor="markeredgecolor")
    axes.set_xlabel("recomputed tokens")
    axes.set_ylabel("time to first token (ms)")
    n = sum(len(found) for found in queries.values())
    lead = (
        f"A point is one of {n:,} queries, hits and misses; the line is least squares through all of them, with the 95 % "
        "interval of its slope; baselines stand side by side where they coincide"
    )
    arrange(figure, panel, TITLE, lead, left=0.62)
    return publish(figure, panel, NAME, TITLE, lead, _rows(panel, queries), folder)


def describe(line: Line) -> str:
    slope = line.slope
    between = "" if slope.ci_low is None else f" [{slope.ci_low * 1e3:,.1f}, {slope.ci_high * 1e3:,.1f}]"
    squared = "not defined" if line.r_squared is None else f"{line.r_squared:.3f}"
    return f"{slope.value * 1e3:,.1f} ms per 1,000 tokens{between}\n{line.intercept.value:,.1f} ms without any; R² {squared}"


def _rows(panel: Panel, queries: Queries) -> list[dict[str, Any]]:
    """The lines (all baselines, then each by itself where its points allow one), then the points."""
    empty = {
        "baseline": "",
        "blocks": "",
        "seed": "",
        "session": "",
        "query": "",
        "recomputed_tokens": "",
        "ttft_ms": "",
    }
    lines = {ALL: fit(queries)}
    for name, found in queries.items():
        if len({step.recomputed for _, step in found}) > 1:
            lines[name] = fit(queries, name)
    ids = {name: " ".join(cell.ids for cell in panel.of(name)) for name in queries}
    ids[ALL] = " ".join(ids.values())
    rows = [
        {
            "kind": "line", **empty, "baseline": name, "slope_ms_per_token": line.slope.value,
            "slope_ci_low": line.slope.ci_low, "slope_ci_high": line.slope.ci_high,
            "intercept_ms": line.intercept.value, "r_squared": line.r_squared, "n": line.n, "n_seeds": line.groups,
            "trials": ids[name],
        }
        for name, line in lines.items()
    ]  # fmt: skip
    none = dict.fromkeys(list(rows[0])[len(empty) + 1 : -1], "")
    for name, found in queries.items():
        rows += [
            {
                "kind": "point", "baseline": name, "blocks": blocks, "seed": step.key[0], "session": step.key[1],
                "query": step.name, "recomputed_tokens": step.recomputed, "ttft_ms": step.ttft_ms, **none,
                "trials": ids[name],
            }
            for blocks, step in found
        ]  # fmt: skip
    return rows


FIGURE = Figure(NAME, "time to first token against recomputed tokens, with slope and R²", COMMAND, applies, draw)


def main(argv: Sequence[str] | None = None) -> int:
    return command_line.main(FIGURE, argv)


if __name__ == "__main__":
    sys.exit(main())
