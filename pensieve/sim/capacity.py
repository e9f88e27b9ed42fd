"""How many requests a second a server without memory of its conversations can finish: the unit of a relative load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pensieve.sim.cost import SimulatedCost

Lengths = Sequence[tuple[int, int]]
"""(tokens of the whole prompt, history included; tokens of the reply) of each request."""


@dataclass(frozen=True, slots=True)
class Batches:
    """What bounds a batch. kv_tokens: of the pool that requests may fill; requests, positions: of one iteration."""

    kv_tokens: int
    requests: int
    positions: int


def stateless_capacity(cost: SimulatedCost, lengths: Lengths, batches: Batches) -> float:
    """Requests a second that stateless serving finishes when it never lacks work.

    Mean values of its steady state: as many requests run as the KV pool holds (or an iteration takes); each iteration
    decodes a token for all of them and prefills the prompts of as many as finish. Queueing, suspension, the spread of lengths
    and prompts that come whole rather than in even shares are left out: saturation lies near it, on either side (a simulated
    A100: OPT-13B at 1.07 times, Llama 2-13B with 10 KV heads beyond 1.3 times). It is a unit of load, not a result.
    """
    assert lengths, "no request to take the mean of"
    prompts = sum(prompt for prompt, _ in lengths)
    replies = sum(reply for _, reply in lengths)
    # A request holds its prompt and the reply so far, for as many iterations as its reply has tokens.
    held = sum(reply * (prompt + reply / 2) for prompt, reply in lengths) / replies
    prefilled = prompts / replies  # positions, for each one that is decoded
    running = min(batches.requests, batches.kv_tokens / held, batches.positions / (1 + prefilled))
    decodes = max(1, round(running))
    chunk = round(decodes * prefilled)
    middle = sum(prompt * prompt for prompt, _ in lengths) / prompts / 2  # the mean position of a prompt's tokens
    start = max(0, round(middle - chunk / 2))
    rows = [(round(held), round(held) + 1)] * decodes + ([(start, start + chunk)] if chunk else [])
    return decodes * len(lengths) / replies / cost.iteration_s(rows, decodes)
