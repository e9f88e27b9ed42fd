"""Published policies: each victim is the one that a slow, written-out definition chooses, from all that ever happened."""

from __future__ import annotations

import math

import pytest

from pensieve.core.request import Hint
from pensieve.plugins.policies.arc import Arc, ArcDirectory
from pensieve.plugins.policies.tool_ttl import ToolTtl, best_time
from tests.eviction.world import World, context, holds

CAPACITY = 48
HINTS = (
    None,
    Hint(stop_reason="end_turn"),
    Hint(stop_reason="tool_use", tool="grep"),
    Hint(stop_reason="tool_use", tool="build"),
    Hint(stop_reason="tool_use", expected_s=4.0),
    Hint(keep_s=5.0),
)


def recompute_s(chunk):
    return 1.0 + (chunk + 1) * 4 / 8


def size(part):
    return sum(tokens for _, tokens in part)


def arc(world):
    """The paper's figure 4, over (conversation, tokens) lists; the oldest in front."""
    t1 = []
    t2 = []
    b1 = []
    b2 = []
    p = 0.0
    again = {}

    def from_t1():
        return bool(t1 and size(t1) > p) or not t2

    for event in world.events:
        if not event.asked:
            continue
        where = next((part for part in (t1, t2, b1, b2) if event.number in dict(part)), None)
        if where is b1:
            p = min(CAPACITY, p + max(1.0, size(b2) / size(b1)) * dict(b1)[event.number])
        if where is b2:
            p = max(0.0, p - max(1.0, size(b1) / size(b2)) * dict(b2)[event.number])
        if where is not None:
            where[:] = [one for one in where if one[0] != event.number]
        while (t1 or t2) and size(t1) + size(t2) + event.tokens > CAPACITY:
            one, gone = (t1, b1) if from_t1() else (t2, b2)
            gone.append(one.pop(0))
        (t1 if where is None else t2).append((event.number, event.tokens))
        while b1 and size(t1) + size(b1) > CAPACITY:
            b1.pop(0)
        while b2 and size(t1) + size(t2) + size(b1) + size(b2) > 2 * CAPACITY:
            b2.pop(0)
        again[event.number] = where is not None
    return lambda session, chunk: (float(again[session.number] == from_t1()),)


def tool_ttl(world):
    gaps = {}
    rested = {}
    until = {}
    for event in world.events:
        hint = event.hint
        if event.asked and event.number in rested:
            since_s, said = rested[event.number]
            if said is not None and said.stop_reason == "tool_use":
                gaps.setdefault(said.tool, []).append(event.at_s - since_s)
        elif not event.asked:
            rested[event.number] = (event.at_s, hint)
            ttl = 0.0
            if hint is not None and hint.keep_s is not None:
                ttl = hint.keep_s
            elif hint is not None and hint.stop_reason == "tool_use":
                seen = [hint.expected_s] if hint.expected_s is not None else gaps.get(hint.tool, [])[-100:]
                saved = sum(recompute_s(index) for index in range(-(-event.tokens // 4)))
                gains = {time: sum(gap <= time for gap in seen) / len(seen) * saved - time for time in seen}
                ttl = max((time for time in seen if gains[time] > 0), key=lambda t: (gains[t], t), default=0.0)
                ttl = ttl if seen else 2.0
            steps = 0
            if ttl > 0:  # the next power of 1.25
                steps = -200
                while 1.25**steps < ttl * (1 - 1e-12):
                    steps += 1
            until[event.number] = event.at_s + (1.25**steps * (1 + 1e-9) if ttl > 0 else 0.0)
    return lambda session, chunk: (
        session.last_active_s if world.now_s >= until[session.number] else math.inf,
    )  # fmt: skip


POLICIES = [
    (Arc, arc),
    (ToolTtl, tool_ttl),
]


@pytest.mark.parametrize(("make", "definition"), POLICIES)
@pytest.mark.parametrize("seed", range(4))
def test_the_victim_is_the_one_of_the_definition(make, definition, seed):
    assert holds(World(make(context()), seed, HINTS), definition) > 50


@pytest.mark.parametrize("make", [make for make, _ in POLICIES])
def test_none_of_them_is_least_recently_used_by_another_name(make):
    """Else a definition that ignores what is particular to the policy would pass above."""
    world = World(make(context()), 1, HINTS)
    with pytest.raises(AssertionError):
        holds(world, lambda world: lambda session, chunk: (session.last_active_s,), steps=200)


def test_arc_shifts_to_recency_when_what_it_gave_up_from_there_returns():
    directory = ArcDirectory(10)
    known = [directory.ask(number, 5) for number in (0, 0, 1, 2)]  # 0 was asked again, and 2 took the place of 1
    assert known == [False, True, False, False] and directory.target == 0.0
    assert directory.ask(1, 5) and directory.target == 5.0
    assert not directory.gives_up_once


def test_a_time_to_live_that_costs_more_than_it_saves_is_none():
    assert best_time([3.0, 3.0, 3.0, 40.0], saved_s=10.0) == 3.0  # 0.75 x 10 - 3 against 10 - 40
    assert best_time([3.0, 3.0, 3.0, 40.0], saved_s=100.0) == 3.0
    assert best_time([3.0, 40.0, 40.0, 40.0], saved_s=100.0) == 40.0
    assert best_time([30.0, 40.0], saved_s=5.0) == 0.0
