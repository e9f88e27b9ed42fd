"""Conversations of a file, or of published lengths, asked again: at their own times where the file has them."""

import logging
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from pensieve.errors import ConfigError
from pensieve.lab.workload.base import (
    Count,
    NoneOrMore,
    NotNegative,
    Positive,
    WorkloadContext,
    check_turns,
    part_of,
    shuffled,
    uniform,
)
from pensieve.lab.workload.fit import Fit, fitted, warmups
from pensieve.lab.workload.formats import load
from pensieve.lab.workload.formats.reading import OnMalformed
from pensieve.lab.workload.playback import Dialogue, Pauses, Playback, Poisson, Recorded, Users
from pensieve.lab.workload.recording import Call, Conversation, Recording, block_repeats, facts_of
from pensieve.lab.workload.recording import Count as Tokens

log = logging.getLogger(__name__)

MEANS_OF = 2000  # conversations whose means set a relative rate, and how many arrive in a time
WARMUP_SIDE_BY_SIDE = 2  # under a Poisson load nobody knows how many there will be


def trace_workload(
    context: WorkloadContext,
    *,
    path: str | None = None,
    format: str | None = None,
    dataset: Literal["sharegpt", "ultrachat"] | None = None,
    on_malformed: OnMalformed = "fail",
    time_scale: Positive = 1.0,
    window_s: Positive | None = None,
    part: str | None = None,
    conversations: Count | None = None,
    users: Count | Literal["all"] | None = None,
    arrivals_s: Positive | None = None,
    request_rate: Positive = 1.0,
    relative_rate: Positive | None = None,
    think_time_s: NotNegative = 60.0,
    think_scale: NotNegative = 1.0,
    hint: Literal["recorded", "none"] = "recorded",
    system_tokens: NoneOrMore = 0,
    systems: Count = 1,
    min_turns: Count = 1,
    max_turns: Count | None = None,
    max_new_tokens: Count | None = None,
    max_context: Count | None = None,
    warmup_turns: Count = 4,
    timeout_s: Positive | None = None,
    free: bool = False,
) -> Playback:
    """Ask what a file has recorded. Without a path synthetic conversations from the published means of `dataset`, named
    synthetic in the record. Fields: conf/workload/trace.yaml and sharegpt.yaml.

    A format with times is replayed open-loop: each request is sent at its recorded time x time_scale after the first
    one, whatever the system does. Its requests carry their whole prompts, or continue where the format's rule says so. A
    format without times (texts), or with times of each session alone (weka), is replayed as conversations that arrive as a
    Poisson process at request_rate / mean turns of those that were taken (load "partly open"), or by `users` who have one
    after another and all start at once (load "closed"). The next turn comes after the reply and a pause: the recorded one
    x think_scale; where none is recorded, think_time_s (mean, exponential).

    relative_rate: a multiple of what stateless serving could finish (cost.capacity) of the conversations that this seed
    brings. arrivals_s: as many conversations are taken as come in this time on average. system_tokens, systems: as of a Fit.
    free: replies end where the model ends them, at most max_new_tokens, or as long as recorded; otherwise they have the
    recorded length and end of sequence is ignored, since the recorded times assume it.

    Raises ConfigError for a field out of range, MalformedInput for a file or line that cannot be read.
    """
    if path is None and dataset is None:
        raise ConfigError("workload=trace needs workload.path=FILE, the recorded requests; set it.")
    check_turns(min_turns, max_turns)
    if users is not None and (arrivals_s is not None or relative_rate is not None):
        raise ConfigError(
            "workload.users sets the load; leave workload.arrivals_s and workload.relative_rate at null, or users."
        )
    if max_context is not None:
        context = replace(context, max_context=min(context.max_context, max_context))
    seed, fit = context.seed, Fit(context, max_turns, max_new_tokens, free, system_tokens, systems, hint == "recorded")
    source = None if path is None else _source(path, format, on_malformed, window_s, part)
    timed = source is not None and source[0].timed
    if timed and (users is not None or relative_rate is not None or arrivals_s is not None):
        raise ConfigError(
            "The file has a time for each request; leave workload.users, arrivals_s and relative_rate alone."
        )

    def taken(count: int | None) -> tuple[Recording, list[Dialogue], dict[str, int]]:
        if source is None:
            recording = draw(dataset or "sharegpt", count or MEANS_OF, seed, min_turns)
            people: Sequence[Conversation] = recording.conversations
        else:
            recording, _, people = source
            order = shuffled(len(people), seed, "conversations") if count else range(len(people))
            people = [people[place] for place in order]
        return recording, *fitted(people, fit, min_turns=min_turns, wanted=count)

    rates: dict[str, Any] = {}
    if arrivals_s is not None or relative_rate is not None:
        _, known, _ = taken(MEANS_OF)
        if relative_rate is not None:
            if context.stateless_capacity is None:
                raise ConfigError(
                    "workload.relative_rate needs a machine whose speed is known beforehand, a simulated one such as "
                    "hardware=sim_a100_80g; on a real one set workload.request_rate in requests a second."
                )
            capacity = context.stateless_capacity([(step.prompt, step.reply) for one in known for step in one.steps])
            request_rate = relative_rate * capacity
            rates["stateless_capacity_req_s"] = round(capacity, 4)
        if arrivals_s is not None:
            conversations = math.ceil(arrivals_s * request_rate / _mean_turns(known))
    at_once = users if isinstance(users, int) else None
    recording, measured, left_out = taken(max(conversations, at_once or 1) if conversations else None)
    begun, never = begun_by(measured, source[1], fit) if source is not None else ([], 0)
    paused = any(call.pause_s is not None for one in recording.conversations for call in one.calls)
    arrivals: Recorded | Poisson | Users = Recorded(time_scale)
    if users is not None:
        count = at_once or len(measured)
        if count > len(measured):
            raise ConfigError(
                f"workload.users={users} people need a conversation each, and there are {len(measured)}. Lower "
                "workload.users or workload.min_turns, or name a file with more conversations that fit the model's context."
            )
        arrivals, rates["users"] = Users.dealt(measured, count), count
    elif not timed:
        per_s = request_rate / _mean_turns(measured)
        arrivals = Poisson(1.0 / per_s)
        rates |= {"request_rate_per_s": request_rate, "conversation_rate_per_s": round(per_s, 6)}
    if not timed and not paused:
        rates["think_time_s"] = think_time_s
    return Playback(
        context,
        warmups(measured, max(warmup_turns, at_once or 1), at_once or WARMUP_SIDE_BY_SIDE, context),
        [*measured, *begun],
        arrivals,
        Pauses(seed, 0.0 if paused else think_time_s, think_scale),
        free=free,
        timeout_s=timeout_s,
        facts={
            "source": recording.format if path is None else Path(path).name,
            "synthetic": path is None,
            **facts_of(recording, context.byte_tokens),
            **left_out,
            **({"begun_by_others": len(begun), "begun_by_others_left_out": never} if begun or never else {}),
            **rates,
        },
    )


