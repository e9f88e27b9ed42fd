"""Orders by one time of the session: least recently used, whole sessions or not; and first in, first out."""

import numpy as np
from numpy.typing import NDArray

from pensieve.core.policies.base import EvictionPolicy
from pensieve.core.session import Session


class Lru(EvictionPolicy):
    """Least recently used. All chunks of a session were last used together, by its last turn; the leading one goes first."""

    def order(self, session: Session, chunk: int) -> float:
        return session.last_active_s

    def many(self, orders: NDArray[np.float64], chunks: NDArray[np.int64], now_s: float) -> NDArray[np.float64]:
        return orders


class ConversationLru(Lru):
    """Whole sessions, oldest first, as CachedAttention does (Gao et al., USENIX ATC 2024): a session that lost one chunk
    loses all of them in the same choice."""

    whole_conversations = True


class Fifo(Lru):
    """Sessions in the order in which they began; of each, the leading chunk, which entered first."""

    def order(self, session: Session, chunk: int) -> float:
        return session.created_s

    many = Lru.many
