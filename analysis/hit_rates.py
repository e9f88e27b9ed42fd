"""Where history was found, stacked, against the size of the cache: python analysis/hit_rates.py [--sweep ID]

Shares of history tokens: GPU hit, CPU hit, recomputed. A sweep over cache, cache.gpu or cache.cpu gets a part of the
figure for each baseline, any other one bar a baseline. The offline bound is drawn where trials record bound_hit_rate.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from any folder, installed or not

from matplotlib.axes import Axes

from analysis.drawing import command_line, style
from analysis.drawing.command_line import Figure
from analysis.drawing.estimates import over_seeds
from analysis.drawing.publish import Drawing, arrange, publish
from analysis.drawing.shares import PARTS, Shares, shares, stack
from analysis.drawing.source import Cell, Panel, Source
from pensieve.results.summary import varying_axes

NAME = "hit_rates"
TITLE = "Where history was found"
LEAD = "Shares of history tokens, with the 95 % intervals of both boundaries"
COMMAND = "python runners/run.py experiment=ablation_cpu_size -m"
SIZES = {"cache": "cache", "cache.gpu": "GPU cache (tokens)", "cache.cpu": "CPU cache (tokens)"}
BOUND = "offline bound"
A_ROW = 3  # baselines beside each other


@dataclass(frozen=True, slots=True)
class Bar:
    """One baseline at one size. found: None where nothing is known. bound: in percent, None where not recorded."""

    cell: Cell
    size: str
    found: Shares | None
    bound: float | None


def applies(source: Source) -> bool:
    """A sweep over the size, or over nothing but baselines; what else is swept has figures of its own."""
    plain = not varying_axes(source.sweep.overrides, source.trials)
    return source.has_metric("gpu_hit_rate") and (plain or axis_of(source) is not None)


def axis_of(source: Source) -> str | None:
    return next((axis for axis in SIZES if len(source.swept(axis)) > 1), None)


def read(source: Source) -> list[tuple[Panel, list[Bar]]]:
    """Bars by baseline, from the smallest cache on. Raises MissingSeries and MixedPanel."""
    axis = axis_of(source)
    found = []
    for panel in source.panels(*([axis] if axis else [])):
        cells = [cell for name in panel.baselines for cell in panel.of(name)]
        bars = [Bar(cell, _size(cell, axis), shares(source, cell), _bound(cell)) for cell in cells]
        if axis:
            order = panel.values(axis)
            bars.sort(key=lambda bar: (panel.baselines.index(bar.cell.baseline), order.index(bar.cell.at[axis])))
        if all(bar.found is None for bar in bars):
            raise source.lacks("turn with history whose engine says what it found")
        found.append((panel, bars))
    return found


def draw(source: Source, folder: Path) -> list[Drawing]:
    axis = axis_of(source)
    return [_draw(panel, bars, axis, folder) for panel, bars in read(source)]


def _draw(panel: Panel, bars: Sequence[Bar], axis: str | None, folder: Path) -> Drawing:
    parts: Mapping[str, list[Bar]] = (
        {name: [bar for bar in bars if bar.cell.baseline == name] for name in panel.baselines}
        if axis
        else {"": list(bars)}
    )
    columns = _columns(parts)
    rows = -(-len(parts) // columns)
    figure, grid = style.new_grid(1.45 + 1.5 * rows, rows, columns, sharey=True)
    flat = [axes for row in grid for axes in row]
    for axes, (name, own) in zip(flat, parts.items(), strict=False):
        _part(axes, name, own)
    for axes in flat[len(parts) :]:
        axes.set_visible(False)
    for row in grid:
        row[0].set_ylabel("history tokens (%)")
    lead = LEAD
    bounded = any(bar.bound is not None for bar in bars)
    if bounded:
        lead += f"; {BOUND}: what a policy that knows the future could find with the same room"
    gap = 0.42 if axis else 0.62 if _slanted(bars) else 0.28
    top = arrange(figure, panel, TITLE, lead, left=0.5, gap=gap, head=0.34 if axis else 0.18)
    figure.subplots_adjust(wspace=0.12, hspace=0.35)
    if axis:
        below = figure.subplotpars.bottom - 0.22 / figure.get_figheight()
        figure.text(0.55, below, SIZES[axis], fontsize=7.5, ha="center", va="top")
    style.key(figure, PARTS, top, dash=BOUND if bounded else "")
    return publish(figure, panel, NAME, TITLE, lead, [_row(bar, axis) for bar in bars], folder)


def _columns(parts: Mapping[str, Sequence[Bar]]) -> int:
    """As many parts beside each other as have room for the names of their bars; four make a square."""
    room = max(sum(len(bar.size) * 0.055 + 0.04 for bar in own) for own in parts.values())
    return max(1, min(2 if len(parts) == 4 else A_ROW, len(parts), int(2.7 / max(room, 0.1))))


def _slanted(bars: Sequence[Bar]) -> bool:
    """Whether the baselines' names have no room beside each other."""
    return sum(len(bar.cell.baseline) + 1 for bar in bars) * 6.5 * 0.65 / 72 > 2.7


