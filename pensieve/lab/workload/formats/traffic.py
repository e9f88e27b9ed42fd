"""Recorded traffic as a Recording to replay."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import get_args

from pensieve.core.request import Hint, StopReason
from pensieve.lab.traffic import table
from pensieve.lab.traffic.hashing import Salt
from pensieve.lab.traffic.table import Exchange, Facts
from pensieve.lab.workload.formats.reading import Reader
from pensieve.lab.workload.formats.served import rows_of
from pensieve.lab.workload.formats.timed import shared_prefix
from pensieve.lab.workload.recording import (
    Begun,
    Blocks,
    Call,
    Content,
    Conversation,
    Count,
    Parts,
    Recording,
    hashes_of,
)

RULE = (
    "Requests with one session are a conversation. One without a session continues the earlier one whose prompt and reply it "
    "begins with, else the one that it shares most leading blocks with, beyond what more than half of all share. Every "
    "request carries its whole prompt; equal blocks give equal tokens. Where blocks of replies are known, later prompts find "
    "the replies. Requests that failed, or whose length nobody said, are left out."
)
PREFIX = ("mooncake", "qwen_bailian")
"""Formats whose hashes stand for a block and all before it."""
STOPS: dict[str | None, StopReason] = {"stop": "end_turn", "tool_calls": "tool_use"}
STOPS |= {one: one for one in get_args(StopReason)}
"""What a client learns from how a reply ended."""


def read_served(format: str, reader: Reader) -> Recording:
    return _recording(*rows_of(format, reader, Salt(b"of a replay")))


def read(reader: Reader) -> Recording:
    return _recording(table.read_facts(reader.path), list(table.read(reader.path)))


def _recording(facts: Facts, found: Sequence[Exchange]) -> Recording:
    asked = asked_in(found, facts)
    left_out = {"requests_left_out": len(found) - len(asked)} if len(found) > len(asked) else {}
    rule, about = f"{RULE} {facts.rule}".strip(), {"recorded_by": facts.source, **left_out}
    return Recording(tuple(conversations_of(asked, facts)), rule, about, facts.one_clock)


def asked_in(found: Iterable[Exchange], facts: Facts) -> list[Exchange]:
    """Those that can be replayed, in order of arrival: a clock may have jumped."""
    asked = (one for one in found if one.status != "failed" and prompt_tokens(one, facts) is not None)
    return sorted(asked, key=lambda one: one.arrival_s or 0.0)  # stable, for those without times


def conversations_of(asked: Sequence[Exchange], facts: Facts) -> list[Conversation]:
    """asked: in order of arrival. The order of a call is its place there."""
    sessions: dict[str, list[tuple[int, Exchange]]] = {}
    for order, (name, one) in enumerate(zip(_sessions(asked), asked, strict=True)):
        sessions.setdefault(name, []).append((order, one))
    place = {one.request: (name, turn) for name, each in sessions.items() for turn, (_, one) in enumerate(each, 1)}
    conversations = []
    for name, each in sessions.items():
        before = place.get(each[0][1].parent if each[0][1].parent is not None else -1)
        begun = Begun(*before) if before is not None and before[0] != name else None
        conversations.append(Conversation(name, tuple(_calls(each, facts)), begun))
    return conversations


def prompt_tokens(one: Exchange, facts: Facts) -> int | None:
    """As the server said, else by the file's ratio."""
    return _length(one.prompt_tokens, one.prompt_bytes, facts)


def _sessions(asked: Sequence[Exchange]) -> Iterator[str]:
    """The session of each, by its prefix chain where nobody has said it."""
    shared = shared_prefix([chain(one.blocks or ()) for one in asked if one.session is None])
    holder: dict[int, str] = {}  # the session whose request or reply held a block last, by its chain
    ends: set[int] = set()  # of replies
    numbers: set[int] = set()
    for order, one in enumerate(asked):
        if one.session is not None:
            yield one.session
            continue
        prompt = len(one.blocks or ())
        held = chain([*(one.blocks or ()), *(one.output_blocks or ())])
        alike = (x for place, x in reversed(list(enumerate(held[:prompt]))) if x in ends or place >= shared)
        fresh = f"prefix-{one.request}" if one.request not in numbers else f"prefix-{one.request}-{order}"
        numbers.add(one.request)
        name = next((holder[x] for x in alike if x in holder), fresh)
        holder.update(dict.fromkeys(held, name))
        ends.update(held[max(prompt, len(held) - 1) :])
        yield name


def chain(blocks: Iterable[int]) -> list[int]:
    """Of each block, a number for it and all before it."""
    found, before = [], 0
    for one in blocks:
        before = hash((before, one))
        found.append(before)
    return found


def _calls(each: Sequence[tuple[int, Exchange]], facts: Facts) -> Iterator[Call]:
    before: int | None = None
    for (order, one), after in zip(each, [*(one for _, one in each[1:]), None], strict=True):
        tokens = prompt_tokens(one, facts) or 1
        content: Content
        said = _length(one.output_tokens, one.output_bytes, facts)
        reply: int | Blocks | None = said
        size, hashes = facts.block_tokens, list(one.blocks or ())
        continues = one.kept_tokens is not None and one.blocks is None and one.parent == before
        before = one.request
        if continues:
            content = Count(tokens - (one.kept_tokens or 0))
        elif one.lengths is not None:
            rest = tokens - sum(one.lengths)
            content = Parts(tuple(zip(hashes, one.lengths, strict=True)) + (((order, rest),) if rest > 0 else ()))
        elif size is not None and one.blocks is not None:
            whole = hashes + list(one.output_blocks or ())
            if one.output_blocks is not None and after is not None and after.blocks is not None:
                further = list(after.blocks[: len(whole) + 1])
                whole = further if further[:-1] == whole else whole  # the rest of its last block is what comes next
            content = Blocks(hashes_of(whole[: len(hashes) + 1]), size, tokens)
            if one.output_blocks is not None and said:
                reply = Blocks(hashes_of(whole), size, tokens + said)
        else:
            content = Count(tokens)
        reason = STOPS.get(one.finish_reason)
        yield Call(
            content,
            reply,
            one.arrival_s,
            continues=continues,
            order=order,
            pause_s=one.pause_s,
            waits_for=tuple(one.waits_for or ()),
            hint=Hint(reason) if reason else None,
        )


def _length(tokens: int | None, size: int | None, facts: Facts) -> int | None:
    """In tokens: as the server said, else by the file's ratio."""
    if tokens is None and size is not None and facts.tokens_per_byte is not None:
        return int(size * facts.tokens_per_byte)
    return tokens
