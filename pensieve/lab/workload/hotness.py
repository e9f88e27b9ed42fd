"""Users who come back at different speeds: who profits from a cache that remembers?"""

from __future__ import annotations

from itertools import chain, count

from pensieve.lab.workload.base import Count, NotNegative, Positive, WorkloadContext, refuse_untrained
from pensieve.lab.workload.chance import uniform
from pensieve.lab.workload.chat import ScriptWriter
from pensieve.lab.workload.playback import Dialogue, Playback, Users

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
        refuse_untrained(free, context)
        writer = ScriptWriter(context, max_new_tokens, free)
        labels = [class_of(user, users) for user in range(users)]
        numbers = count()
        shares = [
            [writer.write(next(numbers), turns, label=label) for _ in range(conversations * _share(label))]
            for label in labels
        ]
        measured = list(chain(*shares))
        facts = {
            "users": {label: labels.count(label) for label in INTERVALS},
            "request_interval_s": {label: round(x * request_interval, 6) for label, x in INTERVALS.items()},
            "conversations": {label: sum(s.label == label for s in measured) for label in INTERVALS},
            "conversations_cut_by_context": sum(script.turns < script.recorded_turns for script in measured),
        }

        def pause_s(script: Dialogue, turn: int) -> float:
            spread = 0.5 + uniform(context.seed, "interval", script.session, turn)
            return request_interval * INTERVALS[script.label] * spread

        warmup = writer.warmup(max(warmup_turns, users), users)
        super().__init__(context, warmup, measured, Users(shares), pause_s, free=free, timeout_s=timeout_s, facts=facts)


def class_of(user: int, users: int) -> str:
    """The class of user `user` (from 0) among `users`: thirds in the order hot, warm, cold."""
    return list(INTERVALS)[user * len(INTERVALS) // users]


def _share(label: str) -> int:
    """How many conversations a user of this class has for each one of a cold user: the ratio of the intervals, rounded."""
    return int(INTERVALS["cold"] / INTERVALS[label] + 0.5)
