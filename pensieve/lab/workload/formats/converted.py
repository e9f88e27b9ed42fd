"""Any Recording as rows of recorded traffic: texts become salted hashes, and what a trace knows by number keeps it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from pensieve.lab.traffic import table
from pensieve.lab.traffic.hashing import BLOCK_BYTES, Salt
from pensieve.lab.traffic.table import Exchange, Facts
from pensieve.lab.workload.formats.traffic import PREFIX
from pensieve.lab.workload.recording import Blocks, Call, Parts, Recording, Text

BYTES_PER_TOKEN = 4


def converted(recording: Recording, salt: Salt) -> tuple[Facts, Iterator[Exchange]]:
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
        tokens_per_byte=1 / BYTES_PER_TOKEN if texts else None,
        ratio_from=f"assumed: {BYTES_PER_TOKEN} bytes a token" if texts else None,
        one_clock=recording.one_clock,
        rule=recording.rule,
    )
    said: dict[str, bytes] = {}
    held: dict[str, int] = {}

    def rows() -> Iterator[Exchange]:
        for request, (call, one, turn) in enumerate(calls):
            row = Exchange(request, call.at_s, session=one.id, session_from="source", status="completed")
            row.parent = number.get((one.id, turn - 1))
            if one.begun is not None and not turn:
                row.parent = number.get((one.begun.conversation, one.begun.turn - 1))
            row.pause_s, row.waits_for = call.pause_s, list(call.waits_for) or None
            row.finish_reason = call.hint.stop_reason if call.hint is not None else None
            if isinstance(call.content, Text):
                said[one.id] = _spoken(row, call, said.get(one.id, b""), f"{one.id} {turn}", salt)
                yield row
                continue
            before = held.get(one.id, 0) if call.continues else 0
            row.kept_tokens = before if call.continues else None
            row.prompt_tokens = before + call.content.tokens
            row.output_tokens = call.reply if isinstance(call.reply, int) else None
            held[one.id] = row.prompt_tokens + (row.output_tokens or 0)
            if isinstance(call.content, Blocks):
                row.blocks = [salt.number(one) for one in call.content.hashes]
                if common is None:
                    row.lengths = _cut(call.content)
            elif isinstance(call.content, Parts):
                row.blocks = [salt.number(one) for one, _ in call.content.pieces]
                row.lengths = [tokens for _, tokens in call.content.pieces]
            yield row

    return facts, rows()


def _spoken(row: Exchange, call: Call, said: bytes, name: str, salt: Salt) -> bytes:
    """Fill in what a text says; returns what has been said by then. A reply of which only the length is known is filled."""
    assert isinstance(call.content, Text)
    text = call.content.text.encode("utf-8", "replace")
    prompt = said + b"\nuser\n" + text + b"\nassistant\n" if call.continues else text
    reply = b""
    if isinstance(call.reply, Text):
        reply = call.reply.text.encode("utf-8", "replace")
    elif isinstance(call.reply, int):
        row.output_tokens = call.reply
        reply = (name.encode() * call.reply)[: call.reply * BYTES_PER_TOKEN].ljust(call.reply * BYTES_PER_TOKEN)
    whole = prompt + reply
    row.prompt_bytes, row.blocks = len(prompt), salt.blocks(prompt, BLOCK_BYTES)
    if call.reply is not None:
        row.output_bytes, row.output_blocks = len(reply), salt.blocks(whole, BLOCK_BYTES, len(row.blocks))
    return whole


def _cut(content: Blocks) -> list[int]:
    """Lengths of its blocks, the last one perhaps partly filled."""
    ends = table.edges(len(content.hashes), content.block_tokens)
    return [min(stop, content.tokens) - min(start, content.tokens) for start, stop in pairwise(ends)]
