"""Recorded traffic as a Recording to replay, and any Recording as recorded traffic."""

from collections.abc import Iterable, Iterator, Sequence
from typing import get_args

import numpy as np

from pensieve.core.request import Hint, StopReason
from pensieve.lab.traffic import table
from pensieve.lab.traffic.table import BLOCK_BYTES, Exchange, Facts, Salt, with_ratio
from pensieve.lab.workload.formats.reading import Reader
from pensieve.lab.workload.formats.served import SERVED, in_order
from pensieve.lab.workload.formats.timed import continuations
from pensieve.lab.workload.playback import Begun
from pensieve.lab.workload.recording import (
    Blocks,
    Call,
    Content,
    Conversation,
    Count,
    Parts,
    Recording,
    Text,
    chain,
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
BY_PREFIX = "prefix"
"""Who named a session where the source knows none."""
STOPS: dict[str | None, StopReason] = {"stop": "end_turn", "tool_calls": "tool_use"}
STOPS |= {one: one for one in get_args(StopReason)}
"""What a client learns from how a reply ended."""


def read_served(format: str, reader: Reader) -> Recording:
    return _recording(*in_order(*SERVED[format][0](reader, Salt(b"of a replay"))))


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
    unnamed = [(order, one) for order, one in enumerate(asked) if one.session is None]
    held = [(len(one.blocks or ()), chain([*(one.blocks or ()), *(one.output_blocks or ())])) for _, one in unnamed]
    firsts, _ = continuations(
        [blocks[:prompt] for prompt, blocks in held], [blocks[prompt:] for prompt, blocks in held]
    )
    names: dict[int, str] = {}
    taken: set[int] = set()
    for place, ((order, one), first) in enumerate(zip(unnamed, firsts, strict=True)):
        fresh = f"prefix-{one.request}" if one.request not in taken else f"prefix-{one.request}-{order}"
        names[order] = fresh if first == place else names[unnamed[first][0]]
        taken.add(one.request)
    return (names[order] if one.session is None else one.session for order, one in enumerate(asked))


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


# The other way: texts become salted hashes, and what a trace knows by number keeps it.


def converted(recording: Recording, salt: Salt) -> tuple[Facts, list[Exchange]]:
    """The rows in order of arrival, or of the file where it has no times."""
    calls = [(call, one, turn) for one in recording.conversations for turn, call in enumerate(one.calls)]
    if recording.timed:
        calls.sort(key=lambda each: (each[0].at_s, each[0].order))
    number = {(one.id, turn): request for request, (_, one, turn) in enumerate(calls)}
    sizes = {call.content.block_tokens for call, _, _ in calls if isinstance(call.content, Blocks)}
    texts = any(isinstance(call.content, Text) for call, _, _ in calls)
    common = int(sizes.pop()) if len(sizes) == 1 and not texts else None
    facts = Facts(
        source=recording.format,
        unit="bytes" if texts else "tokens",
        block=BLOCK_BYTES if texts else common,
        hashes="prefix" if recording.format in PREFIX else "content",
        one_clock=recording.one_clock,
        rule=recording.rule,
    )
    named_by = BY_PREFIX if "shared_prefix_blocks" in recording.facts else "source"
    said: dict[str, bytes] = {}
    held: dict[str, int] = {}

    def row_of(request: int, call: Call, one: Conversation, turn: int) -> Exchange:
        row = Exchange(request, call.at_s, session=one.id, session_from=named_by, status="completed")
        before = one.begun if one.begun is not None and not turn else Begun(one.id, turn)
        row.parent = number.get((before.conversation, before.turn - 1))
        row.pause_s, row.waits_for = call.pause_s, list(call.waits_for) or None
        row.finish_reason = call.hint.stop_reason if call.hint is not None else None
        content = call.content
        if isinstance(content, Text):
            said[one.id] = _spoken(row, call, content, said.get(one.id, b""), salt)
            return row
        row.kept_tokens = held.get(one.id, 0) if call.continues else None
        row.prompt_tokens = (row.kept_tokens or 0) + content.tokens
        row.output_tokens = call.reply if isinstance(call.reply, int) else None
        held[one.id] = row.prompt_tokens + (row.output_tokens or 0)
        if isinstance(content, Blocks):
            row.blocks = [salt.number(one) for one in content.hashes]
            if common is None:
                ends = table.edges(len(content.hashes), content.block_tokens)
                row.lengths = np.diff(np.minimum(ends, content.tokens)).tolist()
        elif isinstance(content, Parts):
            row.blocks = [salt.number(one) for one, _ in content.pieces]
            row.lengths = [tokens for _, tokens in content.pieces]
        return row

    rows = [row_of(request, *each) for request, each in enumerate(calls)]
    return with_ratio(facts, rows, recording.format) if texts else facts, rows


def _spoken(row: Exchange, call: Call, content: Text, said: bytes, salt: Salt) -> bytes:
    """Fill in what a text says; returns what has been said by then."""
    text = content.text.encode("utf-8", "replace")
    prompt = said + b"\nuser\n" + text + b"\nassistant\n" if call.continues else text
    reply = call.reply.text.encode("utf-8", "replace") if isinstance(call.reply, Text) else b""
    row.prompt_bytes, row.blocks = len(prompt), salt.blocks(prompt, BLOCK_BYTES)
    if call.reply is not None:
        row.output_bytes, row.output_blocks = len(reply), salt.blocks(prompt + reply, BLOCK_BYTES, len(row.blocks))
    return prompt + reply
