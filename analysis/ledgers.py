"""Why KV was missing, what keeping it took, and what that saved."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from analysis.forms import Form
from analysis.quantities import over_seeds
from analysis.registry import Plot, Row
from analysis.sweep import Cell, Panel, Source
from pensieve.lab.results.prices import Worth
from pensieve.lab.results.store import Holding
from pensieve.serve.books.holding import TIERS

CAUSES = ("new", "edited", "evicted", "expired", "restarted", "never_stored")
SHOWN = 4  # names of those who evicted most
POLICIES = "eviction"


def _panels(source: Source) -> Iterator[Panel]:
    """With the policies of one baseline side by side where several were swept, else the baselines."""
    policies = source.several(POLICIES) and len(source.baselines()) == 1
    yield from source.panels(*([POLICIES] if policies else []))


def _name(cell: Cell) -> str:
    return cell.at.get(POLICIES, cell.baseline)


def _key(cell: Cell) -> Row:
    named = {"_name": _name(cell)} if POLICIES in cell.at else {}
    return {"baseline": cell.baseline, **cell.at, **named}


# Misses


def misses(source: Source, form: Form) -> Iterator[Plot]:
    """By cause: tokens missed and seconds of first tokens that took, a trial, and the share of those who evicted most."""
    for panel in _panels(source):
        rows = [row for cell in panel.cells for row in _causes(source, cell)]
        if not rows:
            raise source.lacks("turn with a ledger of misses")
        yield Plot(panel, rows)


def _causes(source: Source, cell: Cell) -> Iterator[Row]:
    sums: dict[str, dict[tuple[int, int], Counter[str]]] = defaultdict(dict)
    evictors: dict[str, Counter[str]] = defaultdict(Counter)
    for trial in cell.trials:
        for row in source.store.miss_sums(trial.id):
            own = sums[row.cause].setdefault((trial.seed, trial.repeat), Counter())
            own.update({"tokens": row.tokens, "ms": row.ms})
            if row.evicted_by:
                evictors[row.cause][row.evicted_by] += row.tokens
    keys, none = [(trial.seed, trial.repeat) for trial in cell.trials], Counter[str]()
    for cause in (cause for cause in CAUSES if cause in sums):
        whole = sum(own["tokens"] for own in sums[cause].values())
        most = sorted(evictors[cause].items(), key=lambda one: (-one[1], one[0]))[:SHOWN]
        yield {
            **_key(cell),
            "cause": cause,
            "tokens": over_seeds({key: float(sums[cause].get(key, none)["tokens"]) for key in keys}),
            "seconds": over_seeds({key: sums[cause].get(key, none)["ms"] / 1e3 for key in keys}),
            "evicted_most_by": " ".join(f"{name}:{count / whole:.3f}" for name, count in most),
            "trials": cell.ids,
        }


# Holding


def _holdings(source: Source, cell: Cell) -> list[tuple[int, Holding]]:
    """With the trial of each."""
    return [(trial.id, one) for trial in cell.trials for one in source.store.holdings_of(trial.id)]


def _worth(source: Source, cell: Cell) -> Worth | None:
    return Worth.of(cell.trials[0], source.prices)


def _basis(source: Source) -> str:
    said = ", ".join(f"{name} {value:g}" for name, value in source.prices.model_dump().items() if value is not None)
    return f"at the prices {said}"


def held(source: Source, form: Form) -> Iterator[Plot]:
    """A row a baseline and tier. paid_back: GPU time saved over memory kept idle. worthwhile: the share of its conversations
    that have paid back."""
    for panel in _panels(source):
        rows = [row for cell in panel.cells for row in _tiers(source, cell)]
        if not rows:
            raise source.lacks("trial with a ledger of holding")
        said = f". Paid back: GPU time saved over memory kept idle, {_basis(source)}"
        said += "; worth it: conversations that have paid back"
        yield Plot(panel, rows, said=said if source.prices.given else "")


def _tiers(source: Source, cell: Cell) -> Iterator[Row]:
    every, worth = _holdings(source, cell), _worth(source, cell)
    for tier in TIERS:
        own = [one for _, one in every if one.tier == tier]
        if not own:
            continue
        found = {
            name: over_seeds(source.metrics(cell, metric, tier))
            for name, metric in (("gib_s", "held_gib_s"), ("idle_gib_s", "held_idle_gib_s"), ("saved_s", "saved_s"))
        }
        backs = [worth.paid_back(one.saved_s, one.idle_gib_s, tier) for one in own if worth and one.idle_gib_s]
        known = [one for one in backs if one is not None]
        yield {
            **_key(cell),
            "tier": tier,
            "conversations": len(own) / len(cell.trials),
            **found,
            "paid_back": worth and worth.paid_back(found["saved_s"].value, found["idle_gib_s"].value, tier),
            "worthwhile_pct": 100 * sum(one >= 1 for one in known) / len(known) if known else None,
            "trials": cell.ids,
        }
