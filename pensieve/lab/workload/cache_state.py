"""What the cache holds of a workload's text before it is measured: nothing, all of it, or nothing that anybody shares."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Literal

from pensieve.core.request import Request, TokenArray
from pensieve.lab.workload.base import Arrival, Workload, WorkloadContext, WorkloadPlan, out_of_work
from pensieve.lab.workload.prose import prose
from pensieve.serve.record import TurnRecord

CacheState = Literal["cold", "warm", "salted"]
SALT_TOKENS = 16
BEFORE = "before-"  # begins the names of conversations that only warm the cache


def in_state(state: CacheState, make: Callable[[WorkloadContext], Workload], context: WorkloadContext) -> Workload:
    """The workload that `make` makes, met by a cache in this state.

    cold: as it is; the engine has just started. warm: every conversation was held once before, under another name, as
    warm-up: a cache that finds text by content has what it kept of it, one that keeps it by conversation has nothing. salted:
    each conversation begins with SALT_TOKENS tokens of its own, a function of the seed and its name: no two share text,
    whatever an engine that runs already has kept.
    """
    if state == "salted":
        return _Salted(make(replace(context, max_context=context.max_context - SALT_TOKENS)), context)
    if state == "warm":
        return _Warmed(make(context), make(context))
    return make(context)


class _Salted:
    def __init__(self, inner: Workload, context: WorkloadContext) -> None:
        self._inner, self._context = inner, context

    def describe(self) -> WorkloadPlan:
        plan = self._inner.describe()
        facts = {**plan.facts, "salt_tokens": SALT_TOKENS}
        if facts.get("longest_conversation_tokens") is not None:
            facts["longest_conversation_tokens"] += SALT_TOKENS
        working = plan.working_set_tokens + SALT_TOKENS * plan.sessions
        state = "salted" if plan.cache_state == "cold" else plan.cache_state
        return replace(plan, working_set_tokens=working, cache_state=state, facts=facts)

    def start(self) -> Iterable[Arrival]:
        return map(self._salted, self._inner.start())

    def on_finished(self, turn: TurnRecord) -> Iterable[Arrival]:
        return map(self._salted, self._inner.on_finished(turn))

    def out_of_work(self, turn: TurnRecord, following: Sequence[Arrival]) -> bool:
        return out_of_work(self._inner, turn, following)

    def _salted(self, arrival: Arrival) -> Arrival:
        request = arrival.request
        if arrival.continues and request.turn > 1:
            return arrival
        salt = prose(self._context, SALT_TOKENS, "salt", request.session)
        known = request.history
        history = None if known is None else replace(known, tokens=known.tokens + SALT_TOKENS)
        later = arrival.prompt
        prompt: Callable[[], TokenArray[int]] | None = None if later is None else lambda: salt + later()
        return replace(arrival, request=replace(request, prompt=salt + request.prompt, history=history), prompt=prompt)


class _Warmed:
    """The same workload twice: the first time to warm the cache, and when nothing of that is left, to be measured."""

    def __init__(self, before: Workload, inner: Workload) -> None:
        self._before, self._inner = before, inner
        self._phases: dict[tuple[str, int], str] = {}  # of the turns that warm, in the workload's own eyes
        self._open = 0  # of those, sent or to be sent

    def describe(self) -> WorkloadPlan:
        plan = self._inner.describe()
        assert plan.turns is None or plan.turns >= plan.warmup_turns
        warmup = plan.warmup_turns + (plan.turns or 0)
        turns = None if plan.turns is None else 2 * plan.turns
        state = "warm" if plan.cache_state == "cold" else plan.cache_state
        facts = {**plan.facts, "held_before": plan.sessions}
        return replace(plan, turns=turns, warmup_turns=warmup, cache_state=state, facts=facts)

    def start(self) -> Iterable[Arrival]:
        return self._warming(self._before.start())

    def on_finished(self, turn: TurnRecord) -> Iterable[Arrival]:
        if not turn.session.startswith(BEFORE):
            return map(_measured, self._inner.on_finished(turn))
        phase = self._phases.pop((turn.session, turn.turn))
        told = replace(turn, session=turn.session.removeprefix(BEFORE), phase=phase)
        following = self._warming(self._before.on_finished(told))
        self._open -= 1
        if self._open:
            return following
        assert turn.finished_s is not None
        return [_later(_measured(arrival), turn.finished_s) for arrival in self._inner.start()]

    def out_of_work(self, turn: TurnRecord, following: Sequence[Arrival]) -> bool:
        return out_of_work(self._inner, turn, following)

    def _warming(self, arrivals: Iterable[Arrival]) -> list[Arrival]:
        renamed = []
        for arrival in arrivals:
            request = arrival.request
            session = BEFORE + request.session
            self._phases[session, request.turn] = request.phase
            asked = replace(request, id=2 * request.id, session=session, phase="warmup", label="")
            renamed.append(replace(arrival, request=asked))
        self._open += len(renamed)
        return renamed


def _measured(arrival: Arrival) -> Arrival:
    """Give a measured request an odd id; those of the warm-up have even ones."""
    return replace(arrival, request=_numbered(arrival.request))


def _numbered(request: Request) -> Request:
    return replace(request, id=2 * request.id + 1)


def _later(arrival: Arrival, by_s: float) -> Arrival:
    deadline = None if arrival.deadline_s is None else arrival.deadline_s + by_s
    return replace(arrival, at_s=arrival.at_s + by_s, deadline_s=deadline)
