from array import array

import pytest

from pensieve.core.request import Free, Length
from pensieve.lab.replay import replay
from pensieve.lab.workload.fit import Fit, fitted, warmups
from pensieve.lab.workload.playback import Pauses, Playback, Poisson, Recorded, Users, lengths_of
from pensieve.lab.workload.recording import Call, Conversation, Count
from tests.scripted import ScriptedSystem, context
from tests.workload.dry import drive, measured

TIMED = [
    Conversation("a", (Call(Count(10), 3, 5.0, False, 1), Call(Count(12), 3, 9.0, False, 4))),
    Conversation("b", (Call(Count(20), 4, 5.0, False, 0), Call(Count(25), 4, 5.5, False, 3))),
]
TALKS = [Conversation(f"c{n}", tuple(Call(Count(5 + n), 2) for _ in range(1 + n % 3))) for n in range(9)]


def playback(conversations, arrivals, seed=0, pause_s=1.0, **options):
    dialogues, _ = fitted(conversations, Fit(context(seed)))
    if isinstance(arrivals, int):
        arrivals = Users.dealt(dialogues, arrivals)
    warm = warmups(dialogues, 4, 2, context(seed))
    facts = lengths_of(dialogues) | {"source": "x"}
    return Playback(context(seed), warm, dialogues, arrivals, Pauses(seed, pause_s), facts=facts, **options)


def keys(arrivals):
    return [(arrival.request.session, arrival.request.turn) for arrival in arrivals]


@pytest.mark.parametrize("arrivals", [Recorded(), Poisson(2.0), 2])
def test_every_planned_turn_is_sent_once(arrivals):
    conversations = TIMED if isinstance(arrivals, Recorded) else TALKS
    workload = playback(conversations, arrivals)
    plan, seen = workload.describe(), drive(workload)
    assert len(seen) == plan.turns == plan.warmup_turns + sum(len(one.calls) for one in conversations)
    assert plan.warmup_turns == 4
    assert len(set(keys(seen))) == len({arrival.request.id for arrival in seen}) == plan.turns
    assert plan.sessions == len(conversations)
    assert plan.load == ("closed" if arrivals == 2 else arrivals.load)


def test_recorded_times_are_kept_whatever_the_system_does():
    for service_s in (0.01, 100.0):
        for scale in (1.0, 0.5):
            seen = measured(drive(playback(TIMED, Recorded(scale)), service_s))
            assert keys(seen) == [("b", 1), ("a", 1), ("b", 2), ("a", 2)]
            assert [one.at_s - seen[0].at_s for one in seen] == pytest.approx([0, 0, 0.5 * scale, 4 * scale])


def test_a_recorded_request_is_sent_though_the_one_before_failed():
    assert len(measured(drive(playback(TIMED, Recorded()), fail={("b", 1)}))) == 4
    assert len(measured(drive(playback(TALKS, Poisson(1.0)), fail={("c2", 1)}))) == sum(len(c.calls) for c in TALKS) - 2


def test_conversations_arrive_by_a_poisson_process_and_wait_inside():
    talks = [Conversation(f"c{n}", (Call(Count(5), 2), Call(Count(5), 2))) for n in range(1_500)]
    workload = playback(talks, Poisson(0.5), pause_s=3.0)
    seen = measured(drive(workload))
    starts = sorted(one.at_s for one in seen if one.request.turn == 1)
    assert (starts[-1] - starts[0]) / (len(starts) - 1) == pytest.approx(0.5, rel=0.08)
    first = {one.request.session: one.at_s for one in seen if one.request.turn == 1}
    thoughts = [one.at_s - first[one.request.session] - 1.0 for one in seen if one.request.turn == 2]
    assert min(thoughts) > 0
    assert sum(thoughts) / len(thoughts) == pytest.approx(3.0, rel=0.08)


def test_thoughts_depend_on_the_seed_and_not_on_the_system():
    def gaps(service_s, seed=0):
        sent = measured(drive(playback(TALKS, Poisson(1.0), seed), service_s))
        at = dict(zip(keys(sent), (one.at_s for one in sent), strict=True))
        return {key: at[key] - at[key[0], key[1] - 1] - service_s for key in at if key[1] > 1}

    assert gaps(0.1) == pytest.approx(gaps(9.0))
    assert gaps(0.1) != pytest.approx(gaps(0.1, seed=1))


def test_users_have_one_conversation_each_at_a_time():
    workload = playback(TALKS, 3, pause_s=0.0)
    system = ScriptedSystem()
    replay(system, workload)
    assert system.most_in_flight == 3


def test_outputs_and_deadlines():
    assert {type(one.request.output) for one in drive(playback(TIMED, Recorded()))} == {Length}
    assert {type(one.request.output) for one in drive(playback(TIMED, Recorded(), free=True))} == {Free}
    late = drive(playback(TIMED, Recorded(), timeout_s=2.5))
    assert all(one.deadline_s == one.at_s + 2.5 for one in late)


def test_prompts_are_built_when_they_are_due():
    system, workload = ScriptedSystem(), playback(TIMED, Recorded())
    assert all(arrival.request.prompt == array("i") for arrival in drive(playback(TIMED, Recorded())))
    replay(system, workload)
    sent = {(one.session, one.turn): one for one in system.submitted if one.phase == "chat"}
    assert {key: len(one.prompt) for key, one in sent.items()} == {
        ("a", 1): 10, ("b", 1): 20, ("b", 2): 25, ("a", 2): 12,
    }  # fmt: skip
    assert sent["b", 1].next_use_s - sent["b", 1].intended_s == pytest.approx(0.5)


def test_the_record_says_what_will_be_asked():
    plan = playback(TALKS, Poisson(1.0)).describe()
    longest = [sum(len(one.calls) * [5 + n + 2]) - 1 for n, one in enumerate(TALKS)]
    assert plan.working_set_tokens == sum(longest)
    assert plan.facts["longest_conversation_tokens"] == max(longest)
    assert plan.facts["source"] == "x"
    assert plan.facts["mean_turns"] == 2.0
    assert plan.facts["reply_tokens_mean"] == 2.0
    assert plan.facts["message_tokens_p50"] == 9.0
