"""What a file of recorded requests holds, whatever its format: conversations of calls, nothing tokenised yet."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np

from pensieve.core.request import Hint, TokenArray
from pensieve.lab.workload.playback import Begun


@dataclass(frozen=True, slots=True)
class Text:
    """A text; its tokens depend on the model's tokenizer."""

    text: str


@dataclass(frozen=True, slots=True)
class Blocks:
    """`tokens` tokens in blocks of `block_tokens`, of which only hashes are known: equal hash, equal tokens.

    hashes: signed 64-bit numbers. Tokens beyond the last of them occur nowhere else. block_tokens: a fraction where a block
    is so many bytes; block i then has the tokens from floor(i * block_tokens) up to floor((i + 1) * block_tokens).
    """

    hashes: TokenArray[int]
    block_tokens: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Parts:
    """Pieces of different lengths, of which only hashes are known: (hash, tokens) each."""

    pieces: tuple[tuple[int, int], ...]

    @property
    def tokens(self) -> int:
        return sum(tokens for _, tokens in self.pieces)


@dataclass(frozen=True, slots=True)
class Count:
    """So many tokens that occur nowhere else."""

    tokens: int


Content = Text | Blocks | Parts | Count


@dataclass(frozen=True, slots=True)
class Call:
    """One request. at_s: seconds after the file's first one; None where the format has no times. order: its place among
    the file's requests, which decides between equal times.

    continues: `content` is the new message only; otherwise it is the whole prompt. reply: the recorded answer, of which
    only the length is used: a number of tokens, or a text; None: the format has none. Blocks: of prompt and reply together,
    so that later prompts find the reply: a system that can be told its tokens is told these.
    pause_s: where the format has it, seconds from the reply before it to this request; of the first call of a conversation
    that another one began, from that one's reply. waits_for: conversations that must be over before it, from whose last end
    the pause counts if that is later. hint: what a client knew at the end of this reply.
    """

    content: Content
    reply: int | Text | Blocks | None
    at_s: float | None = None
    continues: bool = True
    order: int = 0
    pause_s: float | None = None
    waits_for: tuple[str, ...] = ()
    hint: Hint | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """begun: None: a person, or whoever the format does not name."""

    id: str
    calls: tuple[Call, ...]
    begun: Begun | None = None


@dataclass(frozen=True, slots=True)
class Recording:
    """conversations: in order of their first call. rule: which requests make a conversation, and what their prompts
    share; goes into the record, as facts do. one_clock: times count from the first request of the file; if not, from that of
    each conversation, and nobody knows when one began beside another. malformed: lines left out; examples: the first of
    them, with file, line and reason.
    """

    conversations: tuple[Conversation, ...]
    rule: str
    facts: dict[str, Any] = field(default_factory=dict)
    one_clock: bool = True
    format: str = "synthetic"
    malformed: int = 0
    examples: tuple[str, ...] = ()

    @property
    def requests(self) -> int:
        return sum(len(conversation.calls) for conversation in self.conversations)

    @property
    def timed(self) -> bool:
        """Every request can be sent at its own time."""
        return self.one_clock and all(
            call.at_s is not None for conversation in self.conversations for call in conversation.calls
        )


def grouped(calls: Iterable[tuple[str, Call]]) -> tuple[Conversation, ...]:
    """Calls with the names of their conversations, in the order of each one's first call."""
    found: dict[str, list[Call]] = {}
    for name, call in calls:
        found.setdefault(name, []).append(call)
    return tuple(Conversation(name, tuple(own)) for name, own in found.items())


def facts_of(recording: Recording, byte_tokens: bool) -> dict[str, Any]:
    """For the facts of a plan. byte_tokens: the lengths of its texts are in bytes."""
    has_text = any(isinstance(call.content, Text) for one in recording.conversations for call in one.calls)
    return {
        "format": recording.format,
        "requests_in_file": recording.requests,
        "conversations_in_file": len(recording.conversations),
        "rule": recording.rule,
        "malformed_lines": recording.malformed,
        "malformed_examples": list(recording.examples),
        **recording.facts,
        **({"tokens": "bytes"} if byte_tokens and has_text else {}),
    }


def hashes_of(values: Any) -> TokenArray[int]:
    """Eight bytes each. Raises ValueError for what is no list of whole numbers that fit."""
    try:
        return array("q", values)
    except (TypeError, OverflowError) as error:
        raise ValueError("these are no whole numbers of 64 bits") from error


def chain(blocks: Iterable[int]) -> list[int]:
    """Of each block, a number for it and all before it."""
    return list(accumulate(blocks, lambda before, one: hash((before, one)), initial=0))[1:]


def block_repeats(recording: Recording) -> dict[str, float]:
    """For the facts of a plan: how many blocks all prompts have, and how many different ones, the figure that traces are
    published with. Empty without block hashes."""
    calls = [call.content for one in recording.conversations for call in one.calls if isinstance(call.content, Blocks)]
    blocks = sum(len(content.hashes) for content in calls)
    if not blocks:
        return {}
    unique = len(np.unique(np.concatenate([np.frombuffer(content.hashes, np.int64) for content in calls])))
    return {
        "block_tokens": calls[0].block_tokens,
        "file_blocks": blocks,
        "file_unique_blocks": unique,
        "file_repeated_blocks_share": round(1.0 - unique / blocks, 6),
    }
