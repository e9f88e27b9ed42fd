"""Least recently used: the leading chunks of the conversation that was active longest ago."""

from __future__ import annotations

from collections.abc import Hashable

from pensieve.cache.base import PolicyContext
from pensieve.cache.session import Session


class Lru:
    """All chunks of a conversation were last used together, by its last turn; among them the leading one goes first."""

    def __init__(self, context: PolicyContext) -> None:
        self._context = context

    def bucket(self, session: Session, chunk: int) -> Hashable:
        return None

    def order(self, session: Session, chunk: int) -> float:
        return session.last_active_s

    def score(self, bucket: Hashable, order: float, now_s: float) -> float:
        return order
