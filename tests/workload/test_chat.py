import math

import pytest

from pensieve.core.request import Free, Length
from pensieve.errors import ConfigError
from pensieve.lab.workload.chat import ChatWorkload
from pensieve.serve.record import TurnRecord
from tests.scripted import context


def finished(arrival, at_s, status="completed"):
    request = arrival.request
    turn = TurnRecord(request.session, request.turn, phase=request.phase, status=status)
    turn.finished_s = at_s
    return turn


def drive(workload, service_s=1.0, fail=()):
    """Serve everything in `service_s`; returns the arrivals in the order in which they were made."""
    waiting, seen = list(workload.start()), []
    while waiting:
        arrival = min(waiting, key=lambda one: (one.at_s, one.request.id))
        waiting.remove(arrival)
        seen.append(arrival)
        key = (arrival.request.session, arrival.request.turn)
        waiting += workload.on_finished(
            finished(arrival, arrival.at_s + service_s, "timeout" if key in fail else "completed")
        )
    return seen


def measured(arrivals):
    return [arrival for arrival in arrivals if arrival.request.phase == "chat"]


def test_every_planned_turn_is_sent_once_and_in_order():
    workload = ChatWorkload(context(), conversations=9, min_turns=3, max_turns=6)
    plan, arrivals = workload.describe(), drive(workload)
    assert len(arrivals) == plan.turns
    assert len({arrival.request.id for arrival in arrivals}) == len(arrivals)
    turns = {}
    for arrival in measured(arrivals):
        turns.setdefault(arrival.request.session, []).append(arrival.request.turn)
    assert len(turns) == plan.sessions == 9
    assert all(numbers == list(range(1, len(numbers) + 1)) for numbers in turns.values())
    assert {len(numbers) for numbers in turns.values()} <= {3, 4, 5, 6}
    assert len({len(numbers) for numbers in turns.values()}) > 1


def test_warmup_ends_before_the_first_measured_turn_and_is_counted():
    workload = ChatWorkload(context(), warmup_turns=5)
    arrivals = drive(workload)
    warm = [arrival for arrival in arrivals if arrival.request.phase == "warmup"]
    assert len(warm) == workload.describe().warmup_turns == 5
    assert len({arrival.request.session for arrival in warm}) == 2
    assert min(arrival.at_s for arrival in measured(arrivals)) == max(arrival.at_s for arrival in warm) + 1.0


def test_the_next_turn_waits_for_the_reply_and_a_think_time_that_the_system_cannot_change():
    def gaps(service_s):
        arrivals = measured(drive(ChatWorkload(context(), think_time_s=0.4), service_s))
        at = {(arrival.request.session, arrival.request.turn): arrival.at_s for arrival in arrivals}
        return {key: at[key] - (at[key[0], key[1] - 1] + service_s) for key in at if key[1] > 1}

    fast, slow = gaps(0.1), gaps(5.0)
    assert fast.keys() == slow.keys()
    assert all(abs(fast[key] - slow[key]) < 1e-9 and fast[key] > 0 for key in fast)
    assert 0.3 < sum(fast.values()) / len(fast) < 0.55


def test_conversations_arrive_by_a_schedule_that_the_system_cannot_change():
    def starts(service_s):
        arrivals = measured(drive(ChatWorkload(context(), conversations=40, request_interval=2.0), service_s))
        first = [arrival.at_s for arrival in arrivals if arrival.request.turn == 1]
        return [at_s - first[0] for at_s in first]

    fast, slow = starts(0.1), starts(30.0)
    assert fast == pytest.approx(slow)
    assert 1.2 < fast[-1] / (len(fast) - 1) < 3.0


def test_the_seed_decides_and_nothing_else():
    def script(seed):
        return [
            (a.at_s, a.request.id, a.request.session, a.request.turn, a.request.prompt.tobytes(), a.request.output)
            for a in drive(ChatWorkload(context(seed), min_turns=2, max_turns=5))
        ]

    assert script(0) == script(0)
    assert script(0) != script(1)


