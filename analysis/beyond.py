"""beyond_*: what a choice that the paper did not vary changes, turn by turn against the same turns under the paper's choice.

Sections are loads (and whatever else is swept): one in which the choice matters, one in which it must not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import log
from typing import Any

import pandas as pd
from matplotlib.lines import Line2D

from analysis import marks, style
from analysis.caches import BOUND
from analysis.marks import Bar, Group
from analysis.quantities import as_estimate, columns, over_seeds, shares
from analysis.registry import Plot
from analysis.sweep import Cell, Source
from pensieve.errors import MissingSeries
from pensieve.lab.metric_registry import REAL
from pensieve.lab.results.frame import conversation_sums, paired, values_of
from pensieve.lab.results.trials import varying_axes
from pensieve.lab.statistics import Estimate, paired_ratio

RATE = "workload.request_rate"
HEADS = ("first token,\nmean (ratio)", "latency a token,\nmean (ratio)", "history found\n(points)")
ORIGINS = (1.0, 1.0, 0.0)


@dataclass(frozen=True, slots=True)
class Change:
    """One value of the axis in one section against the reference there, over the turns that both served.

    moved: mean time to first token and mean latency a token, as ratios, and history found, in points. bound: the offline
    bound's distance from what the reference found, in points; None where there is none. same: no turn differs.
    """

    value: str
    cell: Cell
    moved: tuple[Estimate, Estimate, Estimate]
    bound: float | None
    same: bool


@dataclass(frozen=True, slots=True)
class Section:
    """All values under one load. own: what the reference came to there, in ms, ms and percent."""

    name: str
    at: Mapping[str, str]
    own: tuple[float, float, float]
    changes: Sequence[Change]


def changes(
    source: Source, *, axis: str, reference: str, names: Mapping[str, str] | None = None, reads: str = "{}"
) -> Iterator[Plot]:
    """A plot a baseline: bars that begin at the reference, whose own values stand beside it.

    axis: what is varied; reference: its value that the others are held against, as a trial's configuration has it. names:
    what values are called, if not as they are; reads: as str.format has them, numbers as such.
    """

    def said(value: str) -> str:
        return (names or {}).get(value) or reads.format(float(value) if ":" in reads else value)

    typed = varying_axes(source.sweep.overrides, source.trials)
    others = [other for other in typed if other != axis]
    for baseline in source.baselines():
        [panel] = source.of_baselines([baseline]).panels(axis, *others)
        places: dict[tuple[str, ...], dict[str, Cell]] = {}
        for cell in panel.cells:
            places.setdefault(tuple(cell.at[other] for other in others), {})[cell.at[axis]] = cell
        sections = [
            _section(source, dict(zip(others, place, strict=True)), cells, panel.values(axis), reference)
            for place, cells in places.items()
        ]
        colour = style.colour(baseline)
        groups = [
            [[_group(one, change, index, said, reference, colour) for change in one.changes] for one in sections]
            for index in range(len(HEADS))
        ]
        picture, grid = marks.bar_grid(groups[0], columns=len(HEADS))
        for place, (row, one) in enumerate(zip(grid, sections, strict=True)):
            for index, axes in enumerate(row):
                marks.bars(axes, groups[index][place], names=index == 0, origin=ORIGINS[index])
                axes.margins(x=0.3)
                axes.tick_params(labelsize=6)
            row[0].set_title(one.name, fontsize=6.5)
            for change, tick in zip(one.changes, row[-1].get_yticks(), strict=True):
                if change.bound is not None:
                    row[-1].plot([change.bound], [tick], **marks.BOUND, gid=f"{one.name}/{change.value}/bound")
        for axes, head in zip(grid[-1], HEADS, strict=True):
            axes.set_xlabel(head, fontsize=6.5)
        lead = (
            f"{_finding(sections, said, reference)}. Bars: against {said(reference)}, whose own means stand beside it, over "
            "the same turns, with the 95 % interval over seeds and conversations"
        )
        if any(change.bound is not None for one in sections for change in one.changes):
            style.legend(picture, [Line2D([], [], **marks.BOUND, label=BOUND)])
            lead += f"; {BOUND}: what a policy that knows the future could find with the same room"
        yield Plot(panel, picture, lead, [_row(axis, reference, one, each) for one in sections for each in one.changes])


def _section(
    source: Source, at: Mapping[str, str], cells: Mapping[str, Cell], order: Sequence[str], reference: str
) -> Section:
    start = cells.get(reference)
    base, shown = (source.turns(start), shares(source, start)) if start else (None, None)
    if base is None or shown is None:
        raise source.lacks(f"turn with history under {reference}")
    found = [_change(source, cells[value], value, base, shown.hit.value) for value in order if value in cells]
    first, per_token = (float(values_of(base, name).mean()) for name in ("ttft_ms", "normalized_latency_ms"))
    name = ", ".join(
        f"{value} requests/s" if axis == RATE else f"{axis.rpartition('.')[2]} = {value}" for axis, value in at.items()
    )
    return Section(name, at, (first, per_token, shown.hit.value), found)


def _change(source: Source, cell: Cell, value: str, base: pd.DataFrame, base_found: float) -> Change:
    turns = source.turns(cell)
    first, per_token = (
        paired(values_of(turns, name), values_of(base, name)) for name in ("ttft_ms", "normalized_latency_ms")
    )
    hits = paired(_found(turns), _found(base))
    if any(one.empty for one in (first, per_token, hits)):
        raise MissingSeries(f"Trials {cell.ids} share no turn with those that they are held against.")
    more, history = 100 * (hits["a"] - hits["b"]), base.loc[hits.index, "history_tokens"]
    points = paired_ratio(conversation_sums(more), conversation_sums(history), of="means", support=REAL)
    bounds = cell.metric("bound_hit_rate")
    return Change(
        value,
        cell,
        (_ratio(first), _ratio(per_token), as_estimate(points, len(more))),
        100 * over_seeds(bounds).value - base_found if bounds else None,
        same=all(bool((one["a"] == one["b"]).all()) for one in (first, per_token, hits)),
    )


def _found(turns: pd.DataFrame) -> pd.Series[float]:
    """History tokens found in any tier, of the turns that have history and say."""
    known = turns[(turns["history_tokens"] > 0) & turns["gpu_hit_tokens"].notna()]
    return known[["gpu_hit_tokens", "cpu_hit_tokens", "disk_hit_tokens"]].fillna(0).sum(axis=1)


def _ratio(pairs: pd.DataFrame) -> Estimate:
    """Mean over mean of the same turns."""
    sides = (conversation_sums(pairs[side]) for side in "ab")
    return as_estimate(paired_ratio(*sides, of="means"), len(pairs))


def _finding(found: Sequence[Section], said: Any, reference: str) -> str:
    """Of each section what moved the first token most, in a sentence."""
    parts = []
    for one in found:
        others = [change for change in one.changes if change.value != reference]
        if not others:
            parts.append(f"at {one.name} only {said(reference)} was measured")
        elif all(change.same for change in others):
            parts.append(f"at {one.name} no turn differs")
        else:
            most = max(others, key=lambda change: abs(log(change.moved[0].value)))
            first, per_token, hits = most.moved
            parts.append(
                f"at {one.name}, {said(most.value)} in place of {said(reference)} makes the mean first token "
                f"{_times(first)} ({one.own[0]:.1f} ms), latency a token {_times(per_token)}, history found "
                f"{hits.value:+.1f} points"
            )
    return f"Found: {'; '.join(parts)}"


def _times(one: Estimate) -> str:
    interval = "" if one.ci_low is None or one.ci_high is None else f" [{one.ci_low:.3f}, {one.ci_high:.3f}]"
    return f"{one.value:.3f} times{interval}"


def _group(section: Section, change: Change, index: int, said: Any, reference: str, colour: str) -> Group:
    moved, own = change.moved[index], section.own[index]
    if change.value == reference:
        text = f"{own:.1f} {'%' if index == 2 else 'ms'}"
    else:
        text = f"{moved.value:+.1f}" if index == 2 else f"{moved.value:.{3 if abs(moved.value - 1) < 0.05 else 2}f}"
    return Group(said(change.value), colour, [Bar(moved, colour, text, f"{section.name}/{change.value}/{index}")])


def _row(axis: str, reference: str, section: Section, change: Change) -> Mapping[str, Any]:
    first, per_token, found = change.moved
    return {
        **section.at,
        axis: change.value,
        "reference": reference,
        "reference_ttft_ms_mean": section.own[0],
        "reference_normalized_latency_ms_mean": section.own[1],
        "reference_found_pct": section.own[2],
        **columns("ttft_ratio", first, prefix="ttft_ratio_"),
        **columns("latency_ratio", per_token, prefix="latency_ratio_"),
        **columns("found_points", found, prefix="found_points_"),
        "bound_points": change.bound,
        "no_turn_differs": change.same,
        "trials": change.cell.ids,
    }
