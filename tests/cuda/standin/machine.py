"""The device that is not there: its memory, its streams, the capture under way, and what was found."""

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .clocks import Actor, Cells, Finding, Memory, here, listed

CUDA = torch.device("cuda", 0)
Touched = tuple[Memory, Cells]


@dataclass(frozen=True, slots=True)
class Card:
    """What torch.cuda says of it. Memory is small, since it is RAM in truth; the rest is an A100's."""

    name: str = "Stand-in A100"
    memory: int = 2 * 2**30
    multiprocessors: int = 108
    shared_memory: int = 166912
    capability: tuple[int, int] = (8, 0)


@dataclass(slots=True)
class Recorded:
    """An operation of a capture. outside: memory it touches that was there before the capture."""

    text: str
    run: Callable[[], object]
    reads: list[tuple[weakref.ref[Memory], Cells]]
    writes: list[tuple[weakref.ref[Memory], Cells]]
    outside: list[weakref.ref[Memory]]


@dataclass(slots=True)
class Capture:
    stream: Any
    operations: list[Recorded] = field(default_factory=list)
    made: list[Memory] = field(default_factory=list)  # kept as long as the graph: its pool

    def record(
        self,
        text: str,
        run: Callable[[], object],
        reads: Sequence[Touched],
        writes: Sequence[Touched],
        tells_itself: bool = False,
    ) -> None:
        """tells_itself: `run` tells the machine what it touches, which may be something else at each replay."""
        outside = [
            weakref.ref(m) for m, _ in (*reads, *writes) if not m.pinned and all(m is not own for own in self.made)
        ]
        told = ((), ()) if tells_itself else (reads, writes)
        weak = [[(weakref.ref(memory), cells) for memory, cells in some] for some in told]
        self.operations.append(Recorded(text, run, weak[0], weak[1], outside))


