"""Our learning policy: its choice, what it learns, and when that makes it better than recency, or not."""

import random
from array import array
from typing import Any

import pytest

from pensieve.core.cache.heaps import HeapIndex
from pensieve.core.policies.lru import Lru
from pensieve.core.request import Hint
from pensieve.core.session import Session, View
from pensieve.plugins.policies.learned_return import AGES, BINS, Habit, LearnedReturn, rates_of
from tests.simulated import policy_context, with_chunks

EDGES = (0.0, *AGES, AGES[-1] * 1.4)


def best_rate(hazards: list[float], start: int) -> float:
    """Every time to give up, one after the other."""
    best, away, returned, seconds = 0.0, 1.0, 0.0, 0.0
    for age_bin in range(start, BINS):
        width, hazard = EDGES[age_bin + 1] - EDGES[age_bin], hazards[age_bin]
        returned += away * hazard
        seconds += away * ((1 - hazard) * width + hazard * width / 2)
        away *= 1 - hazard
        best = max(best, returned / seconds)
    return best


@pytest.mark.parametrize("seed", range(20))
def test_the_rate_is_that_of_the_best_time_to_give_up(seed: int) -> None:
    rng = random.Random(seed)
    hazards = [rng.choice((0.0, rng.random() ** 4, rng.random())) for _ in range(BINS)]
    rates = rates_of(hazards)
    for start in range(BINS):
        assert rates[start] == pytest.approx(best_rate(hazards, start), rel=1e-9)


def test_old_counts_fade_and_scaling_them_changes_nothing() -> None:
    root = Habit(None, 1.0)
    for _ in range(1500):
        root.fade(200.0)
        root.note(3, True)
    before = root.hazards()
    root.rescale(1e100 / root.unit)
    root.unit = 1e100
    root.fade(1e9)
    assert root.unit == 1.0 and root.hazards() == pytest.approx(before)
    assert before[3] > 0.9
    for _ in range(1500):
        root.fade(200.0)
        root.note(3, False)
    assert root.hazards()[3] < 0.1


EIGHT = policy_context(chunk_tokens=4, gpu_blocks=8, cpu_blocks=0)
"""Room for what `serve` keeps."""


def serve(policy: Any, gaps: Any, rounds: int = 40) -> tuple[int, int]:
    """Hits and returns of whole conversations in a cache of eight, one request after the other, for which there must be room
    as it starts; gaps(rng, session): seconds until it returns, or None."""
    rng, now, held = random.Random(0), 0.0, dict[int, Session]()
    due: list[tuple[float, int, Session]] = []
    hits = returns = 0
    for number in range(1, rounds * 20 + 1):
        now += 1.0
        ready = sorted(one for one in due if one[0] <= now)
        due = [one for one in due if one[0] > now]
        returns += len(ready)
        for session in [one[2] for one in ready] + [Session(str(number), number, now, now)]:
            hits += held.pop(session.number, None) is not None
            session.turns += 1
            session.tokens[:] = array("i", range(4))
            if policy.observe is not None:
                policy.observe(session, now)
            while len(held) >= 8:
                score = {
                    n: (policy.score(policy.bucket(one, 0), policy.order(one, 0), now), one.last_active_s)
                    for n, one in held.items()
                }
                del held[min(score, key=lambda n: score[n])]
            session.hint = Hint(stop_reason="tool_use" if session.number % 2 else "end_turn")
            if policy.rest is not None:
                policy.rest(session, now)
            session.stop(now)
            held[session.number] = session
            gap_s = gaps(rng, session)
            if gap_s is not None and session.turns < 6:
                due.append((now + gap_s, session.number, session))
    return hits, returns


def test_it_learns_which_conversations_return() -> None:
    """Half of them never do, and nothing but what their clients said tells which."""

    def gaps(rng: random.Random, session: Session) -> float | None:
        return rng.uniform(5, 15) if session.number % 2 else None

    ours, (lru, returns) = serve(LearnedReturn(EIGHT), gaps)[0], serve(Lru(EIGHT), gaps)
    assert returns > 500 and ours > 1.5 * lru, (ours, lru, returns)


def test_what_clients_make_up_and_what_nobody_chooses_from_takes_bounded_room() -> None:
    policy = LearnedReturn(policy_context(), guarded=False)
    index = HeapIndex(policy, View.DIRTY)
    for number in range(600):
        session = with_chunks(Session(str(number % 3), number % 3, 0.0, float(number)), 1)
        session.hint = Hint(tool=f"tool {number}")
        policy.rest(session, float(number))
        session.chunks.view[0] = View.DIRTY
        index.changed(session.leaf, 1)
        assert policy.bucket(session, 0) is not None
        index.remove(session.leaf)
    assert len(policy._root.kinds) == 256
    assert len(index._aging) < 100
