"""What the cache holds before it is measured, and whether it did."""

from contextlib import nullcontext
from dataclasses import replace

import pytest

from pensieve.errors import MeasurementInvalid
from pensieve.lab.turns import Turns
from pensieve.lab.workload.base import WorkloadPlan
from pensieve.lab.workload.cache_state import (
    BEFORE,
    CHANCE_TOKENS,
    SALT_TOKENS,
    check_start,
    contamination,
    in_state,
    unverified,
)
from pensieve.serve.record import TurnRecord, is_measured
from tests.scripted import context
from tests.workload.dry import MAKERS, drive

CHOSEN = pytest.mark.parametrize("name", ["chat", "prefix"])


def asked(arrivals):
    return [(a.request.session, a.request.turn, list(a.due().prompt), a.request.output) for a in arrivals]


@CHOSEN
def test_salted_prompts_differ_from_the_first_tokens_on_and_end_as_before(name):
    plain = drive(MAKERS[name](context()))
    salted = drive(in_state("salted", MAKERS[name], context()))
    salts = {}
    for one, other in zip(plain, salted, strict=True):
        before, now = one.due(), other.due()
        assert (before.session, before.turn, other.at_s) == (now.session, now.turn, one.at_s)
        if one.continues and before.turn > 1:
            assert now.prompt == before.prompt
            continue
        assert now.prompt[SALT_TOKENS:] == before.prompt
        salts.setdefault(now.session, set()).add(tuple(now.prompt[:SALT_TOKENS]))
        if before.history is not None:
            assert now.history.tokens == before.history.tokens + SALT_TOKENS
    assert all(len(found) == 1 for found in salts.values()), "a conversation keeps its salt"
    assert len(set.union(*salts.values())) == len(salts)
    plan, was = in_state("salted", MAKERS[name], context()).describe(), MAKERS[name](context()).describe()
    assert plan.working_set_tokens == was.working_set_tokens + SALT_TOKENS * was.sessions
    assert plan.turns == was.turns == len(salted)


@CHOSEN
def test_warm_holds_everything_once_before_and_then_measures_the_same(name):
    plain = drive(MAKERS[name](context()))
    warm = drive(in_state("warm", MAKERS[name], context()))
    half = len(plain)
    before, measured = warm[:half], warm[half:]
    assert asked(measured) == asked(plain)
    assert [a.request.phase for a in measured] == [a.request.phase for a in plain]
    assert {a.request.phase for a in before} == {"warmup"}
    assert [(s.removeprefix(BEFORE), t, p, o) for s, t, p, o in asked(before)] == asked(plain)
    assert all(a.request.session.startswith(BEFORE) for a in before)
    assert len({a.request.id for a in warm}) == len(warm)
    assert min(a.at_s for a in measured) >= max(a.at_s for a in before) + 1.0, "after the last of them was answered"
    plan, was = in_state("warm", MAKERS[name], context()).describe(), MAKERS[name](context()).describe()
    assert plan.turns == 2 * was.turns == len(warm)
    assert plan.warmup_turns == sum(not is_measured(a.request.phase) for a in warm)


def plan(state):
    return WorkloadPlan("closed", 1, None, 0, 0, cache_state=state)


def turn(session, number, at_s, history=0, hit=0, phase="chat", shared=0, unexplained=None):
    record = TurnRecord(session, number, phase=phase, admitted_s=at_s)
    record.history_tokens, record.gpu_hit_tokens, record.shared_hit_tokens = history, hit, shared
    record.unexplained_tokens = unexplained
    return record


WARM = turn("w", 1, 0.0, phase="warmup")
USED = [turn("w", 1, 0.0, phase="warmup", shared=64), turn("a", 1, 1.0)]
PRIMED = [turn("a", 1, 0.0, phase="warmup"), turn("a", 2, 1.0, history=4)]
UNKNOWN = [replace(turn("a", 1, 0.0), admitted_s=None, arrived_s=at, prompt_tokens=9, shared_hit_tokens=n)
           for at, n in ((1.0, 0), (2.0, 40))]  # fmt: skip

