from pensieve.lab.workload.chat import ChatWorkload
from tests.scripted import context
from tests.workload.dry import drive, measured


def test_the_next_turn_waits_for_the_reply_and_a_think_time_that_the_system_cannot_change():
    def gaps(service_s):
        arrivals = measured(drive(ChatWorkload(context(), think_time_s=0.4), service_s))
        at = {(arrival.request.session, arrival.request.turn): arrival.at_s for arrival in arrivals}
        return {key: at[key] - (at[key[0], key[1] - 1] + service_s) for key in at if key[1] > 1}

    fast, slow = gaps(0.1), gaps(5.0)
    assert fast.keys() == slow.keys()
    assert all(abs(fast[key] - slow[key]) < 1e-9 and fast[key] > 0 for key in fast)
    assert 0.3 < sum(fast.values()) / len(fast) < 0.55


def test_a_conversation_ends_before_it_outgrows_the_context():
    workload = ChatWorkload(context(max_context=600))
    plan, held = workload.describe(), {}
    for arrival in drive(workload):
        request = arrival.request
        held[request.session] = held.get(request.session, 0) + len(arrival.due().prompt) + request.output.max_new_tokens
    assert max(held.values()) <= 600
    assert plan.facts["conversations_cut_by_context"] == plan.sessions
    assert plan.turns < 8 * plan.sessions
