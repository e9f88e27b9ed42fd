import random
from collections.abc import Hashable

import pytest

from pensieve.core.cache.base import CacheCounters
from pensieve.core.cache.heaps import HeapIndex
from pensieve.core.cache.tiers import Tiers
from pensieve.core.cache.victims import VictimIndex
from pensieve.core.policies.base import EvictionPolicy
from pensieve.core.policies.belady import Belady
from pensieve.core.policies.lru import ConversationLru, Fifo, Lru
from pensieve.core.policies.retention_value import RetentionValue
from pensieve.core.request import Hint
from pensieve.core.session import Session, Stem, View
from pensieve.errors import PolicyError
from pensieve.plugins.caches.shared import SharedIndex
from pensieve.plugins.policies.hinted import Hinted
from tests.crossings import calls_of
from tests.simulated import policy_context, with_chunks


def put(index: VictimIndex, session: Session, chunk: int) -> None:
    session.chunks.view[chunk] = View.DIRTY
    index.changed(session.leaf, 1)


def take(index: VictimIndex, session: Session, chunk: int) -> None:
    session.chunks.view[chunk] = View.NONE
    index.changed(session.leaf, -1)


def brute_force(policy: EvictionPolicy, sessions: list[Session], now_s: float) -> tuple[int, int] | None:
    """The definition: over the leading chunk of every conversation, the lowest (level, score, last active, number)."""
    candidates = []
    for session in sessions:
        leading = next((i for i, chunk in enumerate(session.chunks) if chunk.view is View.DIRTY), None)
        if leading is not None:
            score = policy.score(policy.bucket(session, leading), policy.order(session, leading), now_s)
            candidates.append((len(session.waiting), score, session.last_active_s, session.number, leading))
    return min(candidates)[3:] if candidates else None


@pytest.mark.parametrize("make", [RetentionValue, Lru, Belady, Hinted])
@pytest.mark.parametrize("seed", range(3))
def test_choice_equals_brute_force_while_time_passes(make: type[EvictionPolicy], seed: int) -> None:
    rng = random.Random(seed)
    policy = make(policy_context())  # type: ignore[call-arg]
    index = Tiers(policy, 4, 0, 0, CacheCounters()).dirty
    sessions = [with_chunks(Session(str(i), i, 0.0, rng.uniform(0, 5)), 8) for i in range(12)]
    now = 5.0
    for _ in range(300):
        now += rng.choice((0.0, 0.1, 3.0))
        session = rng.choice(sessions)
        chunk = rng.randrange(8)
        action = rng.random()
        if action < 0.5:
            if session.chunks[chunk].view is View.NONE:
                put(index, session, chunk)
            else:
                take(index, session, chunk)
        elif action < 0.6:
            index.remove(session.leaf)
            session.leaf.chunks.view = bytearray(8)
        elif action < 0.75:
            session.last_active_s = now
            session.waiting = (0,) * rng.randint(0, 1)
            session.next_use_s = rng.choice((None, now + rng.uniform(0, 90)))
            session.hint = rng.choice((None, Hint("tool_use"), Hint("end_turn", expected_s=rng.choice((5.0, 70.0)))))
            index.refresh(session.leaf)
        expected = brute_force(policy, sessions, now)
        found = next(index.victims(now), None)
        assert (found and (found[0].number, found[1])) == expected
        told = index.choose(1, now).spans()
        assert [(node.number, first) for node, first, _ in told] == [expected] * (expected is not None), (
            "with one that waits"
        )
        if action > 0.9:
            for victim, victim_chunk in index.victims(now):
                assert (victim.number, victim_chunk) == brute_force(policy, sessions, now)
                take(index, victim.session, victim_chunk)
                if rng.random() < 0.3:
                    break


class Ragged(EvictionPolicy):
    """Somebody's own: scores rise and fall along a conversation, and many are equal."""

    def bucket(self, session: Session, chunk: int) -> int:
        return (session.number + chunk) % 3

    def order(self, session: Session, chunk: int) -> float:
        return (7 * chunk + 3 * session.number) % 5

    def score(self, bucket: Hashable, order: float, now_s: float) -> float:
        assert isinstance(bucket, int)
        return order * (1 + bucket)


class WholeRetention(RetentionValue):
    whole_conversations = True


class Halved(RetentionValue):
    """Its score is not the one that the scores it inherits tell."""

    def score(self, bucket: Hashable, order: float, now_s: float) -> float:
        return 3 * super().score(bucket, order, now_s) - 1


@pytest.mark.parametrize("make", [RetentionValue, Lru, Fifo, Belady, ConversationLru, WholeRetention, Ragged, Halved])
@pytest.mark.parametrize("seed", range(3))
def test_a_choice_is_what_taking_one_chunk_after_the_other_gives(make: type[EvictionPolicy], seed: int) -> None:
    """Runs that are told at once and merged, held against heaps that are asked anew for each chunk, ties included."""
    rng = random.Random(seed)
    policy = make(policy_context())  # type: ignore[call-arg]
    index = Tiers(policy, 4, 0, 0, CacheCounters()).dirty
    sessions = [
        with_chunks(Session(str(i), i, rng.randrange(3), float(rng.randrange(4)), waiting=(0,) * rng.randint(0, 1)), 90)
        for i in range(9)
    ]
    for session in sessions:
        session.next_use_s = rng.choice((None, 5.0, 9.0))
        session.leaf.chunks.view = bytearray(rng.choices((View.NONE, View.DIRTY), (1, 5), k=90))
        index.changed(session.leaf, session.chunks.view.count(View.DIRTY))
    for _ in range(12):
        count, whole, now = rng.randrange(1, 60), rng.random() < 0.5, 4.0 + rng.random()
        before, heads = index.leads(), index.chunks
        chosen = index.choose(count, now, whole)
        assert (index.leads(), index.chunks) == (before, heads), "a choice takes nothing"
        single = []
        for node, chunk in index.victims(now):
            session = node.session
            single.append(index.as_victim(node, chunk, now))
            take(index, session, chunk)
            of_it = View.DIRTY in session.chunks.view
            if len(single) >= count and not (whole and policy.whole_conversations and of_it):
                break
        assert chosen.victims() == single


