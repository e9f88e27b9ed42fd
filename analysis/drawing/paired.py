"""How many times longer the reference takes to the first token, paired by seed and conversation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from statistics import fmean
from typing import Any

from analysis.drawing.source import Cell, Panel, Source
from pensieve.results.summary import REFERENCE
from pensieve.statistics import PairedRatio, paired_ratio

Ttft = dict[tuple[int, str], dict[Any, float]]
"""(seed, "session/repeat") -> turn -> ms."""
LEAD = (
    "Time to first token of stateless over that of the baseline (2: half the time), geometric mean over conversations "
    "paired by seed, with the 95 % interval"
)


def has_reference(source: Source) -> bool:
    names = source.baselines()
    return REFERENCE in names and len(names) > 1


def ttfts(source: Source, cell: Cell, *columns: str) -> list[tuple[tuple[int, str], Any]]:
    """((seed, session/repeat), row) of the measured turns that have a first token; rows have `turn`, `ttft_ms`, columns."""
    return [
        ((trial.seed, f"{row.session}/{trial.repeat}"), row)
        for trial in cell.trials
        for row in source.turns(trial, "session", "turn", "ttft_ms", *columns)
        if row.ttft_ms is not None and row.ttft_ms > 0
    ]


def by_turn(rows: list[tuple[tuple[int, str], Any]], chosen: Callable[[Any], bool] = lambda row: True) -> Ttft:
    found: Ttft = defaultdict(dict)
    for key, row in rows:
        if chosen(row):
            found[key][row.turn] = row.ttft_ms
    return dict(found)


def speed_up(reference: Ttft, own: Ttft) -> PairedRatio | None:
    """Geometric mean over conversations of the ratio of their mean times, over the turns that both completed; None where
    they share none."""
    a, b = {}, {}
    for key in reference.keys() & own.keys():
        shared = reference[key].keys() & own[key].keys()
        if shared:
            a[key] = fmean(reference[key][turn] for turn in shared)
            b[key] = fmean(own[key][turn] for turn in shared)
    return paired_ratio(a, b) if a else None


def others(panel: Panel) -> list[str]:
    return [name for name in panel.baselines if name != REFERENCE]
