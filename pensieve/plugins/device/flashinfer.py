"""FlashInfer's paged prefill kernel, which takes rows of one query too; an optional package, on CUDA only."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from pensieve.device.batch import Batch, Integers
from pensieve.device.kernels.base import Plan, Scores
from pensieve.device.transfers.pinned import sent
from pensieve.errors import EngineMissing

_WORKSPACE_BYTES = 256 * 2**20
PLANS_IN_FLIGHT = 2
"""Iterations that may be in flight at once: a worker's largest depth."""


class FlashInferPlan(Plan):
    """One of FlashInfer's plans for each combination of scale, window and softcap: layers alternate."""

    def __init__(
        self,
        library: Any,
        wrappers: dict[Scores, Any],
        workspaces: dict[Scores, torch.Tensor],
        batch: Batch,
        pool: torch.Tensor,
        chunk_tokens: int,
    ) -> None:
        self._library = library
        self._wrappers, self._workspaces = wrappers, workspaces
        self._chunk_tokens = chunk_tokens
        self._planned: set[Scores] = set()
        spans = batch.spans
        self._queries, self._pages = _indptr(spans.queries), _indptr(spans.chunks)
        self._blocks = sent(np.maximum(spans.blocks, 0).astype(np.int32), pool.device)
        self._last = torch.from_numpy(((spans.stop - 1) % chunk_tokens + 1).astype(np.int32))

    def attend(
        self, pool: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scores: Scores
    ) -> torch.Tensor:
        if scores not in self._planned:
            self._plan(pool, queries, scores)
            self._planned.add(scores)
        paged = pool.unflatten(0, (-1, self._chunk_tokens))
        output: torch.Tensor = self._wrappers[scores].run(queries.contiguous(), (paged[:, :, 0], paged[:, :, 1]))
        return output

    def _plan(self, pool: torch.Tensor, queries: torch.Tensor, scores: Scores) -> None:
        """Plans of one iteration must not share a wrapper, since they are in use at the same time."""
        if scores not in self._wrappers:
            if scores not in self._workspaces:
                self._workspaces[scores] = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=pool.device)
            self._wrappers[scores] = self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspaces[scores], "NHD")
        scaling, window, softcap = scores
        self._wrappers[scores].plan(
            self._queries,
            self._pages,
            self._blocks,
            self._last,
            queries.shape[1],
            pool.shape[2],
            queries.shape[2],
            self._chunk_tokens,
            causal=True,
            sm_scale=scaling,
            window_left=-1 if window is None else window - 1,
            logits_soft_cap=softcap,
            q_data_type=queries.dtype,
            kv_data_type=pool.dtype,
        )


def _indptr(counts: Integers) -> torch.Tensor:
    """[0, and the running sums], on the CPU: FlashInfer plans there."""
    return torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))


class FlashInferBackend:
    """For 16 bits on CUDA (see backends). Raises EngineMissing where its package does not load.

    A wrapper's plan() writes to page-locked memory of its own and copies from there without waiting. With two iterations in
    flight the next plan() would rewrite what the copy has yet to read, so successive iterations take wrappers in turn. When
    the first set comes round again, the iteration that used it has been collected. The large workspace is written by kernels
    alone, one after the other, so the wrappers of a kind of layer share it.
    """

    name = "flashinfer"
    captures = False

    def __init__(self, *_: object) -> None:
        try:
            import flashinfer
        except ImportError as error:
            raise EngineMissing(
                f"attention_backend=flashinfer: its package does not load ({error}); use auto."
            ) from error
        self._library = flashinfer
        self._wrappers: list[dict[Scores, Any]] = [{} for _ in range(PLANS_IN_FLIGHT)]
        self._workspaces: dict[Scores, torch.Tensor] = {}
        self._plans = 0

    @property
    def version(self) -> str:
        return str(self._library.__version__)

    def plan(self, batch: Batch, pool: torch.Tensor, chunk_tokens: int) -> FlashInferPlan:
        self._plans += 1
        wrappers = self._wrappers[self._plans % len(self._wrappers)]
        return FlashInferPlan(self._library, wrappers, self._workspaces, batch, pool, chunk_tokens)
