"""The inputs of the attention benchmark, and ways of attending without a paged kernel."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F

from pensieve.plan import Row, Sample
from pensieve.worker.torch.batch import Batch, BlockTables, Span, build_batch
from pensieve.worker.torch.kernels.base import AttentionBackend, Plan

Runs = Sequence[tuple[int, int]]

_BEYOND_CACHES = {"cuda": 256 * 2**20, "cpu": 32 * 2**20}  # on a CPU a compromise with the time that a call takes
_MOST_LAYERS = 32


@dataclass(frozen=True, slots=True)
class Shape:
    heads: int
    kv_heads: int
    dim: int
    chunk: int


@dataclass(frozen=True)
class Inputs:
    """pool [layers, tokens, 2, kv_heads, dim], its blocks scattered; queries [tokens, heads, dim]; keys, values with
    kv_heads."""

    shape: Shape
    batch: Batch
    pool: torch.Tensor
    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    @property
    def layers(self) -> int:
        return len(self.pool)

    @property
    def uniform(self) -> bool:
        """All spans are at the same positions, so that they can be stacked without padding."""
        return len({(span.start, span.stop) for span in self.batch.spans}) == 1

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that one layer must read; what several runs of a recovery share counts once."""
        ends: dict[int, int] = {}
        for span in self.batch.spans:
            first = int(span.blocks[0])
            ends[first] = max(span.stop, ends.get(first, 0))
        return sum(ends.values()) * int(self.pool[0, 0].nbytes)

    @cached_property
    def places(self) -> list[torch.Tensor]:
        """Where each span's context lies in the pool, token by token."""
        chunk = self.shape.chunk
        each = [(span.blocks[:, None] * chunk + np.arange(chunk)).reshape(-1)[: span.stop] for span in self.batch.spans]
        return [torch.from_numpy(x).to(self.pool.device) for x in each]


