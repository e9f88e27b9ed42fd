from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pensieve.core.plan import Row, Sample
from pensieve.device.attention import Iteration, attending, paged_attention
from pensieve.device.batch import Batch, BlockTables, build_batch
from pensieve.device.kernels import reference
from pensieve.errors import UnsupportedModel

CHUNK, HEADS, KV_HEADS, DIM = 4, 4, 2, 8
CPU = torch.device("cpu")


def _batch(contexts: list[tuple[int, int]], blocks: int = 400) -> tuple[Batch, BlockTables]:
    """One row a (start, stop), with scattered tables."""
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(1)).tolist()
    tables, rows = BlockTables(), []
    for slot, (start, stop) in enumerate(contexts):
        tables.overwrite(slot, 0, [order.pop() for _ in range(-(-stop // CHUNK))])
        rows.append(Row(slot, ((start, stop),), (1,) * (stop - start), Sample(stop)))
    return build_batch(rows, tables, {}, CHUNK, CPU), tables


def _attend(
    batch: Batch, pool: torch.Tensor, window: int | None, softcap: float | None
) -> tuple[Iteration, torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(2)
    count = len(batch.token_ids)
    q = torch.randn(1, HEADS, count, DIM, generator=source)
    k, v = (torch.randn(1, KV_HEADS, count, DIM, generator=source) for _ in range(2))
    iteration = Iteration(batch, pool, CHUNK)
    module = SimpleNamespace(layer_idx=1)
    with attending(iteration):
        output, _ = paged_attention(module, q, k, v, None, scaling=0.3, sliding_window=window, softcap=softcap)
    return iteration, q, output


def _one_query(q: torch.Tensor, kv: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """[heads, head_dim] by the definition; q [heads, head_dim], kv [tokens, 2, kv_heads, head_dim]."""
    result = torch.empty(HEADS, DIM)
    for head in range(HEADS):
        keys, values = kv[:, 0, head // 2], kv[:, 1, head // 2]
        scores = keys @ q[head] * 0.3
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        result[head] = torch.softmax(scores, 0) @ values
    return result


@pytest.mark.parametrize("window", [None, 5, 64])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize(
    "contexts",
    [
        [(0, 1)],
        [(30, 31)],
        [(0, 300)],
        [(9, 21)],
        [(30, 31), (29, 30), (100, 101), (3, 4), (0, 1), (99, 100)],
        [(0, 7), (30, 31), (12, 25), (280, 281), (5, 6), (0, 1), (0, 33), (31, 34)],
    ],
)
def test_equals_the_definition(contexts: list[tuple[int, int]], softcap: float | None, window: int | None) -> None:
    """Unwritten places hold NaN: only keys inside the context and the window may be read."""
    batch, tables = _batch(contexts)
    pool = torch.full((2, 400 * CHUNK, 2, KV_HEADS, DIM), float("nan"))
    places = []
    for slot, (_, stop) in enumerate(contexts):
        blocks = torch.from_numpy(tables.blocks(slot, -(-stop // CHUNK)).copy())
        places.append((blocks[:, None] * CHUNK + torch.arange(CHUNK)).view(-1)[:stop])
        pool[1, places[-1]] = torch.randn(stop, 2, KV_HEADS, DIM, generator=torch.Generator().manual_seed(slot))
    iteration, q, output = _attend(batch, pool, window, softcap)
    assert iteration.layers == [1]
    assert torch.isnan(pool[0]).all(), "the other layer is not touched"
    assert sum(span.queries for span in batch.spans) == output.shape[1]
    by_stop = {(span.start, span.stop): span for span in batch.spans}
    for slot, (start, stop) in enumerate(contexts):
        span = by_stop[(start, stop)]
        for offset in range(stop - start):
            position = start + offset
            low = 0 if window is None else max(0, position - window + 1)
            kv = pool[1, places[slot][low : position + 1]]
            expected = _one_query(q[0, :, span.first + offset], kv, softcap)
            assert torch.allclose(output[0, span.first + offset], expected, atol=2e-5)


def test_a_failed_forward_leaves_no_iteration_behind() -> None:
    batch, _ = _batch([(0, 3)])
    with pytest.raises(RuntimeError), attending(Iteration(batch, torch.zeros(1), CHUNK)):
        raise RuntimeError("x")
    with pytest.raises(LookupError):
        paged_attention(SimpleNamespace(layer_idx=0), *(torch.zeros(1, 2, 3, 8) for _ in range(3)), None)


def test_sinks_are_refused() -> None:
    q = torch.zeros(1, 2, 3, 8)
    with pytest.raises(UnsupportedModel, match="s_aux"):
        paged_attention(SimpleNamespace(layer_idx=0), q, q, q, None, s_aux=torch.zeros(2))


def test_every_layer_waits_before_its_kv_is_touched() -> None:
    batch, _ = _batch([(0, 3)])
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


def test_batch_puts_single_queries_first_by_falling_context() -> None:
    tables = BlockTables()
    for slot in range(3):
        tables.overwrite(slot, 0, range(slot * 10, slot * 10 + 10))
    rows = [
        Row(0, ((0, 2), (6, 7)), (11, 12, 13), Sample(7)),
        Row(1, ((5, 8),), (21, 22, 23), None),
        Row(2, ((20, 21),), None, Sample(21, key=5)),
    ]
    batch = build_batch(rows, tables, {2: 99}, CHUNK, CPU)
    assert batch.token_ids.tolist() == [99, 13, 11, 12, 21, 22, 23]
    assert batch.positions.tolist() == [20, 6, 0, 1, 5, 6, 7]
    assert batch.write_places.tolist() == [100, 6, 0, 1, 45, 46, 47]
    assert [(s.first, s.start, s.stop) for s in batch.spans] == [(0, 20, 21), (1, 6, 7), (2, 0, 2), (4, 5, 8)]
    assert batch.sampled == ((2, Sample(21, key=5)), (0, Sample(7)))
    assert batch.logits_at.tolist() == [0, 1]


def test_tables_are_overwritten_from_a_chunk_on() -> None:
    tables = BlockTables()
    tables.overwrite(0, 0, [5, 6, 7])
    tables.overwrite(0, 1, [8])
    tables.overwrite(0, 40, [9])
    assert tables.blocks(0, 4).tolist() == [5, 8, 7, -1]
    assert tables.blocks(0, 41)[-1] == 9


def test_a_position_without_a_block_is_our_own_bug() -> None:
    tables = BlockTables()
    tables.overwrite(0, 0, [5])
    with pytest.raises(AssertionError, match="no block"):
        build_batch([Row(0, ((3, 5),), (1, 2), None)], tables, {}, CHUNK, CPU)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 120])
def test_long_contexts_attend_by_themselves(window: int | None, softcap: float | None) -> None:
    """Blocks in order, in two runs, scattered, and two short contexts, in one batch; NaN everywhere else."""
    lengths, firsts = [150, 199, 71, 12, 9], [(0,), (50, 200), tuple(range(300, 390, 5)), (393,), (396,)]
    tables, rows = BlockTables(), []
    pool = torch.full((2, 400 * CHUNK, 2, KV_HEADS, DIM), float("nan"))
    places = []
    for slot, (stop, runs) in enumerate(zip(lengths, firsts, strict=True)):
        chunks = -(-stop // CHUNK)
        each = -(-chunks // len(runs))
        blocks = [first + i for first in runs for i in range(each)][:chunks]
        tables.overwrite(slot, 0, blocks)
        rows.append(Row(slot, ((stop - 1, stop),), (1,), Sample(stop)))
        places.append((torch.tensor(blocks)[:, None] * CHUNK + torch.arange(CHUNK)).view(-1)[:stop])
        pool[1, places[-1]] = torch.randn(stop, 2, KV_HEADS, DIM, generator=torch.Generator().manual_seed(slot))
    batch = build_batch(rows, tables, {}, CHUNK, CPU)
    iteration, q, output = _attend(batch, pool, window, softcap)
    assert isinstance(iteration.plan, reference.ReferencePlan)
    pieces = iteration.plan.work(window, softcap is not None)
    told = [(piece.rows, isinstance(piece.places, slice)) for piece in pieces]  # type: ignore[union-attr]
    assert told == [(1, False), (1, True), (1, False), (2, False)]
    for span in batch.spans:
        slot = lengths.index(span.stop)
        low = 0 if window is None else max(0, span.stop - window)
        expected = _one_query(q[0, :, span.first], pool[1, places[slot][low : span.stop]], softcap)
        assert torch.allclose(output[0, span.first], expected, atol=2e-5)