def _mean_turns(dialogues: Sequence[Dialogue]) -> float:
    return sum(dialogue.turns for dialogue in dialogues) / len(dialogues)


# What is taken of a file

AWAY_S = 3600.0
AWAY_SPANS = 10
"""An outlier lies at least so many seconds, and so many times the length of all that is left, from its nearest neighbour."""
FEW = 0.01
"""of the requests may be outliers together; more of them are a part of the recording, and what lies between is a pause."""


def _source(
    path: str, format: str | None, on_malformed: OnMalformed, window_s: float | None, part: str | None
) -> tuple[Recording, Sequence[Conversation], Sequence[Conversation]]:
    """The recording, conversations of the window, and those of them that somebody of this part began. Raises ConfigError for
    a window that the format has no times for, or a part that is none."""
    recording = _read(path, format, on_malformed, _versions(path))
    inside, outliers = recording.conversations, 0
    if window_s is not None:
        if not recording.timed:
            raise ConfigError(f"workload.format={recording.format} has no times; leave workload.window_s alone.")
        inside = _between(inside, -math.inf, math.nextafter(window_s, 0.0))
    if recording.timed:
        inside, outliers = without_outliers(inside)
        if outliers:  # a replay would wait for them
            log.warning("%s: %d requests whose times lie far from all others are left out.", path, outliers)
    halves = re.fullmatch(r"([1-9][0-9]?)/([1-9][0-9]?)", part or "1/1")
    if halves is None or int(halves[1]) > int(halves[2]):
        raise ConfigError(f"workload.part={part!r} is none; 1/2 is the first of two parts, 2/2 the second.")
    people = [one for one in inside if one.begun is None and part_of(one.id, int(halves[2])) == int(halves[1])]
    if not people:
        raise ConfigError(f"workload.part={part} has no conversation; leave it null.")
    return replace(recording, facts={**recording.facts, "requests_far_from_all_others": outliers}), inside, people


