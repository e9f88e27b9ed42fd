"""The ways to copy runs of blocks over the link of a GPU.

Copy engines take one fragment at a time and leave all multiprocessors to the compute. A kernel has reads and writes of many
blocks under way at once, which is faster for small fragments, but takes multiprocessors from the compute.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace
from threading import local
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pensieve.worker.torch.transfers.driver import PREFER_OVERLAP, STREAM_ORDER, Attributes, find_batch_call
from pensieve.worker.torch.transfers.link import Copier, Haul, Piece, gpu_of

WORD_BYTES = 16  # what a thread of the kernel moves at once; blocks of a layer must be whole numbers of them
PROGRAMS = 16  # each takes part of a multiprocessor; 16 x 32 KiB under way outlast the latency of any PCIe link
_WARPS = 8
_TILE = 8192  # elements of 4 bytes: 8 x 16 bytes a thread


def copy_runs(piece: Piece) -> None:
    """Copy runs by slices, never by an index list: x[ids].copy_(y) would write into a temporary."""
    source, target = piece.source.flatten(1), piece.target.flatten(1)
    for run in piece.runs:
        target[run.dst : run.dst + run.blocks].copy_(source[run.src : run.src + run.blocks], non_blocking=True)


def copy_and_wait(piece: Piece) -> None:
    """Copy to or from a GPU on a stream of its own, and wait: on the default stream the copy would wait for the compute."""
    stream = torch.cuda.Stream(gpu_of(piece.source, piece.target))
    with torch.cuda.stream(stream):
        copy_runs(piece)
    stream.synchronize()


class CallCopier:
    """One `copy_` a run and layer; torch makes it one cudaMemcpyAsync, since both sides are contiguous.

    Not one strided copy for all layers: between CPU and GPU torch first gathers in RAM what is not contiguous. The views
    of a run are made for all layers at once, and torch loops over the calls of a layer: both save time of the host.
    """

    name = "dma, a call a run"

    def prepare(self, haul: Haul) -> Callable[[int], None]:
        source, target = haul.source.flatten(2), haul.target.flatten(2)
        sources = list(zip(*(source.narrow(1, run.src, run.blocks).unbind(0) for run in haul.runs), strict=True))
        targets = list(zip(*(target.narrow(1, run.dst, run.blocks).unbind(0) for run in haul.runs), strict=True))

        def copy(layer: int) -> None:
            torch._foreach_copy_(targets[layer], sources[layer], non_blocking=True)

        return copy


class BatchCopier:
    """One driver call a layer. A call a run costs the host some microseconds each; where blocks are scattered that is more
    than the link needs for them.

    call: stands in for the driver's, in tests. Raises EngineMissing where the driver has no batched copy.
    """

    name = "dma, a call a layer"

    def __init__(self, call: Any = None) -> None:
        self._call = find_batch_call() if call is None else call
        self._attributes = Attributes(source_order=STREAM_ORDER, flags=PREFER_OVERLAP)
        self._first, self._refused = ctypes.c_size_t(0), ctypes.c_size_t(0)
        self._used = local()

    def prepare(self, haul: Haul) -> Callable[[int], None]:
        stream = torch.cuda.current_stream(gpu_of(haul.source, haul.target))
        if not hasattr(self._used, "device"):
            stream.query()  # the driver, unlike the runtime, works only in threads that have used the device before
            self._used.device = True
        runs = np.array([(run.src, run.dst, run.blocks) for run in haul.runs], dtype=np.uint64)
        sizes = runs[:, 2] * np.uint64(haul.layer_block_bytes)
        sources = _addresses(haul.source, runs[:, 0])
        targets = _addresses(haul.target, runs[:, 1])

        def copy(layer: int) -> None:
            begins, ends = sources[layer], targets[layer]
            refused = self._call(
                ends.ctypes.data,
                begins.ctypes.data,
                sizes.ctypes.data,
                len(sizes),
                self._attributes,
                self._first,
                1,
                self._refused,
                stream.cuda_stream,
            )
            if refused:
                raise RuntimeError(
                    f"CUDA error {refused} in copy {self._refused.value} of {len(sizes)} between the tiers"
                )

        return copy


def _addresses(pool: torch.Tensor, blocks: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """[layers, blocks]: where each block begins."""
    layer_bytes, block_bytes = (np.uint64(stride * pool.itemsize) for stride in pool.stride()[:2])
    layers = np.arange(pool.shape[0], dtype=np.uint64) * layer_bytes
    return np.uint64(pool.data_ptr()) + layers[:, None] + (blocks * block_bytes)[None, :]


class KernelCopier:
    """One launch of our Triton kernel a layer, on a few multiprocessors. Needs triton, and blocks that are whole numbers of
    WORD_BYTES. programs: how many run side by side."""

    name = "kernel"

    def __init__(self, programs: int = PROGRAMS) -> None:
        from pensieve.worker.torch.kernels.block_copy import copy_blocks_kernel  # triton is an optional package

        self._kernel = copy_blocks_kernel
        self._programs = programs

    def prepare(self, haul: Haul) -> Callable[[int], None]:
        assert haul.layer_block_bytes % WORD_BYTES == 0, "such blocks go by DMA"
        elements = haul.layer_block_bytes // 4
        tile = tile_of(elements)
        pairs = _block_pairs(haul)
        tiles = len(pairs) * -(-elements // tile)
        if (device := gpu_of(haul.source, haul.target)) is not None:
            # Freed when the last launch is enqueued: memory of this stream, whose next user comes behind the kernels.
            pairs = pairs.pin_memory().to(device, non_blocking=True)
        sources, targets = (pool.flatten(2).view(torch.int32).unbind(0) for pool in (haul.source, haul.target))
        grid = (min(self._programs, tiles),)

        def copy(layer: int) -> None:
            self._kernel[grid](
                sources[layer], targets[layer], pairs, tiles, ELEMENTS=elements, TILE=tile, num_warps=_WARPS
            )

        return copy


def tile_of(elements: int) -> int:
    """How many int32 elements a program moves at once in blocks of `elements`: a power of two."""
    return min(_TILE, 1 << (elements - 1).bit_length())


def _block_pairs(haul: Haul) -> torch.Tensor:
    """int32 [blocks, 2]: each block's number in the source and in the target."""
    table = np.array([(run.src, run.dst, run.blocks) for run in haul.runs], dtype=np.int32)
    ends = np.cumsum(table[:, 2])
    within = np.arange(ends[-1], dtype=np.int32) - np.repeat(ends - table[:, 2], table[:, 2])
    return torch.from_numpy(np.repeat(table[:, :2], table[:, 2], axis=0) + within[:, None].astype(np.int32))


@dataclass(frozen=True, slots=True)
class Limits:
    """The kernel copies runs of up to `longest` blocks where there are at least `least` of them. longest 0: never."""

    longest: int = 0
    least: int = 1


class SplitCopier:
    """Short runs by the kernel where there are many, all others by DMA; one after the other on the same stream."""

    def __init__(self, dma: Copier, kernel: Copier, limits: Limits) -> None:
        self._dma, self._kernel, self.limits = dma, kernel, limits

    @property
    def name(self) -> str:
        return (
            f"{self._kernel.name} for runs of up to {self.limits.longest} blocks where there are {self.limits.least} or "
            f"more, else {self._dma.name}"
        )

    def prepare(self, haul: Haul) -> Callable[[int], None]:
        short = [run for run in haul.runs if run.blocks <= self.limits.longest]
        if len(short) < self.limits.least:
            return self._dma.prepare(haul)
        by_kernel = self._kernel.prepare(replace(haul, runs=short))
        if len(short) == len(haul.runs):
            return by_kernel
        by_dma = self._dma.prepare(replace(haul, runs=[run for run in haul.runs if run.blocks > self.limits.longest]))

        def copy(layer: int) -> None:
            by_kernel(layer)
            by_dma(layer)

        return copy
