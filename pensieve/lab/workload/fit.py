"""A recording fitted to a model: conversations whose every length is known before the first request is sent."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

from pensieve.core.hint import Hint
from pensieve.core.request import TokenArray, tokens_of
from pensieve.errors import ConfigError
from pensieve.lab.workload.base import WorkloadContext
from pensieve.lab.workload.filler import filler
from pensieve.lab.workload.recording import Begun, Blocks, Call, Conversation, Count, Parts, Text

BLOCKS_KEPT = 4096  # of a few hundred tokens each: enough for what one prompt after another shares


@dataclass(frozen=True, slots=True)
class Step:
    """One turn. message: tokens sent; prompt: tokens of the whole prompt, history included; reply: tokens asked for.

    build: makes the message's tokens, each time anew. pause_s, waits_for, hint: as of the recorded call.
    """

    build: Callable[[], TokenArray[int]]
    message: int
    prompt: int
    reply: int
    continues: bool
    at_s: float | None = None
    order: int = 0
    pause_s: float | None = None
    waits_for: tuple[str, ...] = ()
    hint: Hint | None = None


@dataclass(frozen=True, slots=True)
class Dialogue:
    """One conversation. recorded_turns: as many as there were, before the fit cut any. begun: as it was recorded."""

    session: str
    phase: str
    steps: tuple[Step, ...]
    recorded_turns: int
    begun: Begun | None = None

    @property
    def longest(self) -> int:
        """KV tokens when it ends; its last token has no KV."""
        return max(step.prompt + step.reply for step in self.steps) - 1

    @property
    def turns(self) -> int:
        return len(self.steps)


@dataclass(frozen=True, slots=True)
class Fit:
    """How calls are fitted to a model: replies capped, conversations cut before the call that its context cannot hold.

    max_new_tokens: None: as recorded. free: replies may be shorter than asked for, so the cap is what is asked for.
    """

    context: WorkloadContext
    max_turns: int | None = None
    max_new_tokens: int | None = None
    free: bool = False

    def dialogue(self, conversation: Conversation, phase: str = "chat") -> Dialogue | None:
        """The calls of a conversation that fit the model; None where not even the first one does."""
        steps: list[Step] = []
        said = 0
        for index, call in enumerate(conversation.calls[: self.max_turns]):
            build, message = self._message(conversation.id, index, call)
            prompt = said + message if call.continues else message
            reply = self._reply(call)
            if prompt + reply > self.context.max_context:
                break
            when = (call.at_s, call.order, call.pause_s, call.waits_for)
            steps.append(Step(build, message, prompt, reply, call.continues, *when, call.hint))
            said = prompt + reply
        recorded = len(conversation.calls)
        return Dialogue(conversation.id, phase, tuple(steps), recorded, conversation.begun) if steps else None

    def _reply(self, call: Call) -> int:
        if self.free and self.max_new_tokens is not None:
            return self.max_new_tokens
        if call.reply is None:
            if self.max_new_tokens is None:
                raise ConfigError("The file has no replies; say with workload.max_new_tokens how long they are.")
            return self.max_new_tokens
        recorded = call.reply if isinstance(call.reply, int) else len(self.context.encode(call.reply.text))
        return max(1, recorded if self.max_new_tokens is None else min(recorded, self.max_new_tokens))

    def _message(self, session: str, index: int, call: Call) -> tuple[Callable[[], TokenArray[int]], int]:
        c, seed, vocab = call.content, self.context.seed, self.context.vocab
        if isinstance(c, Text):
            if call.continues:
                tokens = self.context.message(c.text, first=index == 0)
            else:
                tokens = tokens_of(list(self.context.encode(c.text)))
            return partial(array, "i", tokens), len(tokens)
        if isinstance(c, Count):
            return partial(filler, c.tokens, vocab, seed, "session", session, index), c.tokens
        own = (seed, "session", session, index)
        return partial(synthesised, c, vocab, seed, own), length(c)


def length(content: Blocks | Parts) -> int:
    return content.tokens if isinstance(content, Blocks) else sum(tokens for _, tokens in content.pieces)


def synthesised(content: Blocks | Parts, vocab: int, seed: int, own: tuple[object, ...]) -> TokenArray[int]:
    """Tokens for hashes: equal hashes give equal tokens. own: names the tokens that have no hash."""
    tokens: TokenArray[int] = array("i")
    if isinstance(content, Parts):
        for one, count in content.pieces:
            tokens += filler(count, vocab, seed, "part", one)
        return tokens
    for one in content.hashes:
        tokens += _block(content.block_tokens, vocab, seed, one)
    del tokens[content.tokens :]
    return tokens + filler(content.tokens - len(tokens), vocab, *own)


@lru_cache(maxsize=BLOCKS_KEPT)
def _block(tokens: int, vocab: int, seed: int, one: int) -> TokenArray[int]:
    return filler(tokens, vocab, seed, "block", one)


def warmups(dialogues: Sequence[Dialogue], turns: int, side_by_side: int, context: WorkloadContext) -> list[Dialogue]:
    """`turns` turns in `side_by_side` conversations (fewer where turns are), with the lengths of the first `dialogues`
    and with tokens of their own, so that no measured prompt shares a prefix with them.
    """
    sessions = min(side_by_side, turns)
    found = []
    for index in range(sessions):
        pattern = dialogues[index % len(dialogues)]
        share = turns // sessions + (index < turns % sessions)
        name = f"warmup-{index}"
        found.append(Dialogue(name, "warmup", tuple(_repeated(pattern, share, name, context)), share))
    return found


def _repeated(pattern: Dialogue, turns: int, name: str, context: WorkloadContext) -> Iterator[Step]:
    """The pattern's messages and replies, again and again; from an empty history where the context is full."""
    said = 0
    for turn in range(turns):
        step = pattern.steps[turn % pattern.turns]
        continues = step.continues and said + step.message + step.reply <= context.max_context
        prompt = said + step.message if continues else step.message
        build = partial(filler, step.message, context.vocab, context.seed, name, turn)
        yield Step(build, step.message, prompt, step.reply, continues)
        said = prompt + step.reply


def fitted(
    conversations: Sequence[Conversation], fit: Fit, *, min_turns: int = 1, wanted: int | None = None
) -> tuple[list[Dialogue], dict[str, int]]:
    """The first `wanted` conversations (None: all) that have min_turns turns and fit, and what happened to the others.

    Raises ConfigError where none is left.
    """
    dialogues: list[Dialogue] = []
    short = too_long = 0
    for conversation in conversations:
        if wanted is not None and len(dialogues) == wanted:
            break
        if len(conversation.calls) < min_turns:
            short += 1
            continue
        dialogue = fit.dialogue(conversation)
        if dialogue is None:
            too_long += 1
            continue
        dialogues.append(dialogue)
    if not dialogues:
        raise ConfigError(
            f"No conversation is left: {short} have fewer than workload.min_turns={min_turns} turns, and of {too_long} the "
            f"first call does not fit into a context of {fit.context.max_context:,} tokens. Choose other limits or a model "
            "with a longer context (simulated: raise model.architecture.max_position_embeddings)."
        )
    limit = fit.max_turns
    planned = [
        dialogue.recorded_turns if limit is None else min(limit, dialogue.recorded_turns) for dialogue in dialogues
    ]
    return dialogues, {
        "conversations_with_too_few_turns": short,
        "conversations_too_long_for_the_context": too_long,
        "conversations_cut_by_context": sum(s.turns < turns for s, turns in zip(dialogues, planned, strict=True)),
        "turns_cut_by_context": sum(turns - s.turns for s, turns in zip(dialogues, planned, strict=True)),
    }
