"""Formats whose requests have times and lengths but no text: Azure, Mooncake, Qwen-Bailian and RAGPulse."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from operator import attrgetter
from typing import Annotated, Any, Self

from pydantic import AfterValidator, AliasChoices, Field, model_validator

from pensieve.lab.workload.formats.reading import Entry, Hashes, Positive, Reader, Time, Whole
from pensieve.lab.workload.recording import Blocks, Call, Content, Count, Parts, Recording, grouped
from pensieve.units import ceil_div

_AT = attrgetter("at_s")


class Timed(Entry):
    """A request that carries its whole prompt. A format names the fields as its files do."""

    at_s: float = Field(alias="timestamp")
    prompt: Positive = Field(alias="input_length")
    reply: Whole = Field(alias="output_length")

    @property
    def content(self) -> Content:
        return Count(self.prompt)


def _recording(
    prefix: str,
    rows: Sequence[Timed],
    names: Iterable[object],
    rule: str,
    facts: dict[str, Any] | None = None,
    contents: Iterable[Content] | None = None,
) -> Recording:
    """rows: by time. names: of the conversation of each. contents: of each, where a row alone does not tell."""
    contents = [row.content for row in rows] if contents is None else contents
    calls = [
        (f"{prefix}-{name}", Call(content, row.reply, row.at_s - rows[0].at_s, continues=False, order=order))
        for order, (row, name, content) in enumerate(zip(rows, names, contents, strict=True))
    ]
    return Recording(grouped(calls), rule, facts or {})


# Azure's LLM inference traces: CSV with a time and two lengths. There are no sessions in it.

AZURE_RULE = "Every request is a conversation of its own with its whole prompt; no two prompts share anything."


class Azure(Timed):
    at_s: Time = Field(alias="TIMESTAMP")
    prompt: Positive = Field(alias="ContextTokens")
    reply: Whole = Field(alias="GeneratedTokens")


def azure(reader: Reader) -> Recording:
    rows = sorted(reader.entries(Azure.model_validate), key=_AT)
    return _recording("azure", rows, range(len(rows)), AZURE_RULE)


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
    rows = sorted(reader.entries(Mooncake.model_validate), key=_AT)
    first, shared = continuations([row.hash_ids for row in rows])
    return _recording("mooncake", rows, first, MOONCAKE_RULE.format(shared=shared), {"shared_prefix_blocks": shared})


def continuations(prompts: Sequence[Sequence[int]], replies: Sequence[Sequence[int]] = ()) -> tuple[list[int], int]:
    """Of each request the one that began its conversation; and how many leading blocks everybody shares.

    prompts, replies: block hashes in order of arrival, each of its block and all before it; a reply's go on behind its
    prompt's. A request continues the latest one whose reply ends in a block of its prompt, or that has a block of it which
    not everybody has.
    """
    shared = shared_prefix(prompts)
    first: list[int] = []
    holder: dict[int, int] = {}  # the conversation whose prompt or reply held a block last
    ends: set[int] = set()  # of replies
    for index, (prompt, reply) in enumerate(zip_longest(prompts, replies, fillvalue=())):
        known = (one for place, one in reversed([*enumerate(prompt)]) if place >= shared or one in ends)
        first.append(next((holder[one] for one in known if one in holder), index))
        holder.update(dict.fromkeys((*prompt, *reply), first[-1]))
        ends.update(reply[-1:])
    return first, shared


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
    rows = sorted(reader.entries(Qwen.model_validate), key=lambda row: (row.at_s, row.turn))
    root: dict[int, int] = {}
    orphans = 0
    for row in rows:
        orphans += row.parent_chat_id not in root and row.parent_chat_id != NO_PARENT
        root[row.chat_id] = root.get(row.parent_chat_id, row.chat_id)
    facts = {"requests_whose_parent_is_not_in_the_file": orphans}
    return _recording("qwen", rows, [root[row.chat_id] for row in rows], QWEN_RULE, facts)


# RAGPulse: JSON lines with a time in seconds as text, two lengths, a session, and hashes of the prompt's components; beside
# them files with the tokens of each hash.

COMPONENTS = ("sys_prompt", "passages_ids", "history", "web_search", "user_input")
TRACE, LENGTHS = "0_trace.jsonl", "[1-5]_*.jsonl"
RAGPULSE_RULE = (
    "Requests with one session id are a conversation. Every request carries its whole prompt: system prompt, passages, "
    "history, web search, user input, in this order; equal hashes begin with equal tokens. Their lengths are those published "
    "with the trace, the last one cut or prolonged to the input length. A component without one has no tokens."
)


class RAGPulse(Timed):
    session_id: str
    hash_ids: dict[str, list[int]] = Field(min_length=1)


class _Component(Entry):
    hash: int = Field(
        validation_alias=AliasChoices("sys_prompt_id", "passage_id", "history_id", "user_input_id", "web_search_id")
    )
    token_length: Whole


def ragpulse(reader: Reader) -> Recording:
    """The path is the folder."""
    lengths: dict[int, int] = {}
    for file in reader.files(LENGTHS):
        lengths.update((one.hash, one.token_length) for one in reader.entries(_Component.model_validate, file))
    [trace] = reader.files(TRACE)
    rows = sorted(reader.entries(RAGPulse.model_validate, trace), key=_AT)
    contents = [Parts(pieces(row.hash_ids, row.prompt, lengths)) for row in rows]
    return _recording("ragpulse", rows, [row.session_id for row in rows], RAGPULSE_RULE, contents=contents)


def pieces(
    components: Mapping[str, Sequence[int]], tokens: int, lengths: Mapping[int, int]
) -> tuple[tuple[int, int], ...]:
    """(hash, tokens) of each component, `tokens` in all."""
    hashes = [one for name in COMPONENTS for one in components.get(name, ())]
    found: list[tuple[int, int]] = []
    left = tokens
    for place, one in enumerate(hashes):
        share = left if place == len(hashes) - 1 else min(left, lengths.get(one, 0))
        if share:
            found.append((one, share))
        left -= share
    return tuple(found)
