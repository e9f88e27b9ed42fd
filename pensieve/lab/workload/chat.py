"""People who talk to one model in the words of the shipped conversations: at once, or at three speeds of return."""

import json
import math
from array import array
from functools import cache, partial
from importlib import resources
from itertools import chain, count, islice
from typing import Any, Literal

from pensieve.errors import ConfigError
from pensieve.lab.workload.base import (
    Count,
    NotNegative,
    Positive,
    WorkloadContext,
    between,
    check_turns,
    exponential,
    shuffled,
    uniform,
)
from pensieve.lab.workload.playback import Dialogue, Playback, Poisson, Step, Users

FEWEST_CONVERSATIONS = 8
LONGEST_THOUGHT = 2.5
"""Means before the cut, with think_time_cap_s="auto": a trial ends with its longest pauses, and the machine idle."""
FILL = 1.2  # working set over both tiers, with pressure="auto": a sixth has to be dropped and recomputed
WARMUP_SESSIONS = 2
"""Side by side, so that batches of more than one row are warm too (open load: nobody knows how many)."""

_OPENINGS = (
    "",  # of the first time a text is used
    "Hello there. ",
    "Good morning! ",
    "Hi, I hope you can help me. ",
    "A friend of mine has the same question as I. ",
    "Thanks for your time. ",
    "Sorry to bother you again. ",
    "I've asked this elsewhere without luck. ",
    "Evening! ",
)


Turn = tuple[str, int]
"""What the user says, and how long an answer to it would reasonably be, in words."""


