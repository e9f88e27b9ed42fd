"""The kernel in Triton's interpreter against the definition in float64; see conftest.py for how these are run."""

from __future__ import annotations

import random

import pytest
import torch

from pensieve.device.kernels.base import Scores
from pensieve.device.kernels.triton_backend import OncePlan, TritonBackend

from .cases import MIXED, Heads, Runs, make_case


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_all_kinds_of_rows_in_one_launch(window: int | None, softcap: float | None) -> None:
    case = make_case(MIXED)
    plan = TritonBackend().plan(case.batch, case.pool, case.chunk)
    got = case.attend(plan, 0.3, window, softcap)
    case.check(got, case.expected(0.3, window, softcap))


@pytest.mark.parametrize(
    ("heads", "dtype", "chunk"),
    [
        (Heads(4, 4, 64), torch.float16, 32),
        (Heads(8, 1, 80), torch.bfloat16, 16),
        (Heads(6, 2, 128), torch.float32, 64),
        (Heads(2, 1, 256), torch.float16, 32),
        (Heads(20, 1, 16), torch.float32, 128),
    ],
    ids=str,
)
def test_head_sizes_groups_dtypes_and_blocks(heads: Heads, dtype: torch.dtype, chunk: int) -> None:
    """Groups of 1, 8, 3, 2 and 20; head sizes that are no power of two, and the largest."""
    rows: list[Runs] = [[(140, 141)], [(0, 19)], [(7, 8), (33, 40)]]
    case = make_case(rows, heads, dtype, chunk)
    got = case.attend(TritonBackend().plan(case.batch, case.pool, chunk), None, None, None)
    assert got.dtype == dtype
    case.check(got, case.expected(None, None, None))


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


def test_layers_of_one_iteration_may_differ_in_window_and_take_strided_queries() -> None:
    """As transformers passes them: [heads, tokens, head_dim] transposed. One plan, several layers."""
    case = make_case([[(60, 61)], [(0, 20)]])
    plan = TritonBackend().plan(case.batch, case.pool, case.chunk)
    strided = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (case.queries, case.keys, case.values)]
    plan.write(case.pool[1], case.batch.write_places, *strided[1:])
    for window in (None, 7, None):
        got = plan.attend(case.pool[1], *strided, Scores(window=window))
        case.check(got, case.expected(None, window, None))


@pytest.mark.parametrize("seed", range(4))
def test_random_batches(seed: int) -> None:
    source = random.Random(seed)
    rows: list[Runs] = []
    for _ in range(source.randint(1, 4)):
        cuts = sorted(source.sample(range(120), 2 * source.randint(1, 2)))
        last = source.choice([(cuts[-2], cuts[-2] + 1), (cuts[-2], cuts[-1])])
        rows.append([*zip(cuts[:-2:2], cuts[1:-2:2], strict=True), last])
    heads = Heads(*source.choice([(4, 1), (4, 4), (6, 2)]), dim=source.choice([16, 64, 96]))
    window, softcap = source.choice([None, 1, 33]), source.choice([None, 5.0])
    dtype = source.choice([torch.float32, torch.bfloat16])
    case = make_case(rows, heads, dtype, source.choice([16, 32]), seed=seed)
    got = case.attend(TritonBackend().plan(case.batch, case.pool, case.chunk), None, window, softcap)
    case.check(got, case.expected(None, window, softcap))
