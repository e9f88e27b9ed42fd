"""A CPU's stand-in for copy streams: a thread a direction, with a bandwidth if one is given."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue

import torch

from pensieve.worker.torch.transfers.link import CudaMark, Haul, Mark, Piece, copy_runs


class ThreadLink:
    """The same lanes, marks and waits as on CUDA, made of threads: copies release the interpreter's lock, so they run
    beside the forward. It is used where a slow link is to be studied, and by tests of the order of copies; between two
    tiers of plain RAM a direct copy is faster.

    bytes_per_s: of each direction; a copy that is done sooner holds its mark back. None: as fast as the memory is.
    copy: what performs a piece, and returns when it is done. device: of the compute; a GPU's, with copy_and_wait, is given
    a link that is slower than its own.
    """

    def __init__(
        self,
        bytes_per_s: float | None = None,
        copy: Callable[[Piece], None] = copy_runs,
        device: torch.device | None = None,
    ) -> None:
        self._device = device
        self.inward = _ThreadLane("cpu-to-gpu", bytes_per_s, copy)
        self.outward = _ThreadLane("gpu-to-cpu", bytes_per_s, copy)
        self._stalled_ns = 0

    def throttle(self, bytes_per_s: float | None) -> None:
        """Of copies from now on."""
        self.inward.bytes_per_s = self.outward.bytes_per_s = bytes_per_s

    def computed(self) -> Mark:
        if self._device is not None and self._device.type == "cuda":
            return CudaMark(torch.cuda.current_stream(self._device).record_event())
        return _ThreadMark(reached=True)  # a forward on a CPU is done when the call returns

    def hold_compute(self, mark: Mark) -> None:
        began = time.perf_counter_ns()
        mark.wait()
        self._stalled_ns += time.perf_counter_ns() - began

    def stalled_ns(self) -> int:
        stalled, self._stalled_ns = self._stalled_ns, 0
        return stalled

    def synchronize(self) -> None:
        self.computed().wait()
        for lane in (self.inward, self.outward):
            for mark in lane.enqueue(None, ()):
                mark.wait()

    def close(self) -> None:
        self.inward.close()
        self.outward.close()


def copy_and_wait(piece: Piece) -> None:
    """To or from a GPU, in a stream of this copy alone: the default one would wait for the compute."""
    device = piece.source.device if piece.source.is_cuda else piece.target.device
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        copy_runs(piece)
    stream.synchronize()


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


class _Order:
    """What to copy, with the marks to wait for and those to reach. No haul: one mark behind all that came before."""

    def __init__(self, haul: Haul | None, after: Sequence[Mark]) -> None:
        self.pieces = [] if haul is None else [haul.piece(layer) for layer in range(haul.layers)]
        self.after = after
        self.marks = [_ThreadMark() for _ in self.pieces] or [_ThreadMark()]


class _ThreadLane:
    def __init__(self, name: str, bytes_per_s: float | None, copy: Callable[[Piece], None]) -> None:
        self._orders: SimpleQueue[_Order | None] = SimpleQueue()
        self.bytes_per_s = bytes_per_s
        self._copy = copy
        self._free_s = 0.0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def enqueue(self, haul: Haul | None, after: Sequence[Mark]) -> list[Mark]:
        order = _Order(haul, after)
        self._orders.put(order)
        return list(order.marks)

    def close(self) -> None:
        self._orders.put(None)
        self._thread.join()

    def _run(self) -> None:
        with torch.inference_mode():
            while (order := self._orders.get()) is not None:
                self._perform(order)

    def _perform(self, order: _Order) -> None:
        """The first failure is that of all later marks of the order; the lane goes on with the next one."""
        for mark in order.after:
            with suppress(RuntimeError):  # it is the order that counts: what failed there is reported there
                mark.wait()
        error: BaseException | None = None
        for piece, mark in zip(order.pieces, order.marks, strict=False):
            if error is None:
                began = time.perf_counter()
                try:
                    self._copy(piece)
                except Exception as failure:
                    error = failure
                self._pace(piece, began)
            mark.reach(error)
        if not order.pieces:
            order.marks[0].reach(None)

    def _pace(self, piece: Piece, began: float) -> None:
        rate = self.bytes_per_s
        if rate is not None:
            moved = sum(run.blocks for run in piece.runs) * piece.source[0].nbytes
            self._free_s = max(self._free_s, began) + moved / rate  # so that no sleep's error adds up
            time.sleep(max(0.0, self._free_s - time.perf_counter()))