def make_inputs(
    rows: Sequence[Runs],
    shape: Shape,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
    layers: int | None = None,
) -> Inputs:
    """One request a row. layers: by default so many that they do not fit the caches and a call reads from memory."""
    blocks = [-(-runs[-1][1] // shape.chunk) for runs in rows]
    tokens = sum(blocks) * shape.chunk
    layer_bytes = tokens * 2 * shape.kv_heads * shape.dim * dtype.itemsize
    layers = layers or max(1, min(_MOST_LAYERS, -(-_BEYOND_CACHES[device.type] // layer_bytes)))
    order = list(range(sum(blocks)))
    random.Random(seed).shuffle(order)
    tables, plan_rows = BlockTables(), []
    for slot, (runs, count) in enumerate(zip(rows, blocks, strict=True)):
        tables.overwrite(slot, 0, [order.pop() for _ in range(count)])
        new = sum(stop - start for start, stop in runs)
        plan_rows.append(Row(slot, tuple(runs), (1,) * new, Sample(runs[-1][1])))
    batch = build_batch(plan_rows, tables, {}, shape.chunk, device)
    source = torch.Generator(device).manual_seed(seed)

    def noise(*sizes: int) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype, device=device).normal_(generator=source)

    count = len(batch.token_ids)
    queries = noise(count, shape.heads, shape.dim)
    keys, values = (noise(count, shape.kv_heads, shape.dim) for _ in range(2))
    pool = noise(layers, tokens, 2, shape.kv_heads, shape.dim)
    pool[:, batch.write_places] = torch.stack((keys, values), dim=1)
    return Inputs(shape, batch, pool, queries, keys, values)


def paged(backend: AttentionBackend, inputs: Inputs) -> Callable[[], torch.Tensor]:
    """Attend over the blocks where they are. Returns [tokens, heads, dim] of the last layer."""
    plan = backend.plan(inputs.batch, inputs.pool, inputs.shape.chunk)

    def call() -> torch.Tensor:
        for pool in inputs.pool:
            result = plan.attend(pool, inputs.queries, inputs.keys, inputs.values, None, None, None)
        return result

    return call


def copied_out(inputs: Inputs) -> Callable[[], torch.Tensor]:
    """Gather each context from its blocks, in every layer again, and attend to the contiguous copy."""
    spans, places = inputs.batch.spans, inputs.places
    if inputs.uniform:  # one gather and one call for all
        places, groups = [torch.cat(places)], [inputs.queries.unflatten(0, (len(spans), -1))]
    else:
        groups = [inputs.queries[span.first : span.first + span.queries][None] for span in spans]

    def call() -> torch.Tensor:
        for pool in inputs.pool:
            flat = pool.flatten(1)
            pieces = []
            for queries, own in zip(groups, places, strict=True):
                kv = flat.index_select(0, own).view(len(queries), -1, *pool.shape[1:])
                pieces.append(_attend(queries, kv[:, :, 0].transpose(1, 2), kv[:, :, 1].transpose(1, 2)))
        return torch.cat([piece.flatten(0, 1) for piece in pieces])

    return call


def contiguous(inputs: Inputs) -> Callable[[], torch.Tensor]:
    """Contexts of one length that are contiguous already, head by head: what paging is compared with."""
    assert inputs.uniform
    spans = inputs.batch.spans
    together, queries = torch.cat(inputs.places), inputs.queries.unflatten(0, (len(spans), -1))
    layers = [
        pool[together].unflatten(0, (len(spans), -1)).permute(2, 0, 3, 1, 4).contiguous().unbind(0)
        for pool in inputs.pool
    ]

    def call() -> torch.Tensor:
        for keys, values in layers:
            result = _attend(queries, keys, values)
        return result.flatten(0, 1)

    return call


def one_at_a_time(backend: AttentionBackend, inputs: Inputs) -> Callable[[], torch.Tensor]:
    """One query of each request a launch, as with a kernel that takes single queries only. Rows of one length."""
    spans = inputs.batch.spans
    new = spans[0].queries
    assert {span.queries for span in spans} == {new}
    plans: list[Plan] = []
    singles_of: list[tuple[torch.Tensor, ...]] = []
    for offset in range(new):
        at = torch.tensor([span.first + offset for span in spans], device=inputs.pool.device)
        singles = tuple(
            Span(row, span.start + offset, span.start + offset + 1, span.blocks) for row, span in enumerate(spans)
        )
        batch = Batch(
            inputs.batch.token_ids[at], inputs.batch.positions[at], inputs.batch.write_places[at], singles, at, ()
        )
        plans.append(backend.plan(batch, inputs.pool, inputs.shape.chunk))
        singles_of.append((inputs.queries[at], inputs.keys[at], inputs.values[at]))

    def call() -> torch.Tensor:
        for pool in inputs.pool:
            pieces = [
                plan.attend(pool, q, k, v, None, None, None) for plan, (q, k, v) in zip(plans, singles_of, strict=True)
            ]
        return torch.stack(pieces, dim=1).flatten(0, 1)

    return call


def _attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """torch's own attention, causal and aligned at the end: [batch, m, heads, dim].

    queries [batch, m, heads, dim]; keys, values [batch, kv_heads, n, dim]. No key is repeated: on a GPU the kernel knows
    groups, on a CPU the queries of a group are folded into one dimension.
    """
    new, length = queries.shape[1], keys.shape[2]
    if queries.is_cuda:
        from torch.nn.attention.bias import causal_lower_right

        mask = causal_lower_right(new, length) if new > 1 else None
        result: torch.Tensor = F.scaled_dot_product_attention(
            queries.transpose(1, 2), keys, values, attn_mask=mask, enable_gqa=True
        )
        return result.transpose(1, 2)
    folded = (
        queries.unflatten(2, (keys.shape[1], -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    )  # [batch, kv, group * m, dim]
    mask = None
    if new > 1:
        mask = torch.full((new, length), float("-inf"), dtype=queries.dtype).triu_(length - new + 1)
        mask = mask.repeat(folded.shape[2] // new, 1)
    result = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask)
    return result.unflatten(2, (-1, new)).permute(0, 3, 1, 2, 4).flatten(2, 3)
