"""Recency and FLOPs saved per byte (Marconi: "Prefix Caching for the Era of Hybrid LLMs", Pan et al., MLSys 2025)."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

from pensieve.core.policies.base import EvictionPolicy, PolicyContext
from pensieve.core.session import Session

_NO_TIME_S = 1e-9


class FlopEfficiency(EvictionPolicy):
    """S = recency + alpha x efficiency, both from 0 to 1; the lowest S goes first.

    Chunks have equally many bytes, so efficiency is the time to recompute one, over that of the last chunk of the longest
    session yet. Recency is 0 for a session active when the oldest that could still be held was asked, and 1 now.

    Approximations: the paper normalises both over the candidates of each choice, and finds alpha by replaying past requests
    against a copy of its tree. Here the range of recency is that of the last prompts which fit into both tiers together, and
    alpha is a setting.
    """

    def __init__(self, context: PolicyContext, alpha: float = 1.0) -> None:
        super().__init__(context)
        self.alpha = alpha
        self._capacity = (context.gpu_blocks + context.cpu_blocks) * context.chunk_tokens
        self._asked: deque[tuple[float, int]] = deque()  # when, tokens: the last prompts that fit together
        self._fits = 0
        self._cost: list[float] = []  # by chunk index: seconds to recompute it
        self._longest = 0

    def observe(self, session: Session, now_s: float) -> None:
        tokens = len(session.tokens)
        self._longest = max(self._longest, tokens // self.context.chunk_tokens)
        self._asked.append((now_s, tokens))
        self._fits += tokens
        while self._fits > self._capacity and len(self._asked) > 1:
            self._fits -= self._asked.popleft()[1]

    def bucket(self, session: Session, chunk: int) -> int:
        return chunk

    def order(self, session: Session, chunk: int) -> float:
        return session.last_active_s

    def score(self, bucket: Hashable, order: float, now_s: float) -> float:
        assert isinstance(bucket, int)
        oldest_s = self._asked[0][0] if self._asked else 0.0
        recency = (order - oldest_s) / max(now_s - oldest_s, _NO_TIME_S)
        return recency + self.alpha * self._recompute_s(bucket) / self._recompute_s(max(self._longest, bucket))

    def _recompute_s(self, chunk: int) -> float:
        while len(self._cost) <= chunk:
            self._cost.append(self.context.recompute_s((len(self._cost) + 1) * self.context.chunk_tokens))
        return self._cost[chunk]
