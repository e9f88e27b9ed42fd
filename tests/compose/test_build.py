import subprocess
import sys

import pytest

from pensieve.errors import ConfigError
from pensieve.lab.compose import build_system, build_tokenizer, build_workload, check, plan_trial
from pensieve.lab.replay import replay
from tests.composed import SHORT, checked, composed


@pytest.mark.parametrize("baseline", ["pensieve", "gpu_only", "stateless"])
def test_a_simulated_baseline_serves_the_workload(baseline):
    plan = plan_trial(checked(f"baseline={baseline}", *SHORT))
    tokenizer = build_tokenizer(plan.config.model, plan.model.vocab, simulated=True)
    workload, described = build_workload(plan, tokenizer)
    system = build_system(plan, tokenizer)
    report = system.start()
    record = replay(system, workload)
    settings = system.settings()
    system.close()
    assert report.load_s > 0
    assert len(record.turns) == described.turns
    assert {turn.status for turn in record.turns} == {"completed"}
    assert settings["baseline"] == baseline
    assert settings["weights"] == "none"
    assert settings["tokenizer"] == "bytes"
    assert settings["cpu_tokens"] == (4224 if baseline == "pensieve" else 0)
    assert settings["gpu_tokens"] == 1408


def test_baselines_are_asked_the_same():
    """The workload sees cache=, not what a baseline makes of it."""
    described = []
    for baseline in ("pensieve", "stateless"):
        plan = plan_trial(checked(f"baseline={baseline}", "baseline.kv_budget=total"))
        described.append(build_workload(plan, build_tokenizer(plan.config.model, plan.model.vocab, simulated=True))[1])
    assert described[0] == described[1]
    assert described[0].working_set_tokens >= 2 * 2304


def test_bytes_need_a_vocabulary_for_them():
    model = checked("model.architecture.vocab_size=200").model
    with pytest.raises(ConfigError, match="vocabulary of 259"):
        build_tokenizer(model, 200, simulated=True)


def test_composing_a_simulation_imports_no_torch():
    code = (
        "import sys; from tests.composed import checked, SHORT; from pensieve.lab.compose import *; "
        "from pensieve.lab.compose.preflight import preflight; "
        "p = plan_trial(checked(*SHORT)); preflight(p); build_system(p).start(); "
        "assert not {'torch', 'transformers'} & set(sys.modules), 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_baseline_without_a_cpu_tier_ignores_cache_cpu_whatever_comes_last():
    for order in (("cache=large", "baseline=stateless"), ("baseline=stateless", "cache=large")):
        config = check(composed("model=llama3_8b", *order))
        assert plan_trial(config).cpu_blocks == 0
