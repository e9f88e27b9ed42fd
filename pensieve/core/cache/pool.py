"""Block numbers of one tier: which are free, handed out in runs as long as they come."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence

from pensieve.core.facts import NOBODY_NOW, SILENT, Facts
from pensieve.core.plan import GPU, Tier


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

    def allocate(self, count: int, holder: int = NOBODY_NOW) -> list[int]:
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

    def allocate_after(self, block: int | None, count: int, holder: int = NOBODY_NOW) -> list[int]:
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
