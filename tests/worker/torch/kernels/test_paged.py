"""What is the Triton kernel's own, in its interpreter: splits, tiles, boxes, standing plans. See conftest.py."""

from __future__ import annotations

import pytest
import torch

from pensieve.device.kernels import triton_backend
from pensieve.device.kernels.base import Scores
from pensieve.device.kernels.triton_backend import OncePlan, StandingPlan, TritonBackend, TritonPointersBackend

from .cases import Heads, Runs, make_case


@pytest.mark.parametrize(
    ("rows", "window"), [([[(900, 901)], [(3, 4)]], None), ([[(700, 720)]], None), ([[(799, 800)]], 500)]
)
def test_long_rows_are_split_along_their_keys(rows: list[Runs], window: int | None) -> None:
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


# A prompt over a long context (split along its keys), one from the start, a recovery of two runs, and decode rows.
ROWS = [[(300, 320)], [(0, 40)], [(3, 4), (40, 60)], [(70, 71)]]


@pytest.fixture
def boxes(monkeypatch):
    """The interpreter is taken for a GPU of capability 8."""
    monkeypatch.setattr(triton_backend, "_SHARED_PRODUCTS", (8,))


@pytest.mark.parametrize(
    ("heads", "dtype", "chunk", "softcap"),
    [(Heads(4, 1, 24), torch.bfloat16, 32, None), (Heads(2, 2, 16), torch.float16, 64, 2.0)],
    ids=str,
)
def test_boxes_are_what_pointers_are(boxes, heads, dtype, chunk, softcap):
    """Blocks of one box and of two; heads of no power of two, whose boxes reach beyond them."""
    case = make_case(ROWS, heads, dtype, chunk)
    plans = [backend().plan(case.batch, case.pool, chunk) for backend in (TritonBackend, TritonPointersBackend)]
    got, by_pointers = (case.attend(plan, 0.3, None, softcap) for plan in plans)
    assert [plan._launches[None].tiles.boxed for plan in plans if isinstance(plan, OncePlan)] == [True, False]
    assert len(plans[0]._launches[None].joins), "something was split"
    assert float((got.float() - by_pointers.float()).abs().max()) <= 2 * torch.finfo(dtype).eps, "the last bit at most"
    case.check(got, case.expected(0.3, None, softcap))


def test_a_layer_with_a_window_is_loaded_by_pointers(boxes):
    """Beside one without, in the same iteration."""
    case = make_case([[(40, 80)]], Heads(2, 2, 16), torch.bfloat16, 32)
    plan = TritonBackend().plan(case.batch, case.pool, 32)
    for window in (None, 20):
        case.check(case.attend(plan, None, window, None), case.expected(None, window, None))
    assert {window: launch.tiles.boxed for window, launch in plan._launches.items()} == {None: True, 20: False}


# -- a standing plan, as a captured graph uses it ---------------------------------------------------------------------------

STANDING = 4


def _padded(case):
    """The queries of STANDING rows, of which some may belong to no span."""
    idle = torch.full((STANDING - len(case.queries), *case.queries.shape[1:]), 7.0)
    return torch.cat([case.queries, idle])


def test_the_same_tensors_serve_batch_after_batch():
    batches = [[[(30, 31)]], [[(600, 601)], [(0, 1)], [(99, 100)]], [[(8, 9)], [(40, 41)], [(41, 42)], [(2, 3)]]]
    cases = [make_case(rows, Heads(4, 2, 32), seed=seed) for seed, rows in enumerate(batches)]
    plan = TritonBackend().standing(cases[0].pool, cases[0].chunk, STANDING, 40)
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
    assert len(plan._launches[None].joins) == STANDING, "the launch is as large as it can become"


def test_more_rows_or_blocks_than_there_is_room_for_are_our_own_bug():
    case = make_case([[(30, 31)], [(50, 51)]])
    with pytest.raises(AssertionError):
        TritonBackend().standing(case.pool, case.chunk, 1, 40).update(case.batch)
    with pytest.raises(AssertionError, match="more blocks"):
        TritonBackend().standing(case.pool, case.chunk, 2, 2).update(case.batch)
    with pytest.raises(AssertionError):
        TritonBackend().standing(case.pool, case.chunk, 4, 40).update(make_case([[(3, 9)]]).batch)
