import pytest

from pensieve.errors import EngineMissing
from pensieve.lab.compose.build import build_system, build_workload
from pensieve.lab.compose.model_files import build_tokenizer
from pensieve.lab.compose.plan import plan_trial
from tests.composed import checked


def test_baselines_are_asked_the_same():
    """The workload sees cache=, not what a baseline makes of it."""
    described = []
    for baseline in ("pensieve", "stateless"):
        plan = plan_trial(checked(f"baseline={baseline}", "baseline.kv_budget=total"))
        described.append(build_workload(plan, build_tokenizer(plan.config.model, plan.model.vocab, simulated=True))[1])
    assert described[0] == described[1]
    assert described[0].working_set_tokens >= 2 * 2304


def test_the_model_is_loaded_with_it_the_size_of_the_blocks_and_the_memory_there_is(monkeypatch):
    seen = {}

    def load(asked):
        seen.update(attention=asked.attention, chunk_tokens=asked.chunk_tokens, memory_bytes=asked.memory_bytes)
        raise EngineMissing("enough seen")

    monkeypatch.setattr("pensieve.device.model.load_model", load)
    with pytest.raises(EngineMissing, match="enough seen"):
        build_system(plan_trial(checked("hardware=cpu", "attention_backend=reference", "cache.chunk_tokens=64")))
    assert (seen["attention"], seen["chunk_tokens"], seen["memory_bytes"]) == ("reference", 64, None)
    with pytest.raises(EngineMissing, match="enough seen"):
        build_system(plan := plan_trial(checked("hardware=cpu", "hardware.cpu_memory=2GiB")))
    tiers = (plan.gpu_blocks + plan.cpu_blocks) * plan.block_bytes
    assert plan.gpu_blocks and plan.cpu_blocks
    assert seen["memory_bytes"] == 2 * 2**30 - tiers, "what full tiers leave"
