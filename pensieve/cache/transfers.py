"""Copies under way, and the blocks that must not be handed out before they are done."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pensieve.cache.chunk import Chunk
from pensieve.cache.pool import BlockPool
from pensieve.cache.session import Session


@dataclass(slots=True)
class Transfer:
    """One chunk under way. outward: to CPU. length: the leading offsets that are valid at the destination when it is done.

    alive: the chunk still exists; a truncated or forgotten one leaves its blocks in quarantine.
    """

    session: Session
    chunk: Chunk
    index: int
    outward: bool
    gpu: int
    cpu: int
    length: int
    alive: bool = True


class Transfers:
    """Tickets, and quarantine: a block given up while a copy or a launched plan still uses it waits until both are done."""

    def __init__(self, gpu: BlockPool, cpu: BlockPool) -> None:
        self._gpu, self._cpu = gpu, cpu
        self._moves: dict[int, list[Transfer]] = {}
        self._quarantine: list[tuple[int, bool, int]] = []  # last plan that may use it, on GPU?, block
        self._last_ticket = 0
        self.launched = -1
        self.collected = -1

    def open(self, moves: list[Transfer]) -> int:
        """A new ticket for these chunks; each is marked as copying until it is closed."""
        self._last_ticket += 1
        self._moves[self._last_ticket] = moves
        for moved in moves:
            moved.chunk.copying += 1
        return self._last_ticket

    def close(self, tickets: Sequence[int]) -> Iterator[Transfer]:
        for ticket in tickets:
            for moved in self._moves.pop(ticket):
                moved.chunk.copying -= 1
                yield moved

    def under_way(self) -> Iterator[Transfer]:
        for moves in self._moves.values():
            yield from moves

    def of(self, chunk: Chunk) -> list[Transfer]:
        return [moved for moved in self.under_way() if moved.chunk is chunk] if chunk.copying else []

    @property
    def outgoing(self) -> int:
        """Chunks that will be clean and evictable when their copy is done."""
        return sum(moved.outward and moved.alive and not moved.chunk.pins for moved in self.under_way())

    @property
    def incoming(self) -> int:
        """Chunks that the link from the CPU has still to bring."""
        return sum(not moved.outward for moved in self.under_way())

    @property
    def in_flight(self) -> bool:
        """A plan is launched and not collected."""
        return self.launched > self.collected

    def retire(self, on_gpu: bool, block: int, discarded: bool, copying: bool) -> None:
        """Give a block back to its pool, now or when it is safe.

        An evicted block is in no launched plan (it was not pinned), and its next user comes after those plans; one that
        was discarded may still be written by a plan under way.
        """
        if copying or (discarded and self.in_flight):
            self._quarantine.append((self.launched, on_gpu, block))
        else:
            (self._gpu if on_gpu else self._cpu).release((block,))

    def leave_quarantine(self) -> None:
        if not self._quarantine:
            return
        busy = {(True, m.gpu) for m in self.under_way()} | {(False, m.cpu) for m in self.under_way()}
        stays = []
        for step, on_gpu, block in self._quarantine:
            if step > self.collected or (on_gpu, block) in busy:
                stays.append((step, on_gpu, block))
            else:
                (self._gpu if on_gpu else self._cpu).release((block,))
        self._quarantine = stays

    def quarantined(self, on_gpu: bool) -> list[int]:
        return [block for _, tier, block in self._quarantine if tier is on_gpu]
