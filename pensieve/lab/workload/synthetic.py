"""Conversations drawn from published means, where the real data set is not at hand: lengths only, no text."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pensieve.lab.workload.chance import uniform
from pensieve.lab.workload.recording import Call, Conversation, Count, Recording

MESSAGE_SIGMA, REPLY_SIGMA = 1.2, 0.9
"""Widths of the lognormal distributions of lengths: our choice, since only the means are published."""


@dataclass(frozen=True, slots=True)
class Published:
    """Means of a data set, in turns a conversation and in tokens."""

    name: str
    turns: float
    message_tokens: float
    reply_tokens: float


SHAREGPT = Published("ShareGPT", 5.56, 37.77, 204.58)
ULTRACHAT = Published("UltraChat", 3.86, 51.78, 257.81)


def draw(published: Published, conversations: int, seed: int, min_turns: int = 1) -> Recording:
    """`conversations` conversations with long-tailed lengths, a function of (seed, number).

    Turns are geometric from 1; those below min_turns are drawn again, which raises their mean by min_turns - 1. Lengths are
    lognormal with the published means.
    """
    return Recording(
        format="synthetic",
        conversations=tuple(_conversation(published, number, seed, min_turns) for number in range(conversations)),
        rule=(
            f"Synthetic, not {published.name}'s conversations. Published means: {published.turns} turns, "
            f"{published.message_tokens} tokens a message, {published.reply_tokens} a reply. Turns are geometric from "
            f"{min_turns}, lengths lognormal with sigma {MESSAGE_SIGMA} and {REPLY_SIGMA}. Token ids have no meaning."
        ),
    )


def _conversation(published: Published, number: int, seed: int, min_turns: int) -> Conversation:
    name = f"{published.name.lower()}-{number}"
    more = math.log1p(-uniform(seed, name, "turns")) / math.log1p(-1.0 / published.turns)
    return Conversation(
        name,
        tuple(
            Call(
                Count(_lognormal(published.message_tokens, MESSAGE_SIGMA, seed, name, turn, "message")),
                _lognormal(published.reply_tokens, REPLY_SIGMA, seed, name, turn, "reply"),
            )
            for turn in range(min_turns + int(more))
        ),
    )


def _lognormal(mean: float, sigma: float, seed: int, *names: object) -> int:
    """At least 1; a normal deviate from two uniform ones, by Box and Muller."""
    radius = math.sqrt(-2.0 * math.log1p(-uniform(seed, *names, "radius")))
    deviate = radius * math.cos(2.0 * math.pi * uniform(seed, *names, "angle"))
    return max(1, round(mean * math.exp(sigma * deviate - sigma * sigma / 2.0)))
