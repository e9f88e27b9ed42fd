"""First tokens of conversations by turn; what a changing prefix costs them, and why KV was missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from analysis import style
from analysis.forms import Form
from analysis.quantities import median, moved, over_seeds
from analysis.registry import Plot, Row
from analysis.sweep import Source
from pensieve.lab.results.frame import (
    OURS,
    PROBES,
    REFERENCE,
    Cell,
    by_round,
    conversations_of,
)
from pensieve.lab.statistics import Estimate, paired_ratio

CLASSES = ("hot", "warm", "cold")
PROMPT = ["gpu_hit_tokens", "cpu_hit_tokens", "recomputed_tokens", "disk_hit_tokens", "new_tokens"]
"""What a prompt is made of."""
_IDEAL = (
    ". Ideal: the new tokens alone, as the fastest TTFT without its wait of any turn with as many of them and no history to "
    "restore or compute"
)


def by_turn(source: Source, form: Form) -> Iterator[Plot]:
    """The median of each turn, and the ideal where any turn had all of its history in GPU memory."""
    for panel in source.panels():
        turns = {cell.baseline: source.turns(cell).dropna(subset="ttft_ms") for cell in panel.cells}
        for name, own in turns.items():
            if own.empty:
                raise source.lacks(f"a completed, measured turn of {name}")
        lines = {name: _medians(own, own["ttft_ms"]) for name, own in turns.items()}
        ideal = _ideal(pd.concat(turns.values()))
        ids = {cell.baseline: cell.ids for cell in panel.cells}
        rows = [
            {"baseline": name, "turn": turn, "ttft_ms_median": one, "trials": ids.get(name, " ".join(ids.values()))}
            for name, found in [*lines.items(), (style.IDEAL, ideal)]
            for turn, one in found.items()
        ]
        yield Plot(panel, rows, said=_IDEAL if ideal else "")


def _medians(turns: pd.DataFrame, values: pd.Series[Any]) -> dict[int, Estimate]:
    numbers = turns.index.get_level_values("turn")
    return {int(turn): median(values[numbers == turn]) for turn in np.unique(numbers)}


def _ideal(turns: pd.DataFrame) -> dict[int, Estimate]:
    """What the new tokens alone take: at each turn the median over conversations of the fastest first token, less its wait
    in the queue, of any turn with as many new tokens or more and nothing of its history to restore or compute.

    All of it is measured; nothing is fitted.
    """
    again = turns[["resumed_swapped_tokens", "resumed_recomputed_tokens"]].fillna(0).sum(axis=1)
    free = turns[(turns["gpu_hit_tokens"] == turns["history_tokens"]) & (again == 0)]
    free = free.dropna(subset=["new_tokens", "queue_ms"]).sort_values("new_tokens")
    fastest = (free["ttft_ms"] - free["queue_ms"])[::-1].cummin().to_numpy()[::-1]  # of turns with as many or more
    known = turns.dropna(subset="new_tokens")
    at = np.searchsorted(free["new_tokens"], known["new_tokens"])
    known, at = known[at < len(free)], at[at < len(free)]
    return _medians(known, pd.Series(fastest[at], index=known.index))


def one_conversation(source: Source, form: Form) -> Iterator[Plot]:
    """The prompt of each turn of one conversation by where its tokens were, under Pensieve and under stateless serving, of
    the first seed: that whose least part of GPU hits, CPU hits and recomputed tokens is the largest."""
    for panel in source.of_baselines([OURS, REFERENCE]).panels():
        turns = {cell.baseline: source.turns_of(cell.trials[0])[PROMPT].fillna(0) for cell in panel.cells}
        most = turns[OURS].groupby(level="session")[PROMPT[:3]].sum().min(axis="columns").idxmax()
        every = pd.concat(turns, names=["baseline"]).xs(most, level="session").sort_index().reset_index()
        parts = [name for name in PROMPT if every[name].any()]
        ids = {cell.baseline: cell.ids for cell in panel.cells}
        rows = [
            {
                "baseline": one["baseline"],
                "turn": one["turn"],
                **{name: one[name] for name in parts},
                "trials": ids[one["baseline"]],
                "_section": one["baseline"],
                "_name": f"turn {one['turn']}",
            }
            for one in every.to_dict("records")
        ]
        yield Plot(panel, rows, words={"session": repr(most)})


def has_classes(source: Source) -> bool:
    return any(source.has_metric("ttft_ms_p50", one) for one in CLASSES)


# A changing prefix


STAGES = {"warm-up [A, B]": "warmup", "miss [B, Q]": "miss", "re-warm-up [A, B]": "rewarm"}


def degradation(source: Source, cell: Cell) -> Estimate:
    """(miss - hit) / hit in %, of the mean times to first token, paired by round; the workload discards rounds below 0."""
    turns = source.turns(cell).query("iteration >= 0")
    hit, miss = (by_round(turns[turns["phase"] == kind]["ttft_ms"]) for kind in PROBES)
    return moved(paired_ratio(miss, hit, of="means"), lambda ratio: (ratio - 1) * 100)


def stages(source: Source, form: Form) -> Iterator[Plot]:
    """A miss [B, Q] replaces the warmed [A, B]; the re-warm-up [A, B] shows what that cost the next request."""
    for panel in source.panels():
        rows: list[Row] = []
        for cell in panel.cells:
            turns = source.turns(cell, measured=False).query("status == 'completed' and iteration >= 0")
            missed = conversations_of(turns[turns["phase"] == "miss"])
            for title, name in STAGES.items():
                own = turns[conversations_of(turns).isin(missed) & (turns["phase"] == name)]
                if own.empty:
                    raise source.lacks(f"completed {name} of {cell.baseline}")
                # An engine that reports cached tokens only has no other tier of ours: null there means none.
                found = own["gpu_hit_tokens"] + own[["cpu_hit_tokens", "disk_hit_tokens"]].fillna(0).sum(axis=1)
                shared, time = own["shared_hit_tokens"].fillna(0), median(own["ttft_ms"])
                parts = {
                    "cached": found + shared,
                    "recomputed": own["recomputed_tokens"],
                    "new": own["new_tokens"] - shared,
                }
                known = not any(one.isna().any() for one in parts.values())
                rows.append(
                    {
                        "baseline": cell.baseline,
                        "step": name,
                        **{f"{part}_tokens": float(one.mean()) if known else None for part, one in parts.items()},
                        "ttft_ms_median": time,
                        "trials": cell.ids,
                        "_section": cell.baseline,
                        "_name": title,
                        "_text": f"{'' if known else 'not reported; '}{time.value:,.1f} ms",
                    }
                )
        yield Plot(panel, rows)


# Misses


CAUSES = ("new", "edited", "evicted", "expired", "restarted", "never_stored")
POLICIES = "eviction"


def misses(source: Source, form: Form) -> Iterator[Plot]:
    """By cause: tokens missed and seconds of first tokens that took, a trial. With the policies of one baseline side by side
    where several were swept, else the baselines."""
    policies = source.several(POLICIES) and len(source.baselines()) == 1
    for panel in source.panels(*([POLICIES] if policies else [])):
        rows = [row for cell in panel.cells for row in _causes(source, cell)]
        if not rows:
            raise source.lacks("turn with a ledger of misses")
        yield Plot(panel, rows)


def _causes(source: Source, cell: Cell) -> Iterator[Row]:
    lines = [((trial.seed, trial.repeat), one) for trial in cell.trials for one in source.store.miss_sums(trial.id)]
    named = {"_name": cell.at[POLICIES]} if POLICIES in cell.at else {}
    for cause in (cause for cause in CAUSES if any(one.cause == cause for _, one in lines)):
        tokens = Counter({(trial.seed, trial.repeat): 0.0 for trial in cell.trials})
        seconds = tokens.copy()
        for at, one in lines:
            if one.cause == cause:
                tokens[at] += one.tokens
                seconds[at] += one.ms / 1e3
        yield {
            "baseline": cell.baseline,
            **cell.at,
            **named,
            "cause": cause,
            "tokens": over_seeds(tokens),
            "seconds": over_seeds(seconds),
            "trials": cell.ids,
        }