@pytest.mark.parametrize("make", [RetentionValue, Lru])
@pytest.mark.parametrize("seed", range(3))
def test_what_several_conversations_have_goes_by_what_it_is_worth_to_all(make: type[EvictionPolicy], seed: int) -> None:
    """Chosen by taking the lowest of all first chunks, one after the other; retention value: Cost times the sum of 1 / T."""
    rng = random.Random(seed)
    policy = make(policy_context())  # type: ignore[call-arg]
    index = SharedIndex(policy, View.DIRTY)
    sessions = [with_chunks(Session(str(i), i, 0.0, float(rng.randrange(9))), 90) for i in range(9)]
    nodes = [session.leaf for session in sessions]
    for number in range(-6, 0):
        holders = sorted(rng.sample(sessions, rng.randint(1, 9)), key=lambda session: session.last_active_s)
        stem = Stem(number, holders[-1], [])
        stem.chunks.add(30)
        stem.holders = {session.number: session for session in holders}
        nodes.append(stem)
    for node in nodes:
        node.chunks.view = bytearray(rng.choices((View.NONE, View.DIRTY), (1, 5), k=len(node.chunks)))
        index.changed(node, node.chunks.view.count(View.DIRTY))
    left = {node.number: [i for i, view in enumerate(node.chunks.view) if view == View.DIRTY] for node in nodes}
    for count in (1, 1, 7, 100, 300):
        chosen = index.choose(count, 9.5)
        expected = []
        for _ in range(count):
            first = min(index.as_victim(node, left[node.number][0], 9.5) for node in nodes if left[node.number])
            expected.append(first)
            left[first[3]].pop(0)
        assert chosen.victims() == expected
        by_number = {node.number: node for node in nodes}
        for *_, number, chunk in expected:
            node = by_number[number]
            node.chunks.view[chunk] = View.NONE
            index.changed(node, -1)
    if make is RetentionValue:
        stem = next(node for node in nodes if isinstance(node, Stem) and len(node.holders) > 1)
        (_, score, *_) = index.as_victim(stem, 3, 9.5)
        cost = policy.context.recompute_s(4 * 4)
        assert -1 / score == pytest.approx(cost * sum(1 / (9.5 - one.last_active_s) for one in stem.holders.values()))


def test_a_choice_costs_as_much_however_many_are_idle() -> None:
    costs = []
    for count in (300, 3000):
        index = HeapIndex(Lru(policy_context()), View.DIRTY)
        for number in range(count):
            session = with_chunks(Session(str(number), number, 0.0, float(number)), 32)
            session.leaf.chunks.view = bytearray([View.DIRTY]) * 32
            index.changed(session.leaf, 32)
        index.choose(500, 1e4)
        costs.append(calls_of(lambda index=index: index.choose(500, 1e4 + 1)))
    assert costs[1] < 1.2 * costs[0]


def test_a_policy_that_says_that_its_order_has_turned_is_asked_anew() -> None:
    class Turning(EvictionPolicy):
        version = 0

        def order(self, session: Session, chunk: int) -> float:
            return session.last_active_s * (-1) ** self.version

    policy = Turning(policy_context())
    index = Tiers(policy, 4, 0, 0, CacheCounters()).dirty
    sessions = [with_chunks(Session(str(i), i, 0.0, float(i)), 3) for i in range(4)]
    for session in sessions:
        put(index, session, 0)
    for policy.version, first in ((0, 0), (1, 3), (2, 0)):
        assert next(index.victims(9.0), None) == (sessions[first].leaf, 0)


@pytest.mark.parametrize("method", ["order", "score"])
@pytest.mark.parametrize("key", [float("nan"), None, "first"])
def test_a_key_that_stands_nowhere_is_refused_with_its_method(method: str, key: object) -> None:
    """NaN compares false with everything: a heap that holds one gives up its victims in any order."""

    class Odd(Lru):
        def order(self, session: Session, chunk: int) -> float:
            return key if method == "order" else 0.0  # type: ignore[return-value]

        def score(self, bucket: object, order: float, now_s: float) -> float:
            return key if method == "score" else 0.0  # type: ignore[return-value]

    index = HeapIndex(Odd(policy_context()), View.DIRTY)
    with pytest.raises(PolicyError, match=rf"Odd\.{method} \(.*test_victims\.py, line \d+\) returned .* 'talk'"):  # noqa: PT012
        put(index, with_chunks(Session("talk", 0, 0.0, 1.0), 1), 0)
        next(index.victims(2.0))
