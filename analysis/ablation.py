"""One choice changed at a time, a figure each: python analysis/ablation.py {eviction,scheduler,chunk,...} [--sweep ID]

The choices are the overlays conf/experiment/ablation_*.yaml; a line for each value, a column for each of what it changes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from any folder, installed or not

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from analysis.drawing import command_line, style
from analysis.drawing.command_line import Figure
from analysis.drawing.estimates import FEWEST_SEEDS, over_seeds, percentile
from analysis.drawing.publish import Drawing, arrange, columns, publish
from analysis.drawing.shares import PARTS, Shares, shares, stack
from analysis.drawing.source import Cell, Panel, Source
from pensieve.results.summary import varying_axes
from pensieve.statistics import Estimate

ROW_IN = 0.25


@dataclass(frozen=True, slots=True)
class Measure:
    """A column. head: over it, with the unit. of: None where a cell's trials do not record it."""

    name: str
    head: str
    of: Callable[[Source, Cell], Estimate | Shares | None]


@dataclass(frozen=True, slots=True)
class Ablation:
    """axis: what is swept; None: the baselines themselves. value: how a swept value reads. only: the baselines compared."""

    name: str
    title: str
    axis: str | None
    measures: Sequence[Measure]
    value: Callable[[Cell, str], str] = lambda cell, text: text
    only: Sequence[str] = ()

    @property
    def command(self) -> str:
        return f"python runners/run.py experiment={self.name} -m"


@dataclass(frozen=True, slots=True)
class Line:
    cell: Cell
    value: str
    found: Sequence[Estimate | Shares]


def _ttft(p: float, source: Source, cell: Cell) -> Estimate | None:
    values = source.by_session(cell, ("ttft_ms",), lambda row: row.ttft_ms)
    return percentile(values, p) if values else None


def _per_token(p: float, source: Source, cell: Cell) -> Estimate | None:
    values = source.latency_per_token(cell)
    return percentile(values, p) if values else None


def _sum(names: Sequence[str], scale: float, source: Source, cell: Cell) -> Estimate | None:
    parts = [cell.metric(name) for name in names]
    keys = set(parts[0]).intersection(*parts[1:])
    return over_seeds({key: sum(part[key] for part in parts) / scale for key in keys}) if keys else None


HITS = Measure("history", "history tokens\n(%)", shares)
MEDIAN = Measure("ttft_ms_p50", "first token,\nmedian (ms)", partial(_ttft, 0.5))
TAIL = Measure("ttft_ms_p90", "first token,\np90 (ms)", partial(_ttft, 0.9))
PER_TOKEN = Measure("normalized_latency_ms_p90", "latency, p90\n(ms/token)", partial(_per_token, 0.9))
OUTPUT = Measure("throughput_output_tok_s", "output\n(tokens/s)", partial(_sum, ["throughput_output_tok_s"], 1.0))
RECOMPUTED = Measure("recomputed_ktokens", "recomputed\n(1000 tokens)", partial(_sum, ["recomputed_tokens"], 1e3))
COPIED = Measure(
    "copied_mb_per_token",
    "copied, both\nways (MB/token)",
    partial(_sum, ["h2d_bytes_per_token", "d2h_bytes_per_token"], 1e6),
)


def _percent(cell: Cell, text: str) -> str:
    return f"at {float(text) * 100:g} % free"


def _cpu_tokens(cell: Cell, text: str) -> str:
    tokens = cell.trials[0].cpu_tokens
    return text if tokens is None else f"{tokens:,} tokens"


ABLATIONS = (
    Ablation("ablation_eviction", "Eviction policy", "eviction", (HITS, MEDIAN, RECOMPUTED)),
    Ablation(
        "ablation_scheduler", "Prefill and decode: together or apart", "scheduler", (MEDIAN, PER_TOKEN, OUTPUT)
    ),
    Ablation(
        "ablation_chunk", "Chunk size", "cache.chunk_tokens", (HITS, MEDIAN, COPIED), lambda cell, text: f"{text} tokens"
    ),
    Ablation("ablation_swap_out", "When swap-out starts", "scheduler.swap_out_start", (HITS, TAIL, COPIED), _percent),
    Ablation("ablation_cpu_size", "Size of the CPU tier", "cache.cpu", (HITS, MEDIAN, RECOMPUTED), _cpu_tokens),
    Ablation(
        "ablation_gpu_cache", "The CPU tier taken away", None, (HITS, MEDIAN, OUTPUT),
        only=("pensieve", "gpu_only", "stateless"),
    ),
)  # fmt: skip


def applies(one: Ablation, source: Source) -> bool:
    if one.axis is None:  # a sweep over something else shows it there, at each value
        plain = not varying_axes(source.sweep.overrides, source.trials)
        return plain and {"pensieve", "gpu_only"} <= set(source.baselines()) and source.has_metric("gpu_hit_rate")
    return len(source.swept(one.axis)) > 1


def read(one: Ablation, source: Source) -> list[tuple[Panel, list[Line]]]:
    """Lines from the top down: by baseline, then by value. Raises MissingSeries and MixedPanel."""
    if one.only and not source.wanted:
        source = Source(
            source.store, source.sweep, [name for name in source.baselines() if name in one.only], source.allow_mixed
        )
    found = []
    for panel in source.panels(*([one.axis] if one.axis else [])):
        lines = []
        for baseline in panel.baselines:
            values = panel.values(one.axis) if one.axis else [""]
            cells = {cell.at.get(one.axis or "", ""): cell for cell in panel.of(baseline)}
            lines += [_line(one, source, cells[value], value) for value in values]
        found.append((panel, lines))
    return found


