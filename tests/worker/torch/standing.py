"""Stand-ins on a CPU for what records and replays graphs on a GPU."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from pensieve.device.batch import Batch
from pensieve.device.fused import build_fused
from pensieve.device.graphs import Work
from pensieve.device.kernels.base import Plan, Scores
from pensieve.device.kernels.reference import ReferenceBackend
from pensieve.device.model import LoadedModel

from .driver import tiny_model


class Tracer:
    """Records the operations of `work` with the tensors they touched, as a CUDA graph records kernels and addresses: a
    replay runs no Python of the model, and sees a changed input only where it was changed in place."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def record(self, work: Work) -> Work:
        self.recorded += 1
        work()
        graph = make_fx(work)()

        def replay() -> torch.Tensor:
            self.replayed += 1
            result: torch.Tensor = graph()
            return result

        return replay


class TensorPlan(Plan):
    """Single positions over block tables in plain tensor operations of fixed shape."""

    def __init__(self, pool: torch.Tensor, chunk_tokens: int, rows: int, max_blocks: int) -> None:
        self._chunk = chunk_tokens
        self._tables = torch.zeros(rows, max_blocks, dtype=torch.int64)
        self._lengths = torch.zeros(rows, dtype=torch.int64)

    def update(self, batch: Batch) -> None:
        self._lengths.zero_()
        for row, span in enumerate(batch.spans):
            self._tables[row, : len(span.blocks)] = torch.from_numpy(span.blocks)
            self._lengths[row] = span.stop

    def attend(
        self, pool: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, how: Scores
    ) -> torch.Tensor:
        scaling, window, softcap = how
        rows, heads, head_dim = queries.shape
        kv_heads, chunk = pool.shape[2], self._chunk
        places = (self._tables[:, :, None] * chunk + torch.arange(chunk)).flatten(1)  # [rows, width]
        position = torch.arange(places.shape[1])[None]
        seen = position < self._lengths[:, None]
        if window is not None:
            seen = seen & (position >= self._lengths[:, None] - window)
        kv = pool.index_select(0, places.flatten()).view(rows, -1, 2, kv_heads, head_dim)
        kv = torch.where(seen[:, :, None, None, None], kv, 0.0)
        q = queries.view(rows, kv_heads, -1, head_dim) * (head_dim**-0.5 if scaling is None else scaling)
        scores = torch.einsum("rkgd,rwkd->rkgw", q, kv[:, :, 0])
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        weights = torch.softmax(scores.masked_fill(~seen[:, None, None, :], -1e30), dim=-1)
        return torch.einsum("rkgw,rwkd->rkgd", weights, kv[:, :, 1]).reshape(rows, heads, head_dim)


class TensorBackend(ReferenceBackend):
    """The reference, and standing plans beside it."""

    name = "tensors"
    captures = True

    def standing(self, pool: torch.Tensor, chunk_tokens: int, rows: int, max_blocks: int) -> TensorPlan:
        return TensorPlan(pool, chunk_tokens, rows, max_blocks)


def capturing_model(name: str, fused: bool = True) -> LoadedModel:
    """A tiny model that attends through TensorBackend; unpacked, since packed weights cannot be traced."""
    model = tiny_model(name, fused=fused)
    forward = build_fused(model.module, pack=False) if fused else model.forward
    assert not isinstance(forward, str)
    return replace(model, forward=forward, attention=TensorBackend())
