"""What a decoded token costs in time and in bytes moved, a bar a baseline: python analysis/decode_cost.py [--sweep ID]"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from any folder, installed or not

from matplotlib.ticker import NullLocator

from analysis.drawing import command_line, estimates, style
from analysis.drawing.bars import Bar, Group, draw_groups, height_in, place_values
from analysis.drawing.command_line import Figure
from analysis.drawing.publish import Drawing, arrange, columns, publish
from analysis.drawing.source import Cell, Panel, Source
from pensieve.errors import MissingSeries
from pensieve.statistics import Estimate

NAME = "decode_cost"
TITLE = "A decoded token: time, and bytes moved"
COMMAND = "python runners/run.py experiment=llm_decode -m"
LEAD = (
    "Latency: median over requests of arrival to last token over output tokens, with its 95 % interval; bytes: counted, "
    "sum over a trial by its output tokens, mean over trials"
)
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
    each = source.by_session(
        cell,
        ("phase", "latency_ms", "output_tokens"),
        lambda row: row.latency_ms / row.output_tokens if row.phase == "throughput" and row.output_tokens else None,
    )
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
    moved = [_bytes(cost) for cost in costs]
    figure, grid = style.new_row(height_in(times) + 1.4, 2)
    for index, (axes, groups) in enumerate(zip(grid, (times, moved), strict=True)):
        draw_groups(axes, groups, names=index == 0)
    grid[0].set_xlabel("ms a token")
    grid[1].set_xlabel("bytes a token")
    grid[1].set_xscale("symlog", linthresh=1.0)
    grid[1].xaxis.set_minor_locator(NullLocator())
    arrange(figure, panel, TITLE, LEAD, left=0.10 + style.name_room(panel.baselines), right=0.08)
    figure.subplots_adjust(wspace=0.12)
    for axes, groups in zip(grid, (times, moved), strict=True):
        place_values(figure, axes, groups, size=5.5)
    if all(found is None or found.value == 0 for cost in costs for found in cost.bytes_per_token.values()):
        grid[1].set_xticks([0])
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
    return publish(figure, panel, NAME, TITLE, LEAD, rows, folder)


def _times(cost: Cost) -> Group:
    name, colour = cost.cell.baseline, style.colour(cost.cell.baseline)
    bars = [
        Bar(found, colour, f"{which} {found.value:,.1f}", f"{name}/{which}", which != "p50")
        for which, found in cost.per_token_ms.items()
    ]
    return Group(name, colour, bars)


def _bytes(cost: Cost) -> Group:
    name, colour = cost.cell.baseline, style.colour(cost.cell.baseline)
    bars = [
        Bar(
            found or Estimate(0.0, None, None, 0, 0), colour,
            f"{way} {'not counted' if found is None else _size(found.value)}", f"{name}/{way}", way != "network",
        )
        for way, found in cost.bytes_per_token.items()
    ]  # fmt: skip
    return Group(name, colour, bars)


def _size(value: float) -> str:
    """Three digits and a decimal unit."""
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
