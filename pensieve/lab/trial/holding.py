"""The ledger of holding of a trial: what each conversation held of each tier, and the prefill that this saved."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from pensieve.core.plan import Tier
from pensieve.lab.metrics import MetricValue
from pensieve.lab.results.store import Holding
from pensieve.serve.books.books import PositionPrices
from pensieve.serve.books.holding import TIERS, Held
from pensieve.serve.record import TurnRecord
from pensieve.units import GIB

NS = 10**9


def ledger_of_holding(
    held: Mapping[tuple[str, Tier], Held], turns: Iterable[TurnRecord], block_bytes: int
) -> list[Holding]:
    """A row for each conversation and tier in which it held something or found something. turns: all of the trial."""
    saved: dict[tuple[str, Tier], float] = defaultdict(float)
    for turn in turns:
        for tier, seconds in zip(TIERS, turn.saved_s or (), strict=False):
            if seconds:
                saved[turn.session, tier] += seconds
    none = Held(0, 0)
    return [
        Holding(
            *key,
            gib_s=held.get(key, none).block_ns * block_bytes / (GIB * NS),
            saved_s=saved.get(key, 0.0),
            idle_gib_s=held.get(key, none).idle_block_ns * block_bytes / (GIB * NS),
        )
        for key in dict.fromkeys((*held, *saved))
    ]


def holding_metrics(
    holdings: Iterable[Holding], prices: PositionPrices, turns: Iterable[TurnRecord], chunk_tokens: int
) -> list[MetricValue]:
    """Sums by tier; and what the first tokens of a conversation take to compute, at powers of two of a chunk up to the
    longest prompt: with the size of a token and what memory costs, that is how long it pays to keep them."""
    rows = list(holdings)
    longest = max((turn.prompt_tokens or 0 for turn in turns), default=0)
    found = []
    for tier in TIERS:
        own = [one for one in rows if one.tier == tier]
        sums = {
            "held_gib_s": sum(one.gib_s for one in own),
            "held_idle_gib_s": sum(one.idle_gib_s for one in own),
            "saved_s": sum(one.saved_s for one in own),
        }
        if own:
            found += [
                MetricValue(name, value, label=tier, n=len(own), n_unit="conversations") for name, value in sums.items()
            ]
    tokens = chunk_tokens
    while rows and tokens <= longest:
        found.append(MetricValue("prefill_s", prices.seconds(0, tokens), label=str(tokens)))
        tokens *= 2
    return found
