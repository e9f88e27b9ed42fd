"""The stop reason as it is, a hard priority: who waits for a tool goes last, whose turn it is to write goes first."""

from __future__ import annotations

from pensieve.core.policies.base import EvictionPolicy
from pensieve.core.session import Session
from pensieve.plugins.policies.hinted import AFTER

_CLASS = {"end_turn": 0, None: 1, "tool_use": 2}


class StopReasonFirst(EvictionPolicy):
    """Least recently used first among those with one stop reason (Hint.stop_reason), however long ago it was said; who says
    nothing stands between them."""

    def order(self, session: Session, chunk: int) -> float:
        reason = session.hint.stop_reason if session.hint else None
        return session.last_active_s + AFTER * _CLASS[reason]
