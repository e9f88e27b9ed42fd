"""What managers with a single tier have in common: nothing is ever copied, and a prompt finds a prefix or nothing."""

from __future__ import annotations

from abc import abstractmethod

from pensieve.core.cache.base import CacheManager, Room
from pensieve.core.facts import Admission, Found
from pensieve.core.request import TokenArray
from pensieve.core.session import Session


class OneTier(CacheManager, Room):
    """A subclass says what a prompt finds (`_occupy`), and what becomes of it afterwards."""

    def __init__(self, chunk_tokens: int, gpu_blocks: int) -> None:
        super().__init__(chunk_tokens, gpu_blocks, cpu_blocks=0)
        self.room = self

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

    @abstractmethod
    def _vacate(self, session: Session, now_s: float) -> None:
        """Its request has stopped: others may have its blocks."""

    def release(self, session: Session, now_s: float, finished: bool = True) -> None:
        if session.running:
            session.stop(now_s)
            self.facts.rests(session)
            self._vacate(session, now_s)

    def admit(self, session: Session, keep: int, suffix: TokenArray[int] | None, now_s: float) -> Admission:
        if suffix is None:
            tokens = self._occupy(session, now_s)
            return Admission(((tokens, len(session.tokens)),), self._table(session))
        if keep < len(session.tokens):
            self.truncate(session, keep)
        session.extend(suffix)
        tokens = self._occupy(session, now_s)
        found = self._found(session, tokens)
        return Admission(((tokens, len(session.tokens)),), self._table(session), found)
