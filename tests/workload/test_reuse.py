import itertools
import random

import pytest

from pensieve.lab.workload.chance import exponential
from pensieve.lab.workload.recording import Blocks, Call, Conversation, Count, Recording, hashes_of
from pensieve.lab.workload.reuse import (
    Asked,
    back_within,
    block_reuse,
    furthest_reuse,
    recorded_blocks,
    started_over,
    told_reuse,
)


def test_unbounded_reuse_counts_repeats_and_partly_filled_blocks():
    reuse = block_reuse([([1, 2], 20), ([1, 3], 18), ([1, 2], 20)], 16)
    assert (reuse.blocks, reuse.tokens, reuse.unique_blocks) == (6, 58, 3)
    assert (reuse.hit_blocks, reuse.hit_tokens) == (3, 16 + 16 + 4)
    assert reuse.block_rate == 0.5
    assert reuse.token_rate == pytest.approx(36 / 58)


def test_least_recently_used_goes_first_and_a_hit_counts_as_use():
    prompts = [([1], 4), ([2], 4), ([1], 4), ([3], 4), ([1], 4), ([2], 4)]  # with room for two, 3 evicts 2
    assert block_reuse(prompts, 4, capacity_tokens=8).hit_blocks == 2
    assert block_reuse(prompts, 4, capacity_tokens=11.9).hit_blocks == 2
    assert block_reuse(prompts, 4, capacity_tokens=12).hit_blocks == 3
    assert block_reuse(prompts, 4, capacity_tokens=3).hit_blocks == 0


def test_against_a_plain_list():
    draw = random.Random(1)
    prompts = [([draw.randrange(40) for _ in range(draw.randrange(1, 8))], 8) for _ in range(300)]
    for room in (1, 5, 17, 60):
        held, hits = [], 0
        for blocks, _ in prompts:
            for block in blocks:
                if block in held:
                    held.remove(block)
                    hits += 1
                held.append(block)
                held = held[-room:]
        assert block_reuse(prompts, 1, room).hit_blocks == hits


def most_hits(accesses, room):
    """Brute force: after each access every choice of what to keep."""
    states = {frozenset(): 0}
    for block in accesses:
        reached = {}
        for held, hits in states.items():
            now = hits + (block in held)
            everything = held | {block}
            for size in range(min(room, len(everything)) + 1):
                for kept in itertools.combinations(sorted(everything), size):
                    reached[frozenset(kept)] = max(now, reached.get(frozenset(kept), 0))
        states = reached
    return max(states.values())


@pytest.mark.parametrize("seed", range(40))
def test_who_knows_the_future_hits_as_often_as_anybody_can(seed):
    draw = random.Random(seed)
    prompts = [([draw.randrange(5) for _ in range(draw.randrange(1, 4))], 12) for _ in range(7)]
    for room in (0, 1, 2, 3):
        found = furthest_reuse(prompts, 4, 4 * room)
        assert found.hit_blocks == most_hits([one for blocks, _ in prompts for one in blocks], room)
        assert found.hit_blocks >= block_reuse(prompts, 4, 4 * room).hit_blocks
    assert furthest_reuse(prompts, 4, 1e9) == block_reuse(prompts, 4)


def test_unbounded_reuse_is_that_of_a_cache_that_is_large_enough():
    draw = random.Random(5)
    prompts = [([draw.randrange(60) for _ in range(draw.randrange(0, 9))], draw.randrange(0, 40)) for _ in range(400)]
    assert block_reuse(prompts, 4) == block_reuse(prompts, 4, 1e9)


def test_sessions_with_clocks_of_their_own_are_started_over_a_stretch():
    def session(name, *times):
        calls = tuple(Call(Blocks(hashes_of([1, 2, n + 3, n + 4, 9]), 4, 23), 1, at_s) for n, at_s in enumerate(times))
        return Conversation(name, calls)

    recording = Recording("x", tuple(session(f"s{n}", 0.0, 10.0, 5000.0) for n in range(20)), "", one_clock=False)
    found, size = started_over(recording, 1000.0, 12, seed=1, blocks_in_one=2)
    assert size == 8 and {tokens for _, tokens in found} == {16}, "two whole blocks of five recorded ones"
    began = list(itertools.accumulate(exponential(1000.0 / 12, 1, "arrival", place) for place in range(12)))
    assert len(found) == sum(at + later <= 1000.0 for at in began for later in (0.0, 10.0)) > 12
    assert found == started_over(recording, 1000.0, 12, seed=1, blocks_in_one=2)[0]
    assert block_reuse(found, size).unique_blocks == 3


