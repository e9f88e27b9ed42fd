import pytest

from pensieve.lab.workload.recording import Blocks, Call, Conversation, Count, Recording, block_reuse, hashes_of


def recording(*prompts):
    """A conversation a prompt: (arrival, hashes, tokens)."""
    calls = [
        Call(Blocks(hashes_of(hashes), 16, tokens), 1, at, order=n) for n, (at, hashes, tokens) in enumerate(prompts)
    ]
    return Recording("x", tuple(Conversation(f"c{n}", (call,)) for n, call in enumerate(calls)), "")


def test_reuse_counts_repeats_and_partly_filled_blocks_in_order_of_arrival():
    reuse = block_reuse(recording((2.0, [1, 2], 20), (1.0, [1, 3], 18), (0.0, [1, 2], 20), (3.0, [7, 7], 20)))
    assert (reuse.blocks, reuse.tokens, reuse.unique_blocks, reuse.block_tokens) == (8, 78, 4, 16)
    assert reuse.hit_tokens == 16 + 16 + 4 + 4, "the first of each block is computed, and the first 7 whole"
    assert reuse.block_rate == 0.5
    assert reuse.token_rate == pytest.approx(40 / 78)


def test_a_recording_without_hashes_tells_nothing():
    assert block_reuse(Recording("x", (Conversation("a", (Call(Count(3), 1),)),), "")) is None
