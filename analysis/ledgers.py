"""Why KV was missing, what keeping it took, and the seconds that that saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pandas as pd

from analysis.forms import Form
from analysis.quantities import over_seeds
from analysis.registry import Plot, Row
from analysis.sweep import Source
from pensieve.lab.results.frame import Cell
from pensieve.serve.books.holding import TIERS

CAUSES = ("new", "edited", "evicted", "expired", "restarted", "never_stored")
SHOWN = 4  # names of those who evicted most
POLICIES = "eviction"


def _plots(source: Source, rows_of: Callable[[Source, Cell], Iterator[Row]], lacking: str) -> Iterator[Plot]:
    """With the policies of one baseline side by side where several were swept, else the baselines."""
    policies = source.several(POLICIES) and len(source.baselines()) == 1
    for panel in source.panels(*([POLICIES] if policies else [])):
        rows = [row for cell in panel.cells for row in rows_of(source, cell)]
        if not rows:
            raise source.lacks(lacking)
        yield Plot(panel, rows)


def _key(cell: Cell) -> Row:
    named = {"_name": cell.at[POLICIES]} if POLICIES in cell.at else {}
    return {"baseline": cell.baseline, **cell.at, **named}


# Misses


def misses(source: Source, form: Form) -> Iterator[Plot]:
    """By cause: tokens missed and seconds of first tokens that took, a trial, and the share of those who evicted most."""
    return _plots(source, _causes, "turn with a ledger of misses")


def _causes(source: Source, cell: Cell) -> Iterator[Row]:
    ledger = pd.DataFrame(
        [
            {"at": (trial.seed, trial.repeat), "cause": one.cause, "by": one.evicted_by, "tokens": one.tokens, "ms": one.ms}
            for trial in cell.trials for one in source.store.miss_sums(trial.id)
        ],
        columns=["at", "cause", "by", "tokens", "ms"],
    )  # fmt: skip
    none = dict.fromkeys(((trial.seed, trial.repeat) for trial in cell.trials), 0.0)
    for cause in (cause for cause in CAUSES if (ledger["cause"] == cause).any()):
        own = ledger[ledger["cause"] == cause]
        sums = own.groupby("at")[["tokens", "ms"]].sum().astype(float)
        most = own.groupby("by")["tokens"].sum().sort_values(ascending=False, kind="stable").head(SHOWN)
        yield {
            **_key(cell),
            "cause": cause,
            "tokens": over_seeds(none | dict(zip(sums.index, sums["tokens"], strict=True))),
            "seconds": over_seeds(none | dict(zip(sums.index, sums["ms"] / 1e3, strict=True))),
            "evicted_most_by": " ".join(f"{name}:{count / own['tokens'].sum():.3f}" for name, count in most.items()),
            "trials": cell.ids,
        }


# Holding


def held(source: Source, form: Form) -> Iterator[Plot]:
    """A row a baseline and tier."""
    return _plots(source, _tiers, "trial with a ledger of holding")


def _tiers(source: Source, cell: Cell) -> Iterator[Row]:
    every = [one for trial in cell.trials for one in source.store.holdings_of(trial.id)]
    for tier in TIERS:
        own = [one for one in every if one.tier == tier]
        if not own:
            continue
        found = {
            name: over_seeds(source.metrics(cell, metric, tier))
            for name, metric in (("gib_s", "held_gib_s"), ("idle_gib_s", "held_idle_gib_s"), ("saved_s", "saved_s"))
        }
        yield {
            **_key(cell),
            "tier": tier,
            "conversations": len(own) / len(cell.trials),
            **found,
            "trials": cell.ids,
        }
