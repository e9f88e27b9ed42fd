import pytest

from pensieve.core.hint import Hint
from pensieve.errors import ConfigError
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
        assert [len(a.request.prompt) for a in turns] == [20, 6] * 2
        assert all(a.request.continues for a in turns), "only new tokens are sent"
        acted = [b.at_s - a.at_s - 1.0 for a, b in zip(turns[::2], turns[1::2], strict=True)]
        assert all(9.0 <= seconds <= 11.0 for seconds in acted)
        assert turns[2].at_s == pytest.approx(turns[1].at_s + 1.0)


def test_agents_run_at_once_after_as_many_have_warmed_up():
    workload = AgentsWorkload(context(), agents=5, steps=1)
    plan, arrivals = workload.describe(), drive(workload)
    warm = [a for a in arrivals if a.request.phase == "warmup"]
    assert len(arrivals) == plan.turns == 20
    assert len(warm) == plan.warmup_turns == 10
    starts = [a.at_s for a in arrivals if a.request.phase == "reason"]
    assert starts == [2.0] * 5


def test_latency_comes_labelled_by_stage_and_acting_is_not_part_of_it():
    system = ScriptedSystem(lambda request: Latency(queue=0, first=70 if request.phase == "reason" else 15, gap=2))
    record = replay(system, AgentsWorkload(context(), agents=4, reason_output=6, reflect_output=3))
    found = {(m.name, m.label): m for m in summarise(record.measurement, system.start())}
    assert found["latency_ms_p50", "reason"].value == pytest.approx(80, abs=1.0)
    assert found["latency_ms_p99", "reflect"].value == pytest.approx(19, abs=1.0)
    assert found["oom_turns", ""].value == 0
    assert record.measurement.ended_s > 25, "three acts of ten seconds"


def test_an_agent_that_failed_stops_and_the_others_go_on():
    arrivals = drive(AgentsWorkload(context(), agents=2, steps=3), fail={("agent-0", 3)})
    assert sum(a.request.session == "agent-0" for a in arrivals) == 3
    assert sum(a.request.session == "agent-1" for a in arrivals) == 6


@pytest.mark.parametrize("fields", [{"agents": 0}, {"act_s": -1}, {"steps": 0}, {"reason_output": 0}])
def test_fields_out_of_range_are_refused_by_name(fields):
    with pytest.raises(ConfigError, match=f"workload.{next(iter(fields))}="):
        AgentsWorkload(context(), **fields)


def test_the_harness_says_which_tool_runs_and_for_how_long():
    arrivals = drive(AgentsWorkload(context(), agents=1, steps=2, act_s=10.0))
    said = [a.request.hint for a in arrivals if a.request.phase != "warmup"]
    acting = Hint("tool_use", "act", expected_s=10.0)
    assert said == [acting, Hint(expected_s=0.0), acting, Hint("end_turn")]
