"""Time to first token by turn, a line a baseline, above the ideal: python analysis/ttft_by_turn.py [--sweep ID]

The ideal is what the new tokens alone take: at each turn the median over conversations of the fastest first token, less
its wait in the queue, that any baseline gave to a turn of as many new tokens or more with nothing of its history to
restore or compute. All of it is measured; nothing is fitted. A sweep over more than seeds and baselines gets one figure
for each combination.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from any folder, installed or not

from matplotlib.ticker import MaxNLocator

from analysis.drawing import command_line, style
from analysis.drawing.command_line import Figure
from analysis.drawing.publish import Drawing, arrange, columns, publish
from analysis.drawing.source import DEFAULT_COMMAND, Cell, Panel, Source
from pensieve.statistics import Estimate, bootstrap_percentile_by_seed

NAME = "ttft_by_turn"
TITLE = "Time to first token by turn"

ByTurn = Mapping[int, Estimate]
Key = tuple[int, str]


@dataclass(frozen=True, slots=True)
class Series:
    """One baseline: the median TTFT in ms of each turn over seeds and conversations."""

    cell: Cell
    turns: ByTurn


@dataclass(frozen=True, slots=True)
class Lines:
    """A panel's lines. ideal: empty where no turn had all of its history in GPU memory."""

    panel: Panel
    series: Sequence[Series]
    ideal: ByTurn


def applies(source: Source) -> bool:
    return source.has_turns


def read(source: Source) -> list[Lines]:
    """One for each panel. Raises MissingSeries where a baseline has no measured turn that completed."""
    found = []
    for panel in source.panels():
        rows = {cell.baseline: _rows(source, cell) for cell in panel.cells}
        for name, own in rows.items():
            if not own:
                raise source.lacks(f"a completed, measured turn of {name}")
        series = [Series(cell, _medians(rows[cell.baseline])) for cell in panel.cells]
        found.append(Lines(panel, series, _ideal([row for own in rows.values() for row in own])))
    return found


def draw(source: Source, folder: Path) -> list[Drawing]:
    return [_draw(lines, folder) for lines in read(source)]


def _draw(lines: Lines, folder: Path) -> Drawing:
    figure, axes = style.new_figure(height_in=3.0)
    ends = []
    if lines.ideal:
        numbers = sorted(lines.ideal)
        ideal = [lines.ideal[number].value for number in numbers]
        axes.plot(numbers, ideal, color=style.GREY, linewidth=1.0, linestyle=(0, (3, 1.5)), gid=style.IDEAL)
        ends.append((style.IDEAL, float(numbers[-1]), ideal[-1]))
    for series in reversed(lines.series):  # the first one lies on top
        name, numbers = series.cell.baseline, sorted(series.turns)
        estimates = [series.turns[number] for number in numbers]
        low, high = style.interval_ends(estimates)
        axes.fill_between(numbers, low, high, color=style.colour(name), alpha=0.16, linewidth=0)
        axes.plot(
            numbers, [one.value for one in estimates], color=style.colour(name), marker=style.marker(name),
            markersize=3.2, linewidth=1.4, gid=name,
        )  # fmt: skip
        ends.append((name, float(numbers[-1]), estimates[-1].value))
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("turn of the conversation")
    axes.set_ylabel("time to first token (ms)")
    lead = "Median of completed turns and its 95 % interval"
    if lines.ideal:
        lead += (
            "; ideal: the new tokens alone, as the fastest first token without its wait of any turn with as many of them "
            "and nothing of its history to restore or compute"
        )
    room = style.name_room([name for name, _, _ in ends])
    arrange(figure, lines.panel, TITLE, lead, left=0.56, right=room)
    style.label_ends(axes, ends)
    return publish(figure, lines.panel, NAME, TITLE, lead, _table(lines), folder)


def _table(lines: Lines) -> list[dict[str, Any]]:
    named = [(series.cell.baseline, series.turns, series.cell.ids) for series in lines.series]
    return [
        {"baseline": name, "turn": number, **columns("ttft_ms_median", estimate), "trials": ids}
        for name, turns, ids in [*named, (style.IDEAL, lines.ideal, " ".join(ids for _, _, ids in named))]
        for number, estimate in sorted(turns.items())
    ]


def _rows(source: Source, cell: Cell) -> list[tuple[Key, Any]]:
    """((seed, session/repeat), row) of each measured, completed turn; a repeat of a seed adds conversations to it."""
    wanted = (
        "session", "turn", "ttft_ms", "queue_ms", "new_tokens", "cpu_hit_tokens", "recomputed_tokens",
        "resumed_swapped_tokens", "resumed_recomputed_tokens",
    )  # fmt: skip
    return [
        ((trial.seed, f"{row.session}/{trial.repeat}"), row)
        for trial in cell.trials
        for row in source.turns(trial, *wanted)
        if row.ttft_ms is not None
    ]


def _medians(rows: Sequence[tuple[Key, Any]]) -> dict[int, Estimate]:
    values: dict[int, dict[Key, float]] = defaultdict(dict)
    for key, row in rows:
        values[row.turn][key] = row.ttft_ms
    return _median_by_turn(values)


def _ideal(rows: Sequence[tuple[Key, Any]]) -> dict[int, Estimate]:
    free = sorted(
        (row.new_tokens, row.ttft_ms - row.queue_ms)
        for _, row in rows
        if row.new_tokens is not None and row.queue_ms is not None and _nothing_to_restore(row)
    )
    counts = [new for new, _ in free]
    fastest = [ms for _, ms in free]  # of turns with as many new tokens or more
    for index in range(len(fastest) - 2, -1, -1):
        fastest[index] = min(fastest[index], fastest[index + 1])
    values: dict[int, dict[Key, float]] = defaultdict(dict)
    for key, row in rows:
        if row.new_tokens is not None and (at := bisect_left(counts, row.new_tokens)) < len(fastest):
            values[row.turn][key] = fastest[at]
    return _median_by_turn(values)


def _nothing_to_restore(row: Any) -> bool:
    lost = (row.cpu_hit_tokens, row.recomputed_tokens, row.resumed_swapped_tokens, row.resumed_recomputed_tokens)
    return row.recomputed_tokens is not None and not any(lost)


def _median_by_turn(values: Mapping[int, Mapping[Key, float]]) -> dict[int, Estimate]:
    return {turn: bootstrap_percentile_by_seed(found, 0.5) for turn, found in sorted(values.items())}


FIGURE = Figure(NAME, "time to first token by turn, a line a baseline, and the ideal", DEFAULT_COMMAND, applies, draw)


def main(argv: Sequence[str] | None = None) -> int:
    return command_line.main(FIGURE, argv)


if __name__ == "__main__":
    sys.exit(main())
