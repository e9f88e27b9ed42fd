"""KV that goes along with a conversation: what is accounted, when it is worth it, and when nothing changes."""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from dataclasses import replace

import pytest

from pensieve.plugins.cluster.migration import Migration, Network, computing_s
from tests.baselines.test_cluster_system import run, said

ROOM = ("hardware.router=random", "hardware.replicas=4", "cache.gpu='4096 tokens'", "cache.cpu='4096 tokens'")
FAST = "hardware.network_gbps=3200"


def found(turns, column):
    return sum(getattr(turn, column) or 0 for turn in turns)


def without_bytes(turns):
    """Every column but received_bytes, which is counted only where KV can move."""
    return [repr(replace(turn, received_bytes=None)) for turn in turns]


def ttft_ms(turns):
    """The mean over turns that have history."""
    waited = [turn.ttft_ms for turn in turns if turn.history_tokens and turn.ttft_ms is not None]
    return sum(waited) / len(waited)


@pytest.mark.parametrize("more", [(), ("cache.gpu='704 tokens'", "cache.cpu='320 tokens'")])
def test_tokens_are_the_same_and_all_history_is_accounted_for(more):
    computed, _, _ = run(*ROOM, *more)
    turns, counted, system = run(*ROOM, *more, "hardware.migration=always", FAST)
    assert said(turns) == said(computed)
    history = defaultdict(int)
    for turn in sorted(turns, key=lambda turn: turn.turn):
        assert turn.history_tokens == max(history[turn.session] - 1, 0) and turn.prompt_tokens is not None
        assert (
            (turn.gpu_hit_tokens or 0) + (turn.cpu_hit_tokens or 0) + (turn.recomputed_tokens or 0)
        ) == turn.history_tokens
        history[turn.session] = turn.prompt_tokens + turn.output_tokens
    per_token = system.settings()["kv_bytes_per_token"]
    assert found(turns, "received_bytes") == counted["sent_bytes"] == counted["sent_tokens"] * per_token > 0
    assert {turn.received_bytes for turn in turns if not turn.history_tokens} == {0}, "a first turn brings nothing"
    for replica in system._replicas:
        replica.system.engine.cache.check()
    if more:
        assert 0 < counted["migrated_tokens"] < counted["sent_tokens"], "there was no room for all of it"
    else:
        assert counted["migrated_tokens"] == counted["sent_tokens"]
        assert found(turns, "recomputed_tokens") == 0 < found(computed, "recomputed_tokens")
        assert found(turns, "cpu_hit_tokens") == counted["migrated_tokens"], "it is found where it was put"


def test_over_a_fast_network_long_histories_are_sent_and_arrive_sooner_than_they_are_computed():
    long = ("workload=agents", "workload.agents=3", "workload.reason_tokens=6000", "workload.steps=2", *ROOM,
            "model=llama3_8b", "cache.gpu='60000 tokens'", "cache.cpu='60000 tokens'")  # fmt: skip
    computed, _, _ = run(*long)
    chosen, counted, _ = run(*long, "hardware.migration=cheaper", "hardware.network_gbps=400")
    slower, counted_slower, _ = run(*long, "hardware.migration=cheaper", "hardware.network_gbps=10")
    assert counted["migrated_turns"] > 0 and ttft_ms(chosen) < 0.8 * ttft_ms(computed)
    assert counted_slower["migrated_turns"] == 0
    assert without_bytes(slower) == without_bytes(computed), "every column of every turn"


def test_with_one_replica_nothing_changes():
    alone, _, _ = run("hardware.router=random")
    turns, counted, _ = run("hardware.router=random", "hardware.migration=always", FAST)
    assert without_bytes(turns) == without_bytes(alone)
    assert counted["migrated_turns"] == 0 == found(turns, "received_bytes")


def test_requests_that_time_out_on_the_way_end_once():
    turns, counted, _ = run(*ROOM, "hardware.migration=always", "hardware.network_gbps=1", "workload.timeout_s=0.02")
    assert counted["migrated_turns"] > 0
    assert {turn.status for turn in turns} == {"completed", "timeout"}
    assert len({(turn.session, turn.turn) for turn in turns}) == len(turns)
    assert found(turns, "received_bytes") == counted["sent_bytes"]


class PerToken:
    """A cost model: computing takes a microsecond a token, whatever comes before it; a load takes `load` seconds a chunk."""

    def __init__(self, load):
        self._load = load

    def recompute_s(self, context_tokens):
        return 32e-6

    def load_s(self):
        return self._load


def test_a_gibibyte_is_sent_from_the_rate_on_at_which_that_is_sooner():
    """8,192 tokens of 128 KiB at a microsecond each: 8.192 ms, of which the load takes 2.56 and the way 0.05."""
    left_s = 8192e-6 - 256 * 1e-5 - 5e-5
    even = 2**30 * 8 / left_s / 1e9
    cost = PerToken(1e-5)
    lengths = (32,) * 256
    assert math.isclose(computing_s(cost, lengths, 32), 8192e-6)
    for gbps, sends in ((even * 0.999, False), (even * 1.001, True)):
        migration = Migration("cheaper", Network(gbps, 5e-5))
        transfer = migration.transfer(
            array("i"), lengths, cost, chunk_tokens=32, bytes_per_token=2**17, source=0, target=1, now_ns=0
        )
        assert (transfer is not None) == sends


def test_parcels_wait_for_both_interfaces():
    migration = Migration("always", Network(8.0, 0.0))  # 10^9 bytes/s

    def arrives(source, target, now_ns):
        transfer = migration.transfer(
            array("i"), (32,), PerToken(0.0), chunk_tokens=32, bytes_per_token=10, source=source, target=target,
            now_ns=now_ns,
        )  # fmt: skip
        assert transfer is not None and transfer.count == 32
        return transfer.arrives_ns

    assert arrives(0, 1, 0) == 320
    assert arrives(0, 2, 0) == 640, "one sends one after the other"
    assert arrives(1, 0, 0) == 320, "each way on its own"
    assert arrives(1, 2, 100) == 960, "one receives one after the other"
    assert arrives(0, 1, 5000) == 5320
