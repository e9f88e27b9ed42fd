"""The offline bound as a policy: evict what is needed furthest in the future (Belady 1966)."""

import math

import numpy as np
from numpy.typing import NDArray

from pensieve.core.policies.base import EvictionPolicy
from pensieve.core.session import Session


class Belady(EvictionPolicy):
    """Reads Session.next_use_s, which the replay sets from the arrival it has just scheduled; a session without one
    never returns and goes first. Of sessions that wait, which are victims after all others, the one goes first whose
    request is admitted last: what is scheduled behind that request tells nothing about when the KV is needed. Live traffic
    has no known future: such a server refuses this policy.
    """

    needs_future = True

    def order(self, session: Session, chunk: int) -> float:
        if session.waiting:
            return -session.waiting[0]
        return -math.inf if session.next_use_s is None else -session.next_use_s

    def many(self, orders: NDArray[np.float64], chunks: NDArray[np.int64], now_s: float) -> NDArray[np.float64]:
        return orders
