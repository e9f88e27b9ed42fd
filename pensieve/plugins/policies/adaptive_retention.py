"""Retention value, unless keeping what is there would have hit more: resistant to round-robin scans."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from pensieve.core.policies.base import PolicyContext, Scores
from pensieve.core.policies.retention_value import RetentionValue
from pensieve.core.session import Session
from pensieve.plugins.policies.duel import Held, Shadow, least_recent

_SWITCH_RATIO = 1.10  # the other shadow must hit this much more: a switch reorders every idle session
_FORGET = 0.5  # share of the past hits that still counts after a decision


def _newest(held: OrderedDict[int, Held], now_s: float) -> Held | None:
    """So that what is in stays in."""
    return next(reversed(held.values()))


class AdaptiveRetention(RetentionValue):
    """Any recency rule collapses when more sessions than fit return in strict turn: the oldest is the next to return.
    There it is best to keep a part of them and to evict the newest. Which of the two regimes holds is measured: two shadow
    caches count what recency and what keeping would have hit, and the policy follows the better one. Both see every
    admission. The policy may switch once in twice as many admissions as sessions took part in them, so that the
    reordering after a switch costs a constant an admission.
    """

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self._capacity = (context.gpu_blocks + context.cpu_blocks) * context.chunk_tokens
        self._shadows = Shadow(least_recent), Shadow(_newest)
        self._hits = [0.0, 0.0]  # of recency, and of keeping
        self._seen: set[int] = set()
        self._admissions = 0
        self.keeps = False
        self.version = 0

    def observe(self, session: Session, now_s: float) -> None:
        tokens = len(session.tokens)
        for place, shadow in enumerate(self._shadows):
            held = shadow.held.get(session.number)
            self._hits[place] += min(held.tokens, tokens) if held else 0
            shadow.rest(session.number, tokens, now_s, self._capacity, None)
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

    def scores(self, session: Session, start: int, stop: int, now_s: float) -> Scores:
        if self.keeps:
            return [-session.last_active_s] * (stop - start)
        return super().scores(session, start, stop, now_s)

    def together(self, sessions: Sequence[Session], start: int, stop: int, now_s: float) -> Scores:
        if self.keeps:
            return self.scores(sessions[0], start, stop, now_s)
        return super().together(sessions, start, stop, now_s)

    def _decide(self) -> None:
        if self._hits[not self.keeps] > _SWITCH_RATIO * self._hits[self.keeps]:
            self.keeps = not self.keeps
            self.version += 1
        self._hits = [_FORGET * hits for hits in self._hits]