def _line(one: Ablation, source: Source, cell: Cell, value: str) -> Line:
    measured = []
    for measure in one.measures:
        estimate = measure.of(source, cell)
        if estimate is None:
            raise source.lacks(f"{measure.name} of {cell.baseline}{f' with {one.axis}={value}' if one.axis else ''}")
        measured.append(estimate)
    return Line(cell, one.value(cell, value) if one.axis else cell.baseline, measured)


def draw(one: Ablation, source: Source, folder: Path) -> list[Drawing]:
    return [_draw(one, panel, lines, folder) for panel, lines in read(one, source)]


def _draw(one: Ablation, panel: Panel, lines: Sequence[Line], folder: Path) -> Drawing:
    several = len(panel.baselines) > 1 and one.axis is not None
    names = [f"{line.cell.baseline}, {line.value}" if several else line.value for line in lines]
    stacked = HITS in one.measures
    figure, grid = style.new_grid(1.62 + ROW_IN * len(lines) + 0.14 * stacked, 1, len(one.measures), sharey=True)
    for index, (axes, measure) in enumerate(zip(grid[0], one.measures, strict=True)):
        found = [line.found[index] for line in lines]
        _column(axes, measure, lines, found)
        axes.set_title(measure.head, fontsize=6.5, pad=3, loc="left", linespacing=1.1)
    first = grid[0][0]
    first.set_ylim(len(lines) - 0.5, -0.5)
    first.set_yticks(range(len(lines)), names, fontsize=6.5)
    for label, line in zip(first.get_yticklabels(), lines, strict=True):
        label.set_color(style.colour(line.cell.baseline))
        label.set_fontweight("bold")
    lead = _lead(one, lines)
    room = 0.12 + max(len(name) for name in names) * 6.5 * 0.62 / 72
    top = arrange(figure, panel, one.title, lead, left=room, gap=0.24, head=0.26 + 0.16 * stacked)
    figure.subplots_adjust(wspace=0.16)
    if stacked:
        style.key(figure, PARTS, top)
    return publish(figure, panel, one.name, one.title, lead, [_row(one, line) for line in lines], folder)


def _column(axes: Axes, measure: Measure, lines: Sequence[Line], found: Sequence[Estimate | Shares]) -> None:
    axes.grid(visible=False)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=6)
    axes.xaxis.set_major_locator(MaxNLocator(2))
    if measure is HITS:
        for place, (line, one) in enumerate(zip(lines, found, strict=True)):
            assert isinstance(one, Shares)
            stack(axes, [place], [one], f"{line.value}", across=True)
        axes.set_xlim(0, 100)
        axes.set_xticks((0, 50, 100), ("0", "50", "100"))
        axes.get_xticklabels()[-1].set_horizontalalignment("right")  # its neighbour's 0 is near
        return
    longest = 0.0
    for place, (line, one) in enumerate(zip(lines, found, strict=True)):
        assert isinstance(one, Estimate)
        [bar] = axes.barh(place, one.value, height=0.72, color=style.colour(line.cell.baseline))
        bar.set_gid(f"{line.value}/{measure.name}")
        end = one.value
        if one.ci_low is not None and one.ci_high is not None:
            axes.hlines(place, one.ci_low, one.ci_high, color="black", linewidth=0.8)
            end = max(end, one.ci_high)
        axes.annotate(
            _short(one.value), (end, place), xytext=(2, 0), textcoords="offset points", va="center", fontsize=6
        )
        longest = max(longest, end)
    axes.set_xlim(0, (longest or 1.0) * 1.55)
    axes.set_xticks([tick for tick in axes.get_xticks() if 0 <= tick <= axes.get_xlim()[1]])
    axes.get_xticklabels()[0].set_horizontalalignment("left")


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _lead(one: Ablation, lines: Sequence[Line]) -> str:
    estimates = [found for line in lines for found in line.found if isinstance(found, Estimate)]
    fewest = min(found.groups for found in estimates)
    bare = [found for found in estimates if found.ci_low is None]
    lead = "Bars with their 95 % interval over seeds and conversations"
    if bare and fewest < FEWEST_SEEDS:
        lead += f"; counts and rates are means over seeds, n = {fewest}, no interval"
    return lead


def _row(one: Ablation, line: Line) -> dict[str, Any]:
    row: dict[str, Any] = {"baseline": line.cell.baseline}
    if one.axis:
        row[one.axis] = line.cell.at[one.axis]
    for measure, found in zip(one.measures, line.found, strict=True):
        if isinstance(found, Shares):
            row |= dict(zip(("gpu_hit_pct", "cpu_hit_pct", "recomputed_pct"), found.parts, strict=True))
        else:
            row |= {
                f"{measure.name}_{key}" if key in ("ci_low", "ci_high", "n", "n_seeds") else key: value
                for key, value in columns(measure.name, found).items()
            }
    return {**row, "trials": line.cell.ids}


def _figure(one: Ablation) -> Figure:
    shown = f"ablation: {one.title[0].lower()}{one.title[1:]}"
    return Figure(one.name, shown, one.command, partial(applies, one), partial(draw, one))


FIGURES = tuple(_figure(one) for one in ABLATIONS)


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    known = {figure.name.removeprefix("ablation_"): figure for figure in FIGURES}
    if not words or words[0] not in known:
        print(f"Which one? python analysis/ablation.py {{{','.join(known)}}} [--sweep ID]", file=sys.stderr)
        return 2
    return command_line.main(known[words[0]], words[1:])


if __name__ == "__main__":
    sys.exit(main())
