"""The disaggregated baselines on a simulated machine: a whole trial's records, and how they must move with the network."""

from __future__ import annotations

import pytest

from pensieve.errors import ConfigError, EngineMissing
from pensieve.lab.compose import build_simulated, build_tokenizer, build_workload, plan_trial
from pensieve.lab.replay import replay
from tests.composed import checked, replayed

DECODE = ("model=llama3_8b", "cache=small", "workload=decode", "workload.iterations=4", "workload.discard=1")
NAMES = ("semantic_blind", "partially_aware", "fully_aware")
TOKENS, PROMPT = 50, 72


def turns(name, *overrides):
    """The measured turns, and the system."""
    if name == "stateless":
        record, system = replayed("baseline=stateless", *DECODE, *overrides)
    else:
        plan = plan_trial(checked(f"baseline={name}", *DECODE, *overrides))
        tokenizer = build_tokenizer(plan.config.model, plan.model.vocab, simulated=True)
        workload, _ = build_workload(plan, tokenizer)
        system = build_simulated(plan)
        system.start()
        record = replay(system, workload)
    return [turn for turn in record.turns if turn.phase == "throughput"], system


def test_a_turn_is_made_of_its_parts_and_its_bytes_of_the_models_shapes():
    model = plan_trial(checked(*DECODE)).model
    contexts = range(PROMPT, PROMPT + TOKENS)
    weights, kv = model.weight_bytes * TOKENS, model.kv_bytes_per_token * sum(contexts)
    outputs = set()
    for name in NAMES:
        found, system = turns(name)
        assert len(found) == 3 and len({turn.sent_bytes for turn in found}) == 1
        for turn in found:
            assert turn.queue_ms + turn.compute_ms + turn.transfer_ms == pytest.approx(turn.latency_ms, abs=1e-3)
            assert turn.h2d_bytes is None, "nobody counts what the machine copies"
            outputs.add(turn.output_sha256 if turn.session == found[0].session else None)
            shipped = {"semantic_blind": weights, "partially_aware": 0, "fully_aware": 0}[name]
            if name != "fully_aware":  # at step n the KV of all but the step's own positions
                shipped += kv - model.kv_bytes_per_token * (PROMPT + TOKENS - 1)
                back = kv + model.vocab * model.dtype_bytes * TOKENS
                assert 0 <= turn.received_bytes - back < 250 * TOKENS
            assert 0 <= turn.sent_bytes - shipped < 250 * TOKENS + 4 * PROMPT
        assert "simulated" in system.settings()["network"] and system.settings()["bytes"].startswith("computed")
    assert len(outputs - {None}) == 1, "the same tokens in all three"


def test_full_awareness_costs_one_round_trip_over_having_no_network():
    ours, _ = turns("fully_aware")
    alone, _ = turns("stateless")
    extra = ours[0].latency_ms - alone[0].latency_ms
    assert 2 * 0.05 <= extra < 2 * 0.05 + 0.1
    assert ours[0].output_sha256 == alone[0].output_sha256


@pytest.mark.parametrize("name", NAMES)
def test_a_faster_network_changes_the_waiting_and_nothing_else(name):
    slow, fast = (
        turns(name, f"hardware.network_gbps={gbps}", "hardware.network_latency_s=0")[0][0] for gbps in (25, 50)
    )
    assert slow.transfer_ms == pytest.approx(2 * fast.transfer_ms, rel=1e-3)
    assert slow.transfer_ms == pytest.approx(
        {True: 0, False: (slow.sent_bytes + slow.received_bytes) * 8 / 25e9 * 1e3}[name == "fully_aware"],
        rel=1e-3,
        abs=1e-3,
    )
    assert (slow.compute_ms, slow.sent_bytes, slow.received_bytes) == (
        fast.compute_ms,
        fast.sent_bytes,
        fast.received_bytes,
    )


def test_requests_wait_their_turn_and_can_be_cancelled():
    found, _ = turns("partially_aware", "workload.timeout_s=0.5")
    assert {turn.status for turn in found} == {"timeout"}
    assert all(0 < turn.output_tokens < TOKENS and turn.latency_ms == pytest.approx(500, abs=25) for turn in found)


def test_what_it_needs_is_asked_for_in_a_sentence():
    with pytest.raises(ConfigError, match=r"hardware\.network_gbps has no value"):
        turns("semantic_blind", "hardware.network_gbps=null")
    with pytest.raises(ConfigError, match=r"hardware\.router=single"):
        turns("semantic_blind", "hardware.router=affinity", "hardware.replicas=2")
    with pytest.raises(EngineMissing, match="is simulated"):
        plan_trial(checked("baseline=native_pytorch"))
