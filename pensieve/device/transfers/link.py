"""What moves over the link between the tiers, and the protocols of those who move it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from pensieve.core.plan import Move


@dataclass(frozen=True, slots=True)
class BlockRun:
    """`blocks` consecutive blocks from `src` on, copied to as many from `dst` on."""

    src: int
    dst: int
    blocks: int


def merge_moves(moves: Sequence[Move]) -> list[BlockRun]:
    """Join blocks that are adjacent in source and target alike. Moves of one direction may be done in any order."""
    pairs = sorted(pair for move in moves for pair in zip(move.src, move.dst, strict=True))
    runs: list[BlockRun] = []
    for src, dst in pairs:
        last = runs[-1] if runs else None
        if last is not None and src == last.src + last.blocks and dst == last.dst + last.blocks:
            runs[-1] = BlockRun(last.src, last.dst, last.blocks + 1)
        else:
            runs.append(BlockRun(src, dst, 1))
    return runs


@dataclass(frozen=True, slots=True)
class Haul:
    """The same runs of every layer, from one pool [layers, blocks, ...] to another; both are contiguous."""

    runs: Sequence[BlockRun]
    source: torch.Tensor
    target: torch.Tensor

    @property
    def layers(self) -> int:
        return self.source.shape[0]

    @property
    def layer_block_bytes(self) -> int:
        return self.source.stride(1) * self.source.itemsize


def gpu_of(*pools: torch.Tensor) -> torch.device | None:
    """The device of the pool that is on a GPU; None where all are RAM."""
    return next((pool.device for pool in pools if pool.is_cuda), None)


class Copier(Protocol):
    """A way to copy a haul over the link of a GPU."""

    @property
    def name(self) -> str: ...

    def prepare(self, haul: Haul) -> Callable[[int], None]:
        """A function that copies one layer on the stream that is current now; call it for the layers in order. Both calls
        return at once. Raises RuntimeError where the device refuses."""
        ...


class Mark(Protocol):
    """A point in a lane, reached when all that was enqueued before it is done."""

    def reached(self) -> bool: ...

    def wait(self) -> None:
        """Block the host until the mark is reached. Raises the error of a copy before it that failed."""
        ...

    @property
    def error(self) -> BaseException | None:
        """The error of a copy before the mark that failed; known once the mark is reached."""
        ...


class Lane(Protocol):
    """One direction; hauls are copied in the order in which they were enqueued."""

    def enqueue(self, haul: Haul, after: Sequence[Mark]) -> list[Mark]:
        """Copy layer by layer once all of `after` are reached. Returns at once, with a mark behind each layer."""
        ...


class Link(Protocol):
    """Two lanes, and the compute that waits for marks in them."""

    @property
    def inward(self) -> Lane:
        """CPU to GPU."""
        ...

    @property
    def outward(self) -> Lane:
        """GPU to CPU."""
        ...

    def computed(self) -> Mark:
        """Return a mark that is reached when the compute launched so far is done."""
        ...

    def hold_compute(self, mark: Mark) -> None:
        """Compute launched from now on waits for the mark."""
        ...

    def stalled_ns(self) -> int:
        """How long compute waited since the last call, counting only waits that are over."""
        ...

    def synchronize(self) -> None:
        """Block the host until compute and both lanes are done."""
        ...

    def close(self) -> None: ...
