"""What a decoded token costs in time and in bytes moved, a bar a baseline: python analysis/decode_cost.py [--sweep ID]

Bytes have bars where some were moved: an engine without pressure copies nothing, and one in this process has no network
whose bytes it could count.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from any folder, installed or not

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from analysis.drawing import command_line, estimates, style
from analysis.drawing.bars import Bar, Group, draw_groups, height_in, place_values
from analysis.drawing.command_line import Figure
from analysis.drawing.curves import wide
from analysis.drawing.publish import Drawing, arrange, columns, publish
from analysis.drawing.source import Cell, Panel, Source
from pensieve.errors import MissingSeries
from pensieve.statistics import Estimate

NAME = "decode_cost"
TITLE = "A decoded token: time, and bytes moved"
COMMAND = "python runners/run.py experiment=llm_decode -m"
LEAD = "Latency: median and 99th percentile over requests of arrival to last token over output tokens, with the 95 % interval"
MOVED = "bytes: counted, sum over a trial by its output tokens, mean over trials"
NOTHING = "no baseline moved a byte over a network or between GPU and CPU"
WAYS = {"network": ("sent_bytes", "received_bytes"), "GPU-CPU": ("h2d_bytes", "d2h_bytes")}


@dataclass(frozen=True, slots=True)
class Cost:
    """One baseline. per_token_ms: p50 and p99 by name. bytes_per_token: by way; None: this engine does not count them."""

    cell: Cell
    per_token_ms: Mapping[str, Estimate]
    bytes_per_token: Mapping[str, Estimate | None]


def applies(source: Source) -> bool:
    return any(job.last.workload == "decode" for job in source.jobs)


def read(source: Source) -> list[tuple[Panel, list[Cost]]]:
    return [(panel, [_cost(source, cell) for cell in panel.cells]) for panel in source.panels()]


def draw(source: Source, folder: Path) -> list[Drawing]:
    return [_draw(panel, costs, folder) for panel, costs in read(source)]


def _cost(source: Source, cell: Cell) -> Cost:
    each = source.latency_per_token(cell, phase="throughput")
    if not each:
        raise MissingSeries(
            f"Sweep {source.sweep.id} has no completed request of baseline {cell.baseline} that decodes by itself; run "
            f"`{COMMAND}`."
        )
    times = {name: estimates.percentile(each, p) for name, p in (("p50", 0.5), ("p99", 0.99))}
    return Cost(cell, times, {way: _moved(cell, names) for way, names in WAYS.items()})


def _moved(cell: Cell, names: Sequence[str]) -> Estimate | None:
    parts = [cell.metric(f"{name}_per_token") for name in names]
    trials = {(trial.seed, trial.repeat) for trial in cell.trials}
    if any(part.keys() != trials for part in parts):
        return None
    return estimates.over_seeds({key: sum(part[key] for part in parts) for key in trials})


def _draw(panel: Panel, costs: Sequence[Cost], folder: Path) -> Drawing:
    times = [_times(cost) for cost in costs]
    some = any(found is None or found.value for cost in costs for found in cost.bytes_per_token.values())
    shown = (times, [_bytes(cost) for cost in costs]) if some else (times,)
    figure, grid = style.new_row(height_in(times) + 1.4, len(shown))
    for index, (axes, groups) in enumerate(zip(grid, shown, strict=True)):
        draw_groups(axes, groups, names=index == 0)
    grid[0].set_xlabel("ms a token")
    if some:
        _scale(grid[1], [found.value for cost in costs for found in cost.bytes_per_token.values() if found])
    lead = f"{LEAD}; {MOVED if some else NOTHING}"
    arrange(figure, panel, TITLE, lead, left=0.10 + style.name_room(panel.baselines), right=0.08)
    figure.subplots_adjust(wspace=0.12)
    for axes, groups in zip(grid, shown, strict=True):
        place_values(figure, axes, groups, size=5.5)
    rows = []
    for cost in costs:
        base = {"baseline": cost.cell.baseline}
        for name, estimate in cost.per_token_ms.items():
            rows.append({**base, "quantity": f"per_token_ms_{name}", **columns("value", estimate)})
        for way, found in cost.bytes_per_token.items():
            empty = {"value": None, "ci_low": None, "ci_high": None, "n": 0, "n_seeds": 0}
            quantity = f"bytes_per_token {way}"
            rows.append({**base, "quantity": quantity, **(columns("value", found) if found else empty)})
        for row in rows[-len(cost.per_token_ms) - len(cost.bytes_per_token) :]:
            row["trials"] = cost.cell.ids
    return publish(figure, panel, NAME, TITLE, lead, rows, folder)


def _scale(axes: Axes, values: Sequence[float]) -> None:
    """Linear, unless only a logarithm shows both the smallest and the largest; none where there is nothing to read off."""
    moved = [value for value in values if value]
    axes.set_xlabel("bytes a token")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _size(value)))
    if not moved:
        axes.set_xticks([0])
    elif wide(moved):
        axes.set_xscale("symlog", linthresh=1.0)
        axes.set_xticks([0, 1e3, 1e6, 1e9])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _size(value)))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(3))


def _times(cost: Cost) -> Group:
    name, colour = cost.cell.baseline, style.colour(cost.cell.baseline)
    bars = [
        Bar(found, colour, f"{which} {found.value:,.1f}", f"{name}/{which}", which != "p50")
        for which, found in cost.per_token_ms.items()
    ]
    return Group(name, colour, bars)


def _bytes(cost: Cost) -> Group:
    """Bars of what was moved; a text where it was not counted, or nothing was moved at all."""
    name, colour = cost.cell.baseline, style.colour(cost.cell.baseline)
    nothing = Estimate(0.0, None, None, 0, 0)
    bars = [
        Bar(
            found or nothing, colour, f"{way} {'not counted' if found is None else _size(found.value)}", f"{name}/{way}",
            way != "network",
        )
        for way, found in cost.bytes_per_token.items()
        if found is None or found.value
    ]  # fmt: skip
    return Group(name, colour, bars or [Bar(nothing, colour, "nothing moved", f"{name}/nothing")], rows=2)


def _size(value: float) -> str:
    """Three digits and a decimal unit."""
    if not value:
        return "0"
    for unit in ("B", "kB", "MB"):
        if abs(value) < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} GB"


FIGURE = Figure(NAME, "latency and bytes of a decoded token, a bar a baseline", COMMAND, applies, draw)


def main(argv: Sequence[str] | None = None) -> int:
    return command_line.main(FIGURE, argv)


if __name__ == "__main__":
    sys.exit(main())
