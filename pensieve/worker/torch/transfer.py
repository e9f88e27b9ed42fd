"""Moves whole blocks between the tiers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

import torch

from pensieve.plan import Copy
from pensieve.worker.torch.kv_tensors import KvTensors


@dataclass(frozen=True, slots=True)
class BlockRun:
    """`blocks` consecutive blocks from `src` on, copied to as many from `dst` on."""

    src: int
    dst: int
    blocks: int


def merge_copies(copies: Sequence[Copy]) -> list[BlockRun]:
    """The fewest runs adjacent in source and destination alike; copies of one direction are independent of each other."""
    pairs = sorted(pair for copy in copies for pair in zip(copy.src, copy.dst, strict=True))
    runs: list[BlockRun] = []
    for src, dst in pairs:
        last = runs[-1] if runs else None
        if last is not None and src == last.src + last.blocks and dst == last.dst + last.blocks:
            runs[-1] = BlockRun(last.src, last.dst, last.blocks + 1)
        else:
            runs.append(BlockRun(src, dst, 1))
    return runs


class Transfer:
    """Performs the copies of one plan: swap-ins first, a layer at a time, then swap-outs (section 4.3.3, section 5).

    On CUDA both directions have a stream. The attention of layer i waits for the event of layer i only, so that loading
    overlaps with compute; swap-outs wait for the swap-ins, since two directions at once slow each other by a fifth.
    Without CUDA a copy is done when the call returns.

    h2d_bytes and d2h_bytes count what was copied, fragments the contiguous pieces of one layer it was copied in.
    """

    def __init__(self, tensors: KvTensors) -> None:
        self._tensors = tensors
        self.h2d_bytes = 0
        self.d2h_bytes = 0
        self.fragments = 0
        self._cuda = tensors.device.type == "cuda"
        self._loaded: list[Any] = []  # an event a layer while a swap-in is under way
        self._waits: list[tuple[Any, Any]] = []  # events on the compute stream before and after each wait
        if self._cuda:
            self._h2d_stream = torch.cuda.Stream(tensors.device)
            self._d2h_stream = torch.cuda.Stream(tensors.device)
            self._layer_events = [torch.cuda.Event() for _ in range(tensors.layers)]

    @property
    def mean_fragment_bytes(self) -> float:
        return (self.h2d_bytes + self.d2h_bytes) / self.fragments if self.fragments else 0.0

    def swap_in(self, copies: Sequence[Copy]) -> int:
        """CPU blocks to GPU blocks. Returns the nanoseconds for which the caller was held up (0 on CUDA)."""
        runs = merge_copies(copies)
        self.h2d_bytes += self._count(runs)
        source, target = self._tensors.cpu, self._tensors.gpu
        if not self._cuda:
            return _copy_now(runs, source, target)
        if runs:
            with torch.cuda.stream(self._h2d_stream):
                for layer, event in enumerate(self._layer_events):
                    _copy_layer(runs, source[layer], target[layer])
                    event.record(self._h2d_stream)
            self._loaded = self._layer_events
        return 0

    def wait_for_layer(self, layer: int) -> None:
        """Let the compute stream wait until this layer's swap-ins have arrived; free where there are none."""
        if not self._loaded:
            return
        compute = torch.cuda.current_stream(self._tensors.device)
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record(compute)
        compute.wait_event(self._loaded[layer])
        after.record(compute)
        self._waits.append((before, after))

    def swap_out(self, copies: Sequence[Copy]) -> int:
        """GPU blocks to CPU blocks. Returns the nanoseconds for which the caller was held up (0 on CUDA)."""
        runs = merge_copies(copies)
        self.d2h_bytes += self._count(runs)
        source, target = self._tensors.gpu, self._tensors.cpu
        if not self._cuda:
            return _copy_now(runs, source, target)
        if runs:
            self._d2h_stream.wait_stream(self._h2d_stream)
            with torch.cuda.stream(self._d2h_stream):
                for layer in range(self._tensors.layers):
                    _copy_layer(runs, source[layer], target[layer])
        return 0

    def finish(self) -> int:
        """Wait until copies and compute are done. Returns the nanoseconds for which compute waited for swap-ins.

        Compute too, since a forward that failed halfway may have left kernels that still write to blocks.
        """
        if not self._cuda:
            return 0
        torch.cuda.current_stream(self._tensors.device).synchronize()
        self._h2d_stream.synchronize()
        self._d2h_stream.synchronize()
        stalled_ms = sum(before.elapsed_time(after) for before, after in self._waits)
        self._loaded, self._waits = [], []
        return int(stalled_ms * 1e6)

    def _count(self, runs: list[BlockRun]) -> int:
        self.fragments += len(runs) * self._tensors.layers
        return sum(run.blocks for run in runs) * self._tensors.block_bytes


def _copy_now(runs: list[BlockRun], source: torch.Tensor, target: torch.Tensor) -> int:
    """All layers of a run in one call. A slice, never an index list: x[ids].copy_(y) would write into a temporary."""
    started = perf_counter_ns()
    for run in runs:
        target[:, run.dst : run.dst + run.blocks].copy_(source[:, run.src : run.src + run.blocks])
    return perf_counter_ns() - started if runs else 0


def _copy_layer(runs: list[BlockRun], source: torch.Tensor, target: torch.Tensor) -> None:
    """One layer: contiguous on both sides, so that each run is one DMA transfer."""
    for run in runs:
        target[run.dst : run.dst + run.blocks].copy_(source[run.src : run.src + run.blocks], non_blocking=True)
