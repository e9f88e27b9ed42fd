"""Ours: keep what saves most a second of keeping it, by how long sessions like it were seen to stay away."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from pensieve.core.policies.base import EvictionPolicy, PolicyContext
from pensieve.core.session import Session
from pensieve.plugins.policies.duel import Duel, Held

_TURNS = (1, 2, 4, 8)  # where one class of turn numbers begins and the one before ends
_GROWTHS = (512, 2_048, 8_192, 32_768)  # likewise, of tokens that a turn's prompt added
_SAID_RATIO, _GAP_RATIO = 4.0, 16.0  # of neighbouring classes of seconds that a client says, and of gaps

_FIRST_S, _LAST_S, _RATIO = 1.0, 86_400.0, 1.4
AGES = tuple(_FIRST_S * _RATIO**power for power in range(1 + math.ceil(math.log(_LAST_S / _FIRST_S, _RATIO))))
"""Where one bin ends and the next begins; the first begins at 0 and the last has no end."""

BINS = len(AGES) + 1
_WIDTHS = [stop - start for start, stop in zip((0.0, *AGES), (*AGES, AGES[-1] * _RATIO), strict=True)]
_UNSEEN_HAZARDS = [0.25] + [0.1] * (BINS - 1)
"""Before anything was seen: in log time a return is as likely now as later, so the idle longest goes first. The first bin is
wider than the next ones."""
_UNSEEN_STRENGTH = 20.0  # sessions that this counts as
_NEIGHBOURS = (0.5, 0.25)  # what a session counts for in the bins beside, and in those beside them
_STALE_SHARE = 0.02  # of what was seen in all: that much news before rates are computed again
_MOST_TOOLS = 256  # names that clients make up: of no more of them counts are kept
_ALIVE = 1e-300  # the share still away is never 0, so that a bin nobody reached has a rate too


@dataclass(slots=True, eq=False)
class Rest:
    """The time after a turn. habits: of its kinds, the widest first. length: tokens of the session then. age_bin: the
    one it was last seen to reach. away: it has not returned yet."""

    habits: tuple[Habit, ...]
    since_s: float
    length: int
    age_bin: int = 0
    away: bool = True


class LearnedReturn(EvictionPolicy):
    """The score of a chunk is its value a second: the rate at which sessions of its kind and age return
    (rates_of). The lowest goes first, so what will not return is given up
    before anything else. The copy ahead of time does so too: it leaves no worse chunk on CPU than the one that it drops.

    A session's kind is what is known when a turn ends, from wide to narrow. What its client said comes first: stop reason,
    tool, the seconds it expects or wants it kept for. Then its turn number, how many tokens its last prompt added, how long
    it was away before. A return, or an age passed without one, counts for each of these; a narrow kind that was seen little
    follows the wider one. Nothing is trained ahead, and what is old is forgotten. Evicted sessions count as well, so what it
    learns does not depend on what it keeps.

    The least recently used goes first until a Duel says that this order would have found more, and again once it says less:
    so at the start, and where nothing can be learned.

    guarded: false follows the learned order always, whatever it finds.
    """

    ages = AGES
    half_life = 20_000.0
    """Sessions after which what was seen counts half."""
    strength = 20.0
    """Of how many sessions a wider kind has the say in a narrower one."""

    def __init__(self, context: PolicyContext, guarded: bool = True) -> None:
        super().__init__(context)
        self._root = Habit(None, self.strength)
        # By bin reached, the one that has rested longest first.
        self._resting: list[deque[Rest]] = [deque() for _ in AGES]
        self._asked: dict[int, tuple[float | None, int]] = {}  # of sessions whose turn runs: gap before, growth
        self.version = 0
        capacity = (context.gpu_blocks + context.cpu_blocks) * context.chunk_tokens
        self._duel = Duel(capacity, self._least_worth) if guarded else None

    @property
    def follows_recency(self) -> bool:
        return self._duel is not None and not self._duel.leads

    def observe(self, session: Session, now_s: float) -> None:
        self._pass_time(now_s)
        rest, length = session.memo, len(session.tokens)
        if rest is None:
            self._asked[session.number] = None, length
        else:
            self._asked[session.number] = now_s - rest.since_s, length - rest.length
            if rest.away:
                rest.away = False
                for habit in rest.habits:
                    habit.note(rest.age_bin, True)
        if self._duel is not None and self._duel.ask(session.number, length, now_s):
            self.version += 1

    def rest(self, session: Session, now_s: float) -> None:
        self._pass_time(now_s)
        self._root.fade(self.half_life)
        if session.memo is not None:
            session.memo.away = False
        length = len(session.tokens)
        gap_s, growth = self._asked.pop(session.number, (None, length))
        session.memo = Rest(self._habits(session, gap_s, growth), now_s, length)
        self._resting[0].append(session.memo)
        if self._duel is not None:
            self._duel.rest(session.number, length, now_s, session.memo.habits[-1])

    def bucket(self, session: Session, chunk: int) -> Habit | None:
        if self.follows_recency:
            return None
        return self._root if session.memo is None else session.memo.habits[-1]

    def order(self, session: Session, chunk: int) -> float:
        return session.last_active_s

    def score(self, bucket: Hashable, order: float, now_s: float) -> float:
        if self.follows_recency:
            return order
        assert isinstance(bucket, Habit)
        return self._value(bucket, order, now_s)

    def _value(self, habit: Habit, since_s: float, now_s: float) -> float:
        return habit.rate(bisect_right(AGES, now_s - since_s))

    def _least_worth(self, held: OrderedDict[int, Held], now_s: float) -> Held | None:
        def value(one: Held) -> tuple[float, float]:
            return self._value(one.kind, one.since_s, now_s), one.since_s

        return min((one for one in held.values() if one.rests), key=value, default=None)

    def _habits(self, session: Session, gap_s: float | None, growth: int) -> tuple[Habit, ...]:
        hint = session.hint
        said = hint and (
            hint.stop_reason,
            hint.tool,
            _size(hint.expected_s, _SAID_RATIO),
            _size(hint.keep_s, _SAID_RATIO),
        )
        kind = said, bisect_right(_TURNS, session.turns), bisect_right(_GROWTHS, growth), _size(gap_s, _GAP_RATIO)
        habits = [self._root]
        for known in kind:
            kinds = habits[-1].kinds
            if known not in kinds:
                if len(kinds) == _MOST_TOOLS:
                    break
                kinds[known] = Habit(habits[-1], self.strength)
            habits.append(kinds[known])
        return tuple(habits)

    def _pass_time(self, now_s: float) -> None:
        """Count the ages that sessions have passed since the last call: each of them passes each age once."""
        for age_bin, resting in enumerate(self._resting):
            while resting and now_s - resting[0].since_s >= AGES[age_bin]:
                rest = resting.popleft()
                if rest.away:
                    for habit in rest.habits:
                        habit.note(age_bin, False)
                    rest.age_bin = age_bin + 1
                    if rest.age_bin < len(AGES):
                        self._resting[rest.age_bin].append(rest)


def _size(seconds: float | None, ratio: float) -> int | None:
    """The class of a time, in log time."""
    return None if seconds is None else math.floor(math.log(max(seconds, 1.0), ratio))


# How long sessions of one kind stay away: a life table that forgets, and what it is worth to wait for them. Ages are seconds
# since a session's last turn ended, in bins whose width grows with the age (log time).


class Habit:
    """Of the sessions of one kind: by age, how many returned in that bin, and how many outstayed it.

    `parent` is a wider kind that holds this one; it stands in for what was not seen here, as `strength` sessions would.
    Counts are in a unit that grows, so that what is old counts less. Bins are narrow, so that a peak keeps its place, and
    what happens in one says something of its neighbours.
    """

    unit = 1.0
    """Of the widest kind: in which the latest counts are."""

    def __init__(self, parent: Habit | None, strength: float) -> None:
        self.parent, self._strength = parent, strength
        self._widest: Habit = self if parent is None else parent._widest
        self.kinds: dict[Hashable, Habit] = {}
        self._returned, self._outstayed = [0.0] * BINS, [0.0] * BINS
        self._seen = 0.0
        self._rates: list[float] = []
        self._rates_from = 0.0  # what the widest kind had seen then

    def note(self, age_bin: int, returned: bool) -> None:
        counts, unit = self._returned if returned else self._outstayed, self._widest.unit
        counts[age_bin] += unit
        for distance, share in enumerate(_NEIGHBOURS, start=1):
            if age_bin >= distance:
                counts[age_bin - distance] += share * unit
            if age_bin + distance < BINS:
                counts[age_bin + distance] += share * unit
        self._seen += unit

    def hazards(self) -> list[float]:
        """By bin: the chance that a session which reached it returns within it."""
        if self.parent is None:
            expected, weight = _UNSEEN_HAZARDS, _UNSEEN_STRENGTH * self.unit
        else:
            expected, weight = self.parent.hazards(), self._strength * self._widest.unit
        return [
            (returned + weight * hazard) / (returned + outstayed + weight)
            for returned, outstayed, hazard in zip(self._returned, self._outstayed, expected, strict=True)
        ]

    def rate(self, age_bin: int) -> float:
        """See rates_of; of a session of this age."""
        seen = self._widest._seen
        if not self._rates or seen > self._rates_from * (1 + _STALE_SHARE):
            self._rates, self._rates_from = rates_of(self.hazards()), seen
        return self._rates[age_bin]

    def fade(self, half_life: float) -> None:
        """The unit of the widest kind doubles every `half_life` calls."""
        self.unit *= 2.0 ** (1.0 / half_life)
        if self.unit > 1e100:  # long before numbers end
            self.rescale(1.0 / self.unit)
            self.unit = 1.0

    def rescale(self, factor: float) -> None:
        self._returned = [count * factor for count in self._returned]
        self._outstayed = [count * factor for count in self._outstayed]
        self._seen, self._rates_from = self._seen * factor, self._rates_from * factor
        for habit in self.kinds.values():
            habit.rescale(factor)


def rates_of(hazards: Sequence[float]) -> list[float]:
    """By bin: returns a second of keeping, from there on, with the best time to give up.

    Whoever keeps a session that has reached bin b until the end of bin j, or until it returns, gets
    P(it returns by then) / E(seconds kept); the rate of b is the largest of these over j. It is the index of Gittins
    (1979): where room has one price a second, to keep exactly what has a rate above it is best. With falling hazards j = b; a
    session that is sure to return in an hour is worth keeping before anything happens.

    From the end backwards: a stretch whose rate is below that of the one behind it is best kept on into that one.
    """
    returns, seconds, away = [], [], 1.0
    for hazard, width in zip(hazards, _WIDTHS, strict=True):
        returns.append(away * hazard)
        seconds.append(away * width * (1 - hazard / 2))  # who returns does so halfway, on average
        away = max(away * (1 - hazard), _ALIVE)
    rates = [0.0] * BINS
    stretches: list[tuple[float, float]] = []
    for age_bin in reversed(range(BINS)):
        gained, kept_s = returns[age_bin], seconds[age_bin]
        while stretches and stretches[-1][0] * kept_s > gained * stretches[-1][1]:
            more, longer_s = stretches.pop()
            gained, kept_s = gained + more, kept_s + longer_s
        stretches.append((gained, kept_s))
        rates[age_bin] = gained / kept_s
    return rates
