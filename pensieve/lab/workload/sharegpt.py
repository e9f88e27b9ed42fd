"""Conversations of the length of ShareGPT's or UltraChat's: the real ones where their file is given, else synthetic ones, of
which only the lengths matter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pensieve.errors import ConfigError
from pensieve.lab.workload.base import (
    Count,
    NoneOrMore,
    NotNegative,
    Positive,
    WorkloadContext,
    in_order,
    refuse_untrained,
    shuffled,
    uniform,
)
from pensieve.lab.workload.fit import Fit, fitted, warmups
from pensieve.lab.workload.formats import load
from pensieve.lab.workload.formats.reading import OnMalformed
from pensieve.lab.workload.playback import Dialogue, Pauses, Playback, Poisson, Users, lengths_of
from pensieve.lab.workload.recording import Call, Conversation, Recording, facts_of
from pensieve.lab.workload.recording import Count as Tokens

MEANS_OF = 2000  # conversations whose means set a relative rate, and how many arrive in a time
WARMUP_SIDE_BY_SIDE = 2  # under a Poisson load nobody knows how many there will be
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


def sharegpt_workload(
    context: WorkloadContext,
    *,
    dataset: Literal["sharegpt", "ultrachat"] = "sharegpt",
    path: str | None = None,
    on_malformed: OnMalformed = "fail",
    conversations: Count = 200,
    users: Count | None = None,
    arrivals_s: Positive | None = None,
    request_rate: Positive = 1.0,
    relative_rate: Positive | None = None,
    think_time_s: NotNegative = 60.0,
    system_tokens: NoneOrMore = 0,
    systems: Count = 1,
    min_turns: Count = 1,
    max_turns: Count | None = None,
    max_new_tokens: Count | None = None,
    warmup_turns: Count = 4,
    timeout_s: Positive | None = None,
    free: bool = False,
) -> Playback:
    """People talk to one model, each reply becomes history, and the next message waits for it and for a think time.

    Conversations are those of a file, in an order that the seed decides; without a path synthetic
    ones from the published means of `dataset`, named synthetic in the record. They arrive as a Poisson process at
    request_rate / mean turns of those that were taken (load "partly open"); both rates are recorded. Or `users` people work
    through them, one after another (load "closed"); nobody may be without one.

    relative_rate: a multiple of what stateless serving could finish (cost.capacity) of the conversations that this seed
    brings. arrivals_s: as many conversations are taken as come in this time on average. system_tokens, systems: as of a Fit.
    free: replies end where the model ends them, at most max_new_tokens, or as long as recorded; otherwise they have the
    recorded length and end of sequence is ignored. The other fields: conf/workload/sharegpt.yaml.

    Raises ConfigError for fewer conversations than users, MalformedInput for a file that cannot be read.
    """
    in_order("min_turns", min_turns, "max_turns", max_turns)
    refuse_untrained(free, context)
    if users is not None and (arrivals_s is not None or relative_rate is not None):
        raise ConfigError(
            "workload.users sets the load; leave workload.arrivals_s and workload.relative_rate at null, or users."
        )
    fit = Fit(context, max_turns, max_new_tokens, free, system_tokens, systems)

    published = SHAREGPT if dataset == "sharegpt" else ULTRACHAT

    def taken(count: int) -> tuple[Recording, list[Dialogue], dict[str, int]]:
        if path is None:
            recording = draw(published, count, context.seed, min_turns)
            chosen = recording.conversations
        else:
            recording = load(path, "sharegpt", on_malformed)
            order = shuffled(len(recording.conversations), context.seed, "conversations")
            chosen = tuple(recording.conversations[index] for index in order)
        return recording, *fitted(chosen, fit, min_turns=min_turns, wanted=count)

    relative: dict[str, float] = {}
    if arrivals_s is not None or relative_rate is not None:
        _, known, _ = taken(MEANS_OF)
        if relative_rate is not None:
            capacity = _stateless_capacity(context, known)
            request_rate = relative_rate * capacity
            relative = {"stateless_capacity_req_s": round(capacity, 4)}
        if arrivals_s is not None:
            conversations = math.ceil(arrivals_s * request_rate / _mean_turns(known))
    conversations = max(conversations, users or 1)
    recording, measured, left_out = taken(conversations)
    arrivals, rates = arrivals_of(measured, users, request_rate)
    facts: dict[str, Any] = {
        "source": f"synthetic, published means of {published.name}" if path is None else Path(path).name,
        "synthetic": path is None,
        **facts_of(recording, context.byte_tokens),
        **left_out,
        **rates,
        **relative,
        "think_time_s": think_time_s,
        **lengths_of(measured),
    }
    side_by_side = users or WARMUP_SIDE_BY_SIDE
    return Playback(
        context,
        warmups(measured, max(warmup_turns, users or 1), side_by_side, context),
        measured,
        arrivals,
        Pauses(context.seed, think_time_s),
        free=free,
        timeout_s=timeout_s,
        facts=facts,
    )


def arrivals_of(
    measured: list[Dialogue], users: int | None, request_rate: float
) -> tuple[Poisson | Users, dict[str, Any]]:
    """How conversations begin, and the rates for the record. Raises ConfigError where some user would have none."""
    if users is not None:
        if users > len(measured):
            raise ConfigError(
                f"workload.users={users} people need a conversation each, and there are {len(measured)}. Lower "
                "workload.users or workload.min_turns, or name a file with more conversations that fit the model's context."
            )
        return Users.dealt(measured, users), {"users": users}
    per_s = request_rate / _mean_turns(measured)
    return Poisson(1.0 / per_s), {
        "request_rate_per_s": request_rate,
        "conversation_rate_per_s": round(per_s, 6),
        "arrival_s_mean": round(1.0 / per_s, 6),
    }


def _mean_turns(dialogues: Sequence[Dialogue]) -> float:
    return sum(dialogue.turns for dialogue in dialogues) / len(dialogues)


def _stateless_capacity(context: WorkloadContext, dialogues: Sequence[Dialogue]) -> float:
    if context.stateless_capacity is None:
        raise ConfigError(
            "workload.relative_rate needs a machine whose speed is known beforehand, a simulated one such as "
            "hardware=sim_a100_80g; on a real one set workload.request_rate in requests a second."
        )
    return context.stateless_capacity([(step.prompt, step.reply) for each in dialogues for step in each.steps])


def draw(published: Published, conversations: int, seed: int, min_turns: int = 1) -> Recording:
    """`conversations` conversations with long-tailed lengths, a function of (seed, number).

    Turns are geometric from 1; those below min_turns are drawn again, which raises their mean by min_turns - 1. Lengths are
    lognormal with the published means.
    """
    return Recording(
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
                Tokens(_lognormal(published.message_tokens, MESSAGE_SIGMA, seed, name, turn, "message")),
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
