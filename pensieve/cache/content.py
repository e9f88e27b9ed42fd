"""What other conversations have had too: how far a prompt could be found in blocks that were not computed for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pensieve.cache.block_hash import BlockHash


@dataclass(slots=True)
class SeenContent:
    """Every full block that ever was part of a conversation, by content, and whose it was (None: of several).

    It grows with all that is said, so it is kept only for trials, whose offline bound needs it.
    """

    _owner: dict[BlockHash, int | None] = field(default_factory=dict)
    _noted: dict[int, int] = field(default_factory=dict)  # conversation -> leading blocks of it that are noted

    def note(self, conversation: int, blocks: Sequence[BlockHash]) -> None:
        for block in blocks[self._noted.get(conversation, 0) :]:
            if self._owner.setdefault(block, conversation) != conversation:
                self._owner[block] = None
        self._noted[conversation] = len(blocks)

    def cut(self, conversation: int, blocks: int) -> None:
        """Truncate the conversation to its leading `blocks`; what was noted stays noted."""
        self._noted[conversation] = min(blocks, self._noted.get(conversation, 0))

    def ended(self, conversation: int) -> None:
        """Stop following the conversation; what was noted stays noted."""
        self._noted.pop(conversation, None)

    def elsewhere(self, conversation: int, blocks: Sequence[BlockHash]) -> int:
        """Count the leading blocks that another conversation has had."""
        found = 0
        for block in blocks:
            if self._owner.get(block, conversation) == conversation:
                break
            found += 1
        return found

    def anywhere(self, blocks: Sequence[BlockHash]) -> int:
        """Count the leading blocks that any conversation has had."""
        return next((index for index, block in enumerate(blocks) if block not in self._owner), len(blocks))