def _part(axes: Axes, name: str, bars: Sequence[Bar]) -> None:
    places = list(range(len(bars)))
    if name:
        stack(axes, places, [bar.found for bar in bars], name, across=False)
        axes.set_title(name, fontsize=7, fontweight="bold", color=style.colour(name), pad=3, loc="left")
    else:
        for place, bar in enumerate(bars):
            stack(axes, [place], [bar.found], bar.cell.baseline, across=False)
    for place, bar in enumerate(bars):
        if bar.found is None:
            axes.text(place, 4, "not reported", rotation=90, fontsize=6, ha="center", color=style.GREY)
    known = [(place, bar.bound) for place, bar in enumerate(bars) if bar.bound is not None]
    if known:
        axes.plot(
            *zip(*known, strict=True), color="black", linewidth=1 if name else 0, marker="_", markersize=9, clip_on=False,
            gid=f"{name}/bound",
        )  # fmt: skip
    labels = [bar.size if name else bar.cell.baseline for bar in bars]
    axes.set_xticks(places, labels, fontsize=6 if name else 6.5)
    if not name:
        slant = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"} if _slanted(bars) else {}
        axes.set_xticks(places, labels, fontsize=6.5, **slant)
        for label, bar in zip(axes.get_xticklabels(), bars, strict=True):
            label.set_color(style.colour(bar.cell.baseline))
            label.set_fontweight("bold")
    axes.tick_params(axis="x", length=0)
    axes.set_ylim(0, 100)


def _size(cell: Cell, axis: str | None) -> str:
    """In tokens as the engine had them; an option by its name."""
    if axis is None or axis == "cache":
        return cell.at.get("cache", "")
    trial = cell.trials[0]
    tokens = trial.gpu_tokens if axis == "cache.gpu" else trial.cpu_tokens
    asked = cell.at[axis].removesuffix(" tokens")
    return asked if tokens is None or (axis == "cache.cpu" and not tokens) else short(tokens)


def short(tokens: int) -> str:
    """2560 as 2.6k, to fit under a bar."""
    for size, unit in ((1_000_000, "M"), (1000, "k")):
        if tokens >= size:
            scaled = tokens / size
            return f"{scaled:.0f}{unit}" if scaled >= 10 else f"{scaled:.1f}{unit}"
    return str(tokens)


def _bound(cell: Cell) -> float | None:
    values = cell.metric("bound_hit_rate")
    return 100.0 * over_seeds(values).value if values else None


def _row(bar: Bar, axis: str | None) -> dict[str, Any]:
    found = bar.found
    trial = bar.cell.trials[0]
    parts = found.parts if found else (None, None, None)
    return {
        "baseline": bar.cell.baseline,
        **({axis: bar.cell.at[axis]} if axis else {}),
        "gpu_tokens": trial.gpu_tokens,
        "cpu_tokens": trial.cpu_tokens,
        **dict(zip(("gpu_hit_pct", "cpu_hit_pct", "recomputed_pct"), parts, strict=True)),
        "gpu_ci_low": found.gpu.ci_low if found else None,
        "gpu_ci_high": found.gpu.ci_high if found else None,
        "hit_ci_low": found.hit.ci_low if found else None,
        "hit_ci_high": found.hit.ci_high if found else None,
        "n_conversations": found.hit.n if found else 0,
        "bound_hit_pct": bar.bound,
        "trials": bar.cell.ids,
    }


FIGURE = Figure(NAME, "GPU hits, CPU hits and recomputation against the size of the cache", COMMAND, applies, draw)


def main(argv: Sequence[str] | None = None) -> int:
    return command_line.main(FIGURE, argv)


if __name__ == "__main__":
    sys.exit(main())
