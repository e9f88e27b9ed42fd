"""beyond_*: what a choice that the paper did not vary changes, turn by turn against the same turns under the paper's choice.

Sections are loads (and whatever else is swept): one in which the choice matters, one in which it must not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import log
from typing import Any

import pandas as pd
from matplotlib.lines import Line2D

from analysis import marks, style
from analysis.caches import BOUND, shares
from analysis.estimates import as_estimate, over_seeds
from analysis.marks import Bar, Group
from analysis.registry import Plot, Row, columns, figure
from analysis.sweep import Cell, Panel, Source
from pensieve.errors import MissingSeries
from pensieve.lab.metric_registry import REAL
from pensieve.lab.results.frame import conversation_sums, paired, values_of
from pensieve.lab.results.trials import varying_axes
from pensieve.lab.statistics import Estimate, paired_ratio

RATE = "workload.request_rate"
TIMES = ("ttft_ms", "normalized_latency_ms")


@dataclass(frozen=True, slots=True)
class Factor:
    """name: of the figure and of its overlay. axis: what is varied; reference: its value that the others are held against,
    as a trial's configuration has it. value: how a value reads."""

    name: str
    title: str
    axis: str
    reference: str
    value: Callable[[str], str] = str


@dataclass(frozen=True, slots=True)
class Change:
    """One value in one section against the reference there, over the turns that both served.

    first, per_token: mean time to first token and mean latency a token, as ratios. found: of history, in points. bound: the
    offline bound's distance from what the reference found, in points; None where there is none. same: no turn differs.
    """

    value: str
    cell: Cell
    first: Estimate
    per_token: Estimate
    found: Estimate
    bound: float | None
    same: bool


@dataclass(frozen=True, slots=True)
class Section:
    """All values under one load. *_ms, found_pct: the reference's own."""

    name: str
    at: Mapping[str, str]
    first_ms: float
    per_token_ms: float
    found_pct: float
    changes: Sequence[Change]


FACTORS = (
    Factor(
        "beyond_pipelined_swap_in", "Swap-in layer by layer, or whole", "hardware.pipelined_swap_in", "True",
        lambda value: {"True": "by layer", "False": "whole"}.get(value, value),
    ),
    Factor("beyond_copy_ahead", "Copying to the CPU ahead of time", "scheduler.copy_ahead", "paper"),
    Factor("beyond_cpu_size", "Size of the CPU tier", "cache.cpu", "220GB", lambda value: "none" if value == "0" else value),
    Factor("beyond_chunk_size", "Tokens a chunk", "cache.chunk_tokens", "32"),
    Factor("beyond_cost_error", "Prices that are wrong", "scheduler.cost_error", "1.0", lambda value: f"× {value}"),
    Factor(
        "beyond_cost_context", "Prices of context that are wrong", "scheduler.cost_error_context", "1.0",
        lambda value: f"× {value}",
    ),
    Factor(
        "beyond_duplex", "Rate lost while both ways copy", "hardware.duplex_penalty", "0.2",
        lambda value: f"{100 * float(value):g} %",
    ),
    Factor("beyond_disk", "A disk tier", "cache.disk", "0", lambda value: "none" if value == "0" else value),
)  # fmt: skip


def _applies(of: Factor, source: Source) -> bool:
    return source.compares(of.axis) and of.reference in source.swept(of.axis) and source.has_metric("ttft_ms_mean")


def sections(of: Factor, source: Source) -> Iterator[tuple[Panel, list[Section]]]:
    """A panel a baseline. Raises MissingSeries where no turn of the reference says what it found."""
    typed = varying_axes(source.sweep.overrides, source.trials)
    others = [axis for axis in typed if axis != of.axis]
    for name in source.baselines():
        [panel] = source.of_baselines([name]).panels(of.axis, *others)
        order = panel.values(of.axis)
        by_place: dict[tuple[str, ...], dict[str, Cell]] = {}
        for cell in panel.cells:
            by_place.setdefault(tuple(cell.at[axis] for axis in others), {})[cell.at[of.axis]] = cell
        yield (
            panel,
            [
                _section(source, dict(zip(others, place, strict=True)), cells, order, of.reference)
                for place, cells in by_place.items()
            ],
        )