def test_who_is_not_soon_back_goes_first():
    draw = random.Random(3)
    prompts = [([draw.randrange(40) for _ in range(draw.randrange(1, 8))], 8) for _ in range(300)]
    soon = [draw.random() < 0.5 for _ in prompts]
    for room in (0, 1, 5, 17, 60):
        held, hits = {}, 0  # block -> (is it soon back, when it was used)
        uses = itertools.count()
        for (blocks, _), back in zip(prompts, soon, strict=True):
            for block in blocks:
                hits += block in held
                held[block] = (back, next(uses))
                if len(held) > room:
                    del held[min(held, key=held.get)]
        assert told_reuse(prompts, soon, 1, room).hit_blocks == hits
        for alike in (True, False):
            assert told_reuse(prompts, [alike] * 300, 1, room) == block_reuse(prompts, 1, room), "nothing is told"
    # Two blocks of room; 1 is back at once and 2 never: least recently used keeps 2 and 3, who is told keeps 1.
    few = [([1], 4), ([2], 4), ([3], 4), ([1], 4)]
    assert (block_reuse(few, 4, 8).hit_blocks, told_reuse(few, [True, False, False, False], 4, 8).hit_blocks) == (0, 1)


def test_what_was_told_of_a_block_lapses():
    draw = random.Random(5)
    prompts = [([draw.randrange(40) for _ in range(draw.randrange(1, 8))], 8) for _ in range(300)]
    soon = [draw.random() < 0.5 for _ in prompts]
    at_s = list(itertools.accumulate(draw.random() for _ in prompts))
    lapsing = {}
    for within_s in (0.0, 3.0, 1e9):
        held, hits = {}, 0  # block -> (when it was used, in which order, is it soon back)
        uses = itertools.count()
        for (blocks, _), back, now_s in zip(prompts, soon, at_s, strict=True):
            for block in blocks:
                hits += block in held
                held[block] = (now_s, next(uses), back)
                if len(held) > 17:
                    told = {one for one, (used_s, _, kept) in held.items() if kept and used_s >= now_s - within_s}
                    del held[min(held, key=lambda one: (one in told, held[one][1]))]
        lapsing[within_s] = told_reuse(prompts, soon, 1, 17, at_s, within_s).hit_blocks
        assert lapsing[within_s] == hits
    assert lapsing[1e9] == told_reuse(prompts, soon, 1, 17).hit_blocks
    assert len(set(lapsing.values())) == 3
    with pytest.raises(ValueError):  # a request without a time
        told_reuse(prompts, soon, 1, 17, at_s[:-1], 3.0)


def test_back_within_is_of_the_next_call_of_the_same_conversation():
    def asked(*calls):
        return [Asked(at_s, session, None) for at_s, session in calls]

    calls = asked((0, 0), (5, 1), (50, 0), (70, 1), (200, 0))
    assert back_within(calls, 60) == [True, False, False, False, False]
    assert back_within(calls, 65) == [True, True, False, False, False]
    assert back_within([], 60) == []


def test_nothing_asked_is_no_reuse():
    assert block_reuse([], 16).block_rate == block_reuse([], 16).token_rate == 0.0


def test_blocks_of_a_recording_come_in_order_of_arrival():
    def call(at_s, order, *hashes):
        return Call(Blocks(hashes_of(list(hashes)), 16, 16 * len(hashes)), 1, at_s, order=order)

    one = Conversation("a", (call(0.0, 0, 1), call(2.0, 3, 1, 2)))
    two = Conversation("b", (call(1.0, 1, 5), call(2.0, 2, 6)))
    found, size = recorded_blocks(Recording("x", (one, two), ""))
    assert ([list(hashes) for hashes, _ in found], size) == ([[1], [5], [6], [1, 2]], 16)
    assert recorded_blocks(Recording("x", (Conversation("a", (Call(Count(3), 1),)),), "")) == ([], 1)
