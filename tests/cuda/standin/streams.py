"""Streams and events of the device; captures as lists of operations, replayed on the memory they were recorded with: what is
not static shows in the values."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from .clocks import Finding, here
from .machine import CUDA, Capture, Machine, machine
from .tensors import on_inner


class Stream:
    def __init__(self, device: Any = None, priority: int = 0, name: str = "", owner: Machine | None = None) -> None:
        owner = owner or machine()
        self.device, self.device_index, self.priority = CUDA, 0, priority
        self.cuda_stream = len(owner.streams)  # a handle; 0 is the default stream
        self.actor = owner.actor(name or f"stream {self.cuda_stream}")
        owner.streams.append(self)

    def wait_event(self, event: Event) -> None:
        if event.clock is not None:
            self.actor.learn(event.clock)
        capture = machine().capture
        if capture is not None and self is capture.stream and not event.in_capture:
            machine().refuse_in_capture("the captured stream waits for an event from outside")

    def wait_stream(self, other: Stream) -> None:
        self.actor.learn(other.actor.clock)
        self.actor.learn(machine().host.clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        """Busy until someone waits for what it did: a device is never faster than a test may ask."""
        host = machine().host.clock
        return all(host.get(number, 0) >= time for number, time in self.actor.clock.items())

    def synchronize(self) -> None:
        _wait_for(self.actor.clock, "stream.synchronize()")


class Event:
    """Reached when the host knows of all that was before it, or some queries later."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self._timing, self._queries, self._at_s = enable_timing, 0, 0.0
        self.clock: dict[int, int] | None = None
        self.in_capture = False

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or machine().stream
        stream.actor.learn(machine().host.clock)
        self.clock, self._queries, self._at_s = dict(stream.actor.clock), 0, time.perf_counter()
        self.in_capture = machine().capture is not None

    def query(self) -> bool:
        machine().refuse_in_capture("event.query()")
        host, clock = machine().host, self.clock or {}
        if any(host.clock.get(number, 0) < time for number, time in clock.items()):
            self._queries += 1
            if self._queries <= machine().lag:
                return False
            host.learn(clock)
        return True

    def synchronize(self) -> None:
        _wait_for(self.clock or {}, "event.synchronize()")

    def elapsed_time(self, other: Event) -> float:
        """Milliseconds of the host's own clock: the device has none."""
        assert self._timing and other._timing and self.clock is not None and other.clock is not None
        return 1e3 * (other._at_s - self._at_s)


def _wait_for(clock: dict[int, int], text: str) -> None:
    device = machine()
    device.refuse_in_capture(text)
    device.syncs.append(Finding("sync", text, here()))
    device.host.learn(clock)


def synchronize(device: Any = None) -> None:
    for stream in list(machine().streams):
        machine().host.learn(stream.actor.clock)
    _wait_for({}, "torch.cuda.synchronize()")


@contextlib.contextmanager
def current(stream: Stream | None) -> Iterator[Stream | None]:
    """torch.cuda.stream"""
    before = machine().stream
    machine().stream = stream or before
    try:
        yield stream
    finally:
        machine().stream = before


class CUDAGraph:
    def __init__(self, *_: Any, **__: Any) -> None:
        self.recorded: Capture | None = None

    def replay(self) -> None:
        assert self.recorded is not None, "a replay before a capture"
        device = machine()
        device.replays += 1
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
        if self._stream is None:
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
