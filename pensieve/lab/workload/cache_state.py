"""What the cache holds of a workload's text before it is measured: nothing, all of it, or nothing that anybody shares; and
whether it did."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from pensieve.core.request import TokenArray
from pensieve.errors import MeasurementInvalid
from pensieve.lab.turns import HITS, Floats, Places, Turns
from pensieve.lab.workload.base import Arrival, Workload, WorkloadContext, WorkloadPlan, out_of_work
from pensieve.lab.workload.exact import prose
from pensieve.serve.record import TurnRecord, is_measured

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
        facts = dict(plan.facts)
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
        return replace(plan, turns=turns, warmup_turns=warmup, cache_state=state)

    def start(self) -> Iterable[Arrival]:
        return self._warming(self._before.start())

    def on_finished(self, turn: TurnRecord) -> Iterable[Arrival]:
        if not turn.session.startswith(BEFORE):
            return [_measured(arrival) for arrival in self._inner.on_finished(turn)]
        phase = self._phases.pop((turn.session, turn.turn))
        told = replace(turn, session=turn.session.removeprefix(BEFORE), phase=phase)
        following = self._warming(self._before.on_finished(told))
        self._open -= 1
        if self._open:
            return following
        assert turn.finished_s is not None
        return [_measured(arrival, turn.finished_s) for arrival in self._inner.start()]

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


def _measured(arrival: Arrival, later_s: float = 0.0) -> Arrival:
    """Give a measured request an odd id; those of the warm-up have even ones."""
    deadline_s = None if arrival.deadline_s is None else arrival.deadline_s + later_s
    request = replace(arrival.request, id=2 * arrival.request.id + 1)
    return replace(arrival, at_s=arrival.at_s + later_s, deadline_s=deadline_s, request=request)


# Was the cache at the start what the workload says it was?

CHANCE_TOKENS = 16  # of a prompt that may be found without anybody having said it: two texts that begin alike


def check_start(plan: WorkloadPlan, turns: Turns, starts_empty: bool = True) -> None:
    """Hold `plan.cache_state` against the turns of the trial, which tell what was found.

    cold, salted, warm: no measured conversation has history when its first measured turn is admitted (warm: others have said
    the same before). primed: every one has. All four: the very first turn of the trial finds nothing at all, where the
    engine was started for it (starts_empty; of one that ran before, `contamination` tells). carried: some measured
    conversation has history that no turn of this trial made. Turns that were never admitted, or whose history nobody knows,
    say nothing. Raises MeasurementInvalid.
    """
    told = turns.where(~np.isnan(turns["history_tokens"] + _begun_s(turns)))
    order = np.argsort(_begun_s(told), kind="stable")
    measured, sessions = told.that("phase", is_measured)[order], told.codes("session")[order]

    def firsts(chosen: Places) -> Places:
        """The first one of each conversation."""
        return order[chosen[np.sort(np.unique(sessions[chosen], return_index=True)[1])]]

    opened, first = firsts(np.arange(len(order))), firsts(np.flatnonzero(measured))
    if not len(first):
        return
    history = told["history_tokens"]
    if plan.cache_state == "carried":
        if not history[np.intersect1d(first, opened)].any():
            raise MeasurementInvalid(
                "The workload goes on with conversations of an earlier run, and the cache held none of them; run that one "
                "first, on the same engine."
            )
        return
    # An engine that does not tell when it admits a turn may have served another one before it: of what the first one found,
    # that counts which nobody had said in the trial.
    unsaid, at = told["unexplained_tokens"], order[0]
    found = _found(told)[at] if np.isnan(unsaid[at]) or told["admitted_s"][at] >= 0 else unsaid[at]
    if found and starts_empty:
        raise MeasurementInvalid(
            f"The workload starts with a {plan.cache_state} cache, but the first turn found {found:.0f} tokens of its prompt "
            "there. Restart the engine or empty its cache."
        )
    wrong = first[(history[first] > 0) != (plan.cache_state == "primed")]
    if len(wrong):
        raise MeasurementInvalid(
            f"The workload starts with a {plan.cache_state} cache, but {told.word('session', wrong[0])} had "
            f"{history[wrong[0]]:.0f} tokens of history at its first measured turn (turn {told['turn'][wrong[0]]:.0f}). "
            "Session names must not repeat what warmed up."
        )


def contamination(plan: WorkloadPlan, turns: Turns) -> str | None:
    """A sentence where the engine found what nothing in this trial can have put there: text that nobody had said, by its own
    count of cached tokens (warm: in a measured turn; carried: that is what it declares); or, where nobody knows what was
    said, text of a salted conversation, whose salt nobody else has, at its very first turn."""

    if plan.cache_state == "carried":
        return None
    unsaid, found = turns["unexplained_tokens"], _found(turns)
    judged = turns.that("phase", is_measured) if plan.cache_state == "warm" else np.full(len(turns), True)
    salted = (turns["turn"] == 1) & (found >= SALT_TOKENS) & (plan.cache_state == "salted")
    strange = np.where(np.isnan(unsaid), found * salted, unsaid * (judged & (unsaid >= CHANCE_TOKENS)))
    if not strange.any():
        return None
    first = int(np.flatnonzero(strange)[0])
    return (
        f"The cache was declared {plan.cache_state}, but {np.count_nonzero(strange)} of {len(turns)} turns found "
        f"{int(strange.sum()):,} tokens in it that nobody had said in this trial (turn {turns['turn'][first]:.0f} of "
        f"{turns.word('session', first)}: {strange[first]:,.0f}). The engine still held what "
        "it was asked before. Start it anew, or ask with cache_state=salted and a seed that it has not seen."
    )


def unverified(plan: WorkloadPlan, turns: Turns, starts_empty: bool) -> str | None:
    """A sentence where nobody can say whether the cache was what the workload declares."""
    tells = not np.isnan(turns["gpu_hit_tokens"]).all()
    if starts_empty or tells or plan.cache_state in ("warm", "carried"):
        return None
    return (
        f"The cache was declared {plan.cache_state}; the engine ran before this trial and does not report what it finds in "
        "its cache, so nobody can tell."
    )


def _begun_s(turns: Turns) -> Floats:
    """When each was admitted; of an engine that does not tell, when it arrived there, if it was served."""
    admitted_s = turns["admitted_s"]
    return np.where(np.isnan(admitted_s) & ~np.isnan(turns["prompt_tokens"]), turns["arrived_s"], admitted_s)


def _found(turns: Turns) -> Floats:
    return sum(np.nan_to_num(turns[tier]) for tier in HITS) + np.zeros(len(turns))