def _section(
    source: Source, at: Mapping[str, str], cells: Mapping[str, Cell], order: Sequence[str], reference: str
) -> Section:
    start = cells.get(reference)
    base, shown = (source.turns(start), shares(source, start)) if start else (None, None)
    if base is None or shown is None:
        raise source.lacks(f"turn with history under {reference}")
    changes = [_change(source, cells[value], value, base, shown.hit.value) for value in order if value in cells]
    first, per_token = (float(values_of(base, name).mean()) for name in TIMES)
    return Section(", ".join(_said(*one) for one in at.items()), at, first, per_token, shown.hit.value, changes)


def _said(axis: str, value: str) -> str:
    return f"{value} requests/s" if axis == RATE else f"{axis.rpartition('.')[2]} = {value}"


def _change(source: Source, cell: Cell, value: str, base: pd.DataFrame, base_found: float) -> Change:
    turns = source.turns(cell)
    first, per_token = (paired(values_of(turns, name), values_of(base, name)) for name in TIMES)
    hits = paired(_found(turns), _found(base))
    if any(one.empty for one in (first, per_token, hits)):
        raise MissingSeries(f"Trials {cell.ids} share no turn with those that they are held against.")
    bounds = cell.metric("bound_hit_rate")
    return Change(
        value,
        cell,
        _ratio(first),
        _ratio(per_token),
        _points(hits["a"] - hits["b"], base.loc[hits.index, "history_tokens"]),
        100 * over_seeds(bounds).value - base_found if bounds else None,
        same=all(bool((one["a"] == one["b"]).all()) for one in (first, per_token, hits)),
    )


def _found(turns: pd.DataFrame) -> pd.Series[float]:
    """History tokens found in any tier, of the turns that have history and say."""
    known = turns[(turns["history_tokens"] > 0) & turns["gpu_hit_tokens"].notna()]
    return known[["gpu_hit_tokens", "cpu_hit_tokens", "disk_hit_tokens"]].fillna(0).sum(axis=1)


def _ratio(pairs: pd.DataFrame) -> Estimate:
    """Mean over mean of the same turns."""
    return as_estimate(
        paired_ratio(conversation_sums(pairs["a"]), conversation_sums(pairs["b"]), of="means"), len(pairs)
    )


def _points(more: pd.Series[float], history: pd.Series[float]) -> Estimate:
    tops, bottoms = conversation_sums(100 * more), conversation_sums(history)
    return as_estimate(paired_ratio(tops, bottoms, of="means", support=REAL), len(more))


def finding(of: Factor, found: Sequence[Section]) -> str:
    """Of each section what moved the first token most, in a sentence."""
    parts = []
    for one in found:
        others = [change for change in one.changes if change.value != of.reference]
        if not others:
            parts.append(f"at {one.name} only {of.value(of.reference)} was measured")
            continue
        if all(change.same for change in others):
            parts.append(f"at {one.name} no turn differs")
            continue
        most = max(others, key=lambda change: abs(log(change.first.value)))
        parts.append(
            f"at {one.name}, {of.value(most.value)} in place of {of.value(of.reference)} makes the mean first token "
            f"{_times(most.first)} ({one.first_ms:.1f} ms), latency a token {_times(most.per_token)}, history found "
            f"{most.found.value:+.1f} points"
        )
    return f"Found: {'; '.join(parts)}"


def _times(one: Estimate) -> str:
    interval = "" if one.ci_low is None or one.ci_high is None else f" [{one.ci_low:.3f}, {one.ci_high:.3f}]"
    return f"{one.value:.3f} times{interval}"


