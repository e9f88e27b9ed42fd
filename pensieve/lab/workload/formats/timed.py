"""Formats whose requests have times and lengths but no text: Azure, BurstGPT, Mooncake, Qwen-Bailian and RAGPulse."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Self, TypeVar

from pydantic import AfterValidator, AliasChoices, Field, model_validator

from pensieve.lab.workload.formats.reading import Entry, Hashes, Positive, Reader, Time, Whole
from pensieve.lab.workload.recording import Blocks, Call, Content, Conversation, Count, Parts, Recording
from pensieve.units import ceil_div

Row = TypeVar("Row", bound="Timed")


class Timed(Entry):
    """A request that carries its whole prompt. A format names the fields as its files do."""

    at_s: float = Field(alias="timestamp")
    prompt: Positive = Field(alias="input_length")
    reply: Whole = Field(alias="output_length")

    @property
    def content(self) -> Content:
        return Count(self.prompt)


def _in_order(rows: Iterable[Row], key: Callable[[Row], Any] = lambda row: row.at_s) -> tuple[list[Row], list[Call]]:
    """The rows by time, and the calls that they are."""
    ordered = sorted(rows, key=key)
    start_s = ordered[0].at_s if ordered else 0.0
    return ordered, [
        Call(row.content, row.reply, row.at_s - start_s, continues=False, order=order)
        for order, row in enumerate(ordered)
    ]


def _conversations(prefix: str, names: Iterable[object], calls: Iterable[Call]) -> tuple[Conversation, ...]:
    """Those with one name are a conversation."""
    found: dict[object, list[Call]] = {}
    for name, call in zip(names, calls, strict=True):
        found.setdefault(name, []).append(call)
    return tuple(Conversation(f"{prefix}-{name}", tuple(each)) for name, each in found.items())


# Azure's LLM inference traces: CSV with a time and two lengths. There are no sessions in it.

AZURE_RULE = "Every request is a conversation of its own with its whole prompt; no two prompts share anything."


class Azure(Timed):
    at_s: Time = Field(alias="TIMESTAMP")
    prompt: Positive = Field(alias="ContextTokens")
    reply: Whole = Field(alias="GeneratedTokens")


def azure(reader: Reader) -> Recording:
    _, calls = _in_order(reader.entries(Azure.of))
    return Recording(_conversations("azure", range(len(calls)), calls), AZURE_RULE)


# BurstGPT: CSV with a time in seconds, two lengths, and in its later releases a session.

BURSTGPT_RULE = (
    "Rows with one session id are a conversation, as long as each request has room for all that was said before. The new "
    "message is its tokens less the earlier request and response. A shorter request opens another conversation. "
    "Rows without a session id stand alone. Rows whose response has no tokens failed when recorded and are left out."
)


class BurstGPT(Timed):
    at_s: float = Field(alias="Timestamp")
    prompt: Positive = Field(alias="Request tokens")
    reply: Whole = Field(alias="Response tokens")
    session: str = Field("", validation_alias=AliasChoices("Session ID", "SessionID"))


def burstgpt(reader: Reader) -> Recording:
    found = list(reader.entries(BurstGPT.of))
    rows, whole = _in_order(row for row in found if row.reply)
    names, calls = [], []
    latest: dict[str, tuple[int, int]] = {}  # of a session: its present conversation, and the tokens said in it
    for row, call in zip(rows, whole, strict=True):
        name, said = latest.get(row.session, (call.order, 0)) if row.session else (call.order, 0)
        if row.prompt <= said:
            name, said = call.order, 0
        names.append(name)
        calls.append(replace(call, content=Count(row.prompt - said), continues=True))
        latest[row.session] = (name, row.prompt + row.reply)
    facts = {"requests_without_response": len(found) - len(rows)}
    return Recording(_conversations("burstgpt", names, calls), BURSTGPT_RULE, facts)


# Mooncake's release for FAST 2025: JSON lines with a timestamp in ms, two lengths, and a hash for each 512 tokens.

MOONCAKE_BLOCK = 512
MOONCAKE_RULE = (
    "A request continues the earlier one that it shares most leading blocks with, the latest of several. Those blocks "
    "must reach beyond the prefix that more than half of all requests share ({shared} blocks); otherwise the request opens "
    "a conversation. Every request carries its whole prompt. Equal block hashes give equal tokens. Later prompts hold the "
    "trace's blocks, not our replies."
)


class Mooncake(Timed):
    at_s: Annotated[float, AfterValidator(lambda ms: ms / 1e3)] = Field(alias="timestamp")
    hash_ids: Hashes

    @property
    def content(self) -> Content:
        return Blocks(self.hash_ids, MOONCAKE_BLOCK, self.prompt)

    @model_validator(mode="after")
    def _has_a_hash_a_block(self) -> Self:
        blocks = ceil_div(self.prompt, MOONCAKE_BLOCK)
        if len(self.hash_ids) != blocks:
            raise ValueError(f"input_length={self.prompt} makes {blocks} blocks, and hash_ids has {len(self.hash_ids)}")
        return self


def mooncake(reader: Reader) -> Recording:
    rows, calls = _in_order(reader.entries(Mooncake.of))
    groups, shared = continuations([row.hash_ids for row in rows])
    names = {index: group[0] for group in groups for index in group}
    found = _conversations("mooncake", (names[index] for index in range(len(calls))), calls)
    return Recording(found, MOONCAKE_RULE.format(shared=shared), {"shared_prefix_blocks": shared})


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


class Qwen(Timed):
    chat_id: int
    parent_chat_id: int
    turn: int
    hash_ids: Hashes

    @property
    def content(self) -> Content:
        return Blocks(self.hash_ids, QWEN_BLOCK, self.prompt)


def qwen_bailian(reader: Reader) -> Recording:
    rows, calls = _in_order(reader.entries(Qwen.of), key=lambda row: (row.at_s, row.turn))
    root: dict[int, int] = {}
    orphans = 0
    for row in rows:
        orphans += row.parent_chat_id not in root and row.parent_chat_id != NO_PARENT
        root[row.chat_id] = root.get(row.parent_chat_id, row.chat_id)
    facts = {"requests_whose_parent_is_not_in_the_file": orphans}
    return Recording(_conversations("qwen", (root[row.chat_id] for row in rows), calls), QWEN_RULE, facts)


# RAGPulse: JSON lines with a time in seconds as text, two lengths, a session, and hashes of the prompt's components.

COMPONENTS = ("sys_prompt", "passages_ids", "history", "web_search", "user_input")
TRACE, LENGTHS = "0_trace.jsonl", "[1-5]_*.jsonl"
RAGPULSE_RULE = (
    "Requests with one session id are a conversation. Every request carries its whole prompt: system prompt, passages, "
    "history, web search, user input, in this order; equal hashes begin with equal tokens. {lengths}"
)
KNOWN = "The components' lengths are those published with the trace, the last one cut or prolonged to the input length."
UNKNOWN = (
    "The components' lengths were not given (the path is no folder with them): the input length is divided evenly."
)


class RAGPulse(Timed):
    session_id: str
    hash_ids: dict[str, list[int]] = Field(min_length=1)


class _Component(Entry):
    """A line of the files with the tokens of each hash."""

    hash: int = Field(
        validation_alias=AliasChoices("sys_prompt_id", "passage_id", "history_id", "user_input_id", "web_search_id")
    )
    token_length: Whole


def ragpulse(reader: Reader) -> Recording:
    """The path is the trace alone, or the folder that holds it and the lengths (a configuration is identified by the
    content of its path, so files that merely lie beside a trace are not read).
    """
    lengths: dict[int, int] = {}
    for file in sorted(reader.path.glob(LENGTHS)):
        lengths.update((one.hash, one.token_length) for one in reader.entries(_Component.of, file))
    file = reader.path / TRACE if reader.path.is_dir() else reader.path
    rows, whole = _in_order(reader.entries(RAGPulse.of, file))
    calls = [
        replace(call, content=Parts(pieces(row.hash_ids, row.prompt, lengths)))
        for row, call in zip(rows, whole, strict=True)
    ]
    rule = RAGPULSE_RULE.format(lengths=KNOWN if lengths else UNKNOWN)
    return Recording(_conversations("ragpulse", (row.session_id for row in rows), calls), rule)


def pieces(
    components: Mapping[str, Sequence[int]], tokens: int, lengths: Mapping[int, int]
) -> tuple[tuple[int, int], ...]:
    """(hash, tokens) of each component, `tokens` in all: of known length, or even shares of what is left to divide."""
    hashes = [one for name in COMPONENTS for one in components.get(name, ())]
    found: list[tuple[int, int]] = []
    left = tokens
    for place, one in enumerate(hashes):
        last = place == len(hashes) - 1
        share = left if last else min(left, lengths.get(one, left // (len(hashes) - place)))
        if share:
            found.append((one, share))
        left -= share
    return tuple(found)
