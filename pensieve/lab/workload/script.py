"""What each conversation will say, written before the first of them begins."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from functools import partial
from itertools import chain, count, islice

from pensieve.core.request import TokenArray
from pensieve.errors import ConfigError
from pensieve.lab.workload.base import WorkloadContext
from pensieve.lab.workload.chance import shuffled
from pensieve.lab.workload.playback import Dialogue, Step
from pensieve.lab.workload.prose import Turn, shipped

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


class ScriptWriter:
    """Writes conversations from the shipped texts, in an order that the seed decides.

    max_new_tokens: a reply has the words that the text suggests, one token a word, but at most this many; with `free`
    it is always this many at most, since the model decides.
    """

    def __init__(self, context: WorkloadContext, max_new_tokens: int, free: bool) -> None:
        self._context = context
        self._max_new_tokens = max_new_tokens
        self._free = free
        self._encoded: dict[tuple[str, bool], TokenArray[int]] = {}
        self._order = shuffled(len(shipped()), context.seed, "corpus")

    def session(self, number: int) -> str:
        """The name of measured conversation `number`, from 0; beyond the shipped ones they repeat under another name."""
        copy, place = divmod(number, len(self._order))
        return shipped()[self._order[place]].id + (f".{copy + 1}" if copy else "")

    def write(self, number: int, turns: int, label: str = "") -> Dialogue:
        """Measured conversation `number`. One longer than its text goes on with the next topic.

        Raises ConfigError where the model's context cannot hold its first turn.
        """
        copy, place = divmod(number, len(self._order))
        return self._script(self.session(number), "chat", place, turns, _opening(copy), label)

    def warmup(self, turns: int, sessions: int) -> list[Dialogue]:
        """`turns` turns in `sessions` conversations (fewer where turns are): the topics of the last places of the order,
        under an opening of their own, so that no prefix is shared with a measured one.
        """
        sessions = min(sessions, turns)
        shares = [turns // sessions + (index < turns % sessions) for index in range(sessions)]
        return [
            self._script(f"warmup-{index}", "warmup", -1 - index, share, "Before we begin: ")
            for index, share in enumerate(shares)
        ]

    def _script(self, session: str, phase: str, place: int, turns: int, opening: str, label: str = "") -> Dialogue:
        steps: list[Step] = []
        said = 0
        for turn in islice(self._lines(place), turns):
            message = self._encode(turn.user if steps else f"{opening}{turn.user}", first=not steps)
            reply = self._max_new_tokens if self._free else min(turn.reply_words, self._max_new_tokens)
            if said + len(message) + reply > self._context.max_context:
                break
            # A copy for each request: texts that repeat share one encoding.
            steps.append(Step(partial(array, "i", message), len(message), said + len(message), reply))
            said += len(message) + reply
        if not steps:
            raise ConfigError(
                f"The first message and its reply do not fit into the model's context of {self._context.max_context} "
                "tokens. Lower workload.max_new_tokens or choose a model with a longer context."
            )
        return Dialogue(session, phase, tuple(steps), turns, label=label)

    def _lines(self, place: int) -> Iterator[Turn]:
        """The turns of the topic at `place` of the order, then of the topics that follow it, without end."""
        topics = shipped()
        return chain.from_iterable(topics[self._order[at % len(topics)]].turns for at in count(place))

    def _encode(self, text: str, first: bool) -> TokenArray[int]:
        if (text, first) not in self._encoded:
            self._encoded[text, first] = self._context.message(text, first)
        return self._encoded[text, first]


def _opening(copy: int) -> str:
    if copy == 0:
        return ""
    return _OPENINGS[copy - 1] if copy <= len(_OPENINGS) else f"This is person number {copy + 1}. "
