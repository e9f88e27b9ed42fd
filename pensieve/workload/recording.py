"""What a file of recorded requests holds, whatever its format: conversations of calls, nothing tokenised yet."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

from pensieve.request import TokenArray


@dataclass(frozen=True, slots=True)
class Text:
    """A text; its tokens depend on the model's tokenizer."""

    text: str


@dataclass(frozen=True, slots=True)
class Blocks:
    """`tokens` tokens in blocks of `block_tokens`, of which only hashes are known: equal hash, equal tokens.

    hashes: signed 64-bit numbers. Tokens beyond the last of them occur nowhere else.
    """

    hashes: TokenArray[int]
    block_tokens: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Parts:
    """Pieces of different lengths, of which only hashes are known: (hash, tokens) each."""

    pieces: tuple[tuple[int, int], ...]


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
    only the length is used: a number of tokens, or a text.
    """

    content: Content
    reply: int | Text
    at_s: float | None = None
    continues: bool = True
    order: int = 0


@dataclass(frozen=True, slots=True)
class Conversation:
    id: str
    calls: tuple[Call, ...]


@dataclass(frozen=True, slots=True)
class Recording:
    """conversations: in order of their first call. rule: which requests make a conversation, and what their prompts
    share; goes into the record. malformed: lines left out; examples: the first of them, with file, line and reason.
    """

    format: str
    conversations: tuple[Conversation, ...]
    rule: str
    malformed: int = 0
    examples: tuple[str, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def requests(self) -> int:
        return sum(len(conversation.calls) for conversation in self.conversations)

    @property
    def timed(self) -> bool:
        return all(call.at_s is not None for conversation in self.conversations for call in conversation.calls)


def hashes_of(values: list[int]) -> TokenArray[int]:
    return array("q", values)
