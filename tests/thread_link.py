"""A link made of threads, where there is no GPU.

A CPU has neither streams nor events. One thread a direction stands in, so that pipelined copies, their order and their
failures can be run and measured. No worker has one of itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue

import torch

from pensieve.device.transfers.transfer import BlockRun, Haul, Mark


@dataclass(frozen=True, slots=True)
class Piece:
    """Runs of one layer: source and target are [blocks, ...], contiguous, so that each run is one transfer."""

    runs: Sequence[BlockRun]
    source: torch.Tensor
    target: torch.Tensor


def copy_runs(piece: Piece) -> None:
    """Copy runs by slices, never by an index list: x[ids].copy_(y) would write into a temporary."""
    source, target = piece.source.flatten(1), piece.target.flatten(1)
    for run in piece.runs:
        target[run.dst : run.dst + run.blocks].copy_(source[run.src : run.src + run.blocks], non_blocking=True)


class ThreadLink:
    """The same lanes, marks and waits as on CUDA, made of threads. Copies release the interpreter's lock, so they run beside
    the forward. Used to study a slow link, and by tests of the order of copies; otherwise a worker on a CPU has no link,
    since a direct copy from RAM to RAM is faster than handing it to a thread.

    bytes_per_s: of each direction; a copy that is done sooner delays its mark. None: as fast as memory is.
    copy: performs a piece, and returns when it is done.
    """

    def __init__(
        self,
        bytes_per_s: float | None = None,
        copy: Callable[[Piece], None] = copy_runs,
    ) -> None:
        self.lanes = {way: _ThreadLane(bytes_per_s, copy) for way in (True, False)}  # by whether it leads to the GPU
        self._stalled_ns = 0

    def enqueue(self, haul: Haul, inward: bool, after: Sequence[Mark] = ()) -> list[Mark]:
        return self.lanes[inward].enqueue(haul, after)

    def computed(self) -> _ThreadMark:
        return _ThreadMark(reached=True)  # a forward on a CPU is done when the call returns

    def hold_compute(self, mark: Mark) -> None:
        assert isinstance(mark, _ThreadMark)
        began = time.perf_counter_ns()
        mark.wait()
        self._stalled_ns += time.perf_counter_ns() - began

    def stalled_ns(self) -> int:
        stalled, self._stalled_ns = self._stalled_ns, 0
        return stalled

    def synchronize(self) -> None:
        for lane in self.lanes.values():
            lane.drain()

    def close(self) -> None:
        for lane in self.lanes.values():
            lane.close()


class _ThreadMark:
    def __init__(self, reached: bool = False) -> None:
        self._event = threading.Event()
        self.error: BaseException | None = None
        if reached:
            self._event.set()

    def reach(self, error: BaseException | None) -> None:
        self.error = error
        self._event.set()

    def reached(self) -> bool:
        return self._event.is_set()

    def wait(self) -> None:
        self._event.wait()
        if self.error is not None:
            raise RuntimeError(f"A copy between the tiers failed: {self.error}") from self.error


_Order = tuple[Haul | None, Sequence[Mark], list[_ThreadMark]]  # a haul, what to wait for before it, what to reach


class _ThreadLane:
    def __init__(self, bytes_per_s: float | None, copy: Callable[[Piece], None]) -> None:
        self._orders: SimpleQueue[_Order | None] = SimpleQueue()
        self.bytes_per_s = bytes_per_s
        self._copy = copy
        self._free_s = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def enqueue(self, haul: Haul, after: Sequence[Mark]) -> list[Mark]:
        marks = [_ThreadMark() for _ in range(haul.layers)]
        self._orders.put((haul, after, marks))
        return list(marks)

    def drain(self) -> None:
        """Wait until all orders before this one are done."""
        mark = _ThreadMark()
        self._orders.put((None, (), [mark]))
        mark.wait()

    def close(self) -> None:
        self._orders.put(None)
        self._thread.join()

    def _run(self) -> None:
        with torch.inference_mode():
            while (order := self._orders.get()) is not None:
                self._perform(*order)

    def _perform(self, haul: Haul | None, after: Sequence[Mark], marks: Sequence[_ThreadMark]) -> None:
        """Copy layer by layer. After a failure the remaining marks of this order get its error; the next order is tried."""
        for mark in after:
            assert isinstance(mark, _ThreadMark)
            with suppress(RuntimeError):  # only the order of copies matters here; its own lane reports the failure
                mark.wait()
        error: BaseException | None = None
        for layer, own in enumerate(marks):
            if haul is not None and error is None:
                piece = Piece(haul.runs, haul.source[layer], haul.target[layer])
                began = time.perf_counter()
                try:
                    self._copy(piece)
                except Exception as failure:
                    error = failure
                self._pace(piece, began)
            own.reach(error)

    def _pace(self, piece: Piece, began: float) -> None:
        """Sleep until a link of this bandwidth would have moved the piece."""
        rate = self.bytes_per_s
        if rate is not None:
            moved = sum(run.blocks for run in piece.runs) * piece.source[0].nbytes
            self._free_s = max(self._free_s, began) + moved / rate  # from a fixed point: errors of sleep do not add up
            time.sleep(max(0.0, self._free_s - time.perf_counter()))
