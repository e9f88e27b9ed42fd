"""An agent a process on a simulated card: what fits, what a start takes, and who waits for whom."""

from __future__ import annotations

import pytest

from pensieve.lab.compose import build_simulated, build_tokenizer, build_workload, plan_trial
from pensieve.lab.metrics import out_of_memory
from pensieve.lab.replay import replay
from tests.composed import checked, replayed

LOAD = (
    "hardware=sim_a100_80g",
    "model=llama2_7b",
    "cache.gpu=auto",
    "cache.cpu=0",
    "workload=agents",
    "workload.act_s=1",
)
CARD, LONGEST = 80 * 2**30, 3 * (192 + 32 + 64 + 24)


def asked(name, *overrides):
    """What ran, and its system."""
    plan = plan_trial(checked(f"baseline={name}", *LOAD, *overrides))
    tokenizer = build_tokenizer(plan.config.model, plan.model.vocab, simulated=True)
    workload, _ = build_workload(plan, tokenizer)
    system = build_simulated(plan)
    system.start()
    return replay(system, workload), system


def of(record, phase):
    return [turn for turn in record.turns if turn.phase == phase]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_as_many_actors_live_as_the_card_has_room_for(dtype):
    roofline = [f"hardware.terms.{term}=roofline" for term in ("projections", "attention")]
    width = {"bfloat16": 2, "float32": 4}[dtype]
    process = width * (6_738_415_616 + 2 * 32 * 4096 * -(-LONGEST // 32) * 32)  # parameters: of the model's card
    fit = CARD // process
    assert fit == {"bfloat16": 6, "float32": 3}[dtype]
    record, _ = asked("ray_keepalive", f"workload.agents={fit + 2}", f"model.dtype={dtype}", *roofline)
    served = {turn.session for turn in of(record, "reflect") if turn.status == "completed"}
    assert len(served) == fit
    failed = [turn for turn in of(record, "reason") if turn.status != "completed"]
    assert len(failed) == 2 and all(map(out_of_memory, failed)), "an agent without a process ends at its first request"


def test_one_agent_alone_is_served_by_its_actor_as_by_an_engine():
    ours, _ = replayed("baseline=gpu_only", *LOAD, "workload.agents=1")
    actor, _ = asked("ray_keepalive", "workload.agents=1")
    stages = ("reason", "reflect")
    pairs = zip(*([turn for stage in stages for turn in of(record, stage)] for record in (ours, actor)), strict=True)
    for mine, theirs in pairs:
        assert mine.output_sha256 == theirs.output_sha256
        assert mine.gpu_hit_tokens == theirs.gpu_hit_tokens and mine.history_tokens == theirs.history_tokens
        assert theirs.latency_ms == pytest.approx(mine.latency_ms, rel=1e-3)


def test_a_step_without_an_actor_waits_for_weights_and_computes_all_again():
    kept, system = asked("ray_keepalive", "workload.agents=1")
    fresh, _ = asked("ray_serverless", "workload.agents=1")
    load_ms = system.model.weight_bytes / 25e9 * 1e3
    for mine, theirs in zip(of(kept, "reflect"), of(fresh, "reflect"), strict=True):
        assert theirs.queue_ms == pytest.approx(load_ms, rel=1e-6) and theirs.gpu_hit_tokens == 0
        assert theirs.compute_ms > mine.compute_ms and theirs.output_sha256 == mine.output_sha256


def test_processes_take_turns_on_the_card():
    """Four that decode together take four times as long; an engine batches them."""
    alone, _ = asked("ray_keepalive", "workload.agents=1", "workload.steps=1")
    four, _ = asked("ray_keepalive", "workload.agents=4", "workload.steps=1")
    [one] = of(alone, "reason")
    slowest = max(turn.latency_ms for turn in of(four, "reason"))
    assert slowest == pytest.approx(4 * one.latency_ms, rel=0.02)


def test_steps_wait_for_room_and_for_the_link():
    """Nine agents at once, where six processes fit: their weights come one after the other, and three wait for an end."""
    record, system = asked("ray_serverless", "workload.agents=9", "workload.steps=1")
    load_ms = system.model.weight_bytes / 25e9 * 1e3
    waits = sorted(turn.queue_ms for turn in of(record, "reason"))
    assert not any(map(out_of_memory, record.turns)) and len(waits) == 9
    # The sixth may wait for the end of the first, that of the seventh for the end of the second.
    assert all(wait >= (number + 1) * load_ms * (1 - 1e-6) for number, wait in enumerate(waits))
    assert waits[5] == pytest.approx(6 * load_ms, rel=0.05)
