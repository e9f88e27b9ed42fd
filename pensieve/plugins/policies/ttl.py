"""Time to live, by what the client asks for or by the class of the reply: who expires first goes first."""

from __future__ import annotations

from pensieve.core.policies.base import EvictionPolicy, PolicyContext
from pensieve.core.request import Hint
from pensieve.core.session import Session
from pensieve.errors import ConfigError


class Ttl(EvictionPolicy):
    """Evict in the order of expiry, which is last active + the time to live: what the client asks for (Hint.keep_s), else
    `slack` times what it expects (Hint.expected_s), else that of its stop reason; other_s where nothing was said.
    """

    def __init__(
        self,
        context: PolicyContext,
        tool_use_s: float = 60.0,
        end_turn_s: float = 0.0,
        other_s: float = 0.0,
        slack: float = 2.0,
    ) -> None:
        super().__init__(context)
        given = {"tool_use_s": tool_use_s, "end_turn_s": end_turn_s, "other_s": other_s, "slack": slack}
        for name, value in given.items():
            if not 0 <= value < float("inf"):
                raise ConfigError(f"eviction.{name}={value} must be a number from 0 on.")
        self._of_class = {"tool_use": tool_use_s, "end_turn": end_turn_s, None: other_s}
        self._slack = slack

    def order(self, session: Session, chunk: int) -> float:
        return session.last_active_s + self._ttl_s(session.hint or Hint())

    def _ttl_s(self, hint: Hint) -> float:
        if hint.keep_s is not None:
            return hint.keep_s
        if hint.expected_s is not None:
            return self._slack * hint.expected_s
        return self._of_class[hint.stop_reason]
