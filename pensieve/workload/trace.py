"""Recorded requests, replayed: at their own times where the format has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pensieve.errors import ConfigError
from pensieve.workload.base import WorkloadContext
from pensieve.workload.chance import shuffled
from pensieve.workload.fields import at_least, positive_seconds
from pensieve.workload.fit import Fit, fitted, warmups
from pensieve.workload.formats import FORMATS, load
from pensieve.workload.formats.reading import OnMalformed
from pensieve.workload.playback import Playback, Poisson, Recorded, Users
from pensieve.workload.recording import Conversation, Recording
from pensieve.workload.reuse import block_reuse, recorded_blocks
from pensieve.workload.sharegpt import WARMUP_SIDE_BY_SIDE, arrivals_of


def trace_workload(
    context: WorkloadContext,
    *,
    path: str | None = None,
    format: str | None = None,
    on_malformed: OnMalformed = "fail",
    time_scale: float = 1.0,
    window_start_s: float = 0.0,
    window_s: float | None = None,
    conversations: int | None = None,
    min_turns: int = 1,
    max_turns: int | None = None,
    max_new_tokens: int | None = None,
    max_context: int | None = None,
    request_rate: float = 1.0,
    think_time_s: float = 60.0,
    warmup_turns: int = 4,
    timeout_s: float | None = None,
) -> Playback:
    """Replay a file of recorded requests (formats: see pensieve.workload.formats).

    A format with times is replayed open-loop: each request is sent at its recorded time x time_scale after the first
    one, whatever the system does (0.5: twice the load). Its requests carry their whole prompts, or continue where the
    format's rule says so. A format without times (texts) is replayed as conversations that arrive as a Poisson process
    at request_rate / mean turns, the next turn `think_time_s` (mean, exponential) after the reply (load "partly open").

    window_start_s, window_s: of a timed file, only requests in [start, start + length) of recorded seconds. A
        conversation that continues from before the window is left out where its requests carry no whole prompt.
    conversations: a sample of so many whole conversations, drawn by the seed; None: all.
    min_turns, max_turns: shorter conversations are left out, longer ones cut. max_new_tokens: cap on a reply. Replies
        have the recorded length and end of sequence is ignored, since the recorded times assume them.
    max_context: a conversation ends before the call whose prompt and reply need more tokens than this, or than the
        model's context; all are counted.
    on_malformed: a line that cannot be read ends the trial ("fail") or is left out and counted ("skip").

    Raises ConfigError for a field out of range, MalformedInput for a file or line that cannot be read.
    """
    if path is None or format is None:
        raise ConfigError(
            "workload=trace needs workload.path=FILE and workload.format=" + "|".join(FORMATS) + "; set both."
        )
    at_least("window_start_s", window_start_s, 0)
    at_least("min_turns", min_turns, 1, whole=True)
    at_least("warmup_turns", warmup_turns, 1, whole=True)
    at_least("think_time_s", think_time_s, 0)
    limits = {"max_turns": max_turns, "max_new_tokens": max_new_tokens, "max_context": max_context}
    for name, whole in {"conversations": conversations, **limits}.items():
        if whole is not None:
            at_least(name, whole, 1, whole=True)
    if max_turns is not None:
        at_least("max_turns", max_turns, min_turns, whole=True, than="min_turns")
    for name, positive in (("time_scale", time_scale), ("request_rate", request_rate)):
        if not positive > 0:
            raise ConfigError(f"workload.{name}={positive} must be a positive number.")
    positive_seconds("window_s", window_s)
    positive_seconds("timeout_s", timeout_s)
    if max_context is not None:
        context = replace(context, max_context=min(context.max_context, max_context))
    recording = load(path, format, on_malformed)
    inside, begun_before = windowed(recording, window_start_s, window_s)
    order = shuffled(len(inside), context.seed, "conversations") if conversations else range(len(inside))
    fit = Fit(context, max_turns, max_new_tokens)
    measured, left_out = fitted([inside[i] for i in order], fit, min_turns=min_turns, wanted=conversations)
    arrivals: Recorded | Poisson | Users = Recorded(time_scale)
    rates: dict[str, Any] = {}
    if not recording.timed:
        arrivals, rates = arrivals_of(measured, None, request_rate)
        rates["think_time_s"] = think_time_s
    facts: dict[str, Any] = {
        "source": Path(path).name,
        "format": format,
        "rule": recording.rule,
        "requests_in_file": recording.requests,
        "conversations_in_file": len(recording.conversations),
        "malformed_lines": recording.malformed,
        "malformed_examples": list(recording.examples),
        **recording.facts,
        "conversations_begun_before_the_window": begun_before,
        **left_out,
        **rates,
        **(_timing(recording, time_scale, window_start_s, window_s) if recording.timed else {}),
        **_reuse(recording),
    }
    return Playback(
        context,
        warmups(measured, warmup_turns, WARMUP_SIDE_BY_SIDE, context),
        measured,
        arrivals,
        think_time_s=think_time_s,
        free=False,
        timeout_s=timeout_s,
        facts=facts,
    )


def windowed(recording: Recording, start_s: float, length_s: float | None) -> tuple[Sequence[Conversation], int]:
    """The conversations' calls inside the window, and how many conversations were left out because they began before.

    Raises ConfigError where there is nothing in it, or where a window is asked of a format without times.
    """
    if start_s == 0.0 and length_s is None:
        return recording.conversations, 0
    if not recording.timed:
        raise ConfigError(f"workload.format={recording.format} has no times; leave window_start_s and window_s alone.")
    end_s = float("inf") if length_s is None else start_s + length_s
    inside: list[Conversation] = []
    begun_before = 0
    for conversation in recording.conversations:
        calls = tuple(call for call in conversation.calls if start_s <= (call.at_s or 0.0) < end_s)
        if not calls:
            continue
        if calls[0] is not conversation.calls[0] and any(call.continues for call in calls):
            begun_before += 1
            continue
        inside.append(replace(conversation, calls=calls))
    if not inside:
        raise ConfigError(
            f"No request of the trace lies in the window from {start_s:g} s on; choose another window_start_s or window_s."
        )
    return inside, begun_before


def _timing(recording: Recording, scale: float, start_s: float, length_s: float | None) -> dict[str, Any]:
    return {
        "time_scale": scale,
        "window_start_s": start_s,
        "window_s": length_s,
        "recorded_s": round(max(call.at_s or 0.0 for one in recording.conversations for call in one.calls), 3),
    }


def _reuse(recording: Recording) -> dict[str, Any]:
    """What an unbounded cache of the trace's own blocks would find, over the whole file; nothing without hashes."""
    requests, block_tokens = recorded_blocks(recording)
    if not requests:
        return {}
    reuse = block_reuse(requests, block_tokens)
    return {
        "block_tokens": block_tokens,
        "file_blocks": reuse.blocks,
        "file_unique_blocks": reuse.unique_blocks,
        "file_repeated_blocks_share": round(reuse.block_rate, 6),
        "file_repeated_tokens_share": round(reuse.token_rate, 6),
    }
