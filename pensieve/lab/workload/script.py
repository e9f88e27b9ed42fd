"""What each conversation will say, written before the first of them begins, and the requests that say it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count

from pensieve.core.request import Free, Length, Request, Sampling, TokenArray
from pensieve.errors import ConfigError
from pensieve.lab.workload.base import Arrival, WorkloadContext, said_end, unless_said
from pensieve.lab.workload.chance import shuffled
from pensieve.lab.workload.conversations import Conversation, Turn, shipped
from pensieve.serve.record import TurnRecord

_OPENINGS = (
    "Hello there. ",
    "Good morning! ",
    "Hi, I hope you can help me. ",
    "A friend of mine has the same question as I. ",
    "Thanks for your time. ",
    "Sorry to bother you again. ",
    "I've asked this elsewhere without luck. ",
    "Evening! ",
)


@dataclass(frozen=True, slots=True)
class Script:
    """What one conversation will say. longest: KV tokens after the last turn, replies included; its last token has none.

    cut: it ends early, because the model's context cannot hold more of it.
    """

    session: str
    phase: str
    prompts: tuple[TokenArray[int], ...]
    replies: tuple[int, ...]
    longest: int
    cut: bool
    label: str = ""

    @property
    def turns(self) -> int:
        return len(self.prompts)


class ScriptWriter:
    """Writes conversations from the shipped texts, in an order that the seed decides.

    max_new_tokens: a reply has the words that the text suggests, one token a word, but at most this many; with `free`
    it is always this many at most, since the model decides.
    """

    def __init__(self, context: WorkloadContext, max_new_tokens: int, free: bool) -> None:
        self._context = context
        self._max_new_tokens = max_new_tokens
        self._free = free
        self._ids = count(1)
        self._encoded: dict[tuple[str, bool], TokenArray[int]] = {}
        self._order = shuffled(len(shipped()), context.seed, "corpus")

    def arrival(
        self, script: Script, turn: int, at_s: float, timeout_s: float | None, before: TurnRecord | None = None
    ) -> Arrival:
        """The request of turn `turn`, from 1, after `before`; cancelled `timeout_s` after it was due."""
        limit = script.replies[turn - 1]
        prompt = script.prompts[turn - 1][:]  # a copy: texts that repeat share one encoding
        request = Request(
            id=next(self._ids),
            session=script.session,
            turn=turn,
            prompt=unless_said(prompt, said_end(before)),
            output=Free(limit) if self._free else Length(limit),
            sampling=Sampling(seed=self._context.seed),
            phase=script.phase,
            label=script.label,
        )
        return Arrival(at_s, request, None if timeout_s is None else at_s + timeout_s)

    def session(self, number: int) -> str:
        """The name of measured conversation `number`, from 0; beyond the shipped ones they repeat under another name."""
        copy, place = divmod(number, len(self._order))
        return shipped()[self._order[place]].id + (f".{copy + 1}" if copy else "")

    def write(self, number: int, turns: int, label: str = "") -> Script:
        """Measured conversation `number`. One longer than its text goes on with the next topic.

        Raises ConfigError where the model's context cannot hold its first turn.
        """
        copy, place = divmod(number, len(self._order))
        return self._script(self.session(number), "chat", place, turns, _opening(copy), label)

    def warmup(self, turns: int, sessions: int) -> list[Script]:
        """`turns` turns in `sessions` conversations (fewer where turns are): the topics of the last places of the order,
        under an opening of their own, so that no prefix is shared with a measured one.
        """
        sessions = min(sessions, turns)
        shares = [turns // sessions + (index < turns % sessions) for index in range(sessions)]
        return [
            self._script(f"warmup-{index}", "warmup", -1 - index, share, "Before we begin: ")
            for index, share in enumerate(shares)
        ]

    def _script(self, session: str, phase: str, place: int, turns: int, opening: str, label: str = "") -> Script:
        prompts: list[TokenArray[int]] = []
        replies: list[int] = []
        total = 0
        for turn in self._lines(place, turns):
            text = f"{opening if not prompts else ''}{turn.user}"
            prompt = self._encode(text, first=not prompts)
            reply = self._max_new_tokens if self._free else min(turn.reply_words, self._max_new_tokens)
            if total + len(prompt) + reply > self._context.max_context:
                break
            prompts.append(prompt)
            replies.append(reply)
            total += len(prompt) + reply
        if not prompts:
            raise ConfigError(
                f"The first message and its reply do not fit into the model's context of {self._context.max_context} "
                "tokens. Lower workload.max_new_tokens or choose a model with a longer context."
            )
        return Script(session, phase, tuple(prompts), tuple(replies), total - 1, len(prompts) < turns, label)

    def _lines(self, place: int, turns: int) -> Iterable[Turn]:
        """`turns` turns of the topic at `place` of the order, then of the topics that follow it."""
        topics: tuple[Conversation, ...] = shipped()
        sent = 0
        while True:
            for turn in topics[self._order[place % len(topics)]].turns:
                if sent == turns:
                    return
                yield turn
                sent += 1
            place += 1

    def _encode(self, text: str, first: bool) -> TokenArray[int]:
        if (text, first) not in self._encoded:
            self._encoded[text, first] = self._context.message(text, first)
        return self._encoded[text, first]


def _opening(copy: int) -> str:
    if copy == 0:
        return ""
    return _OPENINGS[copy - 1] if copy <= len(_OPENINGS) else f"This is person number {copy + 1}. "
