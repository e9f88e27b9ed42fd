"""The sessions of an engine: begun by their first request, idle between requests, forgotten in the end.

Of the idle ones those are forgotten that were idle for too long, and the oldest where all together are too large.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from pensieve.core.cache.base import CacheManager
from pensieve.core.facts import NOBODY_NOW, Facts
from pensieve.core.request import Request, TokenArray
from pensieve.core.session import Session

_LOOKED_AT = 4  # ended sessions looked at whenever one more ends; so at most one in four of those kept has no KV left


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


class Sessions:
    """A session with a request under way is never forgotten; of the others the one idle longest goes first. A call costs what
    it forgets, whoever else is idle."""

    def __init__(self, cache: CacheManager, limits: MemoryLimits, facts: Facts) -> None:
        self._cache, self._facts = cache, facts
        self._ttl_ns = None if limits.ttl_s is None or math.isinf(limits.ttl_s) else round(limits.ttl_s * 1e9)
        self._most_tokens = limits.tokens
        self._under_way: dict[str, int] = {}  # session name -> its requests under way
        self._idle: OrderedDict[str, _Idle] = OrderedDict()  # by name, the one idle longest first
        self._idle_tokens = 0
        self._over: deque[Session] = deque()  # sessions that will not be asked again

    @property
    def next_expiry_ns(self) -> int | None:
        """When the next idle session is to be forgotten for its age; None: not before another request ends."""
        if self._ttl_ns is None or not self._idle:
            return None
        return next(iter(self._idle.values())).since_ns + self._ttl_ns

    def asked(self, request: Request, now_s: float) -> tuple[Session, bool]:
        """Return the session of a request that has arrived, and whether it is new."""
        known = self._cache.sessions.get(request.session)
        session = known or self._cache.open(request.session, now_s, request.tenant)
        session.turns += 1
        return session, known is None

    def refused(self, session: Session, new: bool) -> None:
        """The request that it was asked by came to nothing; a new one is forgotten."""
        if new:
            self._cache.forget(session)

    def prepare(self, session: Session, new: bool, request: Request) -> None:
        """A request will be queued for it. A new one begins as its parent, where that is known, else with what an earlier
        engine has computed of it."""
        session.next_use_s, history = request.next_use_s, request.history
        parent = self._cache.sessions.get(request.fork.session) if new and request.fork is not None else None
        if parent is not None and request.fork is not None:
            self._cache.fork(parent, session, request.fork.tokens, request.fork.takes_kv)
        elif new and history is not None and history.lost == "restarted":
            session.begin(request.prompt[: history.tokens + 1], history.tokens)

    def begin(self, session: Session) -> None:
        """A request of it is under way from now on."""
        self._under_way[session.name] = self._under_way.get(session.name, 0) + 1
        self._not_idle(session.name)

    def end(self, session: Session, now_ns: int) -> None:
        """A request of it is over; it becomes idle if it has no other."""
        name = session.name
        self._under_way[name] -= 1
        if not self._under_way[name]:
            del self._under_way[name]
            self._rests(session, now_ns)

    def expect(self, name: str, next_use_s: float | None) -> None:
        """Set when the schedule will ask it again; read by offline policies only."""
        known = self._cache.sessions.get(name)
        if known is not None:
            known.next_use_s = next_use_s
            self._cache.reorder(known)

    def forget(self, name: str | None, tenant: str = "", left: TokenArray[int] | None = None) -> None:
        """Free a session, or all, where no request is under way. No plan is in flight. left: its tokens in an earlier engine,
        whose KV the disk may have."""
        if name is None:
            self._idle.clear()  # also those that the cache has let go
            self._idle_tokens = 0
        for one in [name] if name is not None else list(self._cache.sessions):
            if one in self._under_way:
                continue
            self._not_idle(one)
            known = self._cache.sessions.get(one)
            if known is not None:
                self._cache.forget(known)
            if left:
                earlier = Session(one, NOBODY_NOW, 0.0, 0.0, tenant=tenant)
                earlier.begin(left, len(left))
                self._cache.below.forget(earlier)
                earlier.close()

    def forget_surplus(self, now_ns: int) -> int | None:
        """Forget sessions that were idle for too long, or are too many; returns next_expiry_ns."""
        if self._ttl_ns is None and self._most_tokens is None:
            return None
        while True:
            expiry_ns = self.next_expiry_ns
            expired = expiry_ns is not None and expiry_ns <= now_ns
            surplus = self._most_tokens is not None and self._idle_tokens > self._most_tokens
            if not self._idle or not (expired or surplus):
                return expiry_ns
            _, oldest = self._idle.popitem(last=False)
            self._idle_tokens -= oldest.tokens
            self._facts.expired()
            if oldest.session is not None:
                self._cache.forget(oldest.session)

    def ended(self, name: str) -> None:
        """Let go of a session that nobody will ask again, without any change for others: its KV stays until its blocks
        are needed, and its tokens and chunk records are deleted then."""
        known = self._cache.sessions.get(name)
        if known is not None:
            self._over.append(known)
        for _ in range(min(_LOOKED_AT, len(self._over))):
            over = self._over.popleft()
            if over.name in self._under_way or not self._cache.forget(over, if_empty=True):
                self._over.append(over)
            else:
                self._let_go(over)

    def receive(self, name: str, tenant: str, tokens: TokenArray[int], lengths: Sequence[int], now_ns: int) -> int:
        """Take over KV of a session from another engine (CacheManager.receive). Returns how many tokens of it were
        taken: 0 while it has a request under way."""
        if name in self._under_way:
            return 0
        now_s = now_ns / 1e9
        known = self._cache.open(name, now_s, tenant)
        taken = self._cache.receive(known, tokens, lengths, now_s)
        self._not_idle(name)
        self._rests(known, now_ns)
        return taken

    def _rests(self, session: Session, now_ns: int) -> None:
        """Count a session as idle from now on."""
        self._idle[session.name] = _Idle(session, len(session.tokens), now_ns)
        self._idle_tokens += len(session.tokens)

    def _not_idle(self, name: str) -> None:
        """Stop counting a session, also one that the cache has let go: a request of it arrived, or it was forgotten."""
        known = self._idle.pop(name, None)
        if known is not None:
            self._idle_tokens -= known.tokens

    def _let_go(self, session: Session) -> None:
        """Record that the cache has let the session go. Where there are limits its tokens and age go on counting, so
        that which others are forgotten does not depend on it."""
        known = self._idle.get(session.name)
        if known is None or known.session is not session:
            return  # it was forgotten, and its name may be another session's by now
        if self._ttl_ns is None and self._most_tokens is None:
            self._not_idle(session.name)
        else:
            self._idle[session.name] = _Idle(None, known.tokens, known.since_ns)
