"""First in, first out: the conversation that began longest ago, however recently it was used."""

from __future__ import annotations

from collections.abc import Hashable

from pensieve.cache.base import PolicyContext
from pensieve.cache.session import Session


class Fifo:
    """Conversations in the order in which they began; of each, the leading chunk, which entered first."""

    def __init__(self, context: PolicyContext) -> None:
        self._context = context

    def bucket(self, session: Session, chunk: int) -> Hashable:
        return None

    def order(self, session: Session, chunk: int) -> float:
        return session.created_s

    def score(self, bucket: Hashable, order: float, now_s: float) -> float:
        return order
