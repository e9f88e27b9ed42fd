"""Attention alone: decode, append, mixed and recovery batches, and the paper's microbenchmark, beside every backend here.

One call attends in several layers, enough that their KV does not fit the caches. The plan is made before, as a forward makes
one for all its layers. On a GPU the call is replayed from a CUDA graph where the backend can be captured, so that no time of
launches is measured. The limit is the time to move the KV at the copy bandwidth, or to do the products at the matrix rate,
whichever is longer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F

from pensieve.core.plan import Row, Sample
from pensieve.device.asked import BACKENDS, ON_CPU, candidates
from pensieve.device.batch import Batch, BlockTables, build_batch
from pensieve.device.graphs import record
from pensieve.device.kernels.base import AttentionBackend, Scores
from pensieve.device.model import load_backend
from pensieve.errors import PensieveError
from pensieve.lab.bench.case import OURS, Case, Measured, interleaved
from pensieve.lab.bench.session import Bench
from pensieve.sim.roofline import attended_pairs

Call = Callable[[], torch.Tensor]
Runs = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Shape:
    heads: int
    kv_heads: int
    dim: int
    chunk: int


_SHAPES = {"cuda": Shape(heads=32, kv_heads=8, dim=128, chunk=32), "cpu": Shape(heads=8, kv_heads=4, dim=64, chunk=32)}
_ROUNDS = {"cuda": 15, "cpu": 7}
_BEYOND_CACHES = {"cuda": 256 * 2**20, "cpu": 32 * 2**20}  # on a CPU a compromise with the time that a call takes
_MOST_LAYERS = 32
_TORCH = f"torch {torch.__version__}"


@dataclass(frozen=True, slots=True)
class Asked:
    """A batch to attend in. rows: of each request the runs of positions that it computes."""

    kind: str
    label: str
    rows: Sequence[Runs]
    context: int
    new: int


def run(bench: Bench) -> None:
    """Measure and record all cases. Raises a PensieveError where the backend that serves here cannot be loaded."""
    bench.measure_limits()
    shape = _SHAPES[bench.device.type]
    backends, absent = find_backends(bench.device, bench.dtype, shape)
    for asked in cases(bench.on_gpu):
        _measure(bench, shape, backends, absent, asked)
    ours = f"{backends[OURS].name} ({backends[OURS].version})"
    bench.note(f"Attention of {shape.heads} query and {shape.kv_heads} KV heads of {shape.dim}; ours is {ours}.")


def find_backends(
    device: torch.device, dtype: torch.dtype, shape: Shape
) -> tuple[dict[str, AttentionBackend], dict[str, str]]:
    """Every backend for this kind of device: those that load, first the one that serves as OURS, and why others do not."""
    found: dict[str, AttentionBackend] = {}
    absent: dict[str, str] = {}
    for name in ON_CPU if device.type == "cpu" else (name for name in BACKENDS if name != "native"):
        try:
            found[name] = load_backend(name, device, dtype, shape.dim, shape.chunk)
        except PensieveError as error:
            absent[name] = str(error)
    serving = next(name for name in candidates("auto", device.type) if name in found)
    return {OURS: found.pop(serving), **found}, absent


def cases(on_gpu: bool) -> list[Asked]:
    """Of the sizes of a GPU; on a CPU an eighth of the requests, and of their tokens. The last one is the paper's."""
    scale = 8 if on_gpu else 1
    context, past, new, recovered = 512 * scale, 256 * scale, 64 * scale, 32 * scale
    ends = [context * quarter // 4 for quarter in (1, 2, 3, 4)]
    mixed = [*([[(past - 1, past)]] * 7 * scale), [(0, new)]]
    return [
        *(
            Asked("decode", f"decode {n} over {at}", [[(at - 1, at)]] * n, at, 1)
            for n, at in ((1, 1024), (8 * scale, context))
        ),
        Asked("append", f"append {scale} x 32 over {context}", [[(context, context + 32)]] * scale, context, 32),
        Asked("mixed", f"mixed: {7 * scale} decode over {past}, prefill {new}", mixed, past, new),
        Asked(
            "recovery", f"recovery: 4 runs of {recovered} in {context}",
            [[(end - recovered, end) for end in ends]], context, recovered,
        ),
        Asked("paper", f"paper: batch {4 * scale}, 8 queries, {past} past", [[(past, past + 8)]] * 4 * scale, past, 8),
    ]  # fmt: skip


def _measure(
    bench: Bench, shape: Shape, backends: Mapping[str, AttentionBackend], absent: Mapping[str, str], asked: Asked
) -> None:
    inputs = make_inputs(asked.rows, shape, bench.device, bench.dtype, seed=0)
    calls: dict[str, Call] = {name: paged(backend, inputs) for name, backend in backends.items()}
    if len({(span.start, span.stop) for span in inputs.batch.spans}) == 1:  # they can be stacked without padding
        calls["contiguous"] = contiguous(inputs)
    replays = {name: _captured(call, bench.device) for name, call in calls.items()}
    with torch.inference_mode():
        best = {name: replays[name] or call for name, call in calls.items()}
        times = interleaved(best, bench.options.repeats or _ROUNDS[bench.device.type], bench.device)
    measured = []
    for name, one in times.items():
        used, captured = backends.get(name), {"captured": replays[name] is not None}
        engine = captured if used is None else {**captured, "backend": used.name}
        measured.append(replace(one, version=_TORCH if used is None else used.version, engine=engine))
    bench.record(_case(bench, inputs, asked), [*measured, *(Measured(name, error=why) for name, why in absent.items())])


def _case(bench: Bench, inputs: Inputs, asked: Asked) -> Case:
    shape, layers = inputs.shape, inputs.layers
    moved = inputs.kv_bytes + 2 * inputs.queries.nbytes  # keys and values once each, queries in, results out
    products = 4 * shape.heads * shape.dim * sum(attended_pairs(span.start, span.stop) for span in inputs.batch.spans)
    memory_ms = moved * layers / bench.copy_bytes_s * 1e3
    matrix_ms = products * layers / bench.matrix_flops_s * 1e3
    sizes = {"kind": asked.kind, "batch": len(asked.rows), "context": asked.context, "new": asked.new, "layers": layers}
    return Case(
        label=asked.label,
        floor=max(memory_ms, matrix_ms),
        floor_is="KV at the copy bandwidth" if memory_ms >= matrix_ms else "products at the matrix rate",
        metric="attention_ms",
        parameters={**sizes, "heads": shape.heads, "kv_heads": shape.kv_heads, "head_dim": shape.dim},
    )


def _captured(call: Call, device: torch.device) -> Call | None:
    """The call as the replay of a CUDA graph; None on a CPU, and where it cannot be captured."""
    if device.type != "cuda":
        return None
    try:
        with torch.inference_mode():
            return record(call, device, torch.cuda.graph_pool_handle())
    except Exception:  # one that waits for the device cannot be captured; one that always raises is recorded when timed
        torch.cuda.synchronize(device)
        return None


# -- the inputs, and ways of attending with and without a paged kernel ------------------------------------------------


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
    def kv_bytes(self) -> int:
        """Bytes of keys and values that one layer must read; what several runs of a recovery share counts once."""
        ends: dict[int, int] = {}
        for span in self.batch.spans:
            first = int(span.blocks[0])
            ends[first] = max(span.stop, ends.get(first, 0))
        return sum(ends.values()) * int(self.pool[0, 0].nbytes)


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
    batch = build_batch(plan_rows, tables, shape.chunk, device)
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
            result = plan.attend(pool, inputs.queries, inputs.keys, inputs.values, Scores())
        return result

    return call


def contiguous(inputs: Inputs) -> Callable[[], torch.Tensor]:
    """Contexts of one length that are contiguous already, head by head: what paging is compared with."""
    chunk, spans = inputs.shape.chunk, inputs.batch.spans
    each = [(span.blocks[:, None] * chunk + np.arange(chunk)).reshape(-1)[: span.stop] for span in spans]
    batch, together = len(spans), torch.from_numpy(np.concatenate(each)).to(inputs.pool.device)
    queries = inputs.queries.unflatten(0, (batch, -1))
    layers = [
        pool[together].unflatten(0, (batch, -1)).permute(2, 0, 3, 1, 4).contiguous().unbind(0) for pool in inputs.pool
    ]

    def call() -> torch.Tensor:
        for keys, values in layers:
            result = _attend(queries, keys, values)
        return result.flatten(0, 1)

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
