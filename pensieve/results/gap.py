"""How far eviction policies are apart, and from least recently used and the offline bound."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pensieve.results.frame import conversation_sums
from pensieve.statistics import PairedRatio, paired_ratio

if TYPE_CHECKING:
    import pandas as pd

START = "lru"
"""The policy that closes nothing of the gap; the bound closes all of it."""

GAP_COLUMNS = ("history_tokens", "gpu_hit_tokens", "cpu_hit_tokens", "disk_hit_tokens")
"""What it is computed of."""


def gap_closed(turns: pd.DataFrame, start: pd.DataFrame, bounds: Mapping[int, float]) -> PairedRatio | None:
    """(hits - START's hits) / (bound - START's hits), in tokens on all tiers, paired by seed and conversation.

    turns, start: measured turns of the policy and of START, as frame.turn_frame gives them. bounds: bound_hit_rate of START's
    trials by seed. Negative where the policy finds less than START. The bound is of a whole trial, so for the interval each
    conversation has its share of it, by its history. None where START is at the bound, or nothing is known of either.
    """
    known, found = _counted(start), _counted(turns)
    if known.empty or found.empty:
        return None
    history = conversation_sums(known["history_tokens"])
    before, after = conversation_sums(_hits(known)), conversation_sums(_hits(found))
    keys = [key for key in history if key in after and key[0] in bounds]
    room = {key: bounds[key[0]] * history[key] - before[key] for key in keys}
    if sum(room.values()) <= 0:
        return None
    return paired_ratio({key: after[key] - before[key] for key in keys}, room, of="means")


def missed_more(turns: pd.DataFrame, other: pd.DataFrame) -> PairedRatio | None:
    """The share of the history that `turns` had to recompute beyond what `other` did, paired by seed and conversation: 0.016
    is 1.6 percentage points more. Over the turns that both measured; None where nothing is known of either."""
    ours, theirs = _counted(turns), _counted(other)
    both = ours.index.intersection(theirs.index)
    if both.empty:
        return None
    missed, theirs_missed = (
        conversation_sums((part["history_tokens"] - _hits(part)).loc[both]) for part in (ours, theirs)
    )
    history = conversation_sums(ours["history_tokens"].loc[both])
    return paired_ratio({key: missed[key] - theirs_missed[key] for key in history}, history, of="means")


def _counted(turns: pd.DataFrame) -> pd.DataFrame:
    """The turns with a history whose hits were counted."""
    return turns[turns["gpu_hit_tokens"].notna() & (turns["history_tokens"] > 0)]


def _hits(turns: pd.DataFrame) -> pd.Series[float]:
    """On all tiers together."""
    return turns["gpu_hit_tokens"] + turns[["cpu_hit_tokens", "disk_hit_tokens"]].fillna(0).sum(axis=1)
