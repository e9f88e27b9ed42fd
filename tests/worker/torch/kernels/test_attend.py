"""Each backend that runs on a CPU against the definition in float64: the reference, C, and Triton's kernel, interpreted.

conftest.py says how the interpreter is asked.
"""

from __future__ import annotations

import random

import pytest
import torch

from pensieve.compiler import find_compiler
from pensieve.device.kernels.backends import load_backend
from pensieve.device.kernels.base import Plan, Scores
from pensieve.errors import EngineMissing

from .cases import MIXED, Case, Heads, Runs, make_case
from .conftest import INTERPRETED

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def _backends() -> list[str]:
    if INTERPRETED:
        return ["triton"]
    try:
        find_compiler()
    except EngineMissing:
        return ["reference"]
    return ["reference", "native"]


@pytest.fixture(params=_backends())
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def plan_of(name: str, case: Case) -> Plan:
    backend = load_backend(name, torch.device("cpu"), case.pool.dtype, case.queries.shape[2], case.chunk)
    return backend.plan(case.batch, case.pool, case.chunk)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_all_kinds_of_rows_in_one_batch(name: str, window: int | None, softcap: float | None) -> None:
    case = make_case(MIXED)
    case.check(case.attend(plan_of(name, case), 0.3, window, softcap), case.expected(0.3, window, softcap))


KINDS = [
    (Heads(4, 4, 64), F16, 32),
    (Heads(8, 1, 80), BF16, 16),
    (Heads(6, 2, 128), F32, 64),
    (Heads(2, 1, 256), F16, 32),
    (Heads(20, 1, 16), F32, 128),
    *(
        [] if INTERPRETED else [(Heads(6, 2, 128), F32, 7), (Heads(20, 1, 8), F32, 4)]
    ),  # Triton's have 16 tokens or more
]


@pytest.mark.parametrize(("heads", "dtype", "chunk"), KINDS, ids=str)
def test_head_sizes_groups_dtypes_and_blocks(name: str, heads: Heads, dtype: torch.dtype, chunk: int) -> None:
    """Groups of 1, 8, 3, 2 and 20; heads and blocks that are no power of two. Prefills of one tile of keys and of several,
    with and without earlier positions."""
    short: list[Runs] = [[(140, 141)], [(0, 19)], [(7, 8), (33, 40)]]
    case = make_case(short if INTERPRETED else [*short, [(0, 63)], [(60, 200)], [(130, 132)]], heads, dtype, chunk)
    got = case.attend(plan_of(name, case), None, None, None)
    assert got.dtype == dtype
    case.check(got, case.expected(None, None, None))


@pytest.mark.parametrize("seed", range(4 if INTERPRETED else 12))
def test_random_batches(name: str, seed: int) -> None:
    source = random.Random(seed)
    rows: list[Runs] = []
    for _ in range(source.randint(1, 4 if INTERPRETED else 9)):
        cuts = sorted(source.sample(range(120 if INTERPRETED else 400), 2 * source.randint(1, 2)))
        last = source.choice([(cuts[-2], cuts[-2] + 1), (cuts[-2], cuts[-1])])
        rows.append([*zip(cuts[:-2:2], cuts[1:-2:2], strict=True), last])
    heads = Heads(*source.choice([(4, 1), (4, 4), (6, 2)]), dim=source.choice([16, 64, 96]))
    window, softcap = source.choice([None, 1, 33]), source.choice([None, 5.0])
    case = make_case(rows, heads, source.choice([F32, BF16]), source.choice([16, 32]), seed=seed)
    case.check(case.attend(plan_of(name, case), None, window, softcap), case.expected(None, window, softcap))


def test_layers_of_one_iteration_may_differ_in_window_and_take_strided_queries(name: str) -> None:
    """As transformers passes them: [heads, tokens, head_dim] transposed. One plan, several layers."""
    case = make_case([[(60, 61)], [(30, 31)], [(0, 20)]])
    plan = plan_of(name, case)
    strided = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (case.queries, case.keys, case.values)]
    plan.write(case.pool[1], case.batch.write_places, *strided[1:])
    for window in (None, 7, None):
        case.check(plan.attend(case.pool[1], *strided, Scores(window=window)), case.expected(None, window, None))
