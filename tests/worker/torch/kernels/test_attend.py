"""Each backend that runs on a CPU against the definition in float64: the reference, C, and Triton's kernel, interpreted.

conftest.py says how the interpreter is asked.
"""

import random
from dataclasses import replace

import pytest
import torch

from pensieve.compiler import find_compiler
from pensieve.device.kernels.base import Scores
from pensieve.device.kernels.reference import ReferenceBackend, ReferencePlan
from pensieve.device.model import load_backend
from pensieve.errors import EngineMissing

from .cases import MIXED, Heads, make_case, spans_of
from .conftest import INTERPRETED

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
try:
    find_compiler()
    COMPILES = not INTERPRETED
except EngineMissing:
    COMPILES = False
needs_compiler = pytest.mark.skipif(not COMPILES, reason="no C compiler is here, or Triton interprets in this process")


@pytest.fixture(params=["triton"] if INTERPRETED else ["reference"] + ["native"] * COMPILES)
def name(request):
    return request.param


def plan_of(name, case):
    backend = load_backend(name, CPU, case.pool.dtype, case.queries.shape[2], case.chunk)
    return backend.plan(case.batch, case.pool, case.chunk)


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (20, 2.0)])
def test_all_kinds_of_rows_in_one_batch(name, window, softcap):
    case = make_case(MIXED)
    case.check(case.attend(plan_of(name, case), 0.3, window, softcap), case.expected(0.3, window, softcap))


KINDS = [
    (Heads(4, 4, 64), F16, 32),
    (Heads(8, 1, 80), BF16, 16),
    (Heads(20, 1, 16), F32, 128),
    # Triton's blocks have 16 tokens or more, and its interpreter takes seconds for large heads.
    *([] if INTERPRETED else [(Heads(6, 2, 128), F32, 64), (Heads(2, 1, 256), F16, 32), (Heads(6, 2, 128), F32, 7)]),
]


@pytest.mark.parametrize(("heads", "dtype", "chunk"), KINDS, ids=str)
def test_head_sizes_groups_dtypes_and_blocks(name, heads, dtype, chunk):
    """Groups of 1, 8, 3, 2 and 20; heads and blocks that are no power of two. Prefills of one tile of keys and of several,
    with and without earlier positions."""
    short = [[(140, 141)], [(0, 19)], [(7, 8), (33, 40)]]
    case = make_case(short if INTERPRETED else [*short, [(0, 63)], [(60, 200)], [(130, 132)]], heads, dtype, chunk)
    got = case.attend(plan_of(name, case), None, None, None)
    assert got.dtype == dtype
    case.check(got, case.expected(None, None, None))


@pytest.mark.parametrize("seed", [1] if INTERPRETED else range(6))
def test_random_batches(name, seed):
    source = random.Random(seed)
    rows = []
    for _ in range(source.randint(1, 4 if INTERPRETED else 9)):
        cuts = sorted(source.sample(range(120 if INTERPRETED else 400), 2 * source.randint(1, 2)))
        last = source.choice([(cuts[-2], cuts[-2] + 1), (cuts[-2], cuts[-1])])
        rows.append([*zip(cuts[:-2:2], cuts[1:-2:2], strict=True), last])
    heads = Heads(*source.choice([(4, 1), (4, 4), (6, 2)]), dim=source.choice([16, 64]))
    window, softcap = source.choice([None, 1, 33]), source.choice([None, 5.0])
    case = make_case(rows, heads, source.choice([F32, BF16]), source.choice([16, 32]), seed=seed)
    case.check(case.attend(plan_of(name, case), None, window, softcap), case.expected(None, window, softcap))


def test_layers_of_one_iteration_may_differ_in_window_and_take_strided_queries(name):
    """As transformers passes them: [heads, tokens, head_dim] transposed. One plan, several layers."""
    case = make_case([[(60, 61)], [(30, 31)], [(0, 20)]])
    plan = plan_of(name, case)
    strided = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (case.queries, case.keys, case.values)]
    plan.write(case.pool[1], case.batch.write_places, *strided[1:])
    for window in (None, 7, None):
        case.check(plan.attend(case.pool[1], *strided, Scores(window=window)), case.expected(None, window, None))


def test_the_reference_reads_blocks_in_order_as_they_lie():
    """Blocks in order, in two runs, and scattered, in one batch; NaN everywhere else."""
    tables = [[*range(50, 69), *range(200, 219)], [*range(18)], [*range(300, 390, 5)]]
    case = make_case([[(stop - 1, stop)] for stop in (150, 71, 71)], Heads(4, 2, 8), chunk=4, tables_of=tables)
    plan = ReferenceBackend().plan(case.batch, case.pool, 4)
    case.check(case.attend(plan, 0.3, None, None), case.expected(0.3, None, None))
    assert [isinstance(piece.places, slice) for piece in plan._pieces[None, False]] == [False, True, False]


