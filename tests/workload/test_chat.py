import math

import pytest

from pensieve.core.request import Free, Length
from pensieve.lab.workload.chat import ChatWorkload
from tests.scripted import context
from tests.workload.dry import drive, measured, most_at_once


def test_the_next_turn_waits_for_the_reply_and_a_think_time_that_the_system_cannot_change():
    def gaps(service_s):
        arrivals = measured(drive(ChatWorkload(context(), think_time_s=0.4), service_s))
        at = {(arrival.request.session, arrival.request.turn): arrival.at_s for arrival in arrivals}
        return {key: at[key] - (at[key[0], key[1] - 1] + service_s) for key in at if key[1] > 1}

    fast, slow = gaps(0.1), gaps(5.0)
    assert fast.keys() == slow.keys()
    assert all(abs(fast[key] - slow[key]) < 1e-9 and fast[key] > 0 for key in fast)
    assert 0.3 < sum(fast.values()) / len(fast) < 0.55


def test_users_take_their_conversations_one_after_another_and_warm_up_as_many_at_once():
    workload = ChatWorkload(context(), users=5, conversations=15, warmup_turns=2, think_time_s=0)
    arrivals = drive(workload)
    assert (workload.describe().load, most_at_once(measured(arrivals))) == ("closed", 5)
    warm = [a for a in arrivals if a.request.phase == "warmup"]
    assert [a.at_s for a in warm] == [0.0] * 5
    assert len({a.due().prompt.tobytes() for a in warm}) == 5
    assert ChatWorkload(context(), users=13).describe().sessions == 13, "nobody is without one"
    assert len({a.request.session for a in drive(ChatWorkload(context())) if a.request.phase == "warmup"}) == 2


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


def _gaps(arrivals):
    at = {(arrival.request.session, arrival.request.turn): arrival.at_s for arrival in arrivals}
    return [at_s - at[session, turn - 1] for (session, turn), at_s in at.items() if turn > 1]


def test_a_conversation_ends_before_it_outgrows_the_context():
    workload = ChatWorkload(context(max_context=600))
    plan, held = workload.describe(), {}
    for arrival in drive(workload):
        request = arrival.request
        held[request.session] = held.get(request.session, 0) + len(arrival.due().prompt) + request.output.max_new_tokens
    assert max(held.values()) <= 600
    assert plan.facts["conversations_cut_by_context"] == plan.sessions
    assert plan.turns < 8 * plan.sessions


def test_outputs_have_the_suggested_length_up_to_the_limit():
    lengths = [a.request.output for a in drive(ChatWorkload(context(), max_new_tokens=36))]
    assert all(isinstance(output, Length) for output in lengths)
    assert max(output.tokens for output in lengths) == 36
    assert min(output.tokens for output in lengths) >= 20
    free = ChatWorkload(context(force_lengths=False), free=True, max_new_tokens=50)
    assert (free.describe().facts["replies"], ChatWorkload(context()).describe().facts["replies"]) == (
        "free",
        "forced lengths",
    )
    assert all(a.request.output == Free(50) for a in drive(free))
