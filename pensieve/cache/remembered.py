"""How long, and how much of, idle conversations the engine remembers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from pensieve.cache.session import Session


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """ttl_s: an idle conversation is forgotten after this long; None: never. tokens: raw tokens of all idle conversations
    together (4 bytes each); beyond, the one idle longest is forgotten first."""

    ttl_s: float | None = None
    tokens: int | None = None


class Remembered:
    """Idle conversations, the one idle longest first; each step costs only what it forgets."""

    def __init__(self, limits: MemoryLimits) -> None:
        self._limits = limits
        self._idle: OrderedDict[str, tuple[Session, int]] = OrderedDict()
        self.tokens = 0

    def rest(self, session: Session) -> None:
        """Its last request ended."""
        self.wake(session)
        self._idle[session.name] = (session, len(session.tokens))
        self.tokens += len(session.tokens)

    def wake(self, session: Session) -> None:
        """A request of it arrived, or it was forgotten."""
        known = self._idle.pop(session.name, None)
        if known is not None:
            self.tokens -= known[1]

    def surplus(self, now_s: float) -> Iterator[Session]:
        """Conversations to forget now; each is taken off the books as it is yielded."""
        ttl, most = self._limits.ttl_s, self._limits.tokens
        while self._idle:
            session, _ = next(iter(self._idle.values()))
            expired = ttl is not None and now_s - session.last_active_s > ttl
            if not expired and (most is None or self.tokens <= most):
                return
            self.wake(session)
            yield session
