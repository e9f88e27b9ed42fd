"""How far each eviction policy goes from least recently used to the offline bound, and what a choice that the paper did not
vary changes, turn by turn."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import pandas as pd
from pydantic import BaseModel

from analysis import style
from analysis.forms import Bars, Form
from analysis.quantities import found_pct, moved, over_seeds
from analysis.registry import Plot, Row
from analysis.sweep import Source
from pensieve.errors import MissingSeries
from pensieve.lab.results.frame import (
    PAPERS,
    REFERENCE,
    START,
    Cell,
    conversation_sums,
    found_history,
    found_more,
    gap_closed,
    paired,
    values_of,
    varying_axes,
)
from pensieve.lab.statistics import REAL, Estimate, paired_ratio

SIZES = ("cache", "cache.gpu", "cache.cpu")
AXIS = "eviction"


def size_axis(source: Source) -> str | None:
    return next((axis for axis in SIZES if source.several(axis)), None)


def shows_sizes(source: Source) -> bool:
    """A sweep over the size, or over nothing but baselines; what else is swept has figures of its own."""
    plain = not varying_axes(source.sweep.overrides, source.trials)
    return source.has_metric("gpu_hit_rate") and (plain or size_axis(source) is not None)


# From least recently used to the bound


def has_gap(source: Source) -> bool:
    swept = source.swept(AXIS)
    return len(swept) > 1 and START in swept and source.has_metric("bound_hit_rate")


def gaps(source: Source, form: Form) -> Iterator[Plot]:
    """A panel a baseline and whatever else is swept: by size of the cache, the policies in order of their hits. Bars begin at
    what START finds, 0 %, and 100 % is the bound."""
    size = size_axis(source)
    owns = {name: source.of_baselines([name]) for name in source.baselines()}
    bounded = {name: own for name, own in owns.items() if name != REFERENCE and own.has_metric("bound_hit_rate")}
    for name, own in bounded.items():
        for panel in own.panels(AXIS, *([size] if size else [])):
            rows: list[Row] = []
            for value in panel.values(size) if size else [""]:
                policies = {cell.at[AXIS]: cell for cell in panel.cells if not size or cell.at[size] == value}
                found = [_policy(own, form, cell, policies, value) for cell in policies.values()]
                rows += sorted(found, key=lambda row: -row["hit_pct"].value)
            group = {"baseline": name, **panel.group} if len(bounded) > 1 else panel.group
            yield Plot(replace(panel, group=group), rows)


def _policy(source: Source, form: Form, cell: Cell, policies: Mapping[str, Cell], size: str) -> Row:
    """policies: of the same size."""
    name, hits, start = cell.at[AXIS], found_pct(source, cell), policies.get(START)
    first = None if start is None else found_pct(source, start)
    if start is None or hits is None or first is None:
        raise source.lacks(f"turn with history under {name} and {START}")
    bounds = source.by_seed(start, "bound_hit_rate")
    if not bounds:
        raise source.lacks(f"bound of {START}")
    bound = 100 * fmean(bounds.values())
    ratio = gap_closed(source.turns(cell), source.turns(start), bounds) if name != START else None
    closed, papers = ratio and _in_percent(ratio), policies.get(PAPERS)
    more = None if papers is None or name == PAPERS else found_more(source.turns(cell), source.turns(papers))
    none = Estimate(0.0, None, None, hits.n, hits.groups)
    return {
        "eviction": name,
        "size": size,
        "hit_pct": hits,
        "bound_pct": bound,
        "gap_closed_pct": closed or none,
        f"more_than_{PAPERS}_pct": more and _in_percent(more),
        **{one.name: one.found(source, cell) for one in form.quantities if one.how},
        "trials": cell.ids,
        "_section": f"{size and f'{size}: '}{START} {first.value:.1f} % of history, bound {bound:.1f} %",
        "_name": name,
        "_colour": style.GREY if name == START else style.colour(cell.baseline),
        "_gap_closed_pct": none if name == START else closed,
        "_gap_closed_pct_text": f"{hits.value:.1f} %",
    }


def _in_percent(ratio: Estimate) -> Estimate:
    return moved(ratio, lambda share: 100 * share)


# What the paper did not vary

RATE = "workload.request_rate"
MOVED = ("ttft_ratio", "latency_ratio", "found_points")
TIMES = ("ttft_ms", "normalized_latency_ms")


class Choice(BaseModel, extra="forbid"):
    """A field, and its value that the others are held against, as a trial's configuration has it. names: what values are
    called, of other swept fields too."""

    title: str
    reference: str
    names: dict[str, str] = {}


class Changes(Bars):
    """A plot a baseline: bars that begin at the reference, whose own values stand beside it. Sections are loads, and whatever
    else is swept: one in which the choice matters, one in which it must not.

    choices: by field; the first that the sweep compares is drawn.
    """

    choices: dict[str, Choice]
    rows: str = "analysis.policies.changes"


def varied(source: Source, choices: Mapping[str, str]) -> str | None:
    """choices: field -> reference."""
    compared = (axis for axis, value in choices.items() if source.compares(axis) and value in source.swept(axis))
    return next(compared, None)


def varies(source: Source, choices: Mapping[str, Mapping[str, Any]]) -> bool:
    return varied(source, {axis: one["reference"] for axis, one in choices.items()}) is not None


def changes(source: Source, form: Changes) -> Iterator[Plot]:
    axis = varied(source, {name: one.reference for name, one in form.choices.items()})
    assert axis is not None, "asked only where it applies"
    choice = form.choices[axis]
    others = [other for other in varying_axes(source.sweep.overrides, source.trials) if other != axis]
    baselines = source.baselines()
    for baseline in baselines:
        rows: list[Row] = []
        group: Mapping[str, str] = {"baseline": baseline} if len(baselines) > 1 else {}
        [panel] = source.of_baselines([baseline]).panels(axis, *others)
        places: dict[tuple[str, ...], list[Cell]] = {}
        for cell in sorted(panel.cells, key=lambda cell: panel.values(axis).index(cell.at[axis])):
            places.setdefault(tuple(cell.at[other] for other in others), []).append(cell)
        for cells in places.values():
            rows += _section(source, choice, axis, {other: cells[0].at[other] for other in others}, cells)
        reference = choice.names.get(choice.reference, choice.reference)
        yield Plot(replace(panel, group=group), rows, words={"reference": reference}, title=choice.title)


def _section(source: Source, choice: Choice, axis: str, at: Mapping[str, str], cells: Sequence[Cell]) -> list[Row]:
    """Every value under one load, against the reference there, over the turns that both served."""
    start = next((cell for cell in cells if cell.at[axis] == choice.reference), None)
    hits = None if start is None else found_pct(source, start)
    if start is None or hits is None:
        raise source.lacks(f"turn with history under {choice.reference}")
    base, named = source.turns(start), {name: choice.names.get(value, value) for name, value in at.items()}
    section = ", ".join(
        f"{value} requests/s" if name == RATE else f"{name.rpartition('.')[2]} = {value}"
        for name, value in named.items()
    )
    own = dict(zip(MOVED, [*(float(values_of(base, name).mean()) for name in TIMES), hits.value], strict=True))
    rows: list[Row] = []
    for cell in cells:
        moved = _moved(source, cell, base)
        bounds = source.metrics(cell, "bound_hit_rate")
        rows.append(
            {
                **at,
                axis: cell.at[axis],
                "reference": choice.reference,
                **moved,
                "bound_points": 100 * over_seeds(bounds).value - hits.value if bounds else None,
                "trials": cell.ids,
                "_section": section,
                "_name": choice.names.get(cell.at[axis], cell.at[axis]),
                "_colour": style.colour(cell.baseline),
                **{f"_{name}_text": _text(name, one) for name, one in (own if cell is start else moved).items()},
            }
        )
    return rows


def _moved(source: Source, cell: Cell, base: pd.DataFrame) -> dict[str, Estimate]:
    """Mean TTFT and latency a token as ratios, and history found in points."""
    turns = source.turns(cell)
    times = [paired(values_of(turns, name), values_of(base, name)) for name in TIMES]
    hits = paired(found_history(turns)["hits"], found_history(base)["hits"])
    if any(one.empty for one in (*times, hits)):
        raise MissingSeries(f"Trials {cell.ids} share no turn with those that they are held against.")
    more, history = 100 * (hits["a"] - hits["b"]), base.loc[hits.index, "history_tokens"]
    points = paired_ratio(conversation_sums(more), conversation_sums(history), of="means", support=REAL)
    ratios = [
        replace(paired_ratio(*(conversation_sums(pairs[side]) for side in "ab"), of="means"), n=len(pairs))
        for pairs in times
    ]
    return dict(zip(MOVED, (*ratios, replace(points, n=len(more))), strict=True))


def _text(name: str, found: Estimate | float) -> str:
    """Beside a bar: of the reference its own value, of the others what has moved."""
    if isinstance(found, float):
        return f"{found:.1f} {'%' if name == MOVED[2] else 'ms'}"
    return f"{found.value:+.1f}" if name == MOVED[2] else f"{found.value:.{3 if abs(found.value - 1) < 0.05 else 2}f}"
