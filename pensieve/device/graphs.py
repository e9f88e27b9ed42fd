"""Decode iterations recorded once and replayed: one launch in place of some hundreds.

A graph repeats its kernels on the same addresses. So each batch size that is recorded (a bucket) has one set of static
buffers, an iteration is padded up to the next bucket, and its inputs are copied into the buffers before the replay. Padding
rows are token 0 at position 0; they write their K and V to a scratch block that no request owns, and attend to nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch

from pensieve.device.attention import Forward, Iteration
from pensieve.device.batch import Batch, Span, Spans
from pensieve.device.kernels.base import CapturingBackend, StandingPlan

Work = Callable[[], torch.Tensor]
_NONE = Spans.of(())


class Recorder(Protocol):
    def record(self, work: Work) -> Work:
        """What repeats `work` on the same addresses and returns the same tensor each time. May run `work` more than once."""
        ...


class CudaRecorder:
    """torch.cuda.CUDAGraph; all graphs share one pool of memory, since they run one after the other on one stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def record(self, work: Work) -> Work:
        with torch.cuda.device(self._device):
            return self._record(work)

    def _record(self, work: Work) -> Work:
        compute, aside = torch.cuda.current_stream(self._device), _side_stream(self._device)
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        aside.wait_stream(compute)
        with torch.cuda.stream(aside):
            work()  # outside of a capture first: kernels are compiled and libraries make their workspaces
            work()
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads (a sampler of the device's state) may call CUDA meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, stream=aside, capture_error_mode="thread_local"):
                result = work()
        except BaseException:
            # What cannot be captured cannot be ended in order either: torch leaves the side stream as the current one, and
            # its allocator gives back no memory while it thinks that a capture is under way.
            torch.cuda.set_stream(compute)
            with suppress(Exception):  # it did end in order
                torch._C._cuda_endAllocateToPool(compute.device_index, self._pool)
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


@dataclass(slots=True)
class _Bucket:
    batch: Batch
    plan: StandingPlan
    replay: Work | None = None


class DecodeGraphs:
    """Replays forwards whose rows are all single positions, up to `most_rows` of them.

    scratch: a block of the pool for the K and V of padding. max_blocks: of one row. A bucket is recorded when it is first
    needed, or by `warm_up`.
    When recording fails, `note` says why, and from then on everything is left to the eager forward.
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
        recorder: Recorder,
    ) -> None:
        self._forward, self._backend, self._pool, self._recorder = forward, backend, pool, recorder
        self._chunk_tokens, self._scratch = chunk_tokens, scratch
        self._max_blocks = max_blocks
        self.buckets = buckets_up_to(most_rows)
        self.note = ""
        self._made: dict[int, _Bucket] = {}
        device = pool.device
        self._token_ids, self._positions, self._write_places = (
            torch.zeros(most_rows, dtype=torch.int64, device=device) for _ in range(3)
        )
        self._all_rows = torch.arange(most_rows, device=device)
        self._logits: torch.Tensor | None = None  # what all graphs end in: each would keep its own

    def takes(self, batch: Batch) -> bool:
        """May this batch be replayed?"""
        return batch.all_single and len(batch.spans) <= self.buckets[-1] and not self.note

    def run(self, batch: Batch) -> torch.Tensor | None:
        """Logits [rows, vocab] of a batch that `takes` allows, valid until the next run; None where recording failed."""
        rows = len(batch.spans)
        bucket = self._bucket(self.buckets[bisect_left(self.buckets, rows)])
        self._fill(bucket, batch)
        if bucket.replay is None:
            try:
                bucket.replay = self._recorder.record(lambda: self._compute(bucket))
            except torch.OutOfMemoryError:
                raise
            except Exception as failure:  # whatever in the model or the backend cannot be captured
                self.note = (
                    f"not recorded: {type(failure).__name__}: {str(failure).splitlines()[0] if str(failure) else ''}"
                )
                return None
        return bucket.replay()[:rows]

    def warm_up(self) -> None:
        """Record every bucket, on rows that attend to the scratch block."""
        for size in reversed(self.buckets):  # the largest first: the others fit into its memory
            if self.note:
                break
            block = np.array([self._scratch], dtype=np.int64)
            rows = slice(0, size)
            spans = Spans.of([Span(row, 0, 1, block) for row in range(size)])
            places = self._write_places[rows].fill_(self._scratch * self._chunk_tokens).clone()
            zeros = torch.zeros_like(places)
            self.run(Batch(zeros, zeros, places, spans, self._all_rows[rows], ()))

    def _bucket(self, size: int) -> _Bucket:
        if size not in self._made:
            rows = slice(0, size)
            batch = Batch(
                self._token_ids[rows], self._positions[rows], self._write_places[rows], _NONE, self._all_rows[rows], ()
            )
            plan = self._backend.standing(self._pool, self._chunk_tokens, size, self._max_blocks)
            self._made[size] = _Bucket(batch, plan)
        return self._made[size]

    def _fill(self, bucket: _Bucket, batch: Batch) -> None:
        """Copy a batch into the bucket's buffers, in place: a graph reads the addresses it was recorded with."""
        rows, scratch = len(batch.spans), self._scratch * self._chunk_tokens
        for static, values, padding in (
            (bucket.batch.token_ids, batch.token_ids, 0),
            (bucket.batch.positions, batch.positions, 0),
            (bucket.batch.write_places, batch.write_places, scratch),
        ):
            static[:rows].copy_(values)
            static[rows:].fill_(padding)
        bucket.plan.update(batch)

    def _compute(self, bucket: _Bucket) -> torch.Tensor:
        iteration = Iteration(bucket.batch, self._pool, self._chunk_tokens, plan=bucket.plan)
        logits = self._forward(iteration, bucket.batch.logits_at)
        if self._logits is None:
            self._logits = logits.new_empty(len(self._all_rows), logits.shape[1])
        return self._logits[: len(logits)].copy_(logits)
