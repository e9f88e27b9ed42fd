"""The link between the tiers: two lanes for copies, and marks that the compute waits for.

CUDA has streams and events, a CPU has none: there a thread a direction stands in, so that pipelining, its order and its
failures can be run and measured without a GPU. Where both tiers are plain RAM a copy costs less than handing it to a thread,
so it is simply made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(frozen=True, slots=True)
class BlockRun:
    """`blocks` consecutive blocks from `src` on, copied to as many from `dst` on."""

    src: int
    dst: int
    blocks: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Runs of one layer: source and target are [blocks, ...], contiguous, so that each run is one transfer."""

    runs: Sequence[BlockRun]
    source: torch.Tensor
    target: torch.Tensor


class Mark(Protocol):
    """A point in a lane, reached when all that was enqueued before it is done."""

    def reached(self) -> bool: ...

    def wait(self) -> None:
        """Hold up the host. Raises what made a copy before the mark fail."""
        ...

    @property
    def error(self) -> BaseException | None:
        """What made a copy before the mark fail; known once it is reached."""
        ...


class Lane(Protocol):
    """One direction, first come, first served."""

    def enqueue(self, pieces: Sequence[Piece], after: Sequence[Mark]) -> list[Mark]:
        """Copy the pieces one after the other once `after` is reached; a mark behind each. Returns at once."""
        ...


class Link(Protocol):
    @property
    def inward(self) -> Lane:
        """CPU to GPU."""
        ...

    @property
    def outward(self) -> Lane: ...

    def computed(self) -> Mark:
        """Reached when the compute launched so far is done."""
        ...

    def hold_compute(self, mark: Mark) -> None:
        """Compute launched from now on waits for the mark."""
        ...

    def stalled_ns(self) -> int:
        """For how long compute waited since the last call, as far as those waits are over."""
        ...

    def synchronize(self) -> None:
        """Hold up the host until compute and both lanes are done."""
        ...

    def close(self) -> None: ...


class CudaLink:
    """Copy engines: whole runs through cudaMemcpyAsync (`copy_` between pinned and device memory, contiguous on both
    sides), never a kernel that would compete with compute."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.inward, self.outward = _CudaLane(device), _CudaLane(device)
        self._waits: list[tuple[Any, Any]] = []  # events on the compute stream before and after each wait

    def computed(self) -> Mark:
        return CudaMark(torch.cuda.current_stream(self._device).record_event())

    def hold_compute(self, mark: Mark) -> None:
        assert isinstance(mark, CudaMark)
        if mark.reached():
            return
        compute = torch.cuda.current_stream(self._device)
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record(compute)
        compute.wait_event(mark.event)
        after.record(compute)
        self._waits.append((before, after))

    def stalled_ns(self) -> int:
        stalled_ms, still = 0.0, []
        for before, after in self._waits:
            if after.query():
                stalled_ms += before.elapsed_time(after)
            else:
                still.append((before, after))
        self._waits = still
        return int(stalled_ms * 1e6)

    def synchronize(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()
        self.inward.stream.synchronize()
        self.outward.stream.synchronize()

    def close(self) -> None:
        self.synchronize()


class _CudaLane:
    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)

    def enqueue(self, pieces: Sequence[Piece], after: Sequence[Mark]) -> list[Mark]:
        marks: list[Mark] = []
        with torch.cuda.stream(self.stream):
            for mark in after:
                assert isinstance(mark, CudaMark)
                self.stream.wait_event(mark.event)
            for piece in pieces:
                copy_runs(piece)
                marks.append(CudaMark(self.stream.record_event()))
        return marks


class CudaMark:
    """A failed copy leaves the whole device in error: whatever asks next raises it."""

    error = None

    def __init__(self, event: Any) -> None:
        self.event = event

    def reached(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()


def copy_runs(piece: Piece) -> None:
    """A slice, never an index list: x[ids].copy_(y) would write into a temporary."""
    for run in piece.runs:
        source = piece.source[run.src : run.src + run.blocks]
        piece.target[run.dst : run.dst + run.blocks].copy_(source, non_blocking=True)
