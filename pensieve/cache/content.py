"""What other sessions have had too: how far a prompt could be found in blocks that were not computed for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pensieve.cache.block_hash import BlockHash


@dataclass(slots=True)
class SeenContent:
    """Every full block that ever was part of a session, by content, and the number of the session whose it was
    (None: of several).

    It grows with all that is said, so it is kept only for trials, whose offline bound needs it.
    """

    _owner: dict[BlockHash, int | None] = field(default_factory=dict)
    _noted: dict[int, int] = field(default_factory=dict)  # session number -> leading blocks of it that are noted

    def note(self, number: int, blocks: Sequence[BlockHash]) -> None:
        for block in blocks[self._noted.get(number, 0) :]:
            if self._owner.setdefault(block, number) != number:
                self._owner[block] = None
        self._noted[number] = len(blocks)

    def cut(self, number: int, blocks: int) -> None:
        """Truncate the session to its leading `blocks`; what was noted stays noted."""
        self._noted[number] = min(blocks, self._noted.get(number, 0))

    def ended(self, number: int) -> None:
        """Stop following the session; what was noted stays noted."""
        self._noted.pop(number, None)

    def elsewhere(self, number: int, blocks: Sequence[BlockHash]) -> int:
        """Count the leading blocks that another session has had."""
        found = 0
        for block in blocks:
            if self._owner.get(block, number) == number:
                break
            found += 1
        return found

    def anywhere(self, blocks: Sequence[BlockHash]) -> int:
        """Count the leading blocks that any session has had."""
        return next((index for index, block in enumerate(blocks) if block not in self._owner), len(blocks))