SAID, UNSAID = ([replace(UNKNOWN[0], shared_hit_tokens=23, unexplained_tokens=n)] for n in (0, 23))


@pytest.mark.parametrize(
    ("state", "turns", "starts_empty", "wrong"),
    [
        ("cold", [turn("a", 2, 2.0, history=9, hit=9), turn("a", 1, 1.0), WARM], True, None),
        ("cold", [WARM, turn("a", 1, 1.0, history=5)], True, "a had 5 tokens of history"),
        ("cold", USED, True, "found 64 tokens of its prompt"),
        ("cold", USED, False, None),
        ("cold", [TurnRecord("a", 1, status="refused")], True, None),  # it was never admitted
        ("cold", UNKNOWN, True, None),
        ("cold", [replace(one, arrived_s=3.0 - one.arrived_s) for one in UNKNOWN], True, "found 40 tokens"),
        ("cold", SAID, True, None),  # by another conversation, which the engine may have served first
        ("cold", UNSAID, True, "found 23 tokens"),
        ("cold", [replace(turn("a", 1, 0.0), shared_hit_tokens=23, unexplained_tokens=0)], True, "found 23 tokens"),
        ("primed", PRIMED, True, None),
        ("primed", [*PRIMED, turn("b", 1, 2.0)], True, "b had 0 tokens"),
        ("carried", [turn("a", 7, 0.0, history=40, hit=40)], True, None),
        ("carried", [turn("a", 1, 0.0), turn("a", 2, 1.0, history=40)], True, "held none of them"),
    ],
)
def test_the_first_turns_show_what_the_cache_held(state, turns, starts_empty, wrong):
    with pytest.raises(MeasurementInvalid, match=wrong) if wrong else nullcontext():
        check_start(plan(state), Turns.of(turns), starts_empty)


def strange(session, number, unexplained, phase="chat", shared=None):
    found = (unexplained or 0) if shared is None else shared
    return turn(session, number, float(number), shared=found, phase=phase, unexplained=unexplained)


LITTLE = [strange("w", 1, 0, "warmup"), strange("a", 1, CHANCE_TOKENS - 1)]
TOLD = ("declared {}, but 2 of 4 turns found 100 tokens", "turn 1 of b: 64", "cache_state=salted")


@pytest.mark.parametrize(
    ("state", "turns", "told"),
    [
        ("cold", LITTLE, ()),
        *(
            (state, [*LITTLE, strange("b", 1, 64, "warmup"), strange("c", 1, 36)], TOLD)
            for state in ("salted", "primed")
        ),
        # 16 tokens of a server's chat template were cached: the count of what nobody said has left them out.
        ("salted", [strange("a", 1, 0, shared=16)], ()),
        ("salted", [strange("a", 1, None, shared=16)], ("1 of 1 turns found 16 tokens",)),
        ("salted", [strange("a", 1, None, shared=15), strange("a", 2, None, shared=90)], ()),
        ("warm", [strange("before-a", 1, 64, "warmup"), strange("a", 1, 0)], ()),
        ("warm", [strange("a", 1, 64)], ("declared warm",)),
        ("carried", [strange("a", 7, 64)], ()),
        ("cold", [strange("a", 1, CHANCE_TOKENS)], ("1 of 1 turns found 16 tokens",)),
    ],
)
def test_what_nobody_said_in_the_trial_is_told(state, turns, told):
    said = contamination(plan(state), Turns.of(turns))
    assert (said is not None) == bool(told)
    assert all(part.format(state) in said for part in told)


@pytest.mark.parametrize(
    ("state", "hit", "starts_empty", "told"),
    [("cold", None, False, True), ("cold", None, True, False), ("cold", 0, False, False), ("warm", None, False, False)],
)
def test_a_server_that_ran_before_and_says_nothing_leaves_it_open(state, hit, starts_empty, told):
    assert bool(unverified(plan(state), Turns.of([turn("a", 1, 0.0, hit=hit)]), starts_empty)) is told
