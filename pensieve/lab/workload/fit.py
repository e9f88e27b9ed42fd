"""A recording fitted to a model: conversations whose every length is known before the first request is sent."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from math import ceil

import numpy as np

from pensieve.core.request import TokenArray, tokens_of
from pensieve.errors import ConfigError
from pensieve.lab.workload.base import WorkloadContext, uniform
from pensieve.lab.workload.playback import Dialogue, Step
from pensieve.lab.workload.recording import Blocks, Call, Conversation, Count, Parts, Text

BLOCKS_KEPT = 4096  # of a few hundred tokens each: enough for what one prompt after another shares


@dataclass(frozen=True, slots=True)
class Fit:
    """How calls are fitted to a model: replies capped, conversations cut before the call that its context cannot hold.

    max_new_tokens: None: as recorded. free: replies may be shorter than asked for, so the cap is what is asked for.
    system_tokens, systems: each conversation begins with one of so many system prompts of this length, with the k-th in about
    1/k as many cases as with the first. hints: requests carry what the recorded clients knew.
    """

    context: WorkloadContext
    max_turns: int | None = None
    max_new_tokens: int | None = None
    free: bool = False
    system_tokens: int = 0
    systems: int = 1
    hints: bool = True

    def dialogue(self, conversation: Conversation) -> Dialogue | None:
        """The calls of a conversation that fit the model; None where not even the first one does."""
        steps: list[Step] = []
        held = 0
        for index, call in enumerate(conversation.calls[: self.max_turns]):
            build, message = self._message(conversation.id, index, call)
            if self.system_tokens and not index:
                build, message = partial(_behind, self._system(conversation.id), build), self.system_tokens + message
            prompt = held + message if call.continues else message
            reply = self._reply(call)
            if prompt + reply > self.context.max_context:
                break
            when = (call.at_s or 0.0, call.order, call.pause_s, call.waits_for)
            said = self._said(conversation.id, index, call, reply)
            hint = call.hint if self.hints else None
            steps.append(Step(build, message, prompt, reply, call.continues, *when, hint, said))
            held = prompt + reply
        recorded = len(conversation.calls[: self.max_turns])
        return Dialogue(conversation.id, "chat", tuple(steps), recorded, conversation.begun) if steps else None

    def _system(self, session: str) -> Callable[[], TokenArray[int]]:
        seed, vocab = self.context.seed, self.context.vocab
        which = int((self.systems + 1) ** uniform(seed, session, "system"))
        return partial(filler, self.system_tokens, vocab, seed, "system", which)

    def _reply(self, call: Call) -> int:
        if self.free and self.max_new_tokens is not None:
            return self.max_new_tokens
        if call.reply is None:
            if self.max_new_tokens is None:
                raise ConfigError("The file has no replies; say with workload.max_new_tokens how long they are.")
            return self.max_new_tokens
        if isinstance(call.reply, Blocks):
            assert not isinstance(call.content, Text), "a reply in blocks follows a prompt in blocks"
            recorded = call.reply.tokens - call.content.tokens
        else:
            recorded = call.reply if isinstance(call.reply, int) else len(self.context.encode(call.reply.text))
        return max(1, recorded if self.max_new_tokens is None else min(recorded, self.max_new_tokens))

    def _said(self, session: str, index: int, call: Call, reply: int) -> Callable[[], TokenArray[int]] | None:
        whole, context = call.reply, self.context
        if not isinstance(whole, Blocks) or isinstance(call.content, Text) or self.free or not context.takes_replies:
            return None
        start, own = call.content.tokens, (context.seed, "session", session, index)
        return lambda: synthesised(whole, context.vocab, context.seed, own)[start : start + reply]

    def _message(self, session: str, index: int, call: Call) -> tuple[Callable[[], TokenArray[int]], int]:
        content, context = call.content, self.context
        if not isinstance(content, Text):
            own = (context.seed, "session", session, index)
            return partial(synthesised, content, context.vocab, context.seed, own), content.tokens
        if call.continues:
            tokens = context.message(content.text, first=index == 0)
        else:
            tokens = tokens_of(list(context.encode(content.text)))
        return partial(array, "i", tokens), len(tokens)


def _behind(system: Callable[[], TokenArray[int]], message: Callable[[], TokenArray[int]]) -> TokenArray[int]:
    return system() + message()


def synthesised(content: Blocks | Parts | Count, vocab: int, seed: int, own: tuple[object, ...]) -> TokenArray[int]:
    """Tokens for hashes: equal hashes give equal tokens. own: names the tokens that have no hash."""
    size, drawn = _id_bytes(vocab), b""
    if isinstance(content, Parts):
        drawn = b"".join([_drawn(size * count, seed, "part", one) for one, count in content.pieces])
    if isinstance(content, Blocks):
        each = content.block_tokens
        ends = [int(place * each) for place in range(len(content.hashes) + 1)]
        blocks = zip(content.hashes, pairwise(ends), strict=True)
        whole = size * ceil(each)
        drawn = b"".join([_kept(whole, seed, "block", one)[: size * (end - start)] for one, (start, end) in blocks])
        drawn = drawn[: size * content.tokens]
    return _ids(drawn + _drawn(size * content.tokens - len(drawn), *own), vocab)


def filler(tokens: int, vocab: int, *names: object) -> TokenArray[int]:
    """`tokens` ids in [0, vocab), a function of the names alone; fewer tokens are the beginning of more.

    Ids are drawn from the largest power of two that the vocabulary and 16 bits hold: masking bytes is fast, and two
    fillers still have a chance of one in thousands to agree on a token.
    """
    assert tokens >= 0 and vocab >= 2
    return _ids(_drawn(_id_bytes(vocab) * tokens, *names), vocab)


def _id_bytes(vocab: int) -> int:
    """Bytes that an id is drawn from, the low one first."""
    return 1 if vocab < 512 else 2


def _drawn(size: int, *names: object) -> bytes:
    return hashlib.shake_256("/".join(map(str, names)).encode()).digest(size)


_kept = lru_cache(maxsize=BLOCKS_KEPT)(_drawn)


def _ids(drawn: bytes, vocab: int) -> TokenArray[int]:
    bits = min(vocab, 1 << 16).bit_length() - 1
    return array("i", (np.frombuffer(drawn, f"<u{_id_bytes(vocab)}") & ((1 << bits) - 1)).astype("i").tobytes())


def warmups(dialogues: Sequence[Dialogue], turns: int, side_by_side: int, context: WorkloadContext) -> list[Dialogue]:
    """`turns` turns in `side_by_side` conversations (fewer where turns are), with the lengths of the first `dialogues`
    and with tokens of their own, so that no measured prompt shares a prefix with them.
    """
    sessions = min(side_by_side, turns)
    found = []
    for index in range(sessions):
        pattern, name, said = dialogues[index % len(dialogues)], f"warmup-{index}", 0
        steps: list[Step] = []
        for turn in range(turns // sessions + (index < turns % sessions)):
            step = pattern.steps[turn % pattern.turns]  # from an empty history where the context is full
            continues = step.continues and said + step.message + step.reply <= context.max_context
            prompt = said + step.message if continues else step.message
            build = partial(filler, step.message, context.vocab, context.seed, name, turn)
            steps.append(Step(build, step.message, prompt, step.reply, continues))
            said = prompt + step.reply
        found.append(Dialogue(name, "warmup", tuple(steps), len(steps)))
    return found


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
    return dialogues, {
        "conversations_with_too_few_turns": short,
        "conversations_too_long_for_the_context": too_long,
    }
