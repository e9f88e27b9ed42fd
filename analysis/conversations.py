"""First tokens of conversations: by turn, and how much sooner than without a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.ticker import MaxNLocator

from analysis import marks, style
from analysis.quantities import as_estimate, columns, median
from analysis.registry import Plot, Row
from analysis.sweep import Panel, Source
from pensieve.lab import tables
from pensieve.lab.results.findings import REFERENCE
from pensieve.lab.results.frame import paired, speed_up, values_of
from pensieve.lab.statistics import Estimate, PairedRatio

Ratios = Mapping[str, PairedRatio | None]
"""By part of the turns; None where no conversation has turns of it in both."""
TURNS = (1, 5, 10)
CLASSES = ("hot", "warm", "cold")
PAIRED = (
    "TTFT of stateless over that of the baseline (2: half the time). Geometric mean over conversations paired by seed, "
    "with the 95 % interval"
)


def ttft_by_turn(source: Source) -> Iterator[Plot]:
    """The median of each turn, and the ideal where any turn had all of its history in GPU memory."""
    for panel in source.panels():
        turns = {cell.baseline: source.turns(cell).dropna(subset="ttft_ms") for cell in panel.cells}
        for name, own in turns.items():
            if own.empty:
                raise source.lacks(f"a completed, measured turn of {name}")
        lines = {name: _by_turn(own, own["ttft_ms"]) for name, own in turns.items()}
        ideal = _ideal(pd.concat(turns.values()))
        picture, axes = style.new_axes(2.0)
        for order, (name, found) in enumerate(lines.items()):
            marks.line(axes, name, list(found.items()), order=order, band=True)
        lead = "Median of completed turns and its 95 % interval"
        if ideal:
            dashes: dict[str, Any] = {"linewidth": 1.0, "linestyle": (0, (3, 1.5)), "label": style.IDEAL}
            axes.plot(list(ideal), [one.value for one in ideal.values()], color=style.GREY, gid=style.IDEAL, **dashes)
            lead += (
                ". Ideal: the new tokens alone, as the fastest TTFT without its wait of any turn with as many of them and no "
                "history to restore or compute"
            )
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("turn of the conversation")
        axes.set_ylabel("time to first token (ms)")
        style.legend(picture)
        ids = {cell.baseline: cell.ids for cell in panel.cells}
        rows = [
            {
                "baseline": name,
                "turn": turn,
                **columns("ttft_ms_median", one),
                "trials": ids.get(name, " ".join(ids.values())),
            }
            for name, found in [*lines.items(), (style.IDEAL, ideal)]
            for turn, one in found.items()
        ]
        yield Plot(panel, picture, lead, rows)


def _by_turn(turns: pd.DataFrame, values: pd.Series[Any]) -> dict[int, Estimate]:
    numbers = turns.index.get_level_values("turn")
    return {int(turn): median(values[numbers == turn]) for turn in np.unique(numbers)}


def _ideal(turns: pd.DataFrame) -> dict[int, Estimate]:
    """What the new tokens alone take: at each turn the median over conversations of the fastest first token, less its wait
    in the queue, of any turn with as many new tokens or more and nothing of its history to restore or compute.

    All of it is measured; nothing is fitted.
    """
    lost = turns[
        [
            "cpu_hit_tokens",
            "disk_hit_tokens",
            "recomputed_tokens",
            "resumed_swapped_tokens",
            "resumed_recomputed_tokens",
        ]
    ]
    nothing_lost = turns["recomputed_tokens"].notna() & (lost.fillna(0) == 0).all(axis=1)
    free = turns[nothing_lost & turns["new_tokens"].notna() & turns["queue_ms"].notna()].sort_values("new_tokens")
    known = turns[turns["new_tokens"].notna()]
    if free.empty:
        return {}
    alone = (free["ttft_ms"] - free["queue_ms"]).to_numpy()
    fastest = np.minimum.accumulate(alone[::-1])[::-1]  # of turns with as many new tokens or more
    at = np.searchsorted(free["new_tokens"].to_numpy(dtype=int), known["new_tokens"].to_numpy(dtype=int))
    within = at < len(fastest)
    known = known[within]
    return _by_turn(known, pd.Series(fastest[at[within]], index=known.index))


def has_reference(source: Source) -> bool:
    names = source.baselines()
    return REFERENCE in names and len(names) > 1


def has_classes(source: Source) -> bool:
    return any(source.has_metric("ttft_ms_p50", one) for one in CLASSES)


def speedup(source: Source) -> Iterator[Plot]:
    def parts(turns: pd.DataFrame) -> dict[str, pd.DataFrame]:
        numbers = turns.index.get_level_values("turn")
        return {**{f"turn {turn}": turns[numbers == turn] for turn in TURNS}, "average": turns}

    for panel, found in _speed_ups(source, parts, "turn"):
        table = [
            {"baseline": name, **{at: tables.estimated(one) for at, one in ratios.items()}}
            for name, ratios in found.items()
        ]
        yield Plot(panel, None, PAIRED, _rows(panel, found, "at"), table)


def hotness(source: Source) -> Iterator[Plot]:
    def parts(turns: pd.DataFrame) -> dict[str, pd.DataFrame]:
        return {label: turns[turns["label"] == label] for label in CLASSES}

    for panel, found in _speed_ups(source, parts, "hot, warm or cold turn"):
        picture, axes = style.new_axes(2.0)
        labels = [label for label in CLASSES if any(ratios[label] for ratios in found.values())]
        apart = min(0.18, 0.6 / len(found))
        for order, (name, ratios) in enumerate(found.items()):
            aside = (order - (len(found) - 1) / 2) * apart
            points = [
                (labels.index(label) + aside, as_estimate(one)) for label, one in ratios.items() if one is not None
            ]
            marks.line(axes, name, points, order=order, joined=False)
        axes.axhline(1.0, color=style.colour(REFERENCE), linewidth=0.9, linestyle=(0, (3, 1.5)), label=REFERENCE)
        axes.set_xlim(-0.45, len(labels) - 0.55)
        axes.set_xticks(range(len(labels)), [f"{label} users" for label in labels])
        axes.set_ylim(bottom=0)
        axes.set_ylabel("speed-up of the first token (×)")
        style.legend(picture)
        yield Plot(panel, picture, PAIRED, _rows(panel, found, "class"))


def _speed_ups(
    source: Source, parts: Callable[[pd.DataFrame], dict[str, pd.DataFrame]], what: str
) -> Iterator[tuple[Panel, Mapping[str, Ratios]]]:
    """By baseline but stateless, of each part of the turns. Raises MissingSeries where a baseline shares no turn of any
    part, saying that `what` is missing, and MixedPanel."""
    for panel in source.panels():
        divided = {cell.baseline: parts(source.turns(cell)) for cell in panel.cells}
        reference, found = divided.pop(REFERENCE), {}
        for name, own in divided.items():
            found[name] = {
                at: speed_up(paired(*(values_of(side[at], "ttft_ms") for side in (reference, own)))) for at in own
            }
            if not any(found[name].values()):
                raise source.lacks(f"{what} that {name} shares with {REFERENCE}")
        yield panel, found


def _rows(panel: Panel, found: Mapping[str, Ratios], at: str) -> list[Row]:
    ids = {cell.baseline: cell.ids for cell in panel.cells}
    return [
        {
            "baseline": name,
            at: place,
            "ttft_speed_up": one.ratio,
            "ci_low": one.ci_low,
            "ci_high": one.ci_high,
            "n_conversations": one.n,
            "n_seeds": one.n_seeds,
            "trials": ids[name],
        }
        for name, ratios in found.items()
        for place, one in ratios.items()
        if one is not None
    ]