@cache
def shipped() -> dict[str, list[Turn]]:
    """All of conversations.jsonl by their ids, in its order; only the user's side, since replies come from the model that
    runs."""
    text = (resources.files("pensieve.lab.workload") / "conversations.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    return {row["id"]: [(turn["user"], turn["reply_words"]) for turn in row["turns"]] for row in rows}


@cache
def vocabulary() -> tuple[str, ...]:
    """The words of the shipped conversations, each once, in alphabetical order."""
    said = (user for turns in shipped().values() for user, _ in turns)
    words = {word.strip(".,;:?!()'\"").lower() for user in said for word in user.split()}
    return tuple(sorted(word for word in words if word.isalpha()))


class ChatWorkload(Playback):
    """Several people talk to one model at once.

    A conversation's turns follow each other: the next message is sent when the reply is complete and the user has
    thought, exponentially distributed with mean `think_time_s`, cut at `think_time_cap_s` and fixed by (seed, session,
    turn), so that every baseline meets the same thoughts. Conversations themselves arrive in one of two ways:

    - users=None (load "partly open"): as a Poisson process, `request_interval` seconds apart on average (0: all at
      once), whatever the system's speed.
    - users=N (load "closed"): N people work through the conversations, each with a fixed share, one after another.

    conversations: at least so many; 8, or one a user. Beyond the shipped ones they repeat under another session and with
        another opening sentence. One longer than its text goes on with the next topic; one that the model's context cannot
        hold ends early, which describe() counts.
    pressure: conversations are added until the working set, the KV tokens of all measured conversations at their longest, is
        this multiple of context.gpu_tokens; "auto": until it is FILL times what both tiers hold, so that each is at work.
    turns_per_s: the offered load that think_time_s="auto" and request_interval="auto" follow: users (open load:
        conversations) / turns_per_s of think time, and one conversation every 1 / turns_per_s, so that all of them are
        alive at once. A system that answers late receives less.
    think_time_cap_s: "auto" is LONGEST_THOUGHT times the mean before the cut, which cuts 8 thoughts in 100; the draws are so
        much longer that their mean after it is think_time_s. A cap in seconds leaves the draws as they are.
    warmup_turns: in conversations of their own: two side by side, or one a user, and then at least one turn each, so that
        they run at the measured concurrency.
    The other fields: conf/workload/chat.yaml.

    Turns count from 1. A conversation whose turn did not complete ends there.
    """

    def __init__(
        self,
        context: WorkloadContext,
        *,
        conversations: Count | None = None,
        users: Count | None = None,
        min_turns: Count = 8,
        max_turns: Count = 8,
        max_new_tokens: Count = 36,
        request_interval: NotNegative | Literal["auto"] = 0.3,
        think_time_s: NotNegative | Literal["auto"] = 0.5,
        think_time_cap_s: Positive | Literal["auto"] | None = None,
        turns_per_s: Positive = 10.0,
        pressure: NotNegative | Literal["auto"] = 2.0,
        warmup_turns: Count = 4,
        timeout_s: Positive | None = None,
        free: bool = False,
    ) -> None:
        check_turns(min_turns, max_turns)
        writer = ScriptWriter(context, max_new_tokens, free)

        def write(fewest: int, goal: float) -> list[Dialogue]:
            """At least `fewest` conversations, and as many as have `goal` tokens together."""
            written: list[Dialogue] = []
            tokens = 0
            while len(written) < fewest or tokens < goal:
                number = len(written)
                turns = between(min_turns, max_turns, context.seed, "turns", writer.session(number))
                written.append(writer.write(number, turns))
                tokens += written[-1].longest
            return written

        both_tiers = context.gpu_tokens + context.cpu_tokens
        goal = FILL * both_tiers if pressure == "auto" else pressure * context.gpu_tokens
        fewest = max(conversations or FEWEST_CONVERSATIONS, users or 1)
        measured = write(fewest, goal)
        warmup = writer.warmup(max(warmup_turns, users or 1), users or WARMUP_SESSIONS)
        at_once = users or len(measured)
        mean_s = drawn_mean_s = at_once / turns_per_s if think_time_s == "auto" else think_time_s
        if think_time_cap_s == "auto":  # longer draws, so that their mean is think_time_s when they are cut
            drawn_mean_s /= 1 - math.exp(-LONGEST_THOUGHT)
        cap_s = LONGEST_THOUGHT * drawn_mean_s if think_time_cap_s == "auto" else think_time_cap_s
        interval_s = 1 / turns_per_s if request_interval == "auto" else request_interval
        facts: dict[str, Any] = {
            "think_time_s": round(mean_s, 6),
            **({} if cap_s is None else {"think_time_cap_s": round(cap_s, 6)}),
            **({} if users else {"request_interval_s": round(interval_s, 6)}),
        }

        def pause_s(script: Dialogue, turn: int) -> float:
            thought_s = exponential(drawn_mean_s, context.seed, "think", script.session, turn)
            return thought_s if cap_s is None else min(thought_s, cap_s)

        arrivals = Users.dealt(measured, users) if users else Poisson(interval_s)
        super().__init__(context, warmup, measured, arrivals, pause_s, free=free, timeout_s=timeout_s, facts=facts)


class ScriptWriter:
    """Writes conversations from the shipped texts, in an order that the seed decides.

    max_new_tokens: a reply has the words that the text suggests, one token a word, but at most this many; with `free`
    it is always this many at most, since the model decides.
    """

    def __init__(self, context: WorkloadContext, max_new_tokens: int, free: bool) -> None:
        self._context = context
        self._max_new_tokens = max_new_tokens
        self._free = free
        self._encode = cache(context.message)  # texts repeat
        ids = list(shipped())
        self._order = [ids[place] for place in shuffled(len(ids), context.seed, "corpus")]

    def session(self, number: int) -> str:
        """The name of measured conversation `number`, from 0; beyond the shipped ones they repeat under another name."""
        copy, place = divmod(number, len(self._order))
        return self._order[place] + (f".{copy + 1}" if copy else "")

    def write(self, number: int, turns: int, label: str = "") -> Dialogue:
        """Measured conversation `number`. One longer than its text goes on with the next topic.

        Raises ConfigError where the model's context cannot hold its first turn.
        """
        copy, place = divmod(number, len(self._order))
        opening = _OPENINGS[copy] if copy < len(_OPENINGS) else f"This is person number {copy + 1}. "
        return self._script(self.session(number), "chat", place, turns, opening, label)

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
        order = self._order
        lines = chain.from_iterable(
            shipped()[order[at % len(order)]] for at in count(place)
        )  # this topic, then the next
        for user, words in islice(lines, turns):
            message = self._encode(user if steps else f"{opening}{user}", not steps)
            reply = self._max_new_tokens if self._free else min(words, self._max_new_tokens)
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


INTERVALS = {"hot": 0.3, "warm": 1.0, "cold": 2.5}
"""Of each class, its request interval in multiples of `request_interval`."""


class HotnessWorkload(Playback):
    """N users at once, a third of them hot, a third warm, a third cold (load "closed").

    A user sends the next message `request_interval` x 0.3 (hot), x 1.0 (warm) or x 2.5 (cold) seconds after the reply,
    give or take half of it, fixed by (seed, session, turn). Every turn carries its class as label.

    One user is hot, two are hot and warm. Conversations have equally many turns in all classes, so that contexts are equally
    long; warm and hot users have more of them, in inverse ratio to their intervals, so that all classes are done at about
    the same time. Warm-up runs at the measured concurrency. Fields: conf/workload/hotness.yaml.
    """

    def __init__(
        self,
        context: WorkloadContext,
        *,
        users: Count = 6,
        request_interval: NotNegative = 0.5,
        turns: Count = 8,
        conversations: Count = 1,
        max_new_tokens: Count = 12,
        warmup_turns: Count = 6,
        timeout_s: Positive | None = None,
        free: bool = False,
    ) -> None:
        writer = ScriptWriter(context, max_new_tokens, free)
        labels = [list(INTERVALS)[user * len(INTERVALS) // users] for user in range(users)]
        numbers = count()
        each = {label: int(INTERVALS["cold"] / interval + 0.5) for label, interval in INTERVALS.items()}
        shares = [
            [writer.write(next(numbers), turns, label=label) for _ in range(conversations * each[label])]
            for label in labels
        ]

        def pause_s(script: Dialogue, turn: int) -> float:
            spread = 0.5 + uniform(context.seed, "interval", script.session, turn)
            return request_interval * INTERVALS[script.label] * spread

        warmup = writer.warmup(max(warmup_turns, users), users)
        super().__init__(context, warmup, list(chain(*shares)), Users(shares), pause_s, free=free, timeout_s=timeout_s)
