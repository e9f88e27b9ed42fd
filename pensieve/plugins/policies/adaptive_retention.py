"""Retention value, unless keeping what is there would have hit more: resistant to round-robin scans."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from pensieve.core.policies.base import PolicyContext
from pensieve.core.policies.retention_value import RetentionValue
from pensieve.core.session import Session

_SWITCH_RATIO = 1.10  # the other shadow must hit this much more: a switch reorders every idle session
_FORGET = 0.5  # share of the past hits that still counts after a decision


class _Shadow:
    """A cache of whole sessions, as large as the real one, that holds counts of tokens only: what would it have hit?

    keep: it evicts the most recently used, so that what is in stays in; else the least recently used.
    """

    def __init__(self, capacity_tokens: int, keep: bool) -> None:
        self._capacity = capacity_tokens
        self._keep = keep
        self._tokens: OrderedDict[int, int] = OrderedDict()  # session number -> tokens held, least recently used first
        self._held = 0
        self.hits = 0.0

    def access(self, number: int, tokens: int) -> None:
        held = self._tokens.pop(number, 0)
        self.hits += min(held, tokens)
        self._tokens[number] = tokens
        self._held += tokens - held
        while self._held > self._capacity:
            # With `keep` the newcomer itself makes room; of a session no more tokens go than must.
            victim = next(reversed(self._tokens)) if self._keep else next(iter(self._tokens))
            gone = min(self._tokens[victim], self._held - self._capacity)
            self._held -= gone
            self._tokens[victim] -= gone
            if not self._tokens[victim]:
                del self._tokens[victim]


class AdaptiveRetention(RetentionValue):
    """Any recency rule collapses when more sessions than fit return in strict turn: the oldest is the next to return.
    There it is best to keep a part of them and to evict the newest. Which of the two regimes holds is measured: two shadow
    caches count what recency and what keeping would have hit, and the policy follows the better one. Both see every
    admission. The policy may switch once in twice as many admissions as sessions took part in them, so that the
    reordering after a switch costs a constant an admission.
    """

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        capacity = (context.gpu_blocks + context.cpu_blocks) * context.chunk_tokens
        self._recency, self._keeping = _Shadow(capacity, keep=False), _Shadow(capacity, keep=True)
        self._seen: set[int] = set()
        self._admissions = 0
        self.keeps = False
        self.version = 0

    def observe(self, session: Session, now_s: float) -> None:
        for shadow in (self._recency, self._keeping):
            shadow.access(session.number, len(session.tokens))
        self._seen.add(session.number)
        self._admissions += 1
        if self._admissions >= 2 * len(self._seen):
            self._decide()
            self._admissions = 0
            self._seen.clear()

    def bucket(self, session: Session, chunk: int) -> int:
        return 0 if self.keeps else chunk

    def order(self, session: Session, chunk: int) -> float:
        return -session.last_active_s if self.keeps else session.last_active_s

    def score(self, bucket: Hashable, order: float, now_s: float) -> float:
        return order if self.keeps else super().score(bucket, order, now_s)

    def scores(self, session: Session, start: int, stop: int, now_s: float) -> Sequence[float]:
        if self.keeps:
            return [-session.last_active_s] * (stop - start)
        return super().scores(session, start, stop, now_s)

    def together(self, sessions: Sequence[Session], start: int, stop: int, now_s: float) -> Sequence[float]:
        if self.keeps:
            return self.scores(sessions[0], start, stop, now_s)
        return super().together(sessions, start, stop, now_s)

    def _decide(self) -> None:
        now, other = (self._keeping, self._recency) if self.keeps else (self._recency, self._keeping)
        if other.hits > _SWITCH_RATIO * now.hits:
            self.keeps = not self.keeps
            self.version += 1
        self._recency.hits *= _FORGET
        self._keeping.hits *= _FORGET
