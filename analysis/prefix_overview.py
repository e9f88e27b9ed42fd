"""Three panels on a changing prefix: first token, decoding, warm-up: python analysis/prefix_overview.py [--sweep ID]"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from any folder, installed or not

from analysis.drawing import command_line, style
from analysis.drawing.bars import Bar, Group, draw_groups, height_in, place_values
from analysis.drawing.command_line import Figure
from analysis.drawing.invalidation import COMMAND, Summary, applies, summaries
from analysis.drawing.publish import Drawing, arrange, columns, publish
from analysis.drawing.source import Panel, Source

NAME = "prefix_overview"
TITLE = "Hit, miss, decoding and warm-up"
LEAD = (
    "Medians over conversations and their 95 % intervals; overhead: first token when streaming minus when not, paired by "
    "round; decoding: output tokens over the whole latency of the throughput step, of hits and misses together; "
    "warm-up: [A, B] for one token"
)


def draw(source: Source, folder: Path) -> list[Drawing]:
    """A picture for each split of the prefix."""
    return [_draw(panel, found, folder) for panel, found in summaries(source)]


def _draw(panel: Panel, found: Sequence[Summary], folder: Path) -> Drawing:
    columns_of = {
        "first token\n(ms)": [_first_token(one) for one in found],
        "decoding\n(tokens/s)": [_single(one, "throughput_tok_s", "{:,.1f}") for one in found],
        "warm-up\n(ms)": [_single(one, "warmup_ms", "{:,.0f}") for one in found],
    }
    first = next(iter(columns_of.values()))
    figure, grid = style.new_row(max(0.6, height_in(first)) + 1.6, 3)
    for index, (axes, (label, groups)) in enumerate(zip(grid, columns_of.items(), strict=True)):
        draw_groups(axes, groups, names=index == 0)
        axes.set_xlabel(label)
        axes.locator_params(axis="x", nbins=3)
    arrange(figure, panel, TITLE, LEAD, left=0.10 + style.name_room(panel.baselines), right=0.12, gap=0.47)
    figure.subplots_adjust(wspace=0.12)
    for axes, groups in zip(grid, columns_of.values(), strict=True):
        place_values(figure, axes, groups, size=5.5)
    rows = [
        {
            "baseline": one.baseline,
            "quantity": quantity,
            **columns("value", estimate),
            "trials": one.cell.ids,
        }
        for one in found
        for quantity, estimate in one.quantities.items()
        if estimate is not None
    ]
    return publish(figure, panel, NAME, TITLE, LEAD, rows, folder)


def _first_token(one: Summary) -> Group:
    colour = style.colour(one.baseline)
    bars = [
        Bar(estimate, colour, f"{kind} {estimate.value:,.1f}", f"{one.baseline}/{kind}_ttft_ms", kind == "miss")
        for kind in ("hit", "miss")
        if (estimate := one.quantities[f"{kind}_ttft_ms"]) is not None
    ]
    overhead = one.quantities["stream_overhead_ms"]
    if overhead is not None:
        text = f"overhead {round(overhead.value, 2) + 0:+.2f}".replace("-", "−")
        bars.append(Bar(overhead, colour, text, f"{one.baseline}/stream_overhead_ms"))
    return Group(one.baseline, colour, bars)


def _single(one: Summary, quantity: str, pattern: str) -> Group:
    colour, estimate = style.colour(one.baseline), one.quantities[quantity]
    bars = (
        [Bar(estimate, colour, pattern.format(estimate.value), f"{one.baseline}/{quantity}")]
        if estimate is not None
        else []
    )
    return Group(one.baseline, colour, bars, rows=len(_first_token(one).bars))


FIGURE = Figure(NAME, "first token and streaming overhead, decoding, warm-up, side by side", COMMAND, applies, draw)


def main(argv: Sequence[str] | None = None) -> int:
    return command_line.main(FIGURE, argv)


if __name__ == "__main__":
    sys.exit(main())
