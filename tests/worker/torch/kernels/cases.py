"""Batches over poisoned pools, and what attention over them is, in float64 and by the definition."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pensieve.core.plan import Row, Sample
from pensieve.device.batch import Batch, BlockTables, Span, Spans, build_batch
from pensieve.device.kernels.base import Plan, Scores

Runs = Sequence[tuple[int, int]]

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# Every kind of row at once: decode (long, short, the first token), prefill, append, and recoveries of several runs.
MIXED: list[Runs] = [
    [(299, 300)],
    [(5, 6)],
    [(0, 1)],
    [(0, 40)],
    [(70, 90)],
    [(10, 30), (50, 60), (80, 85)],
    [(0, 3), (210, 211)],
]


@dataclass(frozen=True, slots=True)
class Heads:
    heads: int = 4
    kv_heads: int = 2
    dim: int = 64


@dataclass(frozen=True, slots=True)
class Case:
    """pool [2, tokens, 2, kv_heads, head_dim] is NaN but for positions that a row owns; layer 1 is attended to."""

    batch: Batch
    pool: torch.Tensor
    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    chunk: int

    def attend(self, plan: Plan, scaling: float | None, window: int | None, softcap: float | None) -> torch.Tensor:
        plan.write(self.pool[1], self.batch.write_places, self.keys, self.values)
        return plan.attend(self.pool[1], self.queries, self.keys, self.values, Scores(scaling, window, softcap))

    def expected(self, scaling: float | None, window: int | None, softcap: float | None) -> torch.Tensor:
        """[tokens, heads, head_dim] in float64, from the keys and values as they were stored."""
        tokens, heads, dim = self.queries.shape
        scale = dim**-0.5 if scaling is None else scaling
        result = torch.empty(tokens, heads, dim, dtype=torch.float64)
        for span in self.batch.spans:
            blocks = torch.from_numpy(span.blocks.copy())
            places = (blocks[:, None] * self.chunk + torch.arange(self.chunk)).view(-1)[: span.stop]
            stored = self.pool[1].cpu()[places].double()
            group = heads // stored.shape[2]
            keys, values = (stored[:, i].repeat_interleave(group, dim=1) for i in range(2))
            queries = self.queries[span.first : span.first + span.queries].cpu().double()
            scores = torch.einsum("qhd,nhd->hqn", queries, keys) * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            position, key = torch.arange(span.start, span.stop)[:, None], torch.arange(span.stop)
            hidden = key > position if window is None else (key > position) | (key <= position - window)
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            result[span.first : span.first + span.queries] = torch.einsum("hqn,nhd->qhd", weights, values)
        return result

    def check(self, got: torch.Tensor, expected: torch.Tensor) -> None:
        assert torch.isnan(self.pool[0]).all(), "the other layer is not touched"
        difference = float((got.cpu().double() - expected).abs().max())
        assert difference <= TOLERANCE[got.dtype] * max(1.0, float(expected.abs().max())), difference


def spans_of(spans: Sequence[Span]) -> Spans:
    numbers = [(span.first, span.start, span.stop, len(span.blocks)) for span in spans]
    return Spans(*np.ascontiguousarray(np.array(numbers).T), np.concatenate([span.blocks for span in spans]))


def make_case(
    rows: Sequence[Runs],
    heads: Heads = Heads(),
    dtype: torch.dtype = torch.float32,
    chunk: int = 16,
    device: str = "cpu",
    seed: int = 0,
    tables_of: Sequence[Sequence[int]] = (),
) -> Case:
    """A row for each sequence of runs, over scattered blocks (or those of tables_of); positions below its last run's end hold
    keys already."""
    source = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=source).to(dtype).to(device)

    blocks = max(sum(-(-runs[-1][1] // chunk) for runs in rows) + 5, *(1 + max(one) for one in tables_of), 0)
    order = torch.randperm(blocks, generator=source).tolist()
    pool = torch.full((2, blocks * chunk, 2, heads.kv_heads, heads.dim), float("nan"), dtype=dtype, device=device)
    tables, plan_rows = BlockTables(), []
    for slot, runs in enumerate(rows):
        stop = runs[-1][1]
        own = tables_of[slot] if tables_of else [order.pop() for _ in range(-(-stop // chunk))]
        tables.overwrite(slot, 0, own)
        places = (torch.tensor(own)[:, None] * chunk + torch.arange(chunk)).view(-1)[:stop].to(device)
        pool[1, places] = noise(stop, 2, heads.kv_heads, heads.dim)
        computed = sum(stop - start for start, stop in runs)
        plan_rows.append(Row(slot, tuple(runs), (1,) * computed, Sample(stop)))
    batch = build_batch(plan_rows, tables, chunk, torch.device(device))
    count = len(batch.token_ids)
    return Case(
        batch,
        pool,
        noise(count, heads.heads, heads.dim),
        noise(count, heads.kv_heads, heads.dim),
        noise(count, heads.kv_heads, heads.dim),
        chunk,
    )
