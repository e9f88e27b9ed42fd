"""Sessions that will be back soon go last: by what their client says, or to measure what that is worth, by the schedule."""

import hashlib
from collections.abc import Hashable
from typing import Annotated

from pydantic import Field

from pensieve.core.policies.base import EvictionPolicy, PolicyContext
from pensieve.core.session import Session

AFTER = 1e10
"""Seconds that put one class of sessions behind another: more than any clock counts."""


class Hinted(EvictionPolicy):
    """One bit of each idle session: whether it will be back within `within_s`, by what its client expects
    (Hint.expected_s). Who said so and is not back by then has no claim any more. The others go first, least recently used.
    """

    def __init__(self, context: PolicyContext, within_s: Annotated[float, Field(gt=0)] = 60.0) -> None:
        super().__init__(context)
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


class OracleHint(Hinted):
    """The bit as nobody has it: reads Session.next_use_s, so live traffic refuses it. error_pct: of the turns, after which
    the bit is the wrong one, drawn by (seed, session, turn): with 0 it is an oracle's, with 50 it says nothing.
    """

    needs_future = True

    def __init__(
        self,
        context: PolicyContext,
        within_s: Annotated[float, Field(gt=0)] = 60.0,
        error_pct: Annotated[float, Field(ge=0, le=100)] = 0.0,
    ) -> None:
        super().__init__(context, within_s)
        self.error_pct = error_pct

    def soon(self, session: Session) -> bool:
        due_s = session.next_use_s
        truth = due_s is not None and due_s - session.last_active_s <= self.within_s
        named = f"{self.context.seed}/hint/{session.name}/{session.turns}"
        drawn = int.from_bytes(hashlib.blake2b(named.encode(), digest_size=8).digest(), "big")
        return truth != (drawn < self.error_pct / 100 * 2**64)
