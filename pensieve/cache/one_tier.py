"""What managers with a single tier have in common: nothing is ever copied, and a prompt finds a prefix or nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from pensieve.cache.base import Admission, CacheCounters, Residency
from pensieve.cache.session import Session, Sessions
from pensieve.plan import Copy
from pensieve.request import TokenArray


class OneTier(ABC):
    """A subclass says what a prompt finds (`_occupy`), how its work follows from that, and what becomes of it afterwards."""

    cpu_blocks = 0

    def __init__(self) -> None:
        self.counters = CacheCounters()
        self.sessions = Sessions()

    @abstractmethod
    def _occupy(self, session: Session, now_s: float) -> int:
        """Pin blocks for all of its tokens and one more; returns how many leading tokens have KV there already."""

    @abstractmethod
    def _admission(self, session: Session, residency: Residency, found: int) -> Admission: ...

    @abstractmethod
    def release(self, session: Session, now_s: float) -> None: ...

    @abstractmethod
    def truncate(self, session: Session, length: int) -> None: ...

    def open(self, name: str, now_s: float) -> Session:
        return self.sessions.open(name, now_s)

    @property
    def outgoing(self) -> int:
        return 0

    def find(self, name: str) -> Session | None:
        return self.sessions.get(name)

    def names(self) -> list[str]:
        return list(self.sessions)

    def expect(self, session: Session, next_use_s: float | None) -> None:
        session.next_use_s = next_use_s

    def hold(self, session: Session, now_s: float) -> None:
        session.waiting += 1

    def unhold(self, session: Session, now_s: float) -> None:
        session.waiting -= 1

    def admit(self, session: Session, keep: int, suffix: TokenArray[int], known: int | None, now_s: float) -> Admission:
        prompt = keep + len(suffix)
        history = min(keep, session.computed, prompt - 1) if known is None else min(known, prompt - 1)
        if keep < len(session.tokens):
            self.truncate(session, keep)
        session.tokens.extend(suffix)
        found = self._occupy(session, now_s)
        hit = min(found, history)
        return self._admission(session, Residency(prompt, history, hit, 0, found - hit), found)

    def resume(self, session: Session, now_s: float) -> Admission:
        length = len(session.tokens)
        found = self._occupy(session, now_s)
        return self._admission(session, Residency(length, length - 1, 0, 0), found)

    def suspend(self, session: Session, now_s: float) -> tuple[Copy, ...]:
        self.release(session, now_s)
        return ()

    def end_suspended(self, session: Session, now_s: float) -> None:
        return None  # it was released when it was suspended

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
