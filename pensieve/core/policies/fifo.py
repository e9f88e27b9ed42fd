"""First in, first out: the session that began longest ago, however recently it was used."""

from __future__ import annotations

from collections.abc import Sequence

from pensieve.core.policies.base import EvictionPolicy
from pensieve.core.session import Session


class Fifo(EvictionPolicy):
    """Sessions in the order in which they began; of each, the leading chunk, which entered first."""

    def order(self, session: Session, chunk: int) -> float:
        return session.created_s

    def scores(self, session: Session, start: int, stop: int, now_s: float) -> Sequence[float]:
        return [self.order(session, start)] * (stop - start)
