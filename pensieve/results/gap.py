"""How much of the way from least recently used to the offline bound an eviction policy goes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from pensieve.results.frame import conversation_sums
from pensieve.statistics import PairedRatio, paired_ratio

if TYPE_CHECKING:
    import pandas as pd

START = "lru"
"""The policy that closes nothing of the gap; the bound closes all of it."""

PAPERS = "retention_value"
"""The policy of the paper, and the default, which others have to beat."""

GAP_COLUMNS = ("history_tokens", "gpu_hit_tokens", "cpu_hit_tokens", "disk_hit_tokens")
"""What it is computed of."""


def gap_closed(turns: pd.DataFrame, start: pd.DataFrame, bounds: Mapping[int, float]) -> PairedRatio | None:
    """(hits - START's hits) / (bound - START's hits), in tokens on all tiers, paired by seed and conversation.

    turns, start: measured turns of the policy and of START, as frame.turn_frame gives them. bounds: bound_hit_rate of START's
    trials by seed. Negative where the policy finds less than START. The bound is of a whole trial, so for the interval each
    conversation has its share of it, by its history. None where START is at the bound, or nothing is known of either.
    """
    before, after = hit_tokens(start), hit_tokens(turns)
    keys = [key for key in before if key in after and key[0] in bounds]
    room = {key: bounds[key[0]] * before[key].history - before[key].hits for key in keys}
    if sum(room.values()) <= 0:
        return None
    return paired_ratio({key: after[key].hits - before[key].hits for key in keys}, room, of="means")


def found_more(turns: pd.DataFrame, other: pd.DataFrame) -> PairedRatio | None:
    """(hits - the other's hits) / history, paired by seed and conversation: by how much of the history one policy finds more
    than another one. None where nothing is known of either."""
    before, after = hit_tokens(other), hit_tokens(turns)
    keys = before.keys() & after.keys()
    if not keys:
        return None
    history = {key: before[key].history for key in keys}
    return paired_ratio({key: after[key].hits - before[key].hits for key in keys}, history, of="means")


class Found(NamedTuple):
    """Tokens of one conversation's turns."""

    history: float
    hits: float


def hit_tokens(turns: pd.DataFrame) -> dict[tuple[int, str], Found]:
    """By seed and conversation, on all tiers, over its turns with a history."""
    known = turns[turns["gpu_hit_tokens"].notna() & (turns["history_tokens"] > 0)]
    if known.empty:
        return {}
    hits = known["gpu_hit_tokens"] + known[["cpu_hit_tokens", "disk_hit_tokens"]].fillna(0).sum(axis=1)
    history, found = conversation_sums(known["history_tokens"]), conversation_sums(hits)
    return {key: Found(history[key], found[key]) for key in history}
