"""Which idle sessions are forgotten: those idle for too long, and the oldest where all together are too large."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from pensieve.session import Session


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """ttl_s: an idle session is forgotten after this long; None: never. tokens: raw tokens of all idle sessions
    together (4 bytes each); beyond, the one idle longest is forgotten first."""

    ttl_s: float | None = None
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class _Idle:
    """One idle session. session None: the cache has let it go; its tokens and its age count as before."""

    session: Session | None
    tokens: int
    since_ns: int


class IdleSessions:
    """Sessions without a request, the one idle longest first. A call costs what it forgets, whoever else is idle."""

    def __init__(self, limits: MemoryLimits) -> None:
        ttl_s = limits.ttl_s
        self._ttl_ns = None if ttl_s is None or math.isinf(ttl_s) else round(ttl_s * 1e9)
        self._most_tokens = limits.tokens
        self._idle: OrderedDict[str, _Idle] = OrderedDict()
        self.tokens = 0

    @property
    def next_expiry_ns(self) -> int | None:
        """When the next session will have been idle for too long; None: never, as things stand."""
        if self._ttl_ns is None or not self._idle:
            return None
        return next(iter(self._idle.values())).since_ns + self._ttl_ns

    def add(self, session: Session, now_ns: int) -> None:
        """Count a session as idle: its last request ended."""
        self.remove(session.name)
        self._idle[session.name] = _Idle(session, len(session.tokens), now_ns)
        self.tokens += len(session.tokens)

    def remove(self, name: str) -> None:
        """Stop counting a session, also one that the cache has let go: a request of it arrived, or it was forgotten."""
        known = self._idle.pop(name, None)
        if known is not None:
            self.tokens -= known.tokens

    def clear(self) -> None:
        """Stop counting all of them."""
        self._idle.clear()
        self.tokens = 0

    def let_go(self, session: Session) -> None:
        """Record that the cache has let the session go. Where there are limits its tokens and age go on counting, so
        that which others are forgotten does not depend on it."""
        known = self._idle.get(session.name)
        if known is None or known.session is not session:
            return  # it was forgotten, and its name may be another session's by now
        if self._ttl_ns is None and self._most_tokens is None:
            self.remove(session.name)
        else:
            self._idle[session.name] = _Idle(None, known.tokens, known.since_ns)

    def take_surplus(self, now_ns: int) -> Iterator[Session | None]:
        """Yield the sessions to forget now, and remove each; None for one that the cache has let go before."""
        while self._idle:
            expiry_ns = self.next_expiry_ns
            expired = expiry_ns is not None and expiry_ns <= now_ns
            if not expired and (self._most_tokens is None or self.tokens <= self._most_tokens):
                return
            _, oldest = self._idle.popitem(last=False)
            self.tokens -= oldest.tokens
            yield oldest.session
