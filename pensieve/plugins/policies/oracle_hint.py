"""The bit of `hinted` as nobody has it, to measure what it is worth: from the schedule, right or wrong at a stated rate."""

from __future__ import annotations

import hashlib

from pensieve.core.policies.base import PolicyContext
from pensieve.core.session import Session
from pensieve.errors import ConfigError
from pensieve.plugins.policies.hinted import Hinted


class OracleHint(Hinted):
    """Reads Session.next_use_s, so live traffic refuses it. error_pct: of the turns, after which the bit is the wrong
    one, drawn by (seed, session, turn): with 0 it is an oracle's, with 50 it says nothing.
    """

    needs_future = True

    def __init__(self, context: PolicyContext, within_s: float = 60.0, error_pct: float = 0.0) -> None:
        super().__init__(context, within_s)
        if not 0 <= error_pct <= 100:
            raise ConfigError(f"eviction.error_pct={error_pct} is a percentage from 0 to 100.")
        self.error_pct = error_pct

    def soon(self, session: Session) -> bool:
        due_s = session.next_use_s
        truth = due_s is not None and due_s - session.last_active_s <= self.within_s
        return truth != self._wrong(session)

    def _wrong(self, session: Session) -> bool:
        named = f"{self.context.seed}/hint/{session.name}/{session.turns}"
        drawn = int.from_bytes(hashlib.blake2b(named.encode(), digest_size=8).digest(), "big")
        return drawn < self.error_pct / 100 * 2**64