def _plots(of: Factor, source: Source) -> Iterator[Plot]:
    """Bars begin at the reference, whose own values stand beside it."""
    for panel, found in sections(of, source):
        colour = style.colour(panel.baselines[0])
        columns_of = [
            [[_group(of, one, change, index, colour) for change in one.changes] for one in found] for index in range(3)
        ]
        picture, grid = marks.bar_grid(columns_of[0], columns=3)
        for place, (row, one) in enumerate(zip(grid, found, strict=True)):
            for index, (axes, origin) in enumerate(zip(row, (1.0, 1.0, 0.0), strict=True)):
                marks.bars(axes, columns_of[index][place], names=index == 0, origin=origin)
                axes.margins(x=0.3)
                axes.tick_params(labelsize=6)
            row[0].set_title(one.name, fontsize=6.5)
            _mark_bounds(row[2], one)
        heads = ("first token,\nmean (ratio)", "latency a token,\nmean (ratio)", "history found\n(points)")
        for axes, head in zip(grid[-1], heads, strict=True):
            axes.set_xlabel(head, fontsize=6.5)
        bounded = any(change.bound is not None for one in found for change in one.changes)
        if bounded:
            style.legend(picture, [Line2D([], [], color="black", marker="|", linewidth=0, markersize=7, label=BOUND)])
        lead = (
            f"{finding(of, found)}. Bars: against {of.value(of.reference)}, whose own means stand beside it, over the same "
            "turns, with the 95 % interval over seeds and conversations"
        )
        if bounded:
            lead += f"; {BOUND}: what a policy that knows the future could find with the same room"
        yield Plot(panel, picture, lead, [_row(of, one, change) for one in found for change in one.changes])


def _group(of: Factor, section: Section, change: Change, column: int, colour: str) -> Group:
    estimate = (change.first, change.per_token, change.found)[column]
    own = (f"{section.first_ms:.1f} ms", f"{section.per_token_ms:.1f} ms", f"{section.found_pct:.1f} %")[column]
    moved = (
        f"{estimate.value:+.1f}" if column == 2 else f"{estimate.value:.{3 if abs(estimate.value - 1) < 0.05 else 2}f}"
    )
    name = of.value(change.value)
    gid = f"{section.name}/{change.value}/{('first', 'per_token', 'found')[column]}"
    text = own if change.value == of.reference else moved
    return Group(name, colour, [Bar(estimate, colour, text, gid)])


def _mark_bounds(axes: Any, section: Section) -> None:
    places = [(change.bound, at) for at, change in enumerate(section.changes) if change.bound is not None]
    for (bound, at), tick in zip(places, [axes.get_yticks()[at] for _, at in places], strict=True):
        axes.plot(
            [bound], [tick], color="black", marker="|", markersize=6, linewidth=0, clip_on=False,
            gid=f"{section.name}/{section.changes[at].value}/bound",
        )  # fmt: skip


def _row(of: Factor, section: Section, change: Change) -> Row:
    return {
        **section.at,
        of.axis: change.value,
        "reference": of.reference,
        "reference_ttft_ms_mean": section.first_ms,
        "reference_normalized_latency_ms_mean": section.per_token_ms,
        "reference_found_pct": section.found_pct,
        **columns("ttft_ratio", change.first, prefix="ttft_ratio_"),
        **columns("latency_ratio", change.per_token, prefix="latency_ratio_"),
        **columns("found_points", change.found, prefix="found_points_"),
        "bound_points": change.bound,
        "no_turn_differs": change.same,
        "trials": change.cell.ids,
    }


for _one in FACTORS:
    figure(
        _one.name,
        _one.title,
        shows=f"{_one.title[0].lower()}{_one.title[1:]}: times and hits against {_one.axis}={_one.reference}",
        command=f"python runners/run.py experiment=paper/{_one.name} -m",
        applies=partial(_applies, _one),
    )(partial(_plots, _one))
