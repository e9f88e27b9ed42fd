from hypothesis import given, settings
from hypothesis import strategies as st

from pensieve.core.cache.blocks import BlockPool


@settings(deadline=None)
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
        assert pool._sizes == sum(1 << size for size, extents in enumerate(pool._classes) if extents)


def test_blocks_that_come_one_by_one_lie_behind_each_other() -> None:
    pool = BlockPool(64)
    (first,), (other,) = pool.allocate_after(None, 1), pool.allocate_after(None, 1)
    assert first == 32, "the middle of the longest extent leaves room to go on"
    grown, grown_other = [first], [other]
    for _ in range(8):
        grown += pool.allocate_after(grown[-1], 1)
        grown_other += pool.allocate_after(grown_other[-1], 1)
    assert grown == list(range(first, first + 9))
    assert grown_other == list(range(other, other + 9))
    assert pool.free == 64 - 18 == len(pool.free_blocks())
    assert not pool.free_blocks() & {*grown, *grown_other}


def test_a_run_goes_on_behind_its_last_block_and_then_elsewhere() -> None:
    pool = BlockPool(32)
    taken = pool.allocate(32)
    pool.release(taken[4:8])
    pool.release(taken[16:26])
    assert pool.allocate_after(3, 6) == [4, 5, 6, 7, 21, 22], "two are left over: from the middle of the longest extent"
    assert pool.free_blocks() == {16, 17, 18, 19, 20, 23, 24, 25}
