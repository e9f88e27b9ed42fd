"""A standing plan, as a captured graph uses it: the same tensors and launches for changing batches."""

from __future__ import annotations

import pytest
import torch

from pensieve.device.kernels.base import Scores
from pensieve.device.kernels.triton_backend import StandingPlan, TritonBackend

from .cases import Heads, make_case

ROWS = 4


def _padded(case):
    """The queries of ROWS rows, of which some may belong to no span."""
    idle = torch.full((ROWS - len(case.queries), *case.queries.shape[1:]), 7.0)
    return torch.cat([case.queries, idle])


def test_the_same_tensors_serve_batch_after_batch():
    batches = [[[(30, 31)]], [[(600, 601)], [(0, 1)], [(99, 100)]], [[(8, 9)], [(40, 41)], [(41, 42)], [(2, 3)]]]
    cases = [make_case(rows, Heads(4, 2, 32), seed=seed) for seed, rows in enumerate(batches)]
    plan = TritonBackend().standing(cases[0].pool, cases[0].chunk, ROWS, 40)
    assert isinstance(plan, StandingPlan)
    places = set()
    for case in cases:
        plan.update(case.batch)
        plan.write(case.pool[1], case.batch.write_places, case.keys, case.values)
        real = len(case.queries)
        for window in (None, 16):
            got = plan.attend(case.pool[1], _padded(case), case.keys, case.values, Scores(window=window))
            case.check(got[:real], case.expected(None, window, None))
            assert not got[real:].any(), "padding gets zeros"
        places.add(
            hash(tuple(x.data_ptr() for launch in plan._launches.values() for x in (launch.items, launch.joins)))
        )
    assert len(places) == 1
    assert len(plan._launches[None].joins) == ROWS, "the launch is as large as it can become"


def test_more_rows_or_blocks_than_there_is_room_for_are_our_own_bug():
    case = make_case([[(30, 31)], [(50, 51)]])
    with pytest.raises(AssertionError):
        TritonBackend().standing(case.pool, case.chunk, 1, 40).update(case.batch)
    with pytest.raises(AssertionError, match="more blocks"):
        TritonBackend().standing(case.pool, case.chunk, 2, 2).update(case.batch)
    with pytest.raises(AssertionError):
        TritonBackend().standing(case.pool, case.chunk, 4, 40).update(make_case([[(3, 9)]]).batch)
