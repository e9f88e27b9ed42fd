"""What a file of recorded requests holds, whatever its format: conversations of calls, nothing tokenised yet."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

from pensieve.core.hint import Hint
from pensieve.core.request import TokenArray


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
class Begun:
    """The conversation that began another one, and the turn (from 1) after whose reply it did."""

    conversation: str
    turn: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """begun: None: a person, or whoever the format does not name."""

    id: str
    calls: tuple[Call, ...]
    begun: Begun | None = None


@dataclass(frozen=True, slots=True)
class Recording:
    """conversations: in order of their first call. rule: which requests make a conversation, and what their prompts
    share; goes into the record. malformed: lines left out; examples: the first of them, with file, line and reason.
    one_clock: times count from the first request of the file; if not, from that of each conversation, and nobody knows when
    one began beside another.
    """

    format: str
    conversations: tuple[Conversation, ...]
    rule: str
    malformed: int = 0
    examples: tuple[str, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    one_clock: bool = True

    @property
    def requests(self) -> int:
        return sum(len(conversation.calls) for conversation in self.conversations)

    @property
    def timed(self) -> bool:
        """Every request can be sent at its own time."""
        return self.one_clock and all(
            call.at_s is not None for conversation in self.conversations for call in conversation.calls
        )


def facts_of(recording: Recording, byte_tokens: bool) -> dict[str, Any]:
    """For the facts of a plan: what was left out of the file, and byte_tokens where the lengths of its texts are in bytes."""
    has_text = any(isinstance(call.content, Text) for one in recording.conversations for call in one.calls)
    return {
        "malformed_lines": recording.malformed,
        "malformed_examples": list(recording.examples),
        **recording.facts,
        **({"tokens": "bytes"} if byte_tokens and has_text else {}),
    }


def hashes_of(values: list[int]) -> TokenArray[int]:
    return array("q", values)


@dataclass(frozen=True, slots=True)
class Reuse:
    """What a cache of blocks without a limit would find again of all prompts: the figure that traces are published with.

    unique_blocks: different ones. hit_tokens: of `tokens`, those in blocks that came before.
    """

    block_tokens: float
    blocks: int
    tokens: int
    unique_blocks: int
    hit_tokens: int

    @property
    def block_rate(self) -> float:
        return 1.0 - self.unique_blocks / self.blocks

    @property
    def token_rate(self) -> float:
        return self.hit_tokens / self.tokens


def block_reuse(recording: Recording) -> Reuse | None:
    """Look up each request's blocks, in order of arrival; the last one may be partly filled. None for a recording without
    block hashes. Whole prompts at once: a trace may have ten million blocks."""
    calls = [(call.at_s or 0.0, call.order, call.content) for one in recording.conversations for call in one.calls]
    found = [(at, order, prompt) for at, order, prompt in calls if isinstance(prompt, Blocks)]
    if not any(prompt.hashes for _, _, prompt in found):
        return None
    size = found[0][2].block_tokens
    seen: set[int] = set()
    blocks = tokens = missed_tokens = 0
    for _, _, prompt in sorted(found, key=lambda one: one[:2]):
        filled = min(prompt.tokens, int(len(prompt.hashes) * size))
        fresh = set(prompt.hashes) - seen
        seen |= fresh
        blocks += len(prompt.hashes)
        tokens += filled
        missed_tokens += int(len(fresh) * size)
        unfilled = int(len(prompt.hashes) * size) - filled
        if unfilled and prompt.hashes[-1] in fresh and prompt.hashes.index(prompt.hashes[-1]) == len(prompt.hashes) - 1:
            missed_tokens -= unfilled
    return Reuse(size, blocks, tokens, len(seen), tokens - missed_tokens)