def test_users_take_their_conversations_one_after_another():
    workload = ChatWorkload(context(), users=3, conversations=8, min_turns=2, max_turns=2)
    assert workload.describe().load == "closed"
    arrivals = measured(drive(workload))
    assert len(arrivals) == 16
    events = [(arrival.at_s, 1) for arrival in arrivals] + [(arrival.at_s + 1.0, -1) for arrival in arrivals]
    busy = most = 0
    for _, change in sorted(events):
        busy += change
        most = max(most, busy)
    assert most == 3


def test_users_warm_up_at_the_concurrency_that_is_measured():
    warm = [a for a in drive(ChatWorkload(context(), users=5, warmup_turns=2)) if a.request.phase == "warmup"]
    assert [a.at_s for a in warm] == [0.0] * 5
    assert len({a.request.prompt.tobytes() for a in warm}) == 5


def test_more_users_than_conversations_add_conversations():
    assert ChatWorkload(context(), users=13).describe().sessions == 13


def test_pressure_adds_conversations_until_the_working_set_is_that_multiple():
    for gpu_tokens in (20_000, 60_000):
        plan = ChatWorkload(context(gpu_tokens=gpu_tokens), pressure=2.0).describe()
        longest = plan.facts["longest_conversation_tokens"]
        assert 2 * gpu_tokens <= plan.working_set_tokens < 2 * gpu_tokens + longest
    assert ChatWorkload(context(gpu_tokens=60_000), pressure=0.0).describe().sessions == 8


def test_no_pressure_is_infinite():
    with pytest.raises(ConfigError, match="pressure=inf must be a number"):
        ChatWorkload(context(gpu_tokens=10_000), pressure=math.inf).describe()


def test_the_automatic_pressure_follows_both_tiers():
    """A cache of more CPU memory gets more conversations, so that something is always dropped."""
    for gpu_tokens, cpu_tokens in ((2_000, 8_000), (20_000, 200_000)):
        plan = ChatWorkload(context(gpu_tokens=gpu_tokens, cpu_tokens=cpu_tokens), pressure="auto").describe()
        longest = plan.facts["longest_conversation_tokens"]
        goal = 1.2 * (gpu_tokens + cpu_tokens)
        assert goal <= plan.working_set_tokens < goal + longest


def test_nobody_thinks_longer_than_the_cap_and_shorter_thoughts_stay():
    def thoughts(cap, think_time_s=0.4):
        fields = {"conversations": 40, "pressure": 0, "think_time_s": think_time_s, "turns_per_s": 100.0}
        workload = ChatWorkload(context(), think_time_cap_s=cap, **fields)
        return workload.describe().facts, sorted(_gaps(measured(drive(workload, service_s=1e-6))))

    (free, all_of_them), (_, cut), (automatic, shown) = thoughts(None), thoughts(0.7), thoughts("auto")
    assert max(all_of_them) > 1.2 and "think_time_cap_s" not in free
    assert cut == pytest.approx([min(thought, 0.7) for thought in all_of_them], abs=1e-5)
    longer = 1 / (1 - math.exp(-2.5))
    assert automatic["think_time_cap_s"] == pytest.approx(2.5 * longer * 0.4, abs=1e-6)
    assert shown == pytest.approx([min(longer * thought, 2.5 * longer * 0.4) for thought in all_of_them], abs=1e-5)
    assert thoughts("auto", "auto")[0]["think_time_cap_s"] == pytest.approx(2.5 * longer * 40 / 100.0, abs=1e-6)
    assert sum(shown) / len(shown) == pytest.approx(0.4, rel=0.15), "what the load line says is what is thought"


def test_the_automatic_load_offers_as_many_turns_a_second_whatever_the_number_of_conversations():
    for fields in ({"conversations": 10}, {"conversations": 100}, {"users": 5, "conversations": 60}):
        workload = ChatWorkload(
            context(), pressure=0, think_time_s="auto", request_interval="auto", turns_per_s=4.0, **fields
        )
        arrivals = measured(drive(workload, service_s=1e-6))
        at_once = fields.get("users", fields["conversations"])
        assert workload.describe().facts["think_time_s"] == at_once / 4.0
        thoughts = _gaps(arrivals)
        assert sum(thoughts) / len(thoughts) == pytest.approx(at_once / 4.0, rel=0.35)
        if "users" not in fields:
            first = [arrival.at_s for arrival in arrivals if arrival.request.turn == 1]
            assert (max(first) - min(first)) / (len(first) - 1) == pytest.approx(1 / 4.0, rel=0.6)


