"""Formats whose requests have times and lengths but no text: Azure, BurstGPT, Mooncake, Qwen-Bailian and RAGPulse."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from pensieve.lab.workload.formats.reading import Malformed, Reader, Row, hash_list, number, text, whole
from pensieve.lab.workload.recording import Blocks, Call, Conversation, Count, Parts, Recording, hashes_of
from pensieve.units import ceil_div


@dataclass(frozen=True, slots=True)
class _Request:
    """time: in the unit of the file. who: what tells its conversation. turn: decides between equal times."""

    time: float
    content: Blocks | Parts | Count
    reply: int
    who: Any = None
    turn: int = 0


def _in_order(found: Iterable[_Request], per_s: float = 1.0) -> list[tuple[_Request, Call]]:
    """The requests by time, each with its call, which carries its whole prompt."""
    requests = sorted(found, key=lambda one: (one.time, one.turn))
    return [
        (one, Call(one.content, one.reply, (one.time - requests[0].time) / per_s, continues=False, order=order))
        for order, one in enumerate(requests)
    ]


def _conversations(prefix: str, calls: Iterable[tuple[object, Call]]) -> tuple[Conversation, ...]:
    """Those with one name are a conversation."""
    found: dict[object, list[Call]] = {}
    for name, call in calls:
        found.setdefault(name, []).append(call)
    return tuple(Conversation(f"{prefix}-{name}", tuple(each)) for name, each in found.items())


# Azure's LLM inference traces: CSV with a time and two lengths. There are no sessions in it.

AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
AZURE_RULE = "Every request is a conversation of its own with its whole prompt; no two prompts share anything."
_TIME = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(\.\d+)?")


def azure(reader: Reader) -> Recording:
    calls = _in_order(reader.csv_rows(AZURE, _azure_row))
    return Recording(_conversations("azure", ((call.order, call) for _, call in calls)), AZURE_RULE)


def _azure_row(row: Row) -> _Request:
    prompt = Count(whole(row, "ContextTokens", 1))
    return _Request(seconds(text(row, "TIMESTAMP")), prompt, whole(row, "GeneratedTokens"))


def seconds(stamp: str) -> float:
    """Of a time such as 2023-11-16 18:15:46.6805900, with any number of decimals. Raises Malformed."""
    found = _TIME.match(stamp)
    if not found:
        raise Malformed(f"TIMESTAMP={stamp!r} is not a time")
    try:
        base = datetime.fromisoformat(found[1]).replace(tzinfo=UTC).timestamp()
    except ValueError as error:
        raise Malformed(f"TIMESTAMP={stamp!r} is not a time ({error})") from None
    return base + float(found[2] or 0)


# BurstGPT: CSV with a time in seconds, two lengths, and in its later releases a session.

BURSTGPT = ("Timestamp", "Request tokens", "Response tokens")
SESSIONS = ("Session ID", "SessionID")
BURSTGPT_RULE = (
    "Rows with one session id are a conversation, as long as each request has room for all that was said before. The new "
    "message is its tokens less the earlier request and response. A shorter request opens another conversation. "
    "Rows without a session id stand alone. Rows whose response has no tokens failed when recorded and are left out."
)


def burstgpt(reader: Reader) -> Recording:
    rows = list(reader.csv_rows(BURSTGPT, _burstgpt_row))
    calls: list[tuple[int, Call]] = []
    latest: dict[str, tuple[int, int]] = {}  # of a session: its present conversation, and the tokens said in it
    for row, call in _in_order(row for row in rows if row.reply):
        name, said = latest.get(row.who, (call.order, 0)) if row.who else (call.order, 0)
        asked = row.content.tokens
        if asked <= said:
            name, said = call.order, 0
        calls.append((name, replace(call, content=Count(asked - said), continues=True)))
        latest[row.who] = (name, asked + row.reply)
    facts = {"requests_without_response": sum(not row.reply for row in rows)}
    return Recording(_conversations("burstgpt", calls), BURSTGPT_RULE, facts)


def _burstgpt_row(row: Row) -> _Request:
    session = next((str(row[name]).strip() for name in SESSIONS if name in row), "")
    prompt = Count(whole(row, "Request tokens", 1))
    return _Request(number(row, "Timestamp"), prompt, whole(row, "Response tokens"), session)


# Mooncake's release for FAST 2025: JSON lines with a timestamp in ms, two lengths, and a hash for each 512 tokens.

MOONCAKE_BLOCK = 512
MOONCAKE_RULE = (
    "A request continues the earlier one that it shares most leading blocks with, the latest of several. Those blocks "
    "must reach beyond the prefix that more than half of all requests share ({shared} blocks); otherwise the request opens "
    "a conversation. Every request carries its whole prompt. Equal block hashes give equal tokens. Later prompts hold the "
    "trace's blocks, not our replies."
)


def mooncake(reader: Reader) -> Recording:
    calls = [call for _, call in _in_order(reader.entries(_mooncake_line), per_s=1e3)]
    groups, shared = continuations([call.content.hashes for call in calls if isinstance(call.content, Blocks)])
    named = ((group[0], calls[index]) for group in groups for index in group)
    facts = {"shared_prefix_blocks": shared}
    rule = MOONCAKE_RULE.format(shared=shared)
    return Recording(_conversations("mooncake", named), rule, facts)


def _mooncake_line(row: Row) -> _Request:
    tokens, hashes = whole(row, "input_length", 1), hash_list(row, "hash_ids")
    blocks = ceil_div(tokens, MOONCAKE_BLOCK)
    if len(hashes) != blocks:
        raise Malformed(f"input_length={tokens} makes {blocks} blocks, and hash_ids has {len(hashes)}")
    content = Blocks(hashes_of(hashes), MOONCAKE_BLOCK, tokens)
    return _Request(number(row, "timestamp"), content, whole(row, "output_length"))


def continuations(requests: Sequence[Sequence[int]]) -> tuple[list[list[int]], int]:
    """Groups of indices, a conversation each, in order of their first request; and the blocks that everybody shares.

    requests: block hashes, in order of arrival, a hash standing for its block and all before it.
    """
    shared = shared_prefix(requests)
    groups: list[list[int]] = []
    holder: dict[int, int] = {}  # the group whose request held a block last
    for index, hashes in enumerate(requests):
        known = next((holder[one] for one in reversed(hashes[shared:]) if one in holder), None)
        if known is None:
            known = len(groups)
            groups.append([])
        groups[known].append(index)
        holder.update(dict.fromkeys(hashes[shared:], known))
    return groups, shared


def shared_prefix(requests: Sequence[Sequence[int]]) -> int:
    """How many leading blocks more than half of the requests have in common."""
    left, depth = [hashes for hashes in requests if hashes], 0
    while left:
        common, holders = Counter(hashes[depth] for hashes in left if len(hashes) > depth).most_common(1)[0]
        if 2 * holders <= len(requests):
            break
        depth += 1
        left = [hashes for hashes in left if len(hashes) > depth and hashes[depth - 1] == common]
    return depth


# Qwen-Bailian's usage traces: JSON lines with chat and parent chat, a time in seconds, and a hash for each 16 tokens.

QWEN_BLOCK = 16
NO_PARENT = -1
QWEN_RULE = (
    "A request continues the conversation of its parent chat; one without a parent, or whose parent is not in the file, "
    "opens a conversation. Every request carries its whole prompt; equal block hashes give equal tokens; replies are not "
    "found again in later prompts, whose blocks are the trace's."
)


def qwen_bailian(reader: Reader) -> Recording:
    root: dict[int, int] = {}
    calls: list[tuple[int, Call]] = []
    orphans = 0
    for line, call in _in_order(reader.entries(_qwen_line)):
        chat, parent = line.who
        orphans += parent not in root and parent != NO_PARENT
        root[chat] = root.get(parent, chat)
        calls.append((root[chat], call))
    facts = {"requests_whose_parent_is_not_in_the_file": orphans}
    return Recording(_conversations("qwen", calls), QWEN_RULE, facts)


def _qwen_line(row: Row) -> _Request:
    return _Request(
        number(row, "timestamp"),
        Blocks(hashes_of(hash_list(row, "hash_ids")), QWEN_BLOCK, whole(row, "input_length", 1)),
        whole(row, "output_length"),
        (whole(row, "chat_id"), whole(row, "parent_chat_id", NO_PARENT)),
        whole(row, "turn"),
    )


# RAGPulse: JSON lines with a time in seconds as text, two lengths, a session, and hashes of the prompt's components.

COMPONENTS = ("sys_prompt", "passages_ids", "history", "web_search", "user_input")
TRACE = "0_trace.jsonl"
LENGTHS = {
    "1_sys_prompt.jsonl": "sys_prompt_id",
    "2_passages.jsonl": "passage_id",
    "3_history.jsonl": "history_id",
    "4_user_input.jsonl": "user_input_id",
    "5_web_search.jsonl": "web_search_id",
}
"""Files of the folder with the tokens of each hash: a line holds this field and token_length."""

RAGPULSE_RULE = (
    "Requests with one session id are a conversation. Every request carries its whole prompt: system prompt, passages, "
    "history, web search, user input, in this order; equal hashes begin with equal tokens. {lengths}"
)
KNOWN = "The components' lengths are those published with the trace, the last one cut or prolonged to the input length."
UNKNOWN = (
    "The components' lengths were not given (the path is no folder with them): the input length is divided evenly."
)


def ragpulse(reader: Reader) -> Recording:
    """The path is the trace alone, or the folder that holds it and the lengths (a configuration is identified by the
    content of its path, so files that merely lie beside a trace are not read).
    """
    lengths: dict[int, int] = {}
    for name, field in LENGTHS.items():
        if (reader.path / name).is_file():
            lengths.update(reader.entries(_component_length(field), reader.path / name))
    file = reader.path / TRACE if reader.path.is_dir() else reader.path
    calls = _in_order(reader.entries(_ragpulse_line(lengths), file))
    rule = RAGPULSE_RULE.format(lengths=KNOWN if lengths else UNKNOWN)
    return Recording(_conversations("ragpulse", ((one.who, call) for one, call in calls)), rule)


def _component_length(field: str) -> Callable[[Row], tuple[int, int]]:
    return lambda row: (whole(row, field), whole(row, "token_length"))


def _ragpulse_line(lengths: Mapping[int, int]) -> Callable[[Row], _Request]:
    def parse(row: Row) -> _Request:
        components = row.get("hash_ids")
        if not isinstance(components, Mapping):
            raise Malformed("hash_ids is not an object of components")
        hashes = tuple(one for name in COMPONENTS if name in components for one in hash_list(components, name))
        if not hashes:
            raise Malformed("hash_ids names no component")
        content = Parts(pieces(hashes, whole(row, "input_length", 1), lengths))
        return _Request(number(row, "timestamp"), content, whole(row, "output_length"), text(row, "session_id"))

    return parse


def pieces(hashes: tuple[int, ...], tokens: int, lengths: Mapping[int, int]) -> tuple[tuple[int, int], ...]:
    """(hash, tokens) of each component, `tokens` in all: of known length, or even shares of what is left to divide."""
    found: list[tuple[int, int]] = []
    left = tokens
    for place, one in enumerate(hashes):
        last = place == len(hashes) - 1
        share = left if last else min(left, lengths.get(one, left // (len(hashes) - place)))
        if share:
            found.append((one, share))
        left -= share
    return tuple(found)
