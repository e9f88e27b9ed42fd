import pytest

from pensieve.core.hint import Hint
from pensieve.lab.metrics import summarise
from pensieve.lab.replay import replay
from pensieve.lab.workload.agents import AgentsWorkload
from tests.scripted import Latency, ScriptedSystem, context
from tests.workload.dry import drive


def test_each_agent_reasons_acts_and_reflects():
    arrivals = drive(AgentsWorkload(context(), agents=3, steps=2, act_s=10.0, reason_tokens=20, observation_tokens=6))
    for agent in range(3):
        turns = [a for a in arrivals if a.request.session == f"agent-{agent}"]
        assert [a.request.phase for a in turns] == ["reason", "reflect"] * 2
        assert [a.request.label for a in turns] == ["reason", "reflect"] * 2
        acting = Hint("tool_use", "act", expected_s=10.0)
        assert [a.request.hint for a in turns] == [acting, Hint(expected_s=0.0), acting, Hint("end_turn")]
        assert [len(a.request.prompt) for a in turns] == [20, 6] * 2
        assert all(a.continues for a in turns), "only new tokens are sent"
        acted = [b.at_s - a.at_s - 1.0 for a, b in zip(turns[::2], turns[1::2], strict=True)]
        assert all(9.0 <= seconds <= 11.0 for seconds in acted)
        assert turns[2].at_s == pytest.approx(turns[1].at_s + 1.0)
        assert turns[0].at_s == 2.0, "all at once, after as many have warmed up"


def test_latency_comes_labelled_by_stage_and_acting_is_not_part_of_it():
    system = ScriptedSystem(lambda request: Latency(queue=0, first=70 if request.phase == "reason" else 15, gap=2))
    record = replay(system, AgentsWorkload(context(), agents=4, reason_output=6, reflect_output=3))
    found = {(m.name, m.label): m for m in summarise(record.measurement, system.start())}
    assert found["latency_ms_p50", "reason"].value == pytest.approx(80, abs=1.0)
    assert found["latency_ms_p99", "reflect"].value == pytest.approx(19, abs=1.0)
    assert found["oom_turns", ""].value == 0
    assert record.measurement.ended_s > 25, "three acts of ten seconds"
