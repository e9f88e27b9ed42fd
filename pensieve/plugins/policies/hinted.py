"""Sessions that say they will be back soon go last; the others least recently used first."""

from __future__ import annotations

from collections.abc import Hashable

from pensieve.core.policies.base import EvictionPolicy, PolicyContext
from pensieve.core.session import Session
from pensieve.errors import ConfigError

AFTER = 1e10
"""Seconds that put one class of sessions behind another: more than any clock counts."""


class Hinted(EvictionPolicy):
    """One bit of each idle session: whether it will be back within `within_s`, by what its client expects
    (Hint.expected_s). Who said so and is not back by then has no claim any more.
    """

    def __init__(self, context: PolicyContext, within_s: float = 60.0) -> None:
        super().__init__(context)
        if not within_s > 0:
            raise ConfigError(f"eviction.within_s={within_s} must be a positive number of seconds.")
        self.within_s = within_s

    def soon(self, session: Session) -> bool:
        """The bit."""
        hint = session.hint
        return hint is not None and hint.expected_s is not None and hint.expected_s <= self.within_s

    def bucket(self, session: Session, chunk: int) -> bool:
        return self.soon(session)

    def order(self, session: Session, chunk: int) -> float:
        return session.last_active_s

    def score(self, bucket: Hashable, order: float, now_s: float) -> float:
        return order + AFTER if bucket and now_s - order <= self.within_s else order