def begun_by(
    measured: Sequence[Dialogue], conversations: Sequence[Conversation], fit: Fit
) -> tuple[list[Dialogue], int]:
    """The dialogues that the measured ones began, and those again, and how many of those were left out since they or what
    they come after do not fit."""
    known = {dialogue.session: dialogue for dialogue in measured}
    asked = set(known)
    found: list[Dialogue] = []
    left_out = 0
    for one in conversations:  # a conversation comes behind the one that began it
        if one.begun is None or one.begun.conversation not in asked:
            continue
        asked.add(one.id)
        parent = known.get(one.begun.conversation)
        dialogue = fit.dialogue(one) if parent is not None and one.begun.turn <= parent.turns else None
        if dialogue is None:
            left_out += 1
            continue
        known[one.id] = dialogue
        found.append(dialogue)
    return found, left_out


def _between(conversations: Sequence[Conversation], low_s: float, high_s: float) -> tuple[Conversation, ...]:
    """What timed conversations ask from one second to another, both included."""
    kept = [(one, tuple(call for call in one.calls if low_s <= (call.at_s or 0.0) <= high_s)) for one in conversations]
    return tuple(replace(one, calls=calls) for one, calls in kept if calls)


def without_outliers(conversations: Sequence[Conversation]) -> tuple[tuple[Conversation, ...], int]:
    """Timed conversations without the calls whose times are outliers, and how many those were."""
    times = sorted(call.at_s or 0.0 for one in conversations for call in one.calls)
    most = max(1, int(FEW * len(times)))
    last = len(times) - _strays(times, most)
    first = _strays([-at_s for at_s in reversed(times[:last])], most)
    return _between(conversations, times[first], times[last - 1]), first + len(times) - last


def _strays(times: Sequence[float], most: int) -> int:
    """How many of the last of these ascending times are outliers, of which two are none."""
    for count in range(min(most, len(times) - 2), 0, -1):
        nearest = times[-count - 1]
        if times[-count] - nearest > max(AWAY_S, AWAY_SPANS * (nearest - times[0])):
            return count
    return 0


def _versions(path: str) -> tuple[tuple[str, int, int], ...]:
    """What says whether a file, or those of a folder, are still the same."""
    root = Path(path).expanduser()
    files = sorted(root.iterdir()) if root.is_dir() else [root] if root.exists() else []
    return tuple((str(file), file.stat().st_mtime_ns, file.stat().st_size) for file in files)


@lru_cache(maxsize=1)
def _read(
    path: str, format: str | None, on_malformed: OnMalformed, versions: tuple[tuple[str, int, int], ...]
) -> Recording:
    """With how often its blocks repeat, once for all trials of a sweep. versions: of the files."""
    recording = load(path, format, on_malformed)
    return replace(recording, facts={**recording.facts, **block_repeats(recording)})


# Conversations of published lengths

MESSAGE_SIGMA, REPLY_SIGMA = 1.2, 0.9
"""Widths of the lognormal distributions of lengths: our choice, since only the means are published."""


PUBLISHED = {"sharegpt": ("ShareGPT", 5.56, 37.77, 204.58), "ultrachat": ("UltraChat", 3.86, 51.78, 257.81)}
"""A data set's name, and its means: turns a conversation, tokens a message and a reply."""


def draw(dataset: str, conversations: int, seed: int, min_turns: int = 1) -> Recording:
    """`conversations` conversations with long-tailed lengths, a function of (seed, number).

    Turns are geometric from 1; those below min_turns are drawn again, which raises their mean by min_turns - 1. Lengths are
    lognormal with the published means.
    """
    whose, turns, message, reply = PUBLISHED[dataset]
    found = []
    for name in (f"{dataset}-{number}" for number in range(conversations)):
        more = math.log1p(-uniform(seed, name, "turns")) / math.log1p(-1.0 / turns)
        calls = [
            Call(
                Tokens(_lognormal(message, MESSAGE_SIGMA, seed, name, turn, "message")),
                _lognormal(reply, REPLY_SIGMA, seed, name, turn, "reply"),
            )
            for turn in range(min_turns + int(more))
        ]
        found.append(Conversation(name, tuple(calls)))
    return Recording(
        conversations=tuple(found),
        rule=(
            f"Synthetic, not {whose}'s conversations. Published means: {turns} turns, "
            f"{message} tokens a message, {reply} a reply. Turns are geometric from "
            f"{min_turns}, lengths lognormal with sigma {MESSAGE_SIGMA} and {REPLY_SIGMA}. Token ids have no meaning."
        ),
        format=f"synthetic, published means of {whose}",
    )


def _lognormal(mean: float, sigma: float, seed: int, *names: object) -> int:
    """At least 1; a normal deviate from two uniform ones, by Box and Muller."""
    radius = math.sqrt(-2.0 * math.log1p(-uniform(seed, *names, "radius")))
    deviate = radius * math.cos(2.0 * math.pi * uniform(seed, *names, "angle"))
    return max(1, round(mean * math.exp(sigma * deviate - sigma * sigma / 2.0)))
