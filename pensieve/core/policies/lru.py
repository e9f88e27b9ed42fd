"""Least recently used: the leading chunks of the session that was active longest ago."""

from __future__ import annotations

from collections.abc import Sequence

from pensieve.core.policies.base import EvictionPolicy
from pensieve.core.session import Session


class Lru(EvictionPolicy):
    """All chunks of a session were last used together, by its last turn; among them the leading one goes first."""

    def order(self, session: Session, chunk: int) -> float:
        return session.last_active_s

    def scores(self, session: Session, start: int, stop: int, now_s: float) -> Sequence[float]:
        return [self.order(session, start)] * (stop - start)
