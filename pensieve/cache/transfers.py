"""Copies under way, and the blocks that must not be handed out before they are done."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pensieve.cache.pool import BlockPool
from pensieve.session import Chunk, Session

_Place = tuple[bool, int]  # on GPU?, block
_BEFORE_THE_FIRST = -1  # the number of no plan


@dataclass(slots=True)
class Transfer:
    """The copy of one chunk. outward: to CPU. length: the leading offsets that are valid at the destination when it is done.

    alive: the chunk still has these blocks; if not, they are in quarantine.
    """

    session: Session
    chunk: Chunk
    index: int
    outward: bool
    gpu: int
    cpu: int
    length: int
    alive: bool = True

    @property
    def places(self) -> tuple[_Place, _Place]:
        return (True, self.gpu), (False, self.cpu)


class Transfers:
    """Tickets, and quarantine: a block given up while a copy or a launched plan still uses it waits until both are done.

    Each call costs what it opens, closes or releases, however much else is under way.
    """

    def __init__(self, gpu: BlockPool, cpu: BlockPool) -> None:
        self._gpu, self._cpu = gpu, cpu
        self._moves: dict[int, list[Transfer]] = {}
        self._alive: dict[int, Transfer] = {}  # by id() of the chunk, which its transfer keeps in being
        self._users: Counter[_Place] = Counter()  # open transfers of a block
        # Quarantine: blocks with the last plan that may use them, ascending, and those that only copies still use.
        self._after_plan: deque[tuple[int, _Place]] = deque()
        self._after_copy: set[_Place] = set()
        self._last_ticket = 0
        self.outgoing = 0
        """Chunks that will be clean and evictable when their copy is done."""
        self.incoming = 0
        """Chunks that are being copied to the GPU."""
        self.launched = self._collected = _BEFORE_THE_FIRST

    def open(self, moves: list[Transfer]) -> int:
        """A new ticket for these chunks; each is marked as copying until it is closed."""
        self._last_ticket += 1
        self._moves[self._last_ticket] = moves
        for moved in moves:
            assert id(moved.chunk) not in self._alive, "a chunk under way is not copied a second time"
            self._alive[id(moved.chunk)] = moved
            moved.chunk.copying += 1
            self._users.update(moved.places)
            self.incoming += not moved.outward
            self.outgoing += _is_outgoing(moved)
        return self._last_ticket

    def close(self, tickets: Sequence[int]) -> Iterator[Transfer]:
        """These are over, done or failed."""
        for ticket in tickets:
            for moved in self._moves.pop(ticket):
                moved.chunk.copying -= 1
                self.incoming -= not moved.outward
                if moved.alive:
                    self.outgoing -= _is_outgoing(moved)
                    del self._alive[id(moved.chunk)]
                for place in moved.places:
                    self._leave(place)
                yield moved

    def under_way(self) -> Iterator[Transfer]:
        """All that are open: for check()."""
        for moves in self._moves.values():
            yield from moves

    def pin(self, chunk: Chunk) -> None:
        """Its session starts to run: the end of a copy does not make it evictable."""
        moved = self._alive.get(id(chunk)) if chunk.copying else None
        self.outgoing -= moved is not None and moved.outward

    def unpin(self, chunk: Chunk) -> None:
        """Its session runs no longer."""
        moved = self._alive.get(id(chunk)) if chunk.copying else None
        self.outgoing += moved is not None and moved.outward

    def shorten(self, chunk: Chunk, length: int) -> None:
        """The chunk was truncated: what its copy brings is valid up to here at most."""
        moved = self._alive.get(id(chunk))
        if moved is not None:
            moved.length = min(moved.length, length)

    def abandon(self, chunk: Chunk) -> None:
        """The chunk gives its blocks up: they wait in quarantine for its copy, and what that brings is of no use."""
        moved = self._alive.pop(id(chunk), None)
        if moved is not None:
            self.outgoing -= _is_outgoing(moved)
            moved.alive = False

    @property
    def in_flight(self) -> bool:
        """A plan is launched and not collected."""
        return self.launched > self._collected

    def collected(self, step: int) -> None:
        """Plans up to this one are over."""
        self._collected = step
        while self._after_plan and self._after_plan[0][0] <= step:
            self._release(self._after_plan.popleft()[1])

    def retire(self, on_gpu: bool, block: int, discarded: bool) -> None:
        """Give a block back to its pool, as soon as nothing uses it.

        No launched plan uses an evicted block, since its session does not run; one that was discarded may still be written
        by a plan under way.
        """
        if discarded and self.in_flight:
            self._after_plan.append((self.launched, (on_gpu, block)))
        else:
            self._release((on_gpu, block))

    def quarantined(self, on_gpu: bool) -> list[int]:
        waiting = [*(place for _, place in self._after_plan), *self._after_copy]
        return [block for tier, block in waiting if tier is on_gpu]

    def check(self) -> None:
        """Assert that what is kept from call to call is what a recount finds."""
        moves = list(self.under_way())
        assert self.outgoing == sum(moved.alive and _is_outgoing(moved) for moved in moves)
        assert self.incoming == sum(not moved.outward for moved in moves)
        assert self._alive == {id(moved.chunk): moved for moved in moves if moved.alive}
        assert len(self._alive) == sum(moved.alive for moved in moves), "two copies of one chunk are alive"
        assert self._users == Counter(place for moved in moves for place in moved.places)
        assert all(self._users[place] for place in self._after_copy), "a block waits for a copy that is over"
        plans = [plan for plan, _ in self._after_plan]
        assert plans == sorted(plans)
        assert all(plan > self._collected for plan in plans), "a block waits for a plan that is over"

    def _leave(self, place: _Place) -> None:
        """A transfer that used the block is over."""
        self._users[place] -= 1
        if not self._users[place]:
            del self._users[place]
            if place in self._after_copy:
                self._after_copy.remove(place)
                self._release(place)

    def _release(self, place: _Place) -> None:
        """No plan uses the block any more: free it, once no copy does."""
        if place in self._users:
            self._after_copy.add(place)
        else:
            on_gpu, block = place
            (self._gpu if on_gpu else self._cpu).release((block,))


def _is_outgoing(moved: Transfer) -> bool:
    return moved.outward and not moved.session.running