def _gaps(arrivals):
    at = {(arrival.request.session, arrival.request.turn): arrival.at_s for arrival in arrivals}
    return [at_s - at[session, turn - 1] for (session, turn), at_s in at.items() if turn > 1]


def test_the_working_set_is_what_the_conversations_hold_at_their_longest():
    workload = ChatWorkload(context())
    plan, held = workload.describe(), {}
    for arrival in measured(drive(workload)):
        request = arrival.request
        held[request.session] = held.get(request.session, 0) + len(request.prompt) + request.output.max_new_tokens
    assert plan.working_set_tokens == sum(tokens - 1 for tokens in held.values())


def test_repeated_conversations_share_no_first_block():
    arrivals = measured(drive(ChatWorkload(context(), conversations=60, max_turns=8)))
    first = [tuple(a.request.prompt[:64]) for a in arrivals if a.request.turn == 1]
    assert len(first) == 60
    assert len(set(first)) == 60


def test_a_conversation_longer_than_its_text_goes_on():
    arrivals = measured(drive(ChatWorkload(context(max_context=20_000), conversations=1, min_turns=30, max_turns=30)))
    prompts = [bytes(a.request.prompt) for a in arrivals if a.request.session == arrivals[0].request.session]
    assert len(prompts) == 30
    assert len(set(prompts)) == 30


def test_a_conversation_ends_before_it_outgrows_the_context():
    workload = ChatWorkload(context(max_context=600))
    plan, held = workload.describe(), {}
    for arrival in drive(workload):
        request = arrival.request
        held[request.session] = held.get(request.session, 0) + len(request.prompt) + request.output.max_new_tokens
    assert max(held.values()) <= 600
    assert plan.facts["conversations_cut_by_context"] == plan.sessions
    assert plan.turns < 8 * plan.sessions


def test_a_context_too_short_for_one_turn_is_refused():
    with pytest.raises(ConfigError, match="context of 64 tokens"):
        ChatWorkload(context(max_context=64))


def test_a_failed_turn_ends_its_conversation_only():
    arrivals = measured(drive(ChatWorkload(context(), conversations=8)))
    victim = arrivals[0].request.session
    cut = measured(drive(ChatWorkload(context(), conversations=8), fail={(victim, 3)}))
    assert [a.request.turn for a in cut if a.request.session == victim] == [1, 2, 3]
    assert len(cut) == len(arrivals) - 5


def test_a_failed_warmup_does_not_hold_the_measurement_up():
    arrivals = drive(ChatWorkload(context()), fail={("warmup-0", 1), ("warmup-1", 2)})
    assert len(measured(arrivals)) == 64


def test_outputs_have_the_suggested_length_up_to_the_limit():
    lengths = [a.request.output for a in drive(ChatWorkload(context(), max_new_tokens=36))]
    assert all(isinstance(output, Length) for output in lengths)
    assert max(output.tokens for output in lengths) == 36
    assert min(output.tokens for output in lengths) >= 20
    free = drive(ChatWorkload(context(force_lengths=False), free=True, max_new_tokens=50))
    assert all(a.request.output == Free(50) for a in free)


def test_deadlines_count_from_the_intended_arrival():
    arrivals = drive(ChatWorkload(context(), timeout_s=7.0))
    assert all(a.deadline_s == pytest.approx(a.at_s + 7.0) for a in arrivals)


@pytest.mark.parametrize(
    "fields",
    [
        {"conversations": 0},
        {"conversations": 2.5},
        {"users": 0},
        {"users": True},
        {"min_turns": 0},
        {"min_turns": 5, "max_turns": 4},
        {"max_new_tokens": 0},
        {"request_interval": -1.0},
        {"request_interval": "often"},
        {"think_time_s": -0.1},
        {"think_time_cap_s": 0},
        {"think_time_cap_s": "short"},
        {"pressure": -2},
        {"pressure": float("nan")},
        {"pressure": "much"},
        {"turns_per_s": 0},
        {"warmup_turns": 0},
        {"timeout_s": 0},
        {"free": True},
    ],
)
def test_fields_out_of_range_are_refused_by_name(fields):
    with pytest.raises(ConfigError, match=f"workload.{list(fields)[-1]}="):
        ChatWorkload(context(), **fields)
