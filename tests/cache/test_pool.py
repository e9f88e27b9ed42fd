from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pensieve.cache.pool import BlockPool


@given(st.integers(1, 40), st.lists(st.tuples(st.booleans(), st.integers(1, 12), st.integers(0, 100)), max_size=60))
def test_every_block_is_free_or_handed_out_once(blocks: int, moves: list[tuple[bool, int, int]]) -> None:
    pool, held = BlockPool(blocks), []
    for give, count, pick in moves:
        if give and count <= pool.free:
            got = pool.allocate(count)
            assert len(got) == count
            held.extend(got)
        elif held:
            pool.release([held.pop(pick % len(held))])
        assert len(held) == len(set(held))
        assert pool.free_blocks() == set(range(blocks)) - set(held)
        assert pool.free == blocks - len(held)


def test_freed_neighbours_merge_and_are_handed_out_as_one_run() -> None:
    pool = BlockPool(64)
    taken = pool.allocate(64)
    pool.release(taken[10:13])
    pool.release(taken[40:48])
    pool.release(taken[13:16])
    assert pool.allocate(8) == tuple(range(40, 48))
    assert pool.allocate(6) == tuple(range(10, 16))
