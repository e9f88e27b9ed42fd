"""What managers with a single tier have in common: nothing is ever copied, and a prompt finds a prefix or nothing."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from pensieve.cache.base import Admission, CacheManager, Residency
from pensieve.plan import Copy
from pensieve.request import TokenArray
from pensieve.session import Session


class OneTier(CacheManager):
    """A subclass says what a prompt finds (`_occupy`), how its work follows from that, and what becomes of it afterwards."""

    def __init__(self, chunk_tokens: int, gpu_blocks: int) -> None:
        super().__init__(chunk_tokens, gpu_blocks, cpu_blocks=0)

    @abstractmethod
    def _occupy(self, session: Session, now_s: float) -> int:
        """Start the session and take blocks for all of its tokens and one more; returns how many leading tokens have KV there
        already."""

    @abstractmethod
    def _admission(self, session: Session, residency: Residency, found: int) -> Admission: ...

    @property
    def outgoing(self) -> int:
        return 0

    def admit(self, session: Session, keep: int, suffix: TokenArray[int], known: int | None, now_s: float) -> Admission:
        prompt = keep + len(suffix)
        history = min(keep, session.computed, prompt - 1) if known is None else min(known, prompt - 1)
        if keep < len(session.tokens):
            self.truncate(session, keep)
        session.extend(suffix)
        found = self._occupy(session, now_s)
        hit = min(found, history)
        return self._admission(session, Residency(prompt, history, hit, 0, found - hit), found)

    def resume(self, session: Session, now_s: float) -> Admission:
        length = len(session.tokens)
        found = self._occupy(session, now_s)
        return self._admission(session, Residency(length, length - 1, 0, 0), found)

    def preempt(self, session: Session, now_s: float) -> tuple[Copy, ...]:
        self.release(session, now_s)
        return ()

    def swap_out(self, blocks: int, now_s: float, urgent: bool) -> tuple[Copy, ...]:
        return ()

    def drop(self, blocks: int, now_s: float) -> int:
        return 0  # everything idle is available already

    def complete(self, tickets: Sequence[int]) -> None:
        assert not tickets

    def void(self, tickets: Sequence[int]) -> list[Session]:
        assert not tickets
        return []

    def launched(self, step: int) -> None:
        return None  # nothing is copied, so no block waits for a plan

    def collected(self, step: int) -> None:
        return None
