"""Decode iterations recorded once and replayed: one launch in place of some hundreds.

A graph repeats its kernels on the same addresses. So each batch size that is recorded (a bucket) has one set of static
buffers, an iteration is padded up to the next bucket, and its inputs are copied into the buffers before the replay. Padding
rows are token 0 at position 0; they write their K and V to a scratch block that no request owns, and attend to nothing.
"""

from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from pensieve.device.attention import Forward, Iteration
from pensieve.device.batch import Batch, Spans
from pensieve.device.kernels.base import CapturingBackend, StandingPlan

Work = Callable[[], torch.Tensor]


def record(work: Work, device: torch.device, memory: Any) -> Work:
    """What repeats `work` on the same addresses, by torch.cuda.CUDAGraph, and returns the same tensor each time. memory: a
    handle of graph_pool_handle; graphs that run one after the other on one stream share it."""
    with torch.cuda.device(device):
        compute, aside = torch.cuda.current_stream(device), _side_stream(device)
        aside.wait_stream(compute)
        with torch.cuda.stream(aside):
            work()  # outside of a capture first: kernels are compiled and libraries make their workspaces
            work()
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads (a sampler of the device's state) may call CUDA meanwhile.
            with torch.cuda.graph(graph, pool=memory, stream=aside, capture_error_mode="thread_local"):
                result = work()
        except BaseException:
            # What cannot be captured cannot be ended in order either: torch leaves the side stream as the current one, and
            # its allocator gives back no memory while it thinks that a capture is under way.
            torch.cuda.set_stream(compute)
            with suppress(Exception):  # it did end in order
                torch._C._cuda_endAllocateToPool(compute.device_index, memory)
            raise
        compute.wait_stream(aside)

    def replay() -> torch.Tensor:
        graph.replay()
        return result

    return replay


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Make the one stream of all recordings of this process: on each stream that multiplies, cuBLAS keeps a workspace of 32
    MiB for good."""
    return torch.cuda.Stream(device)


def buckets_up_to(rows: int) -> tuple[int, ...]:
    """1, 2, 4, then multiples of 8: at most 7 rows of padding, or as many as there are rows."""
    return (*(size for size in (1, 2, 4) if size < rows), *range(8, rows, 8), rows)


class DecodeGraphs:
    """Replays forwards whose rows are all single positions, up to `most_rows` of them.

    scratch: a block of the pool for the K and V of padding. max_blocks: of one row. Every bucket is recorded at once, on rows
    that attend to the scratch block. Where that fails, `note` says why, and everything is left to the eager forward.
    """

    def __init__(
        self,
        forward: Forward,
        backend: CapturingBackend,
        pool: torch.Tensor,
        chunk_tokens: int,
        scratch: int,
        most_rows: int,
        max_blocks: int,
    ) -> None:
        """Raises torch.OutOfMemoryError."""
        self._forward, self._pool, self._chunk_tokens, self._scratch = forward, pool, chunk_tokens, scratch
        self.buckets = buckets_up_to(most_rows)
        self.note = ""
        self._recorded: dict[int, tuple[Batch, StandingPlan, Work]] = {}
        device, memory = pool.device, torch.cuda.graph_pool_handle()
        self._token_ids, self._positions, self._write_places = (
            torch.zeros(most_rows, dtype=torch.int64, device=device) for _ in range(3)
        )
        self._all_rows = torch.arange(most_rows, device=device)
        self._logits: torch.Tensor | None = None  # what all graphs end in: each would keep its own
        for size in reversed(self.buckets):  # the largest first: the others fit into its memory
            rows = slice(0, size)
            static = self._token_ids[rows], self._positions[rows], self._write_places[rows]
            places = np.arange(size)  # each attends to the one position that it writes
            spans = Spans(places, 0 * places, 0 * places + 1, 0 * places + 1, 0 * places + scratch)
            batch = Batch(*static, spans, self._all_rows[rows], ())
            plan = backend.standing(pool, chunk_tokens, size, max_blocks)
            zeros = torch.zeros_like(batch.positions)
            to_scratch = replace(batch, token_ids=zeros, positions=zeros, write_places=zeros + scratch * chunk_tokens)
            self._fill(batch, plan, to_scratch)
            try:
                replay = record(partial(self._compute, batch, plan), device, memory)
            except torch.OutOfMemoryError:
                raise
            except Exception as failure:  # whatever in the model or the backend cannot be captured
                first = (str(failure).splitlines() or [""])[0]
                self.note = f"not recorded: {type(failure).__name__}: {first}"
                break
            self._recorded[size] = batch, plan, replay

    def takes(self, batch: Batch) -> bool:
        """May this batch be replayed?"""
        return batch.all_single and len(batch.spans) <= self.buckets[-1] and not self.note

    def run(self, batch: Batch) -> torch.Tensor:
        """Logits [rows, vocab] of a batch that `takes` allows, valid until the next run."""
        rows = len(batch.spans)
        static, plan, replay = self._recorded[self.buckets[bisect_left(self.buckets, rows)]]
        self._fill(static, plan, batch)
        return replay()[:rows]

    def _fill(self, static: Batch, plan: StandingPlan, batch: Batch) -> None:
        """Copy a batch into static buffers, in place: a graph reads the addresses it was recorded with."""
        rows, scratch = len(batch.spans), self._scratch * self._chunk_tokens
        for target, values, padding in (
            (static.token_ids, batch.token_ids, 0),
            (static.positions, batch.positions, 0),
            (static.write_places, batch.write_places, scratch),
        ):
            target[:rows].copy_(values)
            target[rows:].fill_(padding)
        plan.update(batch)

    def _compute(self, batch: Batch, plan: StandingPlan) -> torch.Tensor:
        logits = self._forward(Iteration(batch, self._pool, self._chunk_tokens, plan=plan), batch.logits_at)
        if self._logits is None:
            self._logits = logits.new_empty(len(self._all_rows), logits.shape[1])
        return self._logits[: len(logits)].copy_(logits)
