"""Captures as lists of operations, replayed on the memory they were recorded with: what is not static shows in the values."""

from __future__ import annotations

import weakref
from typing import Any

from .clocks import Cells, Memory
from .machine import Capture, Touched, machine
from .streams import synchronize
from .tensors import on_inner


class CUDAGraph:
    def __init__(self, *_: Any, **__: Any) -> None:
        self.recorded: Capture | None = None

    def replay(self) -> None:
        assert self.recorded is not None, "a replay before a capture"
        device = machine()
        device.counts["replays"] += 1
        gone = [op.text for op in self.recorded.operations if any(memory() is None for memory in op.outside)]
        if gone:
            device.found("freed", f"a replay touches memory that was freed since the capture ({gone[0]})")
        for op in self.recorded.operations:
            reads, writes = (
                [(m, cells) for ref, cells in some if (m := ref()) is not None] for some in (op.reads, op.writes)
            )
            if reads or writes:
                device.launch(f"{op.text} of a graph", reads, writes, used=True)
            on_inner(op.run)


class graph:
    """The context of a capture. Operations are performed while they are recorded, which CUDA does not: a result of the
    capture itself must not be used, and is replayed before anyone looks."""

    def __init__(
        self, cuda_graph: CUDAGraph, pool: Any = None, stream: Any = None, capture_error_mode: str = ""
    ) -> None:
        self._graph, self._stream = cuda_graph, stream

    def __enter__(self) -> None:
        synchronize()
        device = machine()
        device.counts["captures"] += 1
        if self._stream is None:
            from .streams import Stream

            self._stream = Stream()
        self._before = device.stream
        device.stream = self._stream
        device.capture = Capture(self._stream)

    def __exit__(self, kind: Any, *_: Any) -> None:
        device = machine()
        self._graph.recorded, device.capture = device.capture, None
        if kind is not None:  # torch leaves the side stream as the current one
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        device.stream = self._before


def _alive(some: list[tuple[weakref.ref[Memory], Cells]]) -> list[Touched]:
    return [(memory, cells) for reference, cells in some if (memory := reference()) is not None]
