"""Conversations of the length of ShareGPT's or UltraChat's: the real ones where they are given, else synthetic ones."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pensieve.errors import ConfigError
from pensieve.lab.workload.base import WorkloadContext, bytes_fact
from pensieve.lab.workload.chance import shuffled
from pensieve.lab.workload.fields import Count, NotNegative, Positive, in_order, refuse_untrained, within_memory
from pensieve.lab.workload.fit import Dialogue, Fit, fitted, warmups
from pensieve.lab.workload.formats import load
from pensieve.lab.workload.formats.reading import OnMalformed
from pensieve.lab.workload.hub import load_from_hub
from pensieve.lab.workload.playback import Pauses, Playback, Poisson, Users
from pensieve.lab.workload.recording import Recording, has_text
from pensieve.lab.workload.synthetic import SHAREGPT, ULTRACHAT, draw

MEANS_OF = 2000  # conversations whose means set a relative rate, and how many arrive in a time
WARMUP_SIDE_BY_SIDE = 2  # under a Poisson load nobody knows how many there will be
_HUB_NAME = re.compile(r"[\w-]+(\.[\w-]+)*/[\w.-]+")


def sharegpt_workload(
    context: WorkloadContext,
    *,
    dataset: Literal["sharegpt", "ultrachat"] = "sharegpt",
    path: str | None = None,
    split: str = "train",
    on_malformed: OnMalformed = "fail",
    conversations: Count = 200,
    users: Count | None = None,
    arrivals_s: Positive | None = None,
    request_rate: Positive = 1.0,
    relative_rate: Positive | None = None,
    think_time_s: NotNegative = 60.0,
    min_turns: Count = 1,
    max_turns: Count | None = None,
    max_new_tokens: Count | None = None,
    warmup_turns: Count = 4,
    timeout_s: Positive | None = None,
    free: bool = False,
) -> Playback:
    """People talk to one model, each reply becomes history, and the next message waits for it and for a think time.

    path: a file in ShareGPT's or UltraChat's JSON, or a name on the hub (`split` of it); None: synthetic conversations
        from the published means of `dataset`, named synthetic in the record. Conversations of a file are taken in an
        order that the seed decides.
    request_rate: requests a second in steady state: conversations arrive as a Poisson process at request_rate / mean
        turns of the conversations that were taken (load "partly open"); both rates are recorded. users: instead, so
        many people work through the conversations, one after another (load "closed"); as many conversations are taken
        as there are users at least, since nobody may be without one.
    relative_rate: instead of request_rate, a multiple of what stateless serving could finish (cost.capacity), by the
        conversations that this seed brings; simulated machines only.
    conversations: how many are taken. arrivals_s: instead, so many seconds they go on arriving: as many are taken as then
        come on average, at this rate.
    think_time_s: mean of the exponential time between a reply and the next message.
    min_turns, max_turns: shorter conversations are left out, longer ones cut. max_new_tokens: cap on a reply; None: as
        recorded. free: replies end where the model ends them (trained weights), at most max_new_tokens, or as long as
        recorded; otherwise they have the recorded length and end of sequence is ignored.
    warmup_turns: turns of phase "warmup" before the measured ones, two conversations side by side, or one a user.

    Raises ConfigError for fewer conversations than users, MalformedInput for a file that cannot be
    read.
    """
    in_order("min_turns", min_turns, "max_turns", max_turns)
    refuse_untrained(free, context)
    if users is not None and (arrivals_s is not None or relative_rate is not None):
        raise ConfigError(
            "workload.users sets the load; leave workload.arrivals_s and workload.relative_rate at null, or users."
        )
    fit = Fit(context, max_turns, max_new_tokens, free)

    def taken(count: int) -> tuple[Recording, str, list[Dialogue], dict[str, int]]:
        recording, source = _source(dataset, path, split, on_malformed, count, min_turns, context.seed)
        order = [recording.conversations[index] for index in _order(recording, path, context.seed)]
        return recording, source, *fitted(order, fit, min_turns=min_turns, wanted=count)

    relative: dict[str, float] = {}
    if arrivals_s is not None or relative_rate is not None:
        _, _, known, _ = taken(MEANS_OF)
        if relative_rate is not None:
            capacity = _stateless_capacity(context, known)
            request_rate = relative_rate * capacity
            relative = {"relative_rate": relative_rate, "stateless_capacity_req_s": round(capacity, 4)}
        if arrivals_s is not None:
            conversations = math.ceil(arrivals_s * request_rate / _mean_turns(known))
    conversations = max(conversations, users or 1)
    if path is None:  # of a file no more are taken than it has
        field = "users" if conversations == users else "conversations"
        within_memory(field, conversations, min_turns, 0, context.memory_bytes)
    recording, source, measured, left_out = taken(conversations)
    arrivals, rates = arrivals_of(measured, users, request_rate)
    facts: dict[str, Any] = {
        "source": source,
        "synthetic": path is None,
        "rule": recording.rule,
        "conversations_at_hand": len(recording.conversations),
        "malformed_lines": recording.malformed,
        "malformed_examples": list(recording.examples),
        **recording.facts,
        **(bytes_fact(context) if has_text(recording) else {}),
        **left_out,
        **rates,
        **relative,
        "think_time_s": think_time_s,
    }
    side_by_side = users or WARMUP_SIDE_BY_SIDE
    return Playback(
        context,
        warmups(measured, max(warmup_turns, users or 1), side_by_side, context),
        measured,
        arrivals,
        pauses=Pauses(think_time_s),
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
        return Users(users), {"users": users}
    per_s = request_rate / _mean_turns(measured)
    return Poisson(1.0 / per_s), {
        "request_rate_per_s": request_rate,
        "conversation_rate_per_s": round(per_s, 6),
        "arrival_s_mean": round(1.0 / per_s, 6),
    }


def _source(
    dataset: str, path: str | None, split: str, on_malformed: OnMalformed, conversations: int, min_turns: int, seed: int
) -> tuple[Recording, str]:
    if path is None:
        published = SHAREGPT if dataset == "sharegpt" else ULTRACHAT
        return draw(published, conversations, seed, min_turns), f"synthetic, published means of {published.name}"
    file = Path(path).expanduser()
    if not file.exists() and file.suffix not in (".json", ".jsonl") and _HUB_NAME.fullmatch(path):
        return load_from_hub(path, split, on_malformed), f"{path} ({split}) on the hub"
    return load(path, "sharegpt", on_malformed), file.name


def _order(recording: Recording, path: str | None, seed: int) -> list[int]:
    count = len(recording.conversations)
    return list(range(count)) if path is None else shuffled(count, seed, "conversations")


def _mean_turns(dialogues: Sequence[Dialogue]) -> float:
    return sum(dialogue.turns for dialogue in dialogues) / len(dialogues)


def _stateless_capacity(context: WorkloadContext, dialogues: Sequence[Dialogue]) -> float:
    if context.stateless_capacity is None:
        raise ConfigError(
            "workload.relative_rate needs a machine whose speed is known beforehand, a simulated one such as "
            "hardware=sim_a100_80g; on a real one set workload.request_rate in requests a second."
        )
    return context.stateless_capacity([(step.prompt, step.reply) for each in dialogues for step in each.steps])
