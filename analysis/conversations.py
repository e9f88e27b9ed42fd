"""First tokens of conversations: by turn, and how much sooner than without a cache; what a changing prefix costs; why KV was
missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

from analysis import style
from analysis.forms import Form
from analysis.quantities import median, moved, over_seeds
from analysis.registry import Plot, Row
from analysis.sweep import Source
from pensieve.errors import MissingSeries
from pensieve.lab.results.frame import (
    PROBES,
    REFERENCE,
    Cell,
    by_round,
    conversations_of,
    paired,
    speed_up,
    values_of,
)
from pensieve.lab.statistics import Estimate, estimated, paired_ratio

CLASSES = ("hot", "warm", "cold")
_LOST = [
    "cpu_hit_tokens",
    "disk_hit_tokens",
    "recomputed_tokens",
    "resumed_swapped_tokens",
    "resumed_recomputed_tokens",
]
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
    nothing_lost = turns["recomputed_tokens"].notna() & (turns[_LOST].fillna(0) == 0).all(axis=1)
    free = turns[nothing_lost & turns["new_tokens"].notna() & turns["queue_ms"].notna()].sort_values("new_tokens")
    known = turns[turns["new_tokens"].notna()]
    if free.empty:
        return {}
    alone = (free["ttft_ms"] - free["queue_ms"]).to_numpy()
    fastest = np.minimum.accumulate(alone[::-1])[::-1]  # of turns with as many new tokens or more
    at = np.searchsorted(free["new_tokens"].to_numpy(dtype=int), known["new_tokens"].to_numpy(dtype=int))
    within = at < len(fastest)
    known = known[within]
    return _medians(known, pd.Series(fastest[at[within]], index=known.index))


def has_classes(source: Source) -> bool:
    return any(source.has_metric("ttft_ms_p50", one) for one in CLASSES)


def speed_ups(source: Source, form: Form, *, column: str, parts: Mapping[str, str], what: str) -> Iterator[Plot]:
    """Of every baseline over stateless, in each part of the turns, as pandas' query has them. Raises MissingSeries where one
    shares no turn of any part, saying that `what` is missing."""
    for panel in source.panels():
        turns = {cell.baseline: source.turns(cell) for cell in panel.cells}
        if REFERENCE not in turns:
            raise source.lacks(f"completed trial of {REFERENCE} beside the others")
        reference, rows, table = turns.pop(REFERENCE), list[Row](), list[dict[str, str]]()
        for cell in (cell for cell in panel.cells if cell.baseline in turns):
            ratios = {}
            for part, where in parts.items():
                sides = (
                    values_of(own.query(where) if where else own, "ttft_ms")
                    for own in (reference, turns[cell.baseline])
                )
                ratios[part] = speed_up(paired(*sides))
            if not any(ratios.values()):
                raise source.lacks(f"{what} that {cell.baseline} shares with {REFERENCE}")
            rows += [
                {
                    "baseline": cell.baseline, column: part,
                    "ttft_speed_up": one.value, "ci_low": one.ci_low, "ci_high": one.ci_high,
                    "n_conversations": one.n, "n_seeds": one.groups, "trials": cell.ids,
                    "_ttft_speed_up": one, "_section": part,
                }
                for part, one in ratios.items() if one is not None
            ]  # fmt: skip
            table.append({"baseline": cell.baseline, **{part: estimated(one) for part, one in ratios.items()}})
        yield Plot(panel, rows, table=table)


# A changing prefix


NO_HITS = "no hits"
COMMAND = "python runners/run.py experiment=peers/prefix_invalidation -m"
BLOCKS = "workload.blocks"
PARTS = ("cached", "recomputed", "new")
STAGES = {"warm-up [A, B]": "warmup", "miss [B, Q]": "miss", "re-warm-up [A, B]": "rewarm"}


def steps_of(source: Source, cell: Cell) -> pd.DataFrame:
    """The completed turns of a cell's conversations, but for those that the workload runs first and discards.

    Beside the columns of Source.turns: `cached`, prompt tokens found on any tier; `unseen`, tokens never seen before; NaN
    where the engine does not say. Raises MissingSeries where the cell has no hit or no miss, as trials of another workload.
    """
    turns = source.turns(cell, measured=False)
    found = turns[turns.index.get_level_values("iteration") >= 0].dropna(subset=["ttft_ms", "latency_ms"])
    found = found[found["status"] == "completed"].copy()
    for name in PROBES:
        if not (found["phase"] == name).any():
            raise MissingSeries(
                f"Sweep {source.sweep.id} has no completed {name} of baseline {cell.baseline}: it is not a sweep over "
                f"changing prefixes, or all of them failed; run `{COMMAND}`."
            )
    # An engine that reports cached tokens only has no other tier of ours: null there means none.
    shared = found["shared_hit_tokens"].fillna(0)
    others = found["cpu_hit_tokens"].fillna(0) + found["disk_hit_tokens"].fillna(0)
    return found.assign(cached=found["gpu_hit_tokens"] + others + shared, unseen=found["new_tokens"] - shared)


def _first_tokens(steps: pd.DataFrame) -> Estimate:
    assert not conversations_of(steps).has_duplicates, "a conversation goes through each step once"
    return median(steps["ttft_ms"])


def queries(source: Source, form: Form) -> Iterator[Plot]:
    """A hit and a miss of each cell. degradation: (miss - hit) / hit in %, of the mean TTFT, paired by round."""
    for panel in source.panels(BLOCKS):
        rows: list[Row] = []
        for blocks, cell in (
            (one, cell) for one in panel.values(BLOCKS) for cell in panel.cells if cell.at[BLOCKS] == one
        ):
            steps = steps_of(source, cell)
            asked = {kind: steps[steps["phase"] == kind] for kind in PROBES}
            hit, miss = (by_round(asked[kind]["ttft_ms"]) for kind in PROBES)
            change = moved(paired_ratio(miss, hit, of="means"), lambda ratio: (ratio - 1) * 100)
            cached = asked["hit"]["cached"]
            # An engine that finds nothing even where all of it was there has no hits that a miss could be slower than.
            nothing = bool(cached.notna().all() and (cached == 0).all())
            beside = NO_HITS if nothing else f"{change.value:+,.0f} %".replace("-", "−")
            for kind in PROBES:
                found, missed = _first_tokens(asked[kind]), kind == "miss"
                rows.append(
                    {
                        "baseline": cell.baseline,
                        "blocks": blocks,
                        "query": kind,
                        "ttft_ms_median": found,
                        "degradation_pct": change.value if missed else None,
                        "degradation_ci_low": change.ci_low if missed else None,
                        "degradation_ci_high": change.ci_high if missed else None,
                        "trials": cell.ids,
                        "_section": f"A/B = {blocks} tokens",
                        "_hatched": missed,
                        "_ttft_ms_median_text": f"{kind} {found.value:,.1f}{f' ({beside})' if missed else ''}",
                    }
                )
        yield Plot(panel, rows)


def stages(source: Source, form: Form) -> Iterator[Plot]:
    """A miss [B, Q] replaces the warmed [A, B]; the re-warm-up [A, B] shows what that cost the next request."""
    for panel in source.panels():
        rows: list[Row] = []
        for cell in panel.cells:
            steps = steps_of(source, cell)
            probed = conversations_of(steps).isin(conversations_of(steps[steps["phase"] == "miss"]))
            for title, name in STAGES.items():
                own = steps[probed & (steps["phase"] == name)]
                tokens, time = own[["cached", "recomputed_tokens", "unseen"]], _first_tokens(own)
                known = not (own.empty or tokens.isna().to_numpy().any())
                means = [float(total) / len(own) for total in tokens.sum()] if known else [None] * len(PARTS)
                rows.append(
                    {
                        "baseline": cell.baseline,
                        "step": name,
                        **{f"{part}_tokens": one for part, one in zip(PARTS, means, strict=True)},
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
