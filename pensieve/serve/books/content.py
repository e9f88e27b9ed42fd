"""What other sessions have had too: how far a prompt could be found in blocks that were not computed for it."""

from __future__ import annotations

from collections.abc import Sequence

from pensieve.core.session import BlockHash, Session


class Content:
    """Every full block that ever was part of a session, by content, and the number of the session whose it was
    (None: of several).

    It grows with all that is said, so it is kept only for trials, whose offline bound needs it.
    """

    def __init__(self, chunk_tokens: int) -> None:
        self._size = chunk_tokens
        self._owner: dict[BlockHash, int | None] = {}
        self._noted: dict[int, int] = {}  # session number -> leading blocks of it that are noted
        self._unnoted: dict[int, Session] = {}  # sessions that have run since they were noted last

    def findable(self, session: Session, partial: bool) -> tuple[int, int]:
        """At most so many leading tokens of its prompt were in another session, and in any, up to this moment. partial: a
        part of a block can be found."""
        for other in list(self._unnoted.values()):
            self._note(other)
            if not other.running:
                del self._unnoted[other.number]
        size, length = self._size, len(session.tokens)
        blocks = session.named(length, size)
        counts = self._elsewhere(session.number, blocks), self._anywhere(blocks)
        self._note(session)
        self._unnoted[session.number] = session
        beyond = size - 1 if partial else 0
        elsewhere, anywhere = (min(count * size + beyond, length - 1) for count in counts)
        return elsewhere, anywhere

    def truncating(self, session: Session, length: int) -> None:
        """Note what is about to go: it stays noted."""
        self._note(session)
        self._unnoted.pop(session.number, None)
        self._noted[session.number] = min(length // self._size, self._noted[session.number])

    def closed(self, session: Session) -> None:
        """Stop following the session; what was said in it stays noted."""
        self._note(session)
        self._unnoted.pop(session.number, None)
        self._noted.pop(session.number)

    def _note(self, session: Session) -> None:
        number, blocks = session.number, session.named(len(session.tokens), self._size)
        for block in blocks[self._noted.get(number, 0) :]:
            if self._owner.setdefault(block, number) != number:
                self._owner[block] = None
        self._noted[number] = len(blocks)

    def _elsewhere(self, number: int, blocks: Sequence[BlockHash]) -> int:
        """Count the leading blocks that another session has had."""
        found = 0
        for block in blocks:
            if self._owner.get(block, number) == number:
                break
            found += 1
        return found

    def _anywhere(self, blocks: Sequence[BlockHash]) -> int:
        """Count the leading blocks that any session has had."""
        return next((index for index, block in enumerate(blocks) if block not in self._owner), len(blocks))
