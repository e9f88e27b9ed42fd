"""FlashInfer's paged prefill, as far as its buffers go and with what it computes; a model of the library, not the library."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from .kernels import Kernel
from .machine import machine
from .tensors import on_inner

_PART = 1024  # integers of a plan for each of: spans, queries, pages, last page


class Wrapper:
    """BatchPrefillWithPagedKVCacheWrapper (FlashInfer 0.6, scheduler.cuh): the host writes the plan into page-locked memory,
    and one asynchronous copy takes it to the device, where the kernel reads it.

    made, runs: of all wrappers. rows: of queries that the kernel computed.
    """

    made = runs = rows = 0

    def __init__(self, workspace: torch.Tensor, layout: str) -> None:
        assert layout == "NHD"
        Wrapper.made += 1
        self.pinned = torch.empty(4 * _PART, dtype=torch.int32, pin_memory=True)
        self.numbers = torch.zeros(4 * _PART, dtype=torch.int32, device=workspace.device)

    def plan(self, queries: Any, pages: Any, blocks: Any, last: Any, *sizes: int, **how: Any) -> None:
        self.pinned[0] = len(last)
        for at, part in enumerate((queries, pages, last), 1):
            self.pinned[at * _PART : at * _PART + len(part)].copy_(part)
        self.numbers.copy_(self.pinned, non_blocking=True)
        self.blocks, self.how = blocks, how

    def run(self, queries: torch.Tensor, paged: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        Wrapper.runs += 1
        out = torch.empty_like(queries)
        how = {name: self.how[name] for name in ("sm_scale", "window_left", "logits_soft_cap")}
        _PREFILL[(1,)](queries, *paged, out, self.numbers, self.blocks, **how)
        return out


def _prefill(
    q: Any, k: Any, v: Any, out: Any, numbers: Any, blocks: Any, sm_scale: float | None, window_left: int,
    logits_soft_cap: float | None,
) -> None:  # fmt: skip
    """q, out [tokens, heads, head_dim]; k, v [blocks, tokens of a block, kv_heads, head_dim]."""

    def compute() -> Any:
        parts = numbers.inner.view(4, _PART).tolist()
        spans, (queries, pages, last) = parts[0][0], parts[1:]
        read, chunk = [], k.inner.shape[1]
        scale = q.inner.shape[2] ** -0.5 if sm_scale is None else sm_scale
        for span in range(spans):
            own = blocks.inner[pages[span] : pages[span + 1]].long()
            used = (len(own) - 1) * chunk + last[span]
            read.append(own.numpy())
            rows = slice(queries[span], queries[span + 1])
            keys, values = (x.inner[own].flatten(0, 1)[:used].double() for x in (k, v))
            mine = q.inner[rows].double().unflatten(1, (keys.shape[1], -1))
            scores = torch.einsum("qkgd,nkd->kgqn", mine, keys) * scale
            if logits_soft_cap:
                scores = logits_soft_cap * torch.tanh(scores / logits_soft_cap)
            here, there = torch.arange(used - len(mine), used)[:, None], torch.arange(used)
            hidden = there > here
            if window_left >= 0:
                hidden = hidden | (there < here - window_left)
            share = torch.softmax(scores.masked_fill(hidden, -math.inf), -1)
            out.inner[rows] = torch.einsum("kgqn,nkd->qkgd", share, values).flatten(1, 2).to(out.inner.dtype)
            Wrapper.rows += len(mine)
        return np.unique(np.concatenate(read))

    rows = on_inner(compute)
    reads = [q.touched, numbers.touched, blocks.touched, k.rows(rows), v.rows(rows)]
    machine().launch("prefill of a library", reads, [out.touched], used=True)


_PREFILL = Kernel(_prefill)


def module() -> Any:
    """In place of the package."""
    Wrapper.made = Wrapper.runs = Wrapper.rows = 0
    return SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Wrapper, __version__="0.6.18", __spec__=None)
