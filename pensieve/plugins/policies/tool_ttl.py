"""A time to live while a tool runs (Continuum: Li et al., 2025, arXiv 2511.02230)."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Hashable, Iterable

from pensieve.core.policies.base import MOST_TOOLS, EvictionPolicy, PolicyContext
from pensieve.core.session import Session

_REMEMBERED = 100  # gaps a tool, the latest ones
_STEP = 1.25  # times to live are rounded up to powers of it, so that few of them differ


class ToolTtl(EvictionPolicy):
    """Sessions that wait for a tool are kept until their time to live is over; all others, and those whose time is
    over, go first, least recently used first.

    The time is what pays best: with `gaps` the seconds that this tool took so far, the one of them that maximises
    (share of the gaps that are shorter) x (seconds to compute its KV again) - the time. A tool not seen so far, or
    one that does not return in time to pay, gets `first_s` and 0. Where the client says how long to keep it, that is the
    time; where it declares seconds, these are the gaps.

    Approximations: the paper adds to the seconds that a hit saves the wait for a new place in the batch, which a policy does
    not see; and it forbids the eviction within the time, where here such sessions go last.
    """

    def __init__(self, context: PolicyContext, first_s: float = 2.0) -> None:
        super().__init__(context)
        self.first_s = first_s
        self._gaps: defaultdict[str | None, deque[float]] = defaultdict(lambda: deque(maxlen=_REMEMBERED))
        self._until: list[float] = [0.0]  # seconds to compute so many chunks

    def observe(self, session: Session, now_s: float) -> None:
        """session.memo: its time to live."""
        hint = session.hint
        waited = session.memo is not None and hint is not None and hint.stop_reason == "tool_use"
        session.memo = None
        if hint is not None and waited and (hint.tool in self._gaps or len(self._gaps) < MOST_TOOLS):
            self._gaps[hint.tool].append(now_s - session.last_active_s)

    def rest(self, session: Session, now_s: float) -> None:
        session.memo = rounded_up(self._time_to_live(session))

    def bucket(self, session: Session, chunk: int) -> float:
        return session.memo or 0.0

    def order(self, session: Session, chunk: int) -> float:
        return session.last_active_s

    def score(self, bucket: Hashable, order: float, now_s: float) -> float:
        assert isinstance(bucket, float)
        return order if now_s - order >= bucket else math.inf

    def _time_to_live(self, session: Session) -> float:
        hint = session.hint
        if hint is None or (hint.stop_reason != "tool_use" and hint.keep_s is None):
            return 0.0
        if hint.keep_s is not None:
            return hint.keep_s
        gaps = (hint.expected_s,) if hint.expected_s is not None else self._gaps.get(hint.tool, ())
        return best_time(gaps, self._recompute_s(len(session.tokens))) if gaps else self.first_s

    def _recompute_s(self, tokens: int) -> float:
        size = self.context.chunk_tokens
        chunks = -(-tokens // size)
        while len(self._until) <= chunks:
            self._until.append(self._until[-1] + self.context.recompute_s(len(self._until) * size))
        return self._until[chunks]


def best_time(gaps: Iterable[float], saved_s: float) -> float:
    """Which time to live saves most, net of the time itself; 0 where none pays."""
    ascending = sorted(gaps)
    gains = [(shorter * saved_s / len(ascending) - gap, gap) for shorter, gap in enumerate(ascending, start=1)]
    gain, best = max(gains)
    return best if gain > 0 else 0.0


def rounded_up(seconds: float) -> float:
    """To a power of _STEP, which no rounding error puts below what was asked."""
    return float(_STEP ** math.ceil(math.log(seconds, _STEP))) * (1 + 1e-9) if seconds > 0 else 0.0
