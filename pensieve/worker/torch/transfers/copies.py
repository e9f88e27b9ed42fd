"""Copies by a kernel of ours: one launch a layer, on a few multiprocessors.

A copy engine handles a fragment at a time, and small ones leave the link idle in between; a kernel has many reads or writes
under way at once, of as many blocks. It takes multiprocessors from the compute meanwhile, so it runs few programs, and only
where a measurement says that it pays.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import triton

from pensieve.worker.torch.kernels.block_copy import copy_blocks_kernel
from pensieve.worker.torch.transfers.link import Haul

WORD_BYTES = 16  # what a thread moves at once; blocks of a layer are whole numbers of them
PROGRAMS = 16  # each takes part of a multiprocessor; 16 x 32 KiB under way outlast the latency of any PCIe link
_WARPS = 8
_TILE = 8192  # elements of 4 bytes: 8 x 16 bytes a thread


class KernelCopier:
    """Takes any haul whose blocks are whole numbers of WORD_BYTES; programs: how many run side by side."""

    name = "kernel"

    def __init__(self, programs: int = PROGRAMS) -> None:
        self._programs = programs

    def prepare(self, haul: Haul) -> Callable[[int], None]:
        assert haul.layer_block_bytes % WORD_BYTES == 0, "such blocks go by DMA"
        elements = haul.layer_block_bytes // 4
        tile = tile_of(elements)
        pairs = _block_pairs(haul)
        tiles = len(pairs) * -(-elements // tile)
        device = haul.source.device if haul.source.is_cuda else haul.target.device
        if device.type == "cuda":
            # Freed when the last launch is enqueued: memory of this stream, whose next user comes behind the kernels.
            pairs = pairs.pin_memory().to(device, non_blocking=True)
        sources, targets = (pool.flatten(2).view(torch.int32).unbind(0) for pool in (haul.source, haul.target))
        grid = (min(self._programs, tiles),)

        def copy(layer: int) -> None:
            copy_blocks_kernel[grid](
                sources[layer], targets[layer], pairs, tiles, ELEMENTS=elements, TILE=tile, num_warps=_WARPS
            )

        return copy


def tile_of(elements: int) -> int:
    """int32 elements that a program moves at once, for blocks of so many."""
    return min(_TILE, triton.next_power_of_2(elements))


def _block_pairs(haul: Haul) -> torch.Tensor:
    """int32 [blocks, 2]: each block's number in the source and in the target."""
    table = np.array([(run.src, run.dst, run.blocks) for run in haul.runs], dtype=np.int32)
    ends = np.cumsum(table[:, 2])
    within = np.arange(ends[-1], dtype=np.int32) - np.repeat(ends - table[:, 2], table[:, 2])
    return torch.from_numpy(np.repeat(table[:, :2], table[:, 2], axis=0) + within[:, None].astype(np.int32))
