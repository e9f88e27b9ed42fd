"""Was the cache at the start what the workload says it was?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pensieve.core.request import is_measured
from pensieve.errors import MeasurementInvalid
from pensieve.lab.workload.base import WorkloadPlan
from pensieve.serve.record import TurnRecord

STATES = ("cold", "salted", "warm", "primed", "carried")
REMEDY = "Start it anew, or ask with cache_state=salted and a seed that it has not seen."
CHANCE_TOKENS = 16  # of a prompt that may be found without anybody having said it: two texts that begin alike


class _Begun(NamedTuple):
    """A turn that was admitted, in the order of admission."""

    begun_s: float
    place: int
    session: str
    number: int
    history: int
    found: int


def check_start(plan: WorkloadPlan, turns: Sequence[TurnRecord], starts_empty: bool = True) -> None:
    """Hold `plan.cache_state` against the turns of the trial, which tell what was found.

    cold, salted, warm: no measured conversation has history when its first measured turn is admitted (warm: others have said
    the same before). primed: every one has. All four: the very first turn of the trial finds nothing at all, where the
    engine was started for it (starts_empty; of one that ran before, `contamination` tells). carried: some measured
    conversation has history that no turn of this trial made. Turns that were never admitted, or whose history nobody knows,
    say nothing. Raises MeasurementInvalid.
    """
    assert plan.cache_state in STATES, plan.cache_state
    first: dict[str, _Begun] = {}  # of each conversation its first measured turn
    opened: dict[str, _Begun] = {}
    for place, turn in enumerate(turns):
        if (begun_s := _begun_s(turn)) is None or turn.history_tokens is None:
            continue
        this = _Begun(begun_s, place, turn.session, turn.turn, turn.history_tokens, _found(turn))
        opened[turn.session] = min(this, opened.get(turn.session, this))
        if is_measured(turn.phase):
            first[turn.session] = min(this, first.get(turn.session, this))
    if not first:
        return
    if plan.cache_state == "carried":
        if not any(turn.history for session, turn in first.items() if opened[session] is turn):
            raise MeasurementInvalid(
                "The workload goes on with conversations of an earlier run, and the cache held none of them; run that one "
                "first, on the same engine."
            )
        return
    found = min(opened.values()).found
    if found and starts_empty:
        raise MeasurementInvalid(
            f"The workload starts with a {plan.cache_state} cache, but the first turn found {found} tokens of its prompt "
            "there. Restart the engine or empty its cache."
        )
    for begun in sorted(first.values()):
        if (begun.history > 0) != (plan.cache_state == "primed"):
            raise MeasurementInvalid(
                f"The workload starts with a {plan.cache_state} cache, but {begun.session} had {begun.history} tokens of "
                f"history at its first measured turn (turn {begun.number}). Session names must not repeat what warmed up."
            )


def contamination(plan: WorkloadPlan, turns: Sequence[TurnRecord]) -> str | None:
    """A sentence where the engine found what nothing in this trial can have put there: text that nobody had said, by its own
    count of cached tokens (warm: in a measured turn; carried: that is what it declares); or, where nobody knows what was
    said, text of a salted conversation, whose salt nobody else has, at its very first turn."""
    if plan.cache_state == "carried":
        return None
    strange = [
        turn
        for turn in turns
        if (turn.unexplained_tokens or 0) >= CHANCE_TOKENS and (plan.cache_state != "warm" or is_measured(turn.phase))
    ]
    if strange:
        first = strange[0]
        tokens = sum(turn.unexplained_tokens or 0 for turn in strange)
        return (
            f"The cache was declared {plan.cache_state}, but {len(strange)} of {len(turns)} turns found {tokens:,} tokens in "
            f"it that nobody had said in this trial (turn {first.turn} of {first.session}: {first.unexplained_tokens:,}). "
            f"The engine still held what it was asked before. {REMEDY}"
        )
    if plan.cache_state != "salted":
        return None
    salt = int(plan.facts["salt_tokens"])
    unjudged = (turn for turn in turns if turn.turn == 1 and turn.unexplained_tokens is None)
    found = [turn for turn in unjudged if _found(turn) >= salt]
    if not found:
        return None
    return (
        f"{len(found)} salted conversations were found in the cache at their first turn ({_found(found[0])} tokens of "
        f"{found[0].session}): the engine still held an earlier run of them. {REMEDY}"
    )


def unverified(plan: WorkloadPlan, turns: Sequence[TurnRecord], starts_empty: bool) -> str | None:
    """A sentence where nobody can say whether the cache was what the workload declares."""
    tells = any(turn.gpu_hit_tokens is not None for turn in turns)
    if starts_empty or tells or plan.cache_state in ("warm", "carried"):
        return None
    return (
        f"The cache was declared {plan.cache_state}; the engine ran before this trial and does not report what it finds in "
        "its cache, so nobody can tell."
    )


def _begun_s(turn: TurnRecord) -> float | None:
    """When it was admitted; of an engine that does not tell, when it arrived there, if it was served."""
    if turn.admitted_s is not None or turn.prompt_tokens is None:
        return turn.admitted_s
    return turn.arrived_s


def _found(turn: TurnRecord) -> int:
    tiers = (turn.gpu_hit_tokens, turn.cpu_hit_tokens, turn.disk_hit_tokens, turn.shared_hit_tokens)
    return sum(tokens or 0 for tokens in tiers)
