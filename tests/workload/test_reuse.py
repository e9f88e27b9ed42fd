import random

import pytest

from pensieve.lab.workload.recording import Blocks, Call, Conversation, Count, Recording, hashes_of
from pensieve.lab.workload.reuse import block_reuse, recorded_blocks


def test_unbounded_reuse_counts_repeats_and_partly_filled_blocks():
    reuse = block_reuse([([1, 2], 20), ([1, 3], 18), ([1, 2], 20)], 16)
    assert (reuse.blocks, reuse.tokens, reuse.unique_blocks) == (6, 58, 3)
    assert (reuse.hit_blocks, reuse.hit_tokens) == (3, 16 + 16 + 4)
    assert reuse.block_rate == 0.5
    assert reuse.token_rate == pytest.approx(36 / 58)


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
        assert block_reuse(prompts, 2, 2 * room + 1).hit_blocks == hits, "half a block is no room"


def test_unbounded_reuse_is_that_of_a_cache_that_is_large_enough():
    draw = random.Random(5)
    prompts = [([draw.randrange(60) for _ in range(draw.randrange(0, 9))], draw.randrange(0, 40)) for _ in range(400)]
    assert block_reuse(prompts, 4) == block_reuse(prompts, 4, 1e9)
    assert block_reuse([], 16).block_rate == block_reuse([], 16).token_rate == 0.0


def test_blocks_of_a_recording_come_in_order_of_arrival():
    def call(at_s, order, *hashes):
        return Call(Blocks(hashes_of(list(hashes)), 16, 16 * len(hashes)), 1, at_s, order=order)

    one = Conversation("a", (call(0.0, 0, 1), call(2.0, 3, 1, 2)))
    two = Conversation("b", (call(1.0, 1, 5), call(2.0, 2, 6)))
    found, size = recorded_blocks(Recording("x", (one, two), ""))
    assert ([list(hashes) for hashes, _ in found], size) == ([[1], [5], [6], [1, 2]], 16)
    assert recorded_blocks(Recording("x", (Conversation("a", (Call(Count(3), 1),)),), "")) == ([], 1)
