"""Steps to use: furthest from its agent's next step goes first (KVFlow: Pan et al., 2025, arXiv 2507.07400)."""

from __future__ import annotations

from dataclasses import dataclass

from pensieve.core.policies.base import MOST_TOOLS, EvictionPolicy, PolicyContext
from pensieve.core.session import Session

_NEWEST_SHARE = 0.1  # of the latest value in an average


@dataclass(frozen=True, slots=True)
class _Rest:
    """After the turn that was admitted as `step`, waiting for the tool: the next one is due at step `due`."""

    step: int
    tool: str | None
    due: float


class StepsToUse(EvictionPolicy):
    """A step is an admitted turn of any session. A session whose client said that it calls a tool is due so many
    steps after its reply; the one due last goes first. Where nothing was said, or it is a person's turn, nobody knows of a
    next step: such sessions go before all others, least recently used first.

    Approximation: the paper reads the steps off the workflow's graph. Here they are the average that sessions took to
    return from the same tool; where a client declares seconds, these times the steps a second. The first sessions of a
    tool are due at once.
    """

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self._steps = 0
        self._taken: dict[str | None, float] = {}  # steps until the return, by tool
        self._step_s: float | None = None  # seconds a step takes
        self._last_s: float | None = None

    def observe(self, session: Session, now_s: float) -> None:
        self._steps += 1
        if self._last_s is not None:
            self._step_s = _average(self._step_s, now_s - self._last_s)
        self._last_s = now_s
        rest = session.memo
        if rest is not None and (rest.tool in self._taken or len(self._taken) < MOST_TOOLS):
            self._taken[rest.tool] = _average(self._taken.get(rest.tool), self._steps - rest.step)
        session.memo = None

    def rest(self, session: Session, now_s: float) -> None:
        hint = session.hint
        session.memo = None
        if hint is None or (hint.stop_reason != "tool_use" and hint.expected_s is None):
            return
        if hint.expected_s is not None and self._step_s:
            after = hint.expected_s / self._step_s
        else:
            after = self._taken.get(hint.tool, 0.0)
        session.memo = _Rest(self._steps, hint.tool, self._steps + after)

    def order(self, session: Session, chunk: int) -> float:
        return -float("inf") if session.memo is None else -float(session.memo.due)


def _average(before: float | None, value: float) -> float:
    return value if before is None else before + _NEWEST_SHARE * (value - before)
