"""Vector clocks of streams and host threads, memory that remembers who touched it last, and what is found.

Two accesses are ordered if the second one's actor knew of the first: by its own order, through an event it waited for, or
through the host. Accesses that are not ordered may happen in either order, or at once, on a real device.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Cells = NDArray[np.int64]
Found = Callable[[str, str], None]
_ONE = np.zeros(1, dtype=np.int64)


class Actor:
    """A stream or a host thread. clock: how far it knows each actor to have come."""

    def __init__(self, number: int, name: str) -> None:
        self.number, self.name = number, name
        self.clock: dict[int, int] = {}
        self.did: dict[int, str] = {}  # by its own time: for the words of a finding

    def tick(self, text: str) -> None:
        now = self.clock.get(self.number, 0) + 1
        self.clock[self.number] = now
        self.did[now] = text

    @property
    def now(self) -> int:
        return self.clock.get(self.number, 0)

    def learn(self, clock: dict[int, int]) -> None:
        """It waits for what the owner of this clock had done."""
        for number, time in clock.items():
            if self.clock.get(number, 0) < time:
                self.clock[number] = time


@dataclass(slots=True)
class _Copied:
    """A copy of whole cells to other memory: what it read is what arrived there."""

    source: Cells
    target: Memory
    arrived: Cells


@dataclass(eq=False)
class Memory:
    """One allocation; all views of it share it. grain: bytes a cell, 0 for one cell in all. Weakly referred to by graphs.

    name: in findings. pinned: of the host. base: its address, in the RAM behind it.
    """

    size: int
    base: int
    pinned: bool = False
    name: str = "a tensor"
    grain: int = 0
    _writer: Cells = field(default_factory=lambda: np.full(1, -1, dtype=np.int64))
    _written: Cells = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    _torn: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(1, dtype=bool))
    _reads: dict[int, Cells] = field(default_factory=dict)
    _copies: dict[tuple[int, int], _Copied] = field(default_factory=dict)

    def divide(self, grain: int, name: str) -> None:
        """Watch cells of `grain` bytes from now on; what happened before is forgotten, and must be ordered otherwise."""
        cells = max(1, self.size // grain)
        self.grain, self.name = grain, name
        self._writer, self._written = np.full(cells, -1, dtype=np.int64), np.zeros(cells, dtype=np.int64)
        self._torn = np.zeros(cells, dtype=bool)
        self._reads.clear()

    def cells(self, address: int, shape: Sequence[int], strides: Sequence[int], itemsize: int) -> Cells:
        """Those that a tensor with this layout (strides in elements) touches."""
        if not self.grain:
            return _ONE
        if 0 in shape:
            return _ONE[:0]
        dims = [(size, stride * itemsize) for size, stride in zip(shape, strides, strict=True)]
        dims.sort(key=lambda dim: -dim[1])
        offsets = np.array([address - self.base], dtype=np.int64)
        # The leading dimensions one by one, until what is left of a place is one run of bytes.
        while dims and not _dense(dims, itemsize):
            size, stride = dims.pop(0)
            offsets = (offsets[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
        last = sum((size - 1) * stride for size, stride in dims) + itemsize - 1
        first, stop = offsets // self.grain, (offsets + last) // self.grain
        longest = int((stop - first).max()) + 1
        return np.unique(np.minimum(first[:, None] + np.arange(longest), stop[:, None]))

    def bytes_cells(self, address: int, size: int) -> Cells:
        first = (address - self.base) // self.grain
        return np.arange(first, (address - self.base + size - 1) // self.grain + 1, dtype=np.int64)

    def read(self, actor: Actor, cells: Cells, actors: Sequence[Actor], found: Found, used: bool = False) -> None:
        """used: what is read decides a result, so it must not be torn; a copy only carries it on."""
        self._check_written(actor, cells, actors, found, "reads")
        if used and self._torn[cells].any():
            found("torn", f"{actor.did[actor.now]} reads {self.name}, overwritten while it was copied")
            self._torn[cells] = False
        self._of(self._reads, actor.number)[cells] = actor.now

    def write(self, actor: Actor, cells: Cells, actors: Sequence[Actor], found: Found) -> None:
        self._check_written(actor, cells, actors, found, "writes")
        for number, times in self._reads.items():
            late = cells[times[cells] > actor.clock.get(number, 0)]
            for time in np.unique(times[late]).tolist():
                self._overwritten(actor, late[times[late] == time], actors[number], time, found)
            times[cells] = 0
        self._writer[cells], self._written[cells], self._torn[cells] = actor.number, actor.now, False

    def copied(self, actor: Actor, source: Cells, target: Memory, arrived: Cells) -> None:
        """After both sides were told: cell by cell what was read here is now there."""
        if len(source) == len(arrived) and self.grain and self.grain == target.grain:
            self._copies[actor.number, actor.now] = _Copied(source, target, arrived)
            target._torn[arrived] = self._torn[source]

    def _of(self, times: dict[int, Cells], number: int) -> Cells:
        if number not in times:
            times[number] = np.zeros(len(self._writer), dtype=np.int64)
        return times[number]

    def _check_written(self, actor: Actor, cells: Cells, actors: Sequence[Actor], found: Found, verb: str) -> None:
        writer = self._writer[cells]
        if len(cells) == 1:  # most allocations
            number = int(writer[0])
            if number < 0 or int(self._written[cells[0]]) <= actor.clock.get(number, 0):
                return
        known = np.array([actor.clock.get(a.number, 0) for a in actors] + [0], dtype=np.int64)  # -1: nobody wrote
        late = cells[self._written[cells] > known[writer]]
        if len(late):
            other = actors[int(self._writer[late[0]])]
            what = other.did.get(int(self._written[late[0]]), "?")
            found(
                "race",
                f"{actor.name} {verb} {self._at(late)} ({actor.did[actor.now]}), written by {other.name} ({what})",
            )
            self._writer[late] = -1  # once is enough

    def _overwritten(self, actor: Actor, cells: Cells, reader: Actor, time: int, found: Found) -> None:
        """While it was read. A copy carries torn bytes on, and matters only if a kernel uses them: the rest of a block that
        is partly filled may be appended to while its beginning is copied."""
        copy = self._copies.get((reader.number, time))
        if copy is None:
            what = reader.did.get(time, "?")
            found(
                "race",
                f"{actor.name} writes {self._at(cells)} ({actor.did[actor.now]}), read by {reader.name} ({what})",
            )
        else:
            target, arrived = copy.target, copy.arrived[np.isin(copy.source, cells)]
            still = (target._writer[arrived] == reader.number) & (target._written[arrived] == time)
            target._torn[arrived[still]] = True

    def _at(self, cells: Cells) -> str:
        return f"{self.name}[{int(cells[0])}{', ...' if len(cells) > 1 else ''}]" if self.grain else self.name


def _dense(dims: Sequence[tuple[int, int]], itemsize: int) -> bool:
    """One run of bytes without holes?"""
    run = itemsize
    for size, stride in reversed(dims):
        if size > 1 and stride > run:
            return False
        run += (size - 1) * stride
    return True


_HERE = str(Path(__file__).parent)
_ROOT = str(Path(__file__).resolve().parents[3])
_NOT_OURS = (_HERE, "site-packages", "contextlib.py", "threading.py", "/triton/")


@dataclass(frozen=True, slots=True)
class Finding:
    """where: up to three places of the project, the innermost first."""

    kind: str
    text: str
    where: str

    def __str__(self) -> str:
        return f"[{self.kind}] {self.text}, at {self.where}"


def here() -> str:
    """The innermost places of the project in the call under way, else of its tests."""
    frames = [f for f in traceback.extract_stack() if not any(part in f.filename for part in _NOT_OURS)]
    ours = [f for f in frames if f.filename.startswith(f"{_ROOT}/pensieve")] or frames
    return " < ".join(f"{f.filename.removeprefix(_ROOT + '/')}:{f.lineno} {f.name}" for f in reversed(ours[-3:]))


def listed(findings: Iterable[Finding], most: int = 8) -> str:
    """One line each, for the message of an assertion."""
    return "\n".join([*dict.fromkeys(map(str, findings))][:most])