class Machine:
    """lag: how many queries of an event say no before it is reached, if nothing else waited for it.

    findings: rules that were broken. syncs: calls that waited for the device.
    """

    def __init__(self, lag: int) -> None:
        self.lag, self.card = lag, Card()
        self.findings: list[Finding] = []
        self.syncs: list[Finding] = []
        self.replays = 0
        self.allocated = self.peak = 0
        self.capture: Capture | None = None
        self.actors: list[Actor] = []
        self.streams: list[Any] = []
        self.pools: list[weakref.ref[Memory]] = []
        self.default: Any = None
        self._pinned: dict[int, tuple[Memory, Any]] = {}  # by address; torch's own pinned memory is kept alive
        self._registered: list[Memory] = []
        self._thread = threading.local()
        self._main = self._thread.host = self.actor("the host")

    # -- actors -------------------------------------------------------------------------------------------------------

    def actor(self, name: str) -> Actor:
        made = Actor(len(self.actors), name)
        self.actors.append(made)
        return made

    @property
    def host(self) -> Actor:
        """Of this thread; a new one knows what the first thread had seen when it began."""
        if not hasattr(self._thread, "host"):
            self._thread.host = self.actor(f"the host's thread {threading.current_thread().name}")
            self._thread.host.learn(self._main.clock)
        return self._thread.host

    @property
    def stream(self) -> Any:
        return getattr(self._thread, "stream", None) or self.default

    @stream.setter
    def stream(self, stream: Any) -> None:
        self._thread.stream = stream

    # -- findings -----------------------------------------------------------------------------------------------------

    def found(self, kind: str, text: str) -> None:
        self.findings.append(Finding(kind, text, here()))

    def waited(self, text: str) -> None:
        """The host waited for the current stream. Raises RuntimeError inside a capture."""
        self.syncs.append(Finding("sync", text, here()))
        if self.capture is not None:
            self.found("capture", f"{text} waits for the device")
            raise RuntimeError(f"operation not permitted when stream is capturing: {text}")
        self.host.learn(self.stream.actor.clock)

    def refuse_in_capture(self, text: str) -> None:
        if self.capture is not None:
            self.found("capture", text)

    def forget(self) -> None:
        """What was found so far, so that a test looks at the rest."""
        self.findings.clear()
        self.syncs.clear()

    def waits(self, *but: str) -> list[Finding]:
        """What waited in the project elsewhere than in the files that read tokens, and these."""
        return [sync for sync in self.syncs if not sync.where.split(":")[0].endswith(("flight.py", *but))]

    def assert_clean(self) -> None:
        found = [*self.findings, *self.waits()]
        assert not found, listed(found)

    # -- memory -------------------------------------------------------------------------------------------------------

    def refuse_beyond(self, size: int) -> None:
        """Raises torch.OutOfMemoryError."""
        if self.allocated + size > self.card.memory:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {size} bytes; {self.card.memory - self.allocated} are free."
            )

    def allocate(self, inner: torch.Tensor) -> Memory:
        """Of a new tensor on the device. Raises torch.OutOfMemoryError."""
        storage = inner.untyped_storage()
        self.refuse_beyond(storage.nbytes())
        made = Memory(storage.nbytes(), storage.data_ptr())
        self.allocated += made.size
        self.peak = max(self.peak, self.allocated)
        weakref.finalize(made, self._freed, made.size)
        if self.capture is not None:
            self.capture.made.append(made)
        return made

    def _freed(self, size: int) -> None:
        self.allocated -= size

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """RAM that torch has page-locked; torch does not reuse it while a copy is under way, and here it is never reused."""
        self.refuse_in_capture("pinned memory is allocated")
        storage = tensor.untyped_storage()
        if storage.nbytes():
            memory = Memory(storage.nbytes(), storage.data_ptr(), pinned=True, name="pinned memory")
            self._pinned[storage.data_ptr()] = memory, tensor
        return tensor

    def register(self, address: int, size: int) -> None:
        self._registered.append(Memory(size, address, pinned=True, name="registered memory"))

    def unregister(self, address: int) -> None:
        self._registered[:] = [memory for memory in self._registered if memory.base != address]

    @property
    def any_pinned(self) -> bool:
        return bool(self._pinned or self._registered)

    def pinned_memory(self, tensor: torch.Tensor) -> Memory | None:
        """Of a CPU tensor; None where it is pageable."""
        if tensor.device.type != "cpu":
            return None
        if (hit := self._pinned.get(tensor.untyped_storage().data_ptr())) is not None:
            return hit[0]
        address = tensor.data_ptr()
        return next((m for m in self._registered if m.base <= address < m.base + m.size), None)

    def watch_pool(self, tensor: torch.Tensor, memory: Memory, grain: int, name: str) -> None:
        memory.base = tensor.data_ptr()
        memory.divide(grain, name)
        self.pools.append(weakref.ref(memory))

    def at(self, address: int, size: int) -> Touched:
        """The cells of a pool behind an address. Raises RuntimeError where there is none. The newest pool first: one that is
        gone may still be known, and its addresses have been given out again."""
        for reference in reversed(self.pools):
            memory = reference()
            if memory is not None and memory.base <= address and address + size <= memory.base + memory.size:
                return memory, memory.bytes_cells(address, size)
        raise RuntimeError("CUDA error 1: the address belongs to no pool")

    # -- work ---------------------------------------------------------------------------------------------------------

    def launch(self, text: str, reads: Sequence[Touched], writes: Sequence[Touched], used: bool = False) -> None:
        """A kernel or a copy, on the current stream; in a capture it is not performed yet."""
        if self.capture is not None:
            return
        actor = self.stream.actor
        actor.learn(self.host.clock)
        actor.tick(text)
        for memory, cells in reads:
            memory.read(actor, cells, self.actors, self.found, used)
        for memory, cells in writes:
            memory.write(actor, cells, self.actors, self.found)

    def launch_copy(self, text: str, source: Touched, target: Touched) -> None:
        self.launch(text, [source], [target])
        if self.capture is not None:
            return
        source[0].copied(self.stream.actor, source[1], *target)

    def touch(self, tensor: torch.Tensor, write: bool, text: str) -> None:
        """The host itself reads or writes a CPU tensor, which a copy may be using."""
        memory = self.pinned_memory(tensor)
        if memory is not None:
            host = self.host
            host.tick(f"the host's {text}")
            cells = memory.cells(tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.element_size())
            if write:
                memory.write(host, cells, self.actors, self.found)
            else:
                memory.read(host, cells, self.actors, self.found)


installed: list[Machine] = []
"""The one that is in place of torch.cuda now, or none."""


def machine() -> Machine:
    return installed[-1]
