"""What is the Triton kernel's own, in its interpreter: splits, tiles, boxes, standing plans. See conftest.py."""

import pytest
import torch

from pensieve.device.kernels.base import Scores
from pensieve.device.kernels.triton_backend import OncePlan, StandingPlan, TritonBackend

from .cases import Heads, make_case


@pytest.mark.parametrize(("rows", "window"), [([[(500, 501)], [(3, 4)], [(400, 420)]], None), ([[(799, 800)]], 500)])
def test_long_rows_are_split_along_their_keys(rows, window):
    case = make_case(rows, Heads(2, 2, 64))
    plan = TritonBackend().plan(case.batch, case.pool, case.chunk)
    assert isinstance(plan, OncePlan)
    got = case.attend(plan, None, window, None)
    assert (plan._launches[window].joins[:, 3] > 1).all(), "no idle joins"
    assert len(plan._launches[window].joins) > 0, "something was split"
    case.check(got, case.expected(None, window, None))


def test_prompts_of_more_than_one_large_tile() -> None:
    """128 rows: 64 queries with groups of two heads. One tile is full, one is not, and one belongs to a short prompt."""
    case = make_case([[(10, 140)], [(30, 31)], [(0, 20)]], Heads(4, 2, 32), torch.bfloat16)
    plan = TritonBackend().plan(case.batch, case.pool, case.chunk)
    got = case.attend(plan, None, None, None)
    launch = plan._launches[None]
    assert launch.tiles.large_rows == 128 and int(launch.items[:, 2].max()) == 64
    case.check(got, case.expected(None, None, None))


# -- a standing plan, as a captured graph uses it ---------------------------------------------------------------------------

STANDING = 4


def test_the_same_tensors_serve_batch_after_batch():
    batches = [[[(30, 31)]], [[(300, 301)], [(0, 1)], [(99, 100)]], [[(8, 9)], [(40, 41)], [(41, 42)], [(2, 3)]]]
    cases = [make_case(rows, Heads(4, 2, 32), seed=seed) for seed, rows in enumerate(batches)]
    plan = TritonBackend().standing(cases[0].pool, cases[0].chunk, STANDING, 40)
    assert isinstance(plan, StandingPlan)
    places = set()
    for case in cases:
        plan.update(case.batch)
        plan.write(case.pool[1], case.batch.write_places, case.keys, case.values)
        real = len(case.queries)
        idle = torch.full((STANDING - real, *case.queries.shape[1:]), 7.0)  # rows that belong to no span
        for window in (None, 16):
            got = plan.attend(
                case.pool[1], torch.cat([case.queries, idle]), case.keys, case.values, Scores(window=window)
            )
            case.check(got[:real], case.expected(None, window, None))
            assert not got[real:].any(), "padding gets zeros"
        places.add(
            hash(tuple(x.data_ptr() for launch in plan._launches.values() for x in (launch.items, launch.joins)))
        )
    assert len(places) == 1
    assert len(plan._launches[None].joins) == STANDING, "the launch is as large as it can become"
