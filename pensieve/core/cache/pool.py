"""Block numbers of one tier: which are free, handed out in runs as long as they come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

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
        self._length_at: dict[int, int] = {}  # first block of a free extent -> its length
        self._start_of: dict[int, int] = {}  # last block of a free extent -> its first
        self._classes: list[dict[int, None]] = [{} for _ in range(blocks.bit_length() + 1)]
        self._sizes = 0  # a bit for each class that has an extent
        self.free = 0
        if blocks:
            self._put(0, blocks)

    def allocate(self, count: int, holder: int = NOBODY_NOW) -> tuple[int, ...]:
        """Take `count` free blocks, in as few runs as the size classes give quickly. The caller has checked that there are
        enough. holder: the number of the session that has them."""
        assert count <= self.free, f"{count} blocks asked, {self.free} free"
        taken: list[int] = []
        while count:
            start = self._find(count)
            length = self._length_at[start]
            self._cut(start)
            used = min(length, count)
            taken.extend(range(start, start + used))
            self.facts.held(self.tier, start, used, holder)
            if used < length:
                self._put(start + used, length - used)
            count -= used
        return tuple(taken)

    def allocate_after(self, block: int | None, count: int, holder: int = NOBODY_NOW) -> list[int]:
        """Take `count` free blocks: those behind `block` as far as they are free, so that consecutive chunks lie in runs,
        and the others from the middle of the longest free extents, where a run has room to grow. The caller has checked
        that there are enough."""
        taken: list[int] = []
        while len(taken) < count:
            lacking = count - len(taken)
            if block is not None and block + 1 in self._length_at:
                start, offset = block + 1, 0
                length = self._length_at[start]
            else:
                start = self._longest()
                length = self._length_at[start]
                offset = max(0, min(length // 2, length - lacking))
            used = min(length - offset, lacking)
            self._take(start, offset, used)
            self.facts.held(self.tier, start + offset, used, holder)
            taken.extend(range(start + offset, start + offset + used))
            block = taken[-1]
        return taken

    def release(self, blocks: Iterable[int]) -> None:
        for first, length in _extents(blocks):
            self.facts.freed(self.tier, first, length)
            self._release(first, length)

    def free_blocks(self) -> set[int]:
        return {start + i for start, length in self._length_at.items() for i in range(length)}

    def _longest(self) -> int:
        """The first block of a free extent of the longest class."""
        return next(iter(self._classes[self._sizes.bit_length() - 1]))

    def _take(self, start: int, offset: int, count: int) -> None:
        """Take `count` blocks, from `offset` on, out of the free extent that begins at `start`."""
        length = self._length_at[start]
        self._cut(start)
        if offset:
            self._put(start, offset)
        if offset + count < length:
            self._put(start + offset + count, length - offset - count)

    def _release(self, start: int, length: int) -> None:
        left = self._start_of.get(start - 1)
        if left is not None:
            length += self._length_at[left]
            self._cut(left)
            start = left
        right = self._length_at.get(start + length)
        if right is not None:
            self._cut(start + length)
            length += right
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

    def _cut(self, start: int) -> None:
        length = self._length_at.pop(start)
        del self._start_of[start + length - 1]
        size = length.bit_length()
        same = self._classes[size]
        del same[start]
        if not same:
            self._sizes &= ~(1 << size)
        self.free -= length


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
