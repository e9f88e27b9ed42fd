"""Which of two orders of eviction would have found more: each is followed in a shadow, a cache of counts alone."""

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MOST = 256
"""Sessions that a shadow holds; where the cache holds more, it follows a sample of them."""

_HALF_LIFE = 2_000.0  # turns of the sample, after which one counts half
_FADES = 0.5 ** (1.0 / _HALF_LIFE)
_LOOK_EVERY = 64  # turns of the sample: each look is a chance to err, and a switch reorders every idle session
_LEADS_ABOVE, _STAYS_ABOVE = 1.0, -1.0  # roots of the sum of squares
_SPREAD, _SPACE = 2_654_435_761, 2**32  # neighbouring numbers fall far apart (Knuth, multiplicative hashing)


@dataclass(slots=True)
class Held:
    """The last `tokens` of a session's `length`. rests: no turn of it runs, so it may be given up. kind: what the
    challenger said of it then."""

    number: int
    tokens: int
    length: int
    since_s: float
    rests: bool = False
    kind: Any = None


Worst = Callable[[OrderedDict[int, Held], float], Held | None]
"""Which of those that rest goes first, at this time; they are in the order in which they were last active."""


class Shadow:
    """What a cache of `capacity` tokens would hold under one order, counted and not stored: whole sessions of which the
    beginning goes first, in one tier."""

    def __init__(self, worst: Worst) -> None:
        self._worst = worst
        self.held: OrderedDict[int, Held] = OrderedDict()
        self._total = 0

    def ask(self, number: int, length: int, now_s: float, capacity: float) -> tuple[int, int]:
        """A turn begins with a prompt of `length` tokens: which of them, [start, stop), are held. Then all of them are."""
        held = self.held.get(number)
        found = (held.length - held.tokens, min(held.length, length)) if held else (0, 0)
        self._hold(Held(number, length, length, now_s), capacity, now_s)
        return found if found[0] < found[1] else (0, 0)

    def rest(self, number: int, length: int, now_s: float, capacity: float, kind: Any) -> None:
        """Its turn is over."""
        self._hold(Held(number, length, length, now_s, rests=True, kind=kind), capacity, now_s)

    def leave(self, number: int) -> None:
        held = self.held.pop(number, None)
        if held is not None:
            self._total -= held.tokens

    def _hold(self, new: Held, capacity: float, now_s: float) -> None:
        self.leave(new.number)
        self.held[new.number] = new
        self._total += new.tokens
        while self._total > capacity and (victim := self._worst(self.held, now_s)) is not None:
            gone = min(victim.tokens, math.ceil(self._total - capacity))
            victim.tokens -= gone
            self._total -= gone
            if not victim.tokens:
                del self.held[victim.number]


def least_recent(held: OrderedDict[int, Held], now_s: float) -> Held | None:
    return next((one for one in held.values() if one.rests), None)


class Duel:
    """Whether a challenger's order finds more than least recently used does.

    Both see the turns of the same sample of sessions, each with its share of the capacity, as large as `MOST` allows
    (a sample of fixed size: Waldspurger et al., SHARDS, FAST 2015). What the challenger found more is summed, turn by turn,
    and so are the squares. At every 64th turn of the sample it takes the lead if the sum is above the root of the squares',
    and gives it up if below minus that. Old turns fade in both sums, with a half-life of 2,000.

    So a challenger that is better leads after few turns, and one that differs by chance leads half of the time, which costs
    nothing on average. One that is worse leads by chance until that shows: tests/eviction/test_duel.py has what it costs. The
    two are shadows: one tier, no queue, and what runs is never preempted. Where a cache is so small that this matters, the
    challenger may lead and find less than they say.
    """

    def __init__(self, capacity: int, challenger: Worst) -> None:
        self._capacity = float(capacity)
        self._shadows = Shadow(least_recent), Shadow(challenger)
        self._share = 1.0
        self._more = self._squares = 0.0
        self._turns = 0
        self.leads = False

    def ask(self, number: int, length: int, now_s: float) -> bool:
        """A turn begins; returns whether another order leads from now on."""
        if not self._sampled(number):
            return False
        (start, stop), (first, last) = (
            shadow.ask(number, length, now_s, self._capacity * self._share) for shadow in self._shadows
        )
        more = (last - first) - (stop - start)
        self._more, self._squares = self._more * _FADES + more, self._squares * _FADES + more * more
        self._shrink()
        return self._decide()

    def rest(self, number: int, length: int, now_s: float, kind: Any) -> None:
        """Its turn is over; `kind` is handed to the challenger."""
        if self._sampled(number):
            for shadow in self._shadows:
                shadow.rest(number, length, now_s, self._capacity * self._share, kind)

    def _decide(self) -> bool:
        self._turns += 1
        if self._turns % _LOOK_EVERY:
            return False
        led = self.leads
        self.leads = self._more > (_STAYS_ABOVE if led else _LEADS_ABOVE) * math.sqrt(self._squares)
        return self.leads is not led

    def _sampled(self, number: int) -> bool:
        return number * _SPREAD % _SPACE < self._share * _SPACE

    def _shrink(self) -> None:
        while any(len(shadow.held) > MOST for shadow in self._shadows):
            self._share /= 2
            for shadow in self._shadows:
                for number in [number for number in shadow.held if not self._sampled(number)]:
                    shadow.leave(number)
