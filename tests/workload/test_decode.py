import pytest

from pensieve.errors import ConfigError
from pensieve.lab.metrics import summarise
from pensieve.lab.replay import replay
from pensieve.lab.workload.decode import DecodeWorkload
from tests.scripted import Latency, ScriptedSystem, context
from tests.workload.dry import drive


def test_one_prompt_of_72_tokens_thirty_times_one_at_a_time():
    workload = DecodeWorkload(context())
    plan, arrivals = workload.describe(), drive(workload)
    assert len(arrivals) == plan.turns == 30
    assert [a.at_s for a in arrivals] == [float(index) for index in range(30)]
    assert len({a.request.prompt.tobytes() for a in arrivals}) == 1
    assert len(arrivals[0].request.prompt) == 72
    assert {a.request.output.tokens for a in arrivals} == {50}
    assert [a.request.phase for a in arrivals] == ["warmup"] * 5 + ["throughput"] * 25
    assert len({a.request.session for a in arrivals}) == 30


def test_total_and_per_token_time_leave_the_discarded_ones_out():
    system = ScriptedSystem(lambda request: Latency(queue=0, first=500 if request.iteration < 5 else 30, gap=10))
    record = replay(system, DecodeWorkload(context(), new_tokens=8))
    found = {(m.name, m.label): m for m in summarise(record.measurement, system.start())}
    assert found["total_ms_mean", ""].value == pytest.approx(100.0, abs=1e-6)
    assert found["total_ms_mean", ""].n == 25
    assert found["per_token_ms_p50", ""].value == pytest.approx(12.5, abs=1e-6)
    assert found["throughput_output_tok_s", "throughput"].value == pytest.approx(80.0)
    assert found["warmup_ms_mean", ""].value == pytest.approx(570.0)


def test_a_prompt_file_is_used_whole(tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("Why is the sky blue?")
    arrivals = drive(DecodeWorkload(context(), prompt_path=str(file)))
    assert bytes(list(arrivals[0].request.prompt)) == b"Why is the sky blue?"
    file.write_text(" ")
    with pytest.raises(ConfigError, match="is empty"):
        DecodeWorkload(context(), prompt_path=str(file))
    with pytest.raises(ConfigError, match="cannot be read"):
        DecodeWorkload(context(), prompt_path=str(tmp_path / "none.txt"))


def test_a_prompt_beyond_the_context_is_refused():
    with pytest.raises(ConfigError, match="context is 100"):
        DecodeWorkload(context(max_context=100))


def test_iterations_that_are_all_discarded_are_refused_by_the_values_typed():
    with pytest.raises(ConfigError, match=r"workload\.discard=5 leaves none of workload\.iterations=5"):
        DecodeWorkload(context(), iterations=5, discard=5)
