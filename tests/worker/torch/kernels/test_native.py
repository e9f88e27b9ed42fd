"""Attention in C against the definition in float64. Skipped where no C compiler is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pensieve.compiler import find_compiler
from pensieve.device.batch import Spans
from pensieve.device.kernels.base import Scores
from pensieve.device.kernels.native import NativeBackend
from pensieve.device.kernels.reference import ReferencePlan
from pensieve.errors import EngineMissing

from ..driver import PROCESSORS
from .cases import Heads, make_case

try:
    find_compiler()
except EngineMissing as missing:
    pytest.skip(str(missing), allow_module_level=True)


def _plan(case):
    backend = NativeBackend(case.queries.shape[2], case.pool.dtype)
    return backend.plan(case.batch, case.pool, case.chunk)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (33, None), (None, 2.0)])
@pytest.mark.parametrize("heads", [Heads(4, 2, 64), Heads(6, 2, 40), Heads(20, 1, 8)], ids=str)
def test_a_pool_in_16_bits_is_summed_in_float32(dtype, window, softcap, heads):
    """As exact as the rounding of the result to 16 bits, over a context in which sums in 16 bits lose two digits."""
    rows = [[(n - 1, n)] for n in (700, 140, 33, 1)]
    case = make_case([*rows, [(0, 300)], [(190, 270)]], heads, dtype=dtype, chunk=16)
    got, expected = case.attend(_plan(case), None, window, softcap), case.expected(None, window, softcap)
    assert got.dtype == dtype
    rounded = expected.to(dtype).double()
    step = float((rounded - expected).abs().max())  # what rounding alone does
    assert float((got.double() - expected).abs().max()) <= 2 * step


@pytest.mark.parametrize("processor", sorted(PROCESSORS))
@pytest.mark.parametrize(("dtype", "window", "softcap"), [(torch.bfloat16, None, None), (torch.float32, 33, 2.0)])
def test_other_processors_attend_as_this_one(processor, dtype, window, softcap, compile_for):
    """Without a tile unit, or vectors of sixteen numbers, that this machine may have."""
    compile_for(processor)
    case = make_case([[(140, 141)], [(0, 300)], [(190, 270)]], Heads(6, 2, 40), dtype=dtype)
    case.check(case.attend(_plan(case), None, window, softcap), case.expected(None, window, softcap))


@pytest.mark.parametrize(("rows", "times"), [([[(99, 100)], [(49, 50)]], 100), ([[(0, 90)]], 12)])
def test_scores_far_apart_neither_overflow_nor_vanish(rows, times):
    """Of a prefill many more rows: a score of 1,000 in float32 is exact to 4 digits behind the point."""
    case = make_case(rows)
    case.queries.mul_(times)
    got = case.attend(_plan(case), 1.0, None, None)
    assert torch.isfinite(got).all()
    case.check(got, case.expected(1.0, None, None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_neither_other_rows_nor_threads_change_a_row(dtype):
    """Bit for bit: so a request's tokens do not depend on who else is served."""
    rows = [[(300, 301)], [(90, 91)], [(20, 21)], [(0, 230)], [(70, 150)]]
    case = make_case(rows, Heads(8, 4, 64), dtype)
    plan = _plan(case)
    alone = torch.cat([_one(case, row) for row in range(len(rows))])
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            assert torch.equal(case.attend(_plan(case), None, None, None), alone)
            assert torch.equal(case.attend(plan, None, None, None), alone)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_and_values_go_where_torch_would_put_them(dtype):
    """Views of one joined product, as the fused forwards give them, and of another type than the pool's."""
    case = make_case([[(0, 40)], [(20, 21)]], Heads(4, 2, 24), dtype=dtype)
    joined = torch.randn(41, 8, 24)
    keys, values = joined[:, 4:6], joined[:, 6:].transpose(1, 2).contiguous().transpose(1, 2)
    expected = case.pool[0].clone()
    ReferencePlan(case.batch, case.pool, case.chunk).write(
        expected, case.batch.write_places, keys.to(dtype), values.to(dtype)
    )
    plan = _plan(case)
    plan.write(case.pool[0], case.batch.write_places, keys, values)
    assert torch.equal(case.pool[0].nan_to_num(9e9), expected.nan_to_num(9e9))
    with pytest.raises(IndexError, match=f"place {len(expected)} is not one of"):
        plan.write(case.pool[0], torch.full((41,), len(expected)), keys, values)
    for places, given in ((case.batch.write_places.int(), keys), (case.batch.write_places, keys[:, :1])):
        with pytest.raises(AssertionError):
            plan.write(case.pool[0], places, given, values)


@pytest.mark.parametrize(
    ("said", "version"),
    [
        ("cc (Debian 12.2.0-14+deb12u1) 12.2.0", "cc 12.2.0"),
        ("Ubuntu clang version 18.1.3 (1ubuntu1)", "clang 18.1.3"),
        ("tcc", "tcc"),
    ],
)
def test_the_version_is_the_compilers(said, version):
    backend = NativeBackend(64)
    backend._library = replace(backend._library, compiler=said)
    assert backend.version == version


def _one(case, row):
    span = list(case.batch.spans)[row]
    case.attend(_plan(case), None, None, None)  # everybody's keys are in the pool
    batch = replace(case.batch, spans=Spans.of([replace(span, first=0)]))
    backend = NativeBackend(case.queries.shape[2], case.pool.dtype)
    plan = backend.plan(batch, case.pool, case.chunk)
    queries = case.queries[span.first : span.first + span.queries]
    return plan.attend(case.pool[1], queries, case.keys, case.values, Scores())