# -- in C -------------------------------------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize(
    ("heads", "dtype"), [(Heads(4, 2, 64), BF16), (Heads(4, 2, 64), F16), (Heads(6, 2, 40), BF16)], ids=str
)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (33, 2.0)])
def test_a_pool_in_16_bits_is_summed_in_float32(dtype, window, softcap, heads):
    """As exact as the rounding of the result to 16 bits, over a context in which sums in 16 bits lose two digits."""
    rows = [[(n - 1, n)] for n in (700, 140, 33, 1)]
    case = make_case([*rows, [(0, 300)], [(190, 270)]], heads, dtype=dtype, chunk=16)
    got, expected = case.attend(plan_of("native", case), None, window, softcap), case.expected(None, window, softcap)
    step = float((expected.to(dtype).double() - expected).abs().max())  # what rounding alone does
    assert got.dtype == dtype and float((got.double() - expected).abs().max()) <= 2 * step


@needs_compiler
@pytest.mark.parametrize(
    ("processor", "dtype", "window", "softcap"), [("zen 3", BF16, None, None), ("any", F32, 33, 2.0)]
)
def test_other_processors_attend_as_this_one(processor, dtype, window, softcap, compile_for):
    """Without a tile unit, or vectors of sixteen numbers, that this machine may have."""
    compile_for(processor)
    case = make_case([[(140, 141)], [(0, 300)], [(190, 270)]], Heads(6, 2, 40), dtype=dtype)
    case.check(case.attend(plan_of("native", case), None, window, softcap), case.expected(None, window, softcap))


@needs_compiler
@pytest.mark.parametrize(("rows", "times"), [([[(99, 100)], [(49, 50)]], 100), ([[(0, 90)]], 12)])
def test_scores_far_apart_neither_overflow_nor_vanish(rows, times):
    """Of a prefill many more rows: a score of 1,000 in float32 is exact to 4 digits behind the point."""
    case = make_case(rows)
    case.queries.mul_(times)
    case.check(case.attend(plan_of("native", case), 1.0, None, None), case.expected(1.0, None, None))


@needs_compiler
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_neither_other_rows_nor_threads_change_a_row(dtype):
    """Bit for bit: so a request's tokens do not depend on who else is served."""
    case = make_case([[(300, 301)], [(90, 91)], [(20, 21)], [(0, 230)], [(70, 150)]], Heads(8, 4, 64), dtype)
    plan, alone = plan_of("native", case), []
    case.attend(plan, None, None, None)  # everybody's keys are in the pool
    for span in case.batch.spans:
        own = replace(case, batch=replace(case.batch, spans=spans_of([replace(span, first=0)])))
        queries = case.queries[span.first : span.first + span.queries]
        alone.append(plan_of("native", own).attend(case.pool[1], queries, case.keys, case.values, Scores()))
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            assert torch.equal(case.attend(plan_of("native", case), None, None, None), torch.cat(alone))
            assert torch.equal(case.attend(plan, None, None, None), torch.cat(alone))
    finally:
        torch.set_num_threads(before)


@needs_compiler
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_keys_and_values_go_where_torch_would_put_them(dtype):
    """Views of one joined product, as the fused forwards give them, and of another type than the pool's."""
    case = make_case([[(0, 40)], [(20, 21)]], Heads(4, 2, 16), dtype=dtype)
    joined = torch.randn(41, 8, 16)
    keys, values = joined[:, 4:6], joined[:, 6:].transpose(1, 2).contiguous().transpose(1, 2)
    expected, places = case.pool[0].clone(), case.batch.write_places
    ReferencePlan(case.batch, case.pool, case.chunk).write(expected, places, keys.to(dtype), values.to(dtype))
    plan = plan_of("native", case)
    plan.write(case.pool[0], places, keys, values)
    assert torch.equal(case.pool[0].nan_to_num(9e9), expected.nan_to_num(9e9))
    with pytest.raises(IndexError, match=f"place {len(expected)} is not one of"):
        plan.write(case.pool[0], torch.full((41,), len(expected)), keys, values)
    for wrong, given in ((places.int(), keys), (places, keys[:, :1])):
        with pytest.raises(AssertionError):
            plan.write(case.pool[0], wrong, given, values)
