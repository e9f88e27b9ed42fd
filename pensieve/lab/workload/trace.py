"""Recorded requests, replayed: at their own times where the format has them."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from pensieve.errors import ConfigError
from pensieve.lab.workload.base import (
    Count,
    NotNegative,
    Positive,
    WorkloadContext,
    in_order,
    part_of,
    shuffled,
)
from pensieve.lab.workload.fit import Fit, fitted, warmups
from pensieve.lab.workload.formats import load
from pensieve.lab.workload.formats.reading import OnMalformed
from pensieve.lab.workload.playback import Dialogue, Pauses, Playback, Poisson, Recorded, Users, lengths_of
from pensieve.lab.workload.recording import Conversation, Recording, block_repeats, facts_of
from pensieve.lab.workload.sharegpt import WARMUP_SIDE_BY_SIDE, arrivals_of

log = logging.getLogger(__name__)

AWAY_S = 3600.0
AWAY_SPANS = 10
"""An outlier lies at least so many seconds, and so many times the length of all that is left, from its nearest neighbour."""
FEW = 0.01
"""of the requests may be outliers together; more of them are a part of the recording, and what lies between is a pause."""


def trace_workload(
    context: WorkloadContext,
    *,
    path: str | None = None,
    format: str | None = None,
    on_malformed: OnMalformed = "fail",
    time_scale: Positive = 1.0,
    window_s: Positive | None = None,
    conversations: Count | None = None,
    part: str | None = None,
    min_turns: Count = 1,
    max_turns: Count | None = None,
    max_new_tokens: Count | None = None,
    max_context: Count | None = None,
    request_rate: Positive = 1.0,
    users: Count | Literal["all"] | None = None,
    think_time_s: NotNegative = 60.0,
    think_scale: NotNegative = 1.0,
    hint: Literal["recorded", "none"] = "recorded",
    warmup_turns: Count = 4,
    timeout_s: Positive | None = None,
) -> Playback:
    """Replay a file of recorded requests. Fields: conf/workload/trace.yaml.

    A format with times is replayed open-loop: each request is sent at its recorded time x time_scale after the first
    one, whatever the system does. Its requests carry their whole prompts, or continue where the format's rule says so. A
    format without times (texts), or with times of each session alone (weka), is replayed as conversations that arrive as a
    Poisson process at request_rate / mean turns (load "partly open"), or by `users` who have one after another and all
    start at once (load "closed"). The next turn comes after the reply and a pause: the recorded one x think_scale;
    where none is recorded, think_time_s (mean, exponential).

    Replies have the recorded length and end of sequence is ignored, since the recorded times assume them.

    Raises ConfigError for a field out of range, MalformedInput for a file or line that cannot be read.
    """
    if path is None:
        raise ConfigError("workload=trace needs workload.path=FILE, the recorded requests; set it.")
    in_order("min_turns", min_turns, "max_turns", max_turns)
    if max_context is not None:
        context = replace(context, max_context=min(context.max_context, max_context))
    recording, repeats = _read(path, format, on_malformed, _versions(path))
    inside = windowed(recording, window_s)
    outliers = 0
    if recording.timed:
        inside, outliers = without_outliers(inside)
        if outliers:  # a replay would wait for them
            log.warning("%s: %d requests whose times lie far from all others are left out.", path, outliers)
        if users is not None:
            raise ConfigError(
                f"workload.format={recording.format} has a time for each request; leave workload.users alone."
            )
    halves = re.fullmatch(r"([1-9][0-9]?)/([1-9][0-9]?)", part or "1/1")
    if halves is None or int(halves[1]) > int(halves[2]):
        raise ConfigError(f"workload.part={part!r} is none; 1/2 is the first of two parts, 2/2 the second.")
    people = [one for one in inside if one.begun is None and part_of(one.id, int(halves[2])) == int(halves[1])]
    if not people:
        raise ConfigError(f"workload.part={part} has no conversation; leave it null.")
    order = shuffled(len(people), context.seed, "conversations") if conversations else range(len(people))
    fit = Fit(context, max_turns, max_new_tokens)
    measured, left_out = fitted([people[i] for i in order], fit, min_turns=min_turns, wanted=conversations)
    begun, never = begun_by(measured, inside, fit)
    paused = any(call.pause_s is not None for one in recording.conversations for call in one.calls)
    arrivals: Recorded | Poisson | Users = Recorded(time_scale)
    rates: dict[str, Any] = {}
    if not recording.timed:
        arrivals, rates = arrivals_of(measured, len(measured) if users == "all" else users, request_rate)
        rates |= {} if paused else {"think_time_s": think_time_s}
    facts: dict[str, Any] = {
        "source": Path(path).name,
        "format": recording.format,
        "requests_in_file": recording.requests,
        "conversations_in_file": len(recording.conversations),
        **facts_of(recording, context.byte_tokens),
        "requests_far_from_all_others": outliers,
        **left_out,
        **({"begun_by_others": len(begun), "begun_by_others_left_out": never} if begun or never else {}),
        **rates,
        **repeats,
        **lengths_of([*measured, *begun]),
    }
    return Playback(
        context,
        warmups(measured, warmup_turns, WARMUP_SIDE_BY_SIDE, context),
        [*measured, *begun],
        arrivals,
        Pauses(context.seed, 0.0 if paused else think_time_s, think_scale),
        timeout_s=timeout_s,
        facts=facts,
        hints=hint == "recorded",
    )


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


def windowed(recording: Recording, length_s: float | None) -> Sequence[Conversation]:
    """What the conversations ask in the first so many seconds. Raises ConfigError where that is asked of a format without
    times."""
    if length_s is None:
        return recording.conversations
    if not recording.timed:
        raise ConfigError(f"workload.format={recording.format} has no times; leave workload.window_s alone.")
    inside = [
        (one, tuple(call for call in one.calls if (call.at_s or 0.0) < length_s)) for one in recording.conversations
    ]
    return [replace(one, calls=calls) for one, calls in inside if calls]


def without_outliers(conversations: Sequence[Conversation]) -> tuple[Sequence[Conversation], int]:
    """Timed conversations without the calls whose times are outliers, and how many those were."""
    times = sorted(call.at_s or 0.0 for one in conversations for call in one.calls)
    most = max(1, int(FEW * len(times)))
    last = len(times) - _strays(times, most)
    first = _strays([-at_s for at_s in reversed(times[:last])], most)
    low, high = times[first], times[last - 1]
    kept = [(one, tuple(call for call in one.calls if low <= (call.at_s or 0.0) <= high)) for one in conversations]
    return [replace(one, calls=inside) for one, inside in kept if inside], first + len(times) - last


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
) -> tuple[Recording, dict[str, Any]]:
    """The recording, and how often its blocks repeat; once for all trials of a sweep. versions: of the files."""
    recording = load(path, format, on_malformed)
    return recording, block_repeats(recording)
