"""The offline bound as a policy: evict what is needed furthest in the future (Belady 1966)."""

from __future__ import annotations

import math
from collections.abc import Hashable

from pensieve.cache.base import PolicyContext
from pensieve.cache.session import Session


class Belady:
    """Reads Session.next_use_s, which the replay sets from the arrival it has just scheduled; a conversation without one
    never returns and goes first. Live traffic has no known future: such a server refuses this policy.
    """

    needs_future = True

    def __init__(self, context: PolicyContext) -> None:
        self._context = context

    def bucket(self, session: Session, chunk: int) -> Hashable:
        return None

    def order(self, session: Session, chunk: int) -> float:
        return -math.inf if session.next_use_s is None else -session.next_use_s

    def score(self, bucket: Hashable, order: float, now_s: float) -> float:
        return order
