"""Which positions one iteration computes: a function from the running requests to shares of the token budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from pensieve.scheduler.sequence import Sequence as Running

Share = tuple[Running, int]
"""A running request and how many positions of its work this iteration computes."""

Composition = Callable[[Sequence[Running], int], list[Share]]


def unified(running: Sequence[Running], max_tokens: int) -> list[Share]:
    """Prefill and decode in one batch (paper section 4.2): decodes first, since they are one token each and somebody reads
    them; the rest of the budget goes to prefills, first come, first served."""
    shares: list[Share] = [(sequence, 1) for sequence in running if sequence.decoding][:max_tokens]
    return shares + _prefills(running, max_tokens - len(shares))


def split(running: Sequence[Running], max_tokens: int) -> list[Share]:
    """Prefill and decode in separate iterations, prefill first: the paper's ablation."""
    prefills = _prefills(running, max_tokens)
    return prefills or [(sequence, 1) for sequence in running if sequence.decoding][:max_tokens]


def _prefills(running: Iterable[Running], budget: int) -> list[Share]:
    shares: list[Share] = []
    for sequence in running:
        if budget <= 0:
            break
        if not sequence.decoding and sequence.work_tokens:
            count = min(sequence.work_tokens, budget)
            shares.append((sequence, count))
            budget -= count
    return shares
