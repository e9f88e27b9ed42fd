"""TraceLab: rounds of coding agents (Claude Code, Codex) with times, lengths and what the provider's cache had (CC BY 4.0).

https://github.com/uw-syfi/TraceLab, a JSON object a round, unpacked. Texts are not in it, so prompts are put together again.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from datetime import datetime

from pensieve.core.request import Hint
from pensieve.lab.workload.formats.reading import Malformed, Reader, Row, text, whole
from pensieve.lab.workload.recording import Call, Conversation, Parts, Recording

RULE = (
    "A session file is a conversation, and every round carries its whole prompt. A prompt that is not shorter than the one "
    "before it begins with it. A shorter one (the agent compacted or edited) begins with those of its tokens that the "
    "provider had cached. What the provider had cached of a first prompt is shared by all sessions of that provider and "
    "model. Other tokens occur nowhere else. A round is sent at its last user message or tool result, and ends with its "
    "last event."
)
_Pieces = tuple[tuple[int, int], ...]
_ASKS = ("user_message", "tool_result")


@dataclass(frozen=True, slots=True)
class _Round:
    """Times in seconds since 1970."""

    session: str
    index: int
    id: str
    whose: str
    at_s: float
    end_s: float
    prompt: int
    cached: int
    output: int
    tool: str | None


def read(reader: Reader) -> Recording:
    rows = list(reader.entries(_round))
    rounds = sorted(
        {(one.session, one.index, one.id): one for one in reversed(rows)}.values(), key=lambda one: one.at_s
    )
    facts = Counter(duplicate_rounds=len(rows) - len(rounds), shorter_prompts=0)
    prompts: dict[str, _Pieces] = {}
    ended_s: dict[str, float] = {}
    calls: dict[str, list[Call]] = {}
    for order, one in enumerate(rounds):
        before = prompts.get(one.session)
        if before is None:
            before = ((_name(one.whose), one.cached),)
        elif one.prompt < sum(tokens for _, tokens in before):
            facts["shorter_prompts"] += 1
            before = _cut(before, one.cached)
        own = one.prompt - sum(tokens for _, tokens in before)
        prompt = prompts[one.session] = (*before, (_name(one.session, one.index, one.id), own))
        call = Call(
            Parts(tuple(piece for piece in prompt if piece[1])),
            one.output,
            one.at_s - rounds[0].at_s,
            continues=False,
            order=order,
            pause_s=max(0.0, one.at_s - ended_s[one.session]) if one.session in ended_s else None,
            hint=Hint("tool_use", one.tool) if one.tool else Hint("end_turn"),
        )
        calls.setdefault(one.session, []).append(call)
        ended_s[one.session] = one.end_s
    return Recording(tuple(Conversation(name, tuple(own)) for name, own in calls.items()), RULE, dict(facts))


def _round(row: Row) -> _Round:
    prompt, cached = whole(row, "input_tokens_total", 1), whole(row, "prefix_tokens")
    if cached + whole(row, "newly_append_tokens") != prompt:
        raise Malformed(f"prefix_tokens and newly_append_tokens are not {prompt} together")
    events = row.get("timing_events")
    if not isinstance(events, list) or not events:
        raise Malformed("it has no timing_events")
    asks = [_time(one["timestamp"]) for one in events if one.get("event_type") in _ASKS]
    times = [_time(one["timestamp"]) for one in events]
    provider, model = text(row, "provider"), str(row.get("model"))
    tools = row.get("tools") or [{}]
    session = f"{row.get('project')}/{row.get('session_file')}/{text(row, 'session_id')}"
    return _Round(
        session=f"{provider}-{_name(session) & (1 << 64) - 1:016x}",
        index=whole(row, "round_index"),
        id=str(row.get("round_id")),
        whose=f"{provider}/{model}",
        at_s=max(asks) if asks else min(times),
        end_s=max(times),
        prompt=prompt,
        cached=min(cached, prompt - 1),
        output=max(1, whole(row, "output_tokens")),
        tool=tools[-1].get("tool_name"),
    )


def _time(stamp: str) -> float:
    try:
        return datetime.fromisoformat(stamp).timestamp()
    except (TypeError, ValueError) as error:
        raise Malformed(f"timestamp={stamp!r} is not a time ({error})") from None


def _cut(pieces: _Pieces, tokens: int) -> _Pieces:
    """The first so many tokens. A piece that is cut is the beginning of the whole one."""
    found = []
    for name, count in pieces:
        if tokens > 0:
            found.append((name, min(count, tokens)))
        tokens -= count
    return tuple(found)


def _name(*names: object) -> int:
    """A signed number of 64 bits, a function of the names alone."""
    key = "/".join(str(name) for name in ("tracelab", *names)).encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big", signed=True)
