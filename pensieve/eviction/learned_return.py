"""Ours: keep what saves most a second of keeping it, by how long conversations like it were seen to stay away."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal, get_args

from pensieve.errors import ConfigError
from pensieve.eviction.base import MOST_TOOLS, EvictionPolicy, PolicyContext
from pensieve.eviction.return_times import AGES, Forgetting, Habit
from pensieve.session import Session

Weight = Literal["tokens", "seconds"]
_TURNS = (1, 2, 3, 4, 6, 12)  # where one class of turn numbers ends and the next begins
_GAP_RATIO = 4.0  # of neighbouring classes of gaps


@dataclass(slots=True, eq=False)
class Rest:
    """The time after a turn. habits: of its kinds, the widest first. age_bin: the one it was last seen to reach. away: it
    has not returned yet."""

    habits: tuple[Habit, ...]
    since_s: float
    age_bin: int = 0
    away: bool = True


class LearnedReturn(EvictionPolicy):
    """The score of a chunk is its value a second: the rate at which conversations of its kind and age return
    (return_times.rates_of), times what a hit on it saves. The lowest goes first; so what will not return is given up before
    anything else, also by the copy ahead of time, which leaves no worse chunk on CPU than the one that it drops.

    A conversation's kind is what is known when a turn ends, from wide to narrow: what its client said (stop reason, tool,
    the seconds it expects or wants it kept for), its turn number, how long it was away before. A return, or an age passed
    without one, counts for each of these; a narrow kind that was seen little follows the wider one. Nothing is trained
    ahead, and what is old is forgotten. Evicted conversations count as well, so what it learns does not depend on what it
    keeps.

    weight: what a hit saves: "tokens", all alike, for the highest hit rate; or "seconds", to recompute the chunk instead of
    loading it, for the least work. half_life: conversations after which what was seen counts half. strength: of how many
    conversations a wider kind has the say in a narrower one. Raises ConfigError for values out of range.
    """

    ages = AGES

    def __init__(
        self, context: PolicyContext, weight: Weight = "tokens", half_life: float = 20_000.0, strength: float = 20.0
    ) -> None:
        if weight not in get_args(Weight):
            raise ConfigError(f"eviction.weight is one of {', '.join(get_args(Weight))}, not {weight!r}.")
        for name, value in (("half_life", half_life), ("strength", strength)):
            if not 0 < value < math.inf:
                raise ConfigError(f"eviction.{name}={value} must be a positive number.")
        super().__init__(context)
        self._by_chunk, self._strength = weight == "seconds", strength
        self._root = Habit(None, strength)
        self._counts = Forgetting(half_life)
        self._resting: list[deque[Rest]] = [
            deque() for _ in AGES
        ]  # by bin reached, the one that has rested longest first
        self._gaps: dict[int, float] = {}  # of conversations whose turn runs: how long they were away before it
        self._saved: list[float] = []  # by chunk index: seconds that a hit saves

    def observe(self, session: Session, now_s: float) -> None:
        self._pass_time(now_s)
        rest = session.memo
        if rest is not None:
            self._gaps[session.number] = now_s - rest.since_s
            if rest.away:
                rest.away = False
                for habit in rest.habits:
                    habit.note(rest.age_bin, True, self._counts.unit)

    def rest(self, session: Session, now_s: float) -> None:
        self._pass_time(now_s)
        self._counts.step(self._root)
        if session.memo is not None:
            session.memo.away = False
        session.memo = Rest(self._habits(session, self._gaps.pop(session.number, None)), now_s)
        self._resting[0].append(session.memo)

    def bucket(self, session: Session, chunk: int) -> tuple[Habit, int]:
        habit = self._root if session.memo is None else session.memo.habits[-1]
        return habit, chunk if self._by_chunk else 0

    def order(self, session: Session, chunk: int) -> float:
        return session.last_active_s

    def score(self, bucket: Hashable, order: float, now_s: float) -> float:
        assert isinstance(bucket, tuple)
        habit, chunk = bucket
        rate: float = habit.rate(bisect_right(AGES, now_s - order), self._counts.unit)
        return rate * self._saved_s(chunk) if self._by_chunk else rate

    def _habits(self, session: Session, gap_s: float | None) -> tuple[Habit, ...]:
        hint = session.hint
        said = hint and (hint.stop_reason, hint.tool, _size(hint.expected_s), _size(hint.keep_s))
        habits = [self._root]
        for known in (said, bisect_right(_TURNS, session.turns), _size(gap_s)):
            kinds = habits[-1].kinds
            if known not in kinds:
                if len(kinds) == MOST_TOOLS:
                    break
                kinds[known] = Habit(habits[-1], self._strength)
            habits.append(kinds[known])
        return tuple(habits)

    def _pass_time(self, now_s: float) -> None:
        """Count the ages that conversations have passed since the last call: each of them passes each age once."""
        for age_bin, resting in enumerate(self._resting):
            while resting and now_s - resting[0].since_s >= AGES[age_bin]:
                rest = resting.popleft()
                if rest.away:
                    for habit in rest.habits:
                        habit.note(age_bin, False, self._counts.unit)
                    rest.age_bin = age_bin + 1
                    if rest.age_bin < len(AGES):
                        self._resting[rest.age_bin].append(rest)

    def _saved_s(self, chunk: int) -> float:
        """Seconds to recompute it, less those to load it, where loading is the quicker way."""
        context = self.context
        while len(self._saved) <= chunk:
            recompute_s = context.recompute_s((len(self._saved) + 1) * context.chunk_tokens)
            loads = context.cpu_blocks and context.load_s < recompute_s
            self._saved.append(recompute_s - context.load_s if loads else recompute_s)
        return self._saved[chunk]


def _size(seconds: float | None) -> int | None:
    """The class of a time, in log time."""
    return None if seconds is None else math.floor(math.log(max(seconds, 1.0), _GAP_RATIO))
