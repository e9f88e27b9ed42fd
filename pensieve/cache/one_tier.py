"""What managers with a single tier have in common: nothing is ever copied, and a prompt finds a prefix or nothing."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from pensieve.cache.base import CacheManager
from pensieve.facts import Admission, Found
from pensieve.plan import Copy
from pensieve.request import TokenArray
from pensieve.session import Session


class OneTier(CacheManager):
    """A subclass says what a prompt finds (`_occupy`), and what becomes of it afterwards."""

    def __init__(self, chunk_tokens: int, gpu_blocks: int) -> None:
        super().__init__(chunk_tokens, gpu_blocks, cpu_blocks=0)

    @abstractmethod
    def _occupy(self, session: Session, now_s: float) -> int:
        """Start the session and take blocks for all of its tokens and one more; returns how many leading tokens have KV there
        already."""

    @abstractmethod
    def _table(self, session: Session) -> tuple[int, ...]:
        """The blocks of a session that runs."""

    def _found(self, session: Session, tokens: int) -> Found:
        """What its admission has found, where that is so many leading tokens."""
        return Found(gpu=((0, tokens),) if tokens else (), shared=True)

    def truncate(self, session: Session, length: int, computed: int | None = None) -> None:
        self.facts.truncating(session, length)
        session.rollback(length, computed)

    @property
    def outgoing(self) -> int:
        return 0

    def admit(self, session: Session, keep: int, suffix: TokenArray[int], now_s: float) -> Admission:
        if keep < len(session.tokens):
            self.truncate(session, keep)
        session.extend(suffix)
        tokens = self._occupy(session, now_s)
        found = self._found(session, tokens)
        return Admission(((tokens, len(session.tokens)),), self._table(session), found)

    def resume(self, session: Session, now_s: float) -> Admission:
        tokens = self._occupy(session, now_s)
        return Admission(((tokens, len(session.tokens)),), self._table(session))

    def preempt(self, session: Session, now_s: float) -> tuple[Copy, ...]:
        self.release(session, now_s)
        return ()

    def swap_out(self, blocks: int, now_s: float, urgent: bool, spare: bool = False) -> tuple[Copy, ...]:
        return ()

    def drop(self, blocks: int, now_s: float) -> int:
        return 0  # everything idle is available already

    def finish(self, tickets: Sequence[int], valid: bool) -> list[Session]:
        assert not tickets
        return []

    def launched(self, step: int) -> None:
        return None  # nothing is copied, so no block waits for a plan

    def collected(self, step: int) -> None:
        return None

    def forget(self, session: Session) -> None:
        self.truncate(session, 0)
        self._close(session)
