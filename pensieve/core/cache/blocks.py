"""Blocks of the tiers: which are free, which a copy under way uses, and which wait for one before they are free."""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from pensieve.core.facts import NOBODY_NOW, SILENT, Facts
from pensieve.core.plan import GPU, Tier
from pensieve.core.request import TokenArray
from pensieve.core.session import NO_BLOCK, ChunkRun, Node, runs_of


class BlockPool:
    """Free blocks as maximal extents, so that neighbours can be handed out together.

    A plain stack of free numbers would scatter a session over the pool, and the speed of a swap depends on how long
    its fragments are (5 GB/s at 32 KB, ten times that at large ones). Extents are merged when a block comes back; the
    classes by power of two find a long enough one without a search.
    """

    def __init__(self, blocks: int, tier: Tier = GPU) -> None:
        self.tier: Tier = tier
        self.blocks = blocks
        self.facts: Facts = SILENT
        # Free extents: by first block their length (0: none begins there), by last block their first (-1: none ends there).
        # One entry more than there are blocks stands for the neighbours of the first and the last one.
        self._length_at = array("i", bytes(4 * (blocks + 1)))
        self._start_of = array("i", (-1,)) * (blocks + 1)
        self._classes: list[dict[int, None]] = [{} for _ in range(blocks.bit_length() + 1)]
        self._sizes = 0  # a bit for each class that has an extent
        self.free = 0
        if blocks:
            self._put(0, blocks)

    def allocate(self, count: int, holder: int = NOBODY_NOW) -> Sequence[int]:
        """Take `count` free blocks, in as few runs as the size classes give quickly. The caller has checked that there are
        enough. holder: the number of the session that has them."""
        assert count <= self.free, f"{count} blocks asked, {self.free} free"
        taken: list[int] = []
        while (lacking := count - len(taken)) > 0:
            longest = self._sizes.bit_length() - 1
            if lacking >> longest:  # none is as long
                start = next(iter(self._classes[longest]))
                used = self._cut(start)
            else:
                start = self._find(lacking)
                used = min(self._length_at[start], lacking)
                self._take(start, 0, used)
            taken += range(start, start + used)
        self.facts.held(self.tier, taken, holder)
        return taken

    def allocate_after(self, block: int | None, count: int, holder: int = NOBODY_NOW) -> Sequence[int]:
        """Take `count` free blocks: those behind `block` as far as they are free, so that consecutive chunks lie in runs,
        and the others from the middle of the longest free extents, where a run has room to grow. The caller has checked
        that there are enough."""
        taken: list[int] = []
        while (lacking := count - len(taken)) > 0:
            start, offset = -1 if block is None else block + 1, 0
            length = 0 if block is None else self._length_at[start]
            if not length:
                start = next(iter(self._classes[self._sizes.bit_length() - 1]))
                length = self._length_at[start]
                offset = max(0, min(length // 2, length - lacking))
            used = min(length - offset, lacking)
            self._take(start, offset, used)
            taken += range(start + offset, start + offset + used)
            block = taken[-1]
        self.facts.held(self.tier, taken, holder)
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        self.facts.freed(self.tier, blocks)
        for first, length in _extents(blocks):
            self._release(first, length)

    def free_blocks(self) -> set[int]:
        return {start + i for start, length in enumerate(self._length_at) for i in range(length)}

    def besides(self) -> list[int]:
        """Blocks in use that are no chunk's own; for check()."""
        return []

    def _take(self, start: int, offset: int, count: int) -> None:
        """Take `count` blocks, from `offset` on, out of the free extent that begins at `start`."""
        length = self._cut(start)
        if offset:
            self._put(start, offset)
        if offset + count < length:
            self._put(start + offset + count, length - offset - count)

    def _release(self, start: int, length: int) -> None:
        left = self._start_of[start - 1]
        if left >= 0:
            length += self._cut(left)
            start = left
        if self._length_at[start + length]:
            length += self._cut(start + length)
        self._put(start, length)

    def _find(self, count: int) -> int:
        # The next class up is surely long enough; then the own class may be; then the longest there is.
        wanted = (count - 1).bit_length() + 1 if count > 1 else 1
        assert self._sizes, "no free extent although blocks are counted free"
        longer = self._sizes >> wanted
        size = wanted + (longer & -longer).bit_length() - 1 if longer else self._sizes.bit_length() - 1
        return next(iter(self._classes[size]))

    def _put(self, start: int, length: int) -> None:
        self._length_at[start] = length
        self._start_of[start + length - 1] = start
        size = length.bit_length()
        self._classes[size][start] = None
        self._sizes |= 1 << size
        self.free += length

    def _cut(self, start: int) -> int:
        """Take a whole free extent; returns its length."""
        length = self._length_at[start]
        self._length_at[start], self._start_of[start + length - 1] = 0, -1
        size = length.bit_length()
        same = self._classes[size]
        del same[start]
        if not same:
            self._sizes &= ~(1 << size)
        self.free -= length
        return length


def _extents(blocks: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Group consecutive block numbers: the first of each run, and how many."""
    first = length = 0
    for block in blocks:
        if length and block == first + length:
            length += 1
            continue
        if length:
            yield first, length
        first, length = block, 1
    if length:
        yield first, length


_Place = tuple[bool, int]  # on GPU?, block

ALIVE, ABANDONED, GONE = range(3)
"""Fates of a chunk that is copied, each worse than the one before: it still has these blocks; it has given one of them up,
which is in quarantine; it has ceased to exist."""


@dataclass(slots=True)
class CopyRun:
    """The copies of a run of chunks, from `first` on. outward: to CPU. from_below: to GPU, and there are no CPU blocks.
    lengths: by chunk, the leading offsets that are valid at the destination when it is done. fates: by chunk.
    """

    node: Node
    first: int
    outward: bool
    gpu: TokenArray[int]
    cpu: TokenArray[int]
    lengths: TokenArray[int]
    from_below: bool = False
    ticket: int = 0
    fates: bytearray = field(default_factory=bytearray)

    def runs(self, worst: int) -> list[ChunkRun]:
        """The chunks whose fate is no worse."""
        if max(self.fates) <= worst:
            return [(self.first, self.first + len(self.fates))]
        return runs_of(index for index, fate in enumerate(self.fates, self.first) if fate <= worst)


_ONE_MORE = bytes((*range(1, 256), 0))
_ONE_LESS = bytes((255, *range(255)))
_GIVEN_UP = bytes.maketrans(bytes((ALIVE,)), bytes((ABANDONED,)))


class OpenCopies:
    """Tickets, and quarantine: a block given up while a copy or a launched plan still uses it waits until both are done.

    Each call costs what it opens, closes or releases, however much else is under way.
    """

    def __init__(self, gpu: BlockPool, cpu: BlockPool) -> None:
        self._gpu, self._cpu = gpu, cpu
        self.open_moves: dict[int, list[CopyRun]] = {}
        """Those under way, by ticket."""
        self.by_node: dict[int, list[CopyRun]] = {}
        """The same by number of their node."""
        # Quarantine: what each block waits for, the copies that use it and the plan, and which plan that is, ascending.
        self._holds: dict[_Place, int] = {}
        self._after_plan: deque[tuple[int, _Place]] = deque()
        self._last_ticket = 0
        self.outgoing = 0
        """Chunks that will be clean and evictable when their copy is done."""
        self.incoming = 0
        """Chunks that are being copied from the CPU to the GPU."""
        self._oldest = self._following = 0  # plans in flight: [oldest, following)
        self.in_flight = False
        """A plan is launched and not collected."""

    def open(self, moves: list[CopyRun]) -> int:
        """Issue a ticket for these copies, and mark their chunks as copying until it is closed."""
        ticket = self.ticket()
        self.open_moves[ticket] = moves
        for moved in moves:
            moved.ticket, moved.fates = ticket, bytearray(len(moved.gpu))
            self.by_node.setdefault(moved.node.number, []).append(moved)
            self._count(moved, [(moved.first, moved.first + len(moved.gpu))], 1)
        return ticket

    def ticket(self) -> int:
        self._last_ticket += 1
        return self._last_ticket

    def close(self, ticket: int) -> list[tuple[CopyRun, list[ChunkRun]]]:
        """Close the ticket of copies that are done or failed; returns these, and which of their chunks exist still. Nothing
        where it is not open: of a move to a tier below."""
        closed = []
        for moved in self.open_moves.pop(ticket, ()):
            existing = moved.runs(ABANDONED)
            closed.append((moved, existing))
            own = self.by_node[moved.node.number]
            own.remove(moved)
            if not own:
                del self.by_node[moved.node.number]
            self._count(moved, existing, -1)
            if any(moved.fates):
                for fate, gpu, cpu in zip(moved.fates, moved.gpu, moved.cpu, strict=True):
                    if fate != ALIVE:
                        self._let_go((True, gpu))
                        self._let_go((False, cpu))
        return closed

    def any_of(self, node: Node) -> bool:
        """Whether an open copy reads or writes blocks that the node has or had."""
        return node.number in self.by_node

    def pin(self, node: Node, runs: bool) -> None:
        """The node runs from now on, so that the end of its copies makes no chunk evictable, or it has stopped."""
        if node.number in self.by_node:
            outward = sum(moved.fates.count(ALIVE) for moved in self.by_node[node.number] if moved.outward)
            self.outgoing += -outward if runs else outward

    def shorten(self, node: Node, index: int, length: int) -> None:
        """Limit what the open copies of a chunk make valid to its first `length` offsets, to which it was truncated."""
        for moved in self.by_node.get(node.number, ()):
            place = index - moved.first
            if 0 <= place < len(moved.fates) and moved.fates[place] == ALIVE:
                moved.lengths[place] = min(moved.lengths[place], length)

    def abandon(self, node: Node, start: int, stop: int) -> None:
        """Mark the chunks' open copies as useless: the chunks give up their blocks, which wait in quarantine for these
        copies."""
        for moved in self.by_node.get(node.number, ()):
            some = slice(max(start - moved.first, 0), max(stop - moved.first, 0))
            if moved.outward and not node.running:
                self.outgoing -= moved.fates[some].count(ALIVE)
            moved.fates[some] = moved.fates[some].translate(_GIVEN_UP)

    def gone(self, node: Node, first: int) -> None:
        """Mark the chunks from `first` on as deleted in open copies; those under way were abandoned before."""
        for moved in self.by_node.get(node.number, ()):
            place = max(first - moved.first, 0)
            assert ALIVE not in moved.fates[place:]
            moved.fates[place:] = bytes([GONE]) * len(moved.fates[place:])

    def plans(self, oldest: int, following: int) -> None:
        """Record which plans are in flight, and release the blocks that waited for earlier ones."""
        self._oldest, self._following, self.in_flight = oldest, following, following > oldest
        while self._after_plan and self._after_plan[0][0] < oldest:
            self._let_go(self._after_plan.popleft()[1])

    def retire(self, on_gpu: bool, node: Node, first: int, blocks: TokenArray[int], discarded: bool) -> None:
        """Return these blocks (NO_BLOCK: none) of the chunks from `first` on to their pool, as soon as nothing uses them.

        No launched plan uses an evicted block, since its node does not run; one that was discarded may still be written
        by a plan under way.
        """
        pool = self._gpu if on_gpu else self._cpu
        waits = discarded and self.in_flight
        if not waits and not any(node.chunks.copying[first : first + len(blocks)]):
            pool.release(blocks if NO_BLOCK not in blocks else [block for block in blocks if block != NO_BLOCK])
            return
        for index, block in enumerate(blocks, first):
            if block == NO_BLOCK:
                continue
            holds = waits + (self._copies_with(on_gpu, node, index, block) if node.chunks.copying[index] else 0)
            if not holds:
                pool.release((block,))
                continue
            self._holds[on_gpu, block] = holds
            if waits:
                self._after_plan.append((self._following - 1, (on_gpu, block)))

    def quarantined(self, on_gpu: bool) -> list[int]:
        return [block for tier, block in self._holds if tier is on_gpu]

    def under_way(self) -> Iterator[CopyRun]:
        """Yield all open copies; for check()."""
        for moves in self.open_moves.values():
            yield from moves

    def check(self) -> None:
        """Assert that the counts kept from call to call equal a recount."""
        moves = list(self.under_way())
        outward = [moved for moved in moves if moved.outward and not moved.node.running]
        assert self.outgoing == sum(moved.fates.count(ALIVE) for moved in outward)
        assert self.incoming == sum(len(moved.gpu) for moved in moves if not moved.outward and not moved.from_below)
        assert sorted(map(id, moves)) == sorted(id(moved) for own in self.by_node.values() for moved in own)
        holds = Counter(place for _, place in self._after_plan)
        for moved in moves:
            for block_of_tier in (((True, gpu), (False, cpu)) for gpu, cpu in zip(moved.gpu, moved.cpu, strict=True)):
                holds.update(place for place in block_of_tier if place in self._holds)
        assert holds == self._holds, "a block waits for what is over"
        plans = [plan for plan, _ in self._after_plan]
        assert plans == sorted(plans)
        assert all(plan >= self._oldest for plan in plans), "a block waits for a plan that is over"

    def _count(self, moved: CopyRun, existing: list[ChunkRun], more: int) -> None:
        """A copy of chunks, these of which exist, begins (1) or is over (-1)."""
        copying = moved.node.chunks.copying
        for start, stop in existing:
            copying[start:stop] = copying[start:stop].translate(_ONE_MORE if more > 0 else _ONE_LESS)
        if moved.outward and not moved.node.running:
            self.outgoing += more * moved.fates.count(ALIVE)
        elif not moved.outward and not moved.from_below:
            self.incoming += more * len(moved.gpu)

    def _copies_with(self, on_gpu: bool, node: Node, index: int, block: int) -> int:
        """Count the open copies that read or write this block of a chunk."""
        count = 0
        for moved in self.by_node.get(node.number, ()):
            blocks, place = moved.gpu if on_gpu else moved.cpu, index - moved.first
            count += 0 <= place < len(blocks) and moved.fates[place] != GONE and blocks[place] == block
        return count

    def _let_go(self, place: _Place) -> None:
        """Record that one copy or plan is over that the block may have waited for."""
        holds = self._holds.get(place)
        if holds is None:
            return  # the chunk has it still
        if holds > 1:
            self._holds[place] = holds - 1
            return
        del self._holds[place]
        on_gpu, block = place
        (self._gpu if on_gpu else self._cpu).release((block,))
