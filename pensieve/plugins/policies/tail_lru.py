"""Tail-optimised LRU: first what a TTFT target will not miss ("Tail-Optimized Caching for LLM Inference", 2025)."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import accumulate, count

from pensieve.core.policies.base import EvictionPolicy, PolicyContext
from pensieve.core.session import Session


class TailLru(EvictionPolicy):
    """Least recently used first among the chunks that can be spared: those without which, and without all before them, the
    next turn still has its first token within `target_s`. When there are none, least recently used first among all.

    The next message is taken to be as long as the turns of the session were on average, replies included, and the
    machine to be idle, so the time is that of computing the missing chunks and the message.
    """

    def __init__(self, context: PolicyContext, target_s: float = 0.5) -> None:
        super().__init__(context)
        self.target_s = target_s
        size = context.chunk_tokens
        self._seconds = accumulate(context.recompute_s(chunk * size) for chunk in count(1))
        self._until: list[float] = []  # seconds to compute the chunks up to this one

    def bucket(self, session: Session, chunk: int) -> bool:
        """Whether the next turn needs the chunk to be in time."""
        size, length = self.context.chunk_tokens, len(session.tokens)
        message = self.context.recompute_s(max(length, 1)) * length / size / max(session.turns, 1)
        return self._recompute_until(chunk) + message > self.target_s

    def order(self, session: Session, chunk: int) -> float:
        return session.last_active_s

    def score(self, bucket: Hashable, order: float, now_s: float) -> float:
        return 1.0 if bucket else 0.0

    def _recompute_until(self, chunk: int) -> float:
        while len(self._until) <= chunk:
            self._until.append(next(self._seconds))
        return self._until[chunk]
