"""Each backend that is installed, on CUDA, against the definition in float64; the kernel inside a captured graph."""

import pytest
import torch

from pensieve.device.asked import BACKENDS
from pensieve.device.kernels.base import Scores
from pensieve.device.model import load_backend
from pensieve.errors import EngineMissing

from ..worker.torch.kernels.cases import MIXED, Heads, make_case

LONG = [[(9000, 9001)], [(3000, 3001)], [(17, 18)], [(0, 700)], [(2000, 2033)], [(0, 64), (500, 700), (1400, 1500)]]


def _backend(name, dtype, dim, chunk):
    try:
        return load_backend(name, torch.device("cuda", 0), dtype, dim, chunk)
    except EngineMissing as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (40, None), (None, 2.0)])
def test_mixed_rows(name, window, softcap):
    backend = _backend(name, torch.bfloat16, 128, 32)
    for rows in (MIXED, LONG):
        case = make_case(rows, Heads(8, 2, 128), torch.bfloat16, 32, "cuda")
        got = case.attend(backend.plan(case.batch, case.pool, 32), 0.1, window, softcap)
        case.check(got, case.expected(0.1, window, softcap))


SHAPES = [Heads(4, 4, 64), Heads(32, 8, 128), Heads(14, 2, 80), Heads(8, 4, 256)]
TYPES = [torch.float32, torch.float16, torch.bfloat16]
# Each takes some seconds to compile, so blocks of other sizes are tried on one shape alone.
KINDS = [*((heads, dtype, 32) for heads in SHAPES for dtype in TYPES), *((SHAPES[1], TYPES[2], n) for n in (16, 128))]


@pytest.mark.parametrize(("heads", "dtype", "chunk"), KINDS, ids=str)
def test_the_kernel_on_all_shapes(heads, dtype, chunk):
    backend = _backend("triton", dtype, heads.dim, chunk)
    batches = [[[(2100, 2101)], [(4, 5)]], [[(0, 300)]], MIXED]
    for rows in batches:
        case = make_case(rows, heads, dtype, chunk, "cuda")
        case.check(
            case.attend(backend.plan(case.batch, case.pool, chunk), None, None, None), case.expected(None, None, None)
        )


def test_offsets_beyond_two_to_the_31():
    """A layer of 2^31 elements and more: the last block is past what 32 bits can address."""
    backend = _backend("triton", torch.bfloat16, 128, 32)
    tokens = 2**31 // (2 * 8 * 128) + 64
    if torch.cuda.mem_get_info()[0] < 2.2 * tokens * 2 * 8 * 128 * 2:
        pytest.skip("needs 10 GB of free GPU memory")
    case = make_case([[(50, 51)]], Heads(32, 8, 128), torch.bfloat16, 32, "cuda")
    expected = case.expected(None, None, None)
    blocks = len(case.pool[1]) // 32
    pool = torch.zeros(1, tokens, 2, 8, 128, dtype=torch.bfloat16, device="cuda")
    pool[0, -blocks * 32 :] = case.pool[1]
    for span in case.batch.spans:
        span.blocks[:] += tokens // 32 - blocks  # the arrays are this test's own
    plan = backend.plan(case.batch, pool, 32)
    places = case.batch.write_places + tokens - blocks * 32
    plan.write(pool[0], places, case.keys, case.values)
    got = plan.attend(pool[0], case.queries, case.keys, case.values, Scores())
    assert float((got.cpu().double() - expected).abs().max()) < 0.05
