"""What stands for engines of others on a simulated machine: what fits a card and who waits, and what a network adds."""

import pytest

from pensieve.errors import MemoryRanOut
from pensieve.lab.compose.build import build_simulated, build_workload
from pensieve.lab.compose.model_files import build_tokenizer
from pensieve.lab.compose.plan import plan_trial
from pensieve.lab.replay import replay
from tests.composed import checked, replayed

AGENTS = (
    "hardware=sim_a100_80g", "model=llama2_7b", "cache.gpu=auto", "cache.cpu=0", "workload=agents", "workload.act_s=1",
)  # fmt: skip
CARD, LONGEST = 80 * 2**30, 3 * (192 + 32 + 64 + 24)
DECODE = ("model=llama3_8b", "cache=small", "workload=decode", "workload.iterations=4", "workload.discard=1")
NAMES = ("semantic_blind", "partially_aware", "fully_aware")
TOKENS, PROMPT = 50, 72


def asked(name, *overrides):
    """What ran, and its system."""
    plan = plan_trial(checked(f"baseline={name}", *overrides))
    tokenizer = build_tokenizer(plan.config.model, plan.model.vocab, simulated=True)
    workload, _ = build_workload(plan, tokenizer)
    system = build_simulated(plan)
    system.start()
    return replay(system, workload), system


def ran_out(turn):
    return turn.finish_reason == MemoryRanOut.reason


def of(record, phase):
    return [turn for turn in record.turns if turn.phase == phase]


# -- agents -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "width", "fit"), [("bfloat16", 2, 6), ("float32", 4, 3)])
def test_as_many_actors_live_as_the_card_has_room_for(dtype, width, fit):
    roofline = [f"hardware.terms.{term}=roofline" for term in ("projections", "attention")]
    process = width * (6_738_415_616 + 2 * 32 * 4096 * -(-LONGEST // 32) * 32)  # parameters: of the model's card
    assert fit == CARD // process
    record, _ = asked("ray_keepalive", *AGENTS, f"workload.agents={fit + 2}", f"model.dtype={dtype}", *roofline)
    served = {turn.session for turn in of(record, "reflect") if turn.status == "completed"}
    assert len(served) == fit
    failed = [turn for turn in of(record, "reason") if turn.status != "completed"]
    assert len(failed) == 2 and all(map(ran_out, failed)), "an agent without a process ends at its first request"


def test_an_actor_alone_serves_as_an_engine_does_and_a_step_without_one_begins_with_weights():
    ours, _ = replayed("baseline=gpu_only", *AGENTS, "workload.agents=1")
    actor, system = asked("ray_keepalive", *AGENTS, "workload.agents=1")
    fresh, _ = asked("ray_serverless", *AGENTS, "workload.agents=1")
    load_ms = system.model.weight_bytes / 25e9 * 1e3
    for stage in ("reason", "reflect"):
        for mine, theirs, anew in zip(*(of(record, stage) for record in (ours, actor, fresh)), strict=True):
            assert mine.output_sha256 == theirs.output_sha256 == anew.output_sha256
            assert mine.gpu_hit_tokens == theirs.gpu_hit_tokens and mine.history_tokens == theirs.history_tokens
            assert theirs.latency_ms == pytest.approx(mine.latency_ms, rel=1e-3)
            assert anew.queue_ms == pytest.approx(load_ms, rel=1e-6) and anew.gpu_hit_tokens == 0
            assert anew.compute_ms > theirs.compute_ms or stage == "reason"


def test_processes_take_turns_on_the_card():
    """Four that decode together take four times as long; an engine batches them."""
    alone, four = (asked("ray_keepalive", *AGENTS, f"workload.agents={n}", "workload.steps=1")[0] for n in (1, 4))
    [one] = of(alone, "reason")
    assert max(turn.latency_ms for turn in of(four, "reason")) == pytest.approx(4 * one.latency_ms, rel=0.02)


def test_steps_wait_for_room_and_for_the_link():
    """Nine agents at once, where six processes fit: their weights come one after the other, and three wait for an end."""
    record, system = asked("ray_serverless", *AGENTS, "workload.agents=9", "workload.steps=1")
    load_ms = system.model.weight_bytes / 25e9 * 1e3
    waits = sorted(turn.queue_ms for turn in of(record, "reason"))
    assert not any(map(ran_out, record.turns)) and len(waits) == 9
    # The sixth may wait for the end of the first, that of the seventh for the end of the second.
    assert all(wait >= (number + 1) * load_ms * (1 - 1e-6) for number, wait in enumerate(waits))
    assert waits[5] == pytest.approx(6 * load_ms, rel=0.05)


# -- a model in another process ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_of_the_models_shapes_and_a_faster_network_changes_the_waiting_alone(name):
    model = plan_trial(checked(*DECODE)).model
    slow, fast = (
        of(asked(name, *DECODE, f"hardware.network_gbps={gbps}", "hardware.network_latency_s=0")[0], "throughput")
        for gbps in (25, 50)
    )
    kv = model.kv_bytes_per_token * sum(range(PROMPT, PROMPT + TOKENS))
    sent = model.weight_bytes * TOKENS if name == "semantic_blind" else 0
    back = 0
    if name != "fully_aware":  # at step n the KV of all but the step's own positions
        sent += kv - model.kv_bytes_per_token * (PROMPT + TOKENS - 1)
        back = kv + model.vocab * model.dtype_bytes * TOKENS
    for turn, other in zip(slow, fast, strict=True):
        assert turn.queue_ms + turn.compute_ms + turn.transfer_ms == pytest.approx(turn.latency_ms, abs=1e-3)
        assert turn.h2d_bytes is None, "nobody counts what the machine copies"
        assert 0 <= turn.sent_bytes - sent < 250 * TOKENS + 4 * PROMPT
        assert 0 <= turn.received_bytes - back < 250 * TOKENS
        waited_ms = 0 if name == "fully_aware" else (turn.sent_bytes + turn.received_bytes) * 8 / 25e9 * 1e3
        assert turn.transfer_ms == pytest.approx(waited_ms, rel=1e-3, abs=1e-3)
        assert turn.transfer_ms == pytest.approx(2 * other.transfer_ms, rel=1e-3, abs=1e-5)
        same = ("compute_ms", "sent_bytes", "received_bytes", "output_sha256")
        assert [getattr(turn, each) for each in same] == [getattr(other, each) for each in same]
    assert len(slow) == 3


def test_full_awareness_costs_one_round_trip_over_having_no_network():
    ours = of(asked("fully_aware", *DECODE)[0], "throughput")[0]
    alone = of(replayed("baseline=stateless", *DECODE)[0], "throughput")[0]
    assert 2 * 0.05 <= ours.latency_ms - alone.latency_ms < 2 * 0.05 + 0.1
    assert ours.output_sha256 == alone.output_sha256


def test_requests_wait_their_turn_and_can_be_cancelled():
    found = of(asked("partially_aware", *DECODE, "workload.timeout_s=0.5")[0], "throughput")
    assert {turn.status for turn in found} == {"timeout"}
    assert all(0 < turn.output_tokens < TOKENS and turn.latency_ms == pytest.approx(500, abs=25) for turn in found)
