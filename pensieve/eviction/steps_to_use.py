"""Steps to use: furthest from its agent's next step goes first (KVFlow: Pan et al., 2025, arXiv 2507.07400)."""

from __future__ import annotations

from pensieve.eviction.base import EvictionPolicy, PolicyContext
from pensieve.hint import Hint
from pensieve.session import Session

_NEWEST_SHARE = 0.1  # of the latest value in an average


class StepsToUse(EvictionPolicy):
    """A step is an admitted turn of any conversation. A conversation whose client said that it calls a tool is due so many
    steps after its reply; the one due last goes first. Where nothing was said, or it is a person's turn, nobody knows of a
    next step: such conversations go before all others, least recently used first.

    Approximation: the paper reads the steps off the workflow's graph. Here they are the average that conversations took to
    return from the same tool; where a client declares seconds, these times the steps a second. The first conversations of a
    tool are due at once.
    """

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self._steps = 0
        self._taken: dict[str | None, float] = {}  # steps until the return, by tool
        self._step_s: float | None = None  # seconds a step takes
        self._last_s: float | None = None
        self._rests: dict[int, tuple[int, Hint]] = {}  # by conversation: the step of its reply, and what was said then

    def observe(self, session: Session, now_s: float) -> None:
        self._steps += 1
        if self._last_s is not None:
            self._step_s = _average(self._step_s, now_s - self._last_s)
        self._last_s = now_s
        known = self._rests.pop(session.number, None)
        if known is not None:
            step, hint = known
            self._taken[hint.tool] = _average(self._taken.get(hint.tool), self._steps - step)

    def rest(self, session: Session, now_s: float) -> None:
        hint = session.hint
        session.memo = None
        if hint is None or (hint.stop_reason != "tool_use" and hint.expected_s is None):
            return
        self._rests[session.number] = (self._steps, hint)
        if hint.expected_s is not None and self._step_s:
            session.memo = self._steps + hint.expected_s / self._step_s
        else:
            session.memo = self._steps + self._taken.get(hint.tool, 0.0)

    def order(self, session: Session, chunk: int) -> float:
        """session.memo: the step at which it is due."""
        return -float("inf") if session.memo is None else -session.memo


def _average(before: float | None, value: float) -> float:
    return value if before is None else before + _NEWEST_SHARE * (value - before)
