"""The link between the tiers: two lanes for copies, and marks that the compute waits for.

CUDA has streams and events, a CPU has none: there a thread a direction stands in, so that pipelining, its order and its
failures can be run and measured without a GPU. Where both tiers are plain RAM a copy costs less than handing it to a thread,
so it is simply made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
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

    def piece(self, layer: int) -> Piece:
        return Piece(self.runs, self.source[layer], self.target[layer])


class Copier(Protocol):
    """A way of getting a haul over the link of a GPU."""

    @property
    def name(self) -> str: ...

    def prepare(self, haul: Haul) -> Callable[[int], None]:
        """What copies one layer, to be called for one after the other, on the stream that is current now. Both return at
        once. Raises RuntimeError where the device refuses."""
        ...


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

    def enqueue(self, haul: Haul, after: Sequence[Mark]) -> list[Mark]:
        """Copy layer by layer once `after` is reached; a mark behind each layer. Returns at once."""
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
    """Two streams. How a lane copies is its copier's: by default a cudaMemcpyAsync a run, which a copy engine performs
    beside the compute; `copying.choose_copying` finds out what is fastest here."""

    def __init__(self, device: torch.device, inward: Copier | None = None, outward: Copier | None = None) -> None:
        self._device = device
        self.inward = _CudaLane(device, inward or CallCopier())
        self.outward = _CudaLane(device, outward or CallCopier())
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
            with suppress(RuntimeError):  # of a device in error, which answers nothing
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
    def __init__(self, device: torch.device, copier: Copier) -> None:
        # A copy that is a kernel gets the next free multiprocessor before the compute does; copy engines do not care.
        self.stream = torch.cuda.Stream(device, priority=-1)
        self.copier = copier

    def enqueue(self, haul: Haul, after: Sequence[Mark]) -> list[Mark]:
        marks: list[Mark] = []
        with torch.cuda.stream(self.stream):
            for mark in after:
                assert isinstance(mark, CudaMark)
                self.stream.wait_event(mark.event)
            copy = self.copier.prepare(haul) if haul.runs else _nothing
            for layer in range(haul.layers):
                copy(layer)
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


class CallCopier:
    """A `copy_` a run and layer, which torch turns into one cudaMemcpyAsync since both sides are contiguous.

    Not one strided copy for all layers: between CPU and GPU torch first gathers in RAM what is not contiguous. The views
    are made for all layers of a run at once, and the calls of a layer from within torch: both save time of the host.
    """

    name = "dma, a call a run"

    def prepare(self, haul: Haul) -> Callable[[int], None]:
        source, target = haul.source.flatten(2), haul.target.flatten(2)
        sources = list(zip(*(source.narrow(1, run.src, run.blocks).unbind(0) for run in haul.runs), strict=True))
        targets = list(zip(*(target.narrow(1, run.dst, run.blocks).unbind(0) for run in haul.runs), strict=True))

        def copy(layer: int) -> None:
            torch._foreach_copy_(targets[layer], sources[layer], non_blocking=True)

        return copy


def _nothing(layer: int) -> None:
    """Of a haul without runs."""


def copy_runs(piece: Piece) -> None:
    """A slice, never an index list: x[ids].copy_(y) would write into a temporary."""
    source, target = piece.source.flatten(1), piece.target.flatten(1)
    for run in piece.runs:
        target[run.dst : run.dst + run.blocks].copy_(source[run.src : run.src + run.blocks], non_blocking=True)
