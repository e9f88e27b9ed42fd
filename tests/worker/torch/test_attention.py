from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pensieve.device.attention import Iteration, attending, paged_attention
from pensieve.device.kernels import reference
from pensieve.errors import UnsupportedModel

from .kernels.cases import Heads, make_case

CHUNK, HEADS, KV_HEADS, DIM = 4, 4, 2, 8
SMALL = Heads(HEADS, KV_HEADS, DIM)
CPU = torch.device("cpu")


def test_a_failed_forward_leaves_no_iteration_behind() -> None:
    batch = make_case([[(0, 3)]], SMALL, chunk=CHUNK).batch
    with pytest.raises(RuntimeError), attending(Iteration(batch, torch.zeros(1), CHUNK)):
        raise RuntimeError("x")
    with pytest.raises(LookupError):
        paged_attention(SimpleNamespace(layer_idx=0), *(torch.zeros(1, 2, 3, 8) for _ in range(3)), None)


def test_sinks_are_refused() -> None:
    q = torch.zeros(1, 2, 3, 8)
    with pytest.raises(UnsupportedModel, match="s_aux"):
        paged_attention(SimpleNamespace(layer_idx=0), q, q, q, None, s_aux=torch.zeros(2))


def test_every_layer_waits_before_its_kv_is_touched() -> None:
    batch = make_case([[(0, 3)]], SMALL, chunk=CHUNK).batch
    pool = torch.zeros(2, 400 * CHUNK, 2, KV_HEADS, DIM)
    waited: list[int] = []

    def wait(layer: int) -> None:
        assert not pool[layer].any()
        waited.append(layer)

    q, k = torch.ones(1, HEADS, 3, DIM), torch.ones(1, KV_HEADS, 3, DIM)
    with attending(Iteration(batch, pool, CHUNK, wait)):
        for layer in range(2):
            paged_attention(SimpleNamespace(layer_idx=layer), q, k, k, None)
    assert waited == [0, 1]
    assert pool.sum() == 2 * 3 * 2 * KV_HEADS * DIM


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 120])
def test_long_contexts_attend_by_themselves(window: int | None, softcap: float | None) -> None:
    """Blocks in order, in two runs, scattered, and two short contexts, in one batch; NaN everywhere else."""
    lengths, firsts = [150, 199, 71, 12, 9], [(0,), (50, 200), tuple(range(300, 390, 5)), (393,), (396,)]
    tables = []
    for stop, runs in zip(lengths, firsts, strict=True):
        chunks = -(-stop // CHUNK)
        each = -(-chunks // len(runs))
        tables.append([first + i for first in runs for i in range(each)][:chunks])
    case = make_case([[(stop - 1, stop)] for stop in lengths], SMALL, chunk=CHUNK, tables_of=tables)
    plan = reference.ReferenceBackend().plan(case.batch, case.pool, CHUNK)
    pieces = plan.work(window, softcap is not None)
    told = [(piece.rows, isinstance(piece.places, slice)) for piece in pieces]  # type: ignore[union-attr]
    assert told == [(1, False), (1, True), (1, False), (2, False)]
    case.check(case.attend(plan, 0.3, window, softcap), case.expected(0.3, window, softcap))
