"""What holds of every workload: what it says of itself is what it sends, under the seed alone."""

from collections import Counter

import pytest

from pensieve.errors import ConfigError
from pensieve.lab.compose.conf import read_option
from pensieve.lab.compose.settings import factory
from pensieve.lab.trial.inspection import inspect
from pensieve.lab.workload.exact import RoundsWorkload
from pensieve.lab.workload.sharegpt import sharegpt_workload
from pensieve.serve.record import is_measured
from tests.scripted import context
from tests.workload.dry import MAKERS, drive, measured

ALL = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def asked(arrivals):
    return [
        (a.at_s, a.request.id, a.request.session, a.request.turn, a.due().prompt.tobytes(), a.request.output)
        for a in arrivals
    ]


@ALL
def test_what_is_planned_is_sent_once_and_in_order(make):
    plan, arrivals = make(context()).describe(), drive(make(context()))
    assert len(arrivals) == len({a.request.id for a in arrivals}) == plan.turns
    assert plan.warmup_turns == plan.turns - len(measured(arrivals))
    turns = {}
    for arrival in arrivals:
        turns.setdefault(arrival.request.session, []).append(arrival.request.turn)
    assert all(numbers == list(range(1, len(numbers) + 1)) for numbers in turns.values())
    assert len({a.request.session for a in measured(arrivals)}) == plan.sessions
    assert all(a.deadline_s == pytest.approx(a.at_s + 7.0) for a in arrivals), "it counts from the intended arrival"
    found = inspect(make(context()))
    assert (len(found.turns), found.warmup_turns) == (plan.turns - plan.warmup_turns, plan.warmup_turns)
    assert found.sessions == plan.sessions


@ALL
def test_the_seed_decides_and_nothing_else(make):
    assert asked(drive(make(context()))) == asked(drive(make(context())))
    assert asked(drive(make(context()))) != asked(drive(make(context(1))))


@pytest.mark.parametrize("name", sorted(set(MAKERS) - {"prefix"}))
def test_measured_turns_wait_for_the_last_of_the_warm_up_also_where_it_failed(name):
    for fail in ((), {("warmup-0", 1), ("warmup-1", 1), ("warmup", 1)}):
        arrivals = drive(MAKERS[name](context()), fail=fail)
        warm = [a.at_s for a in arrivals if not is_measured(a.request.phase)]
        assert min(a.at_s for a in measured(arrivals)) >= max(warm) + 1.0
        assert len(measured(arrivals)) == len(measured(drive(MAKERS[name](context()))))


@ALL
def test_a_failed_turn_ends_its_conversation_only(make):
    whole = Counter(a.request.session for a in measured(drive(make(context()))))
    victim = next(a.request for a in measured(drive(make(context()))) if a.request.turn < 3)
    cut = Counter(a.request.session for a in measured(drive(make(context()), fail={(victim.session, victim.turn)})))
    before = {session: turns for session, turns in cut.items() if session != victim.session}
    assert before == {session: turns for session, turns in whole.items() if session != victim.session}
    assert cut[victim.session] == 1


@pytest.mark.parametrize("name", sorted(set(MAKERS) - {"prefix", "decode"}))  # those keep one conversation at a time
def test_the_working_set_is_what_the_conversations_hold_at_their_longest(name):
    plan, held = MAKERS[name](context()).describe(), Counter()
    for arrival in measured(drive(MAKERS[name](context()))):
        held[arrival.request.session] += len(arrival.due().prompt) + arrival.request.output.max_new_tokens
    assert plan.working_set_tokens == held.total() - plan.sessions, "the last token of each has no KV"


REFUSED = {
    "agents": "agents=0 act_s=-1 steps=0 reason_output=0 observation_tokens=0 timeout_s=0",
    "chat": "conversations=0 conversations=2.5 users=0 users=True min_turns=0 max_new_tokens=0 request_interval=-1.0 "
    "request_interval='often' think_time_s=-0.1 think_time_cap_s=0 think_time_cap_s='short' pressure=-2 "
    "pressure=float('nan') pressure=float('inf') pressure='much' turns_per_s=0 warmup_turns=0 timeout_s=0 max_turns=4 "
    "free=True",
    "decode": "new_tokens=0 prompt_tokens=0 discard=0 iterations=5 timeout_s=-1",
    "hotness": "users=0 request_interval=-1 turns=0 conversations=0 max_new_tokens=0 warmup_turns=0 free=True",
    "prefix_invalidation": "rounds=0 settle_s=-1 discard=-1 query_tokens=0 new_tokens=0 blocks='512' blocks='0/5' "
    "blocks='8000/500'",
    "rounds": "rounds=0 at_once=0 conversations=0 pressure=-1 message_tokens=0 rounds=10**6 order='odd'",
    "sharegpt": "request_rate=0 conversations=0 max_turns=4 users=0 timeout_s=0 arrivals_s=0 think_time_s=-1 "
    "max_new_tokens=0 relative_rate=0 free=True",
    "trace": "time_scale=0.0 request_rate=-1.0 window_s=0.0 window_start_s=-1.0 conversations=0 max_turns=4 "
    "max_new_tokens=0 max_context=0 think_scale=-1 think_cap_s=-1 hint='oracle' users='many'",
    "vllm_run": "warmup_turns=0",
}


@pytest.mark.parametrize(
    ("name", "field"), [(name, field) for name, fields in REFUSED.items() for field in fields.split()]
)
def test_a_field_out_of_range_is_refused_by_name(name, field):
    key, _, text = field.partition("=")
    node = read_option("workload", name) | {key: eval(text)}
    if key == "max_turns":
        node["min_turns"] = 5
    if name == "trace":
        node["path"] = "none"
    with pytest.raises(ConfigError, match=rf"workload\.{key}="):
        factory("workload", node)(context())


@pytest.mark.parametrize("make", [RoundsWorkload, sharegpt_workload])
def test_conversations_begin_with_a_system_prompt(make):
    """Equal to its last token, and followed by what they say without one; the first of several is the most frequent."""

    def prompts(**more):
        arrivals = measured(drive(make(context(), conversations=40, **more)))
        return {(a.request.session, a.request.turn): a.due().prompt for a in arrivals}

    alone, systems = prompts(), {} if make is RoundsWorkload else {"systems": 4}
    found, begins = prompts(system_tokens=50, **systems), Counter()
    for (session, turn), prompt in found.items():
        assert prompt[50 if turn == 1 else 0 :] == alone[session, turn]
        if turn == 1:
            begins[prompt[:50].tobytes()] += 1
    assert begins.total() == 40 and len(begins) == (4 if systems else 1)
    if systems:
        first = sharegpt_workload(context(), conversations=400, system_tokens=50, systems=4)
        counts = Counter(a.due().prompt[:50].tobytes() for a in measured(drive(first)) if a.request.turn == 1)
        assert [share > 400 / 4 for _, share in counts.most_common()] == [True, False, False, False]
