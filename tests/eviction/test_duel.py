"""Models of the cache that say which of two orders finds more: what they hold, who leads, how large they get."""

import random
from typing import ClassVar

import pytest

from pensieve.plugins.policies.duel import Duel, Held, Shadow, least_recent


def newest(held, now_s):
    return next((one for one in reversed(held.values()) if one.rests), None)


@pytest.mark.parametrize("seed", range(5))
def test_what_a_model_holds_is_what_single_tokens_would(seed):
    """A set of (conversation, position), out of which the least recently active conversation loses its first ones first."""
    rng = random.Random(seed)
    shadow, there, lengths = Shadow(least_recent), set[tuple[int, int]](), dict[int, int]()
    active = []  # least recently first
    running = set()
    capacity, found = 40, 0
    for now in range(400):
        number = rng.randrange(8)
        if number in active:
            active.remove(number)
        active.append(number)
        if number in running:
            lengths[number] += rng.randint(0, 3)
            shadow.rest(number, lengths[number], now, capacity, None)
            running.discard(number)
        else:
            known = lengths.get(number, 0)
            prompt = rng.randint(1, 5) if rng.random() < 0.1 else known + rng.randint(1, 6)
            start, stop = shadow.ask(number, prompt, now, capacity)
            hits = {(number, position) for position in range(min(known, prompt))} & there
            assert {(number, position) for position in range(start, stop)} == hits
            found += len(hits)
            lengths[number] = prompt
            running.add(number)
        there = {token for token in there if token[0] != number} | {(number, at) for at in range(lengths[number])}
        for victim in active:
            for position in range(lengths[victim]):
                if len(there) > capacity and victim not in running:
                    there.discard((victim, position))
        assert sum(one.tokens for one in shadow.held.values()) == len(there)
    assert found > 40


def turns(one, numbers, now, length=10):
    """One turn of each, one after the other; who leads after each."""
    leads = []
    for number in numbers:
        one.ask(number, length, now)
        one.rest(number, length, now, None)
        leads.append(one.leads)
    return leads


def test_the_challenger_leads_where_it_finds_more_and_gives_way_where_it_does_not():
    """Sixteen in strict turn in a cache of eight: the least recently used finds nothing, whoever keeps what it has half.
    Then four new ones at a time, each asked twice: the least recently used finds all, who gives up the newest nothing."""
    contest = Duel(80, newest)
    assert not contest.leads
    leads = turns(contest, list(range(16)) * 20, 0.0)
    assert not any(leads[:16]) and all(leads[160:])
    later = turns(contest, [number for first in range(16, 2_000, 4) for number in [*range(first, first + 4)] * 2], 1.0)
    assert later[0] and not later[-1]
    assert not any(turns(Duel(80, least_recent), list(range(16)) * 20, 0.0)), "who finds as much does not lead"


class Coin:
    """Stands for a model: at each turn one of the two finds something, by the toss of a coin that both see."""

    held: ClassVar[dict[int, Held]] = {}

    def __init__(self, seed, sign, favour):
        self._rng, self._sign, self._favour = random.Random(seed), sign, favour

    def ask(self, *_):
        toss = (1 if self._rng.random() < self._favour else -1) * self._rng.choice((0, 100, 1_000, 3_000))
        return 0, max(0, toss * self._sign)


@pytest.mark.parametrize(
    ("favour", "least", "most"), [(0.5, -0.01, 0.01), (0.45, -0.01, 0.0), (0.4, -0.01, 0.0), (0.6, 0.15, 0.2)]
)
def test_who_leads_loses_no_point_and_a_good_challenger_gains_what_it_can(favour, least, most):
    """Of all that the two find: by how much more whoever leads finds than the least recently used. A challenger that leads
    always has 2 x favour - 1."""
    gained = thrown = 0.0
    for seed in range(30):
        contest, before = Duel(1, least_recent), 0.0
        contest._shadows = Coin(seed, -1, favour), Coin(seed, 1, favour)
        both = Coin(seed, -1, favour), Coin(seed, 1, favour)
        for _ in range(4_000):
            recency, challenger = both[0].ask()[1], both[1].ask()[1]
            gained += (challenger - recency) * contest.leads
            thrown += challenger + recency
            contest.ask(0, 1, before)
    assert least < gained / thrown < most, gained / thrown
