"""Pensieve's own policy: evict the chunk whose retention value is lowest (paper section 4.3.1)."""

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from pensieve.core.policies.base import EvictionPolicy, PolicyContext, Scores
from pensieve.core.session import Session


class RetentionValue(EvictionPolicy):
    """V = Cost(s, l) / T: seconds to recompute the chunk, over seconds since its session was last active.

    A chunk late in a context costs more to recompute, so the leading chunks of an old session go first. Chunks of
    equal index cost the same: they are one bucket, ordered by last active. Compared as T / Cost, so that T = 0 divides
    nothing. What several sessions have is worth the sum of what it is worth to each: Cost * (1 / T1 + 1 / T2 ...).
    """

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self._cost: list[float] = []  # by chunk index: seconds to recompute it
        self._told: NDArray[np.float64] = np.empty(0)  # the same
        self._rises = True

    def bucket(self, session: Session, chunk: int) -> int:
        return chunk

    def order(self, session: Session, chunk: int) -> float:
        return session.last_active_s

    def score(self, bucket: Hashable, order: float, now_s: float) -> float:
        assert isinstance(bucket, int)
        if bucket >= len(self._cost):
            self._learn(bucket + 1)
        return (order - now_s) / self._cost[bucket]

    def together(self, sessions: Sequence[Session], start: int, stop: int, now_s: float) -> Scores:
        ages = [session.last_active_s - now_s for session in sessions]
        age = 0.0 if 0.0 in ages else 1.0 / sum([1.0 / one for one in ages])
        return self.many(np.array([age]), np.arange(start, stop), 0.0)

    def many(self, orders: NDArray[np.float64], chunks: NDArray[np.int64], now_s: float) -> NDArray[np.float64]:
        try:
            return (orders - now_s) / self._told[chunks]
        except IndexError:
            self._learn(int(chunks.max()) + 1)
            return (orders - now_s) / self._told[chunks]

    def below(self, orders: NDArray[np.float64], score: float, now_s: float) -> NDArray[np.int64]:
        if not (score < 0 and self._rises):
            return np.full(len(orders), _ALL)
        costs = (orders - now_s) / (score * _NEARLY)
        stops = self._told.searchsorted(costs, "right")
        stops[stops == len(self._told)] = _ALL  # what the others cost is not known yet
        return stops

    def _learn(self, chunks: int) -> None:
        """Ask what so many chunks cost at least."""
        size = self.context.chunk_tokens
        self._cost += [self.context.recompute_s(chunk * size) for chunk in range(len(self._cost) + 1, chunks + 1)]
        self._told = np.array(self._cost)
        self._rises = bool((self._told[1:] >= self._told[:-1]).all())


_ALL = np.iinfo(np.int64).max
_NEARLY = 1 - 1e-9  # wider than what rounding moves
