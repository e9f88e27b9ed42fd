"""Keys in boxes of a tensor descriptor, in Triton's interpreter: what pointers give, and what is right."""

from __future__ import annotations

import pytest
import torch

from pensieve.device.kernels import triton_backend
from pensieve.device.kernels.triton_backend import OncePlan, TritonBackend, TritonPointersBackend

from .cases import Heads, make_case

# A prompt over a long context (split along its keys), one from the start, a recovery of two runs, and decode rows.
ROWS = [[(300, 320)], [(0, 40)], [(3, 4), (40, 60)], [(70, 71)]]


@pytest.fixture(autouse=True)
def boxes(monkeypatch):
    """The interpreter is taken for a GPU of capability 8."""
    monkeypatch.setattr(triton_backend, "_SHARED_PRODUCTS", (8,))


@pytest.mark.parametrize(
    ("heads", "dtype", "chunk", "softcap"),
    [(Heads(4, 1, 24), torch.bfloat16, 32, None), (Heads(2, 2, 16), torch.float16, 64, 2.0)],
    ids=str,
)
def test_boxes_are_what_pointers_are(heads, dtype, chunk, softcap):
    """Blocks of one box and of two; heads of no power of two, whose boxes reach beyond them."""
    case = make_case(ROWS, heads, dtype, chunk)
    plans = [backend().plan(case.batch, case.pool, chunk) for backend in (TritonBackend, TritonPointersBackend)]
    got, by_pointers = (case.attend(plan, 0.3, None, softcap) for plan in plans)
    assert [plan._launches[None].tiles.boxed for plan in plans if isinstance(plan, OncePlan)] == [True, False]
    assert len(plans[0]._launches[None].joins), "something was split"
    assert float((got.float() - by_pointers.float()).abs().max()) <= 2 * torch.finfo(dtype).eps, "the last bit at most"
    case.check(got, case.expected(0.3, None, softcap))


def test_a_layer_with_a_window_is_loaded_by_pointers():
    """Beside one without, in the same iteration."""
    case = make_case([[(40, 80)]], Heads(2, 2, 16), torch.bfloat16, 32)
    plan = TritonBackend().plan(case.batch, case.pool, 32)
    for window in (None, 20):
        case.check(case.attend(plan, None, window, None), case.expected(None, window, None))
    assert {window: launch.tiles.boxed for window, launch in plan._launches.items()} == {None: True, 20: False}
